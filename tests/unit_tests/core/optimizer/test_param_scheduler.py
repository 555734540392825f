"""Schedules against formulas written by hand, and the schedule of a resumed run."""

import math

import pytest

from megatron.core.optimizer import (
    OptimizerConfig,
    OptimizerParamScheduler,
    Schedule,
    SchedulerConfig,
    make_schedule,
)

MAX = 2e-3
MIN = 2e-4
WARMUP = 16
END = 80


def make_schedule_of(style, **options):
    return Schedule(
        max_lr=MAX,
        min_lr=MIN,
        lr_warmup_steps=WARMUP,
        lr_decay_steps=END,
        lr_decay_style=style,
        **options,
    )


def make_groups(*extra):
    base = {"lr_mult": 1.0, "is_decoupled_lr": False}
    return [{**base, "wd_mult": 1.0}, {**base, "wd_mult": 0.0}, *extra]


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root"])
def test_warmup_is_linear(style):
    for n in range(WARMUP + 1):
        assert make_schedule_of(style).learning_rate(n) == pytest.approx(MAX * n / WARMUP, abs=0)
        expected = 1e-4 + (MAX - 1e-4) * n / WARMUP
        assert make_schedule_of(style, init_lr=1e-4).learning_rate(n) == pytest.approx(
            expected,
            abs=0,
        )


def test_decay_styles():
    for n in range(WARMUP + 1, END + 1):
        r = (n - WARMUP) / (END - WARMUP)
        assert make_schedule_of("constant").learning_rate(n) == MAX
        assert make_schedule_of("linear").learning_rate(n) == pytest.approx(
            MAX - r * (MAX - MIN),
            abs=1e-12,
        )
        cosine = MIN + (MAX - MIN) / 2 * (1 + math.cos(math.pi * r))
        assert make_schedule_of("cosine").learning_rate(n) == pytest.approx(cosine, abs=1e-12)
        root = max(MIN, MAX * (WARMUP / n) ** 0.5)
        assert make_schedule_of("inverse-square-root").learning_rate(n) == pytest.approx(
            root,
            abs=1e-12,
        )
    for style in ("linear", "cosine", "inverse-square-root"):
        assert make_schedule_of(style).learning_rate(END + 1) == MIN
    assert make_schedule_of("constant").learning_rate(END + 1) == MAX
    assert make_schedule_of("linear").learning_rate(END) == pytest.approx(MIN)


def test_learning_rate_of_a_megatron_lm_run():
    """Megatron-LM 0.16.1 saved this `lr` after 5 of 10 iterations of 8 samples, 2 of them
    warmup.
    """
    assert make_schedule_of("cosine").learning_rate(40) == 0.001444415089128581


def test_wsd_without_a_decay_phase_is_constant():
    """As in Megatron-LM, whose published recipes contain --lr-wsd-decay-iters 0."""
    wsd = make_schedule_of("WSD", wsd_decay_steps=0)
    last = wsd.lr_decay_steps
    assert wsd.learning_rate(last) == wsd.learning_rate(last // 2) == wsd.max_lr
    assert wsd.learning_rate(last + 1) == wsd.min_lr


@pytest.mark.parametrize(
    ("style", "left"),
    [
        ("linear", lambda r: 1 - r),
        ("cosine", lambda r: (1 + math.cos(math.pi * r)) / 2),
        ("exponential", lambda r: 2 * 0.5**r - 1),
        ("minus_sqrt", lambda r: 1 - r**0.5),
    ],
)
def test_wsd_decay_styles(style, left):
    wsd = make_schedule_of("WSD", wsd_decay_steps=20, wsd_decay_style=style)
    for n in range(WARMUP + 1, END - 20 + 1):
        assert wsd.learning_rate(n) == MAX
    for n in range(END - 20, END + 1):
        assert wsd.learning_rate(n) == pytest.approx(
            MIN + (MAX - MIN) * left((n - 60) / 20),
            abs=1e-12,
        )
    assert wsd.learning_rate(END + 1) == MIN


def test_without_warmup_the_schedule_starts_at_the_maximum():
    flat = Schedule(max_lr=MAX, min_lr=MIN, lr_decay_steps=END, lr_decay_style="cosine")
    assert flat.learning_rate(0) == MAX


def test_weight_decay_rises_to_its_end():
    options = {"start_wd": 0.01, "end_wd": 0.1, "wd_incr_steps": 50}
    linear, cosine = (
        make_schedule_of("constant", wd_incr_style=style, **options)
        for style in ("linear", "cosine")
    )
    for n in range(51):
        assert linear.weight_decay(n) == pytest.approx(0.01 + 0.09 * n / 50, abs=1e-12)
        coefficient = 0.5 * (math.cos(math.pi * (1 - n / 50)) + 1)
        assert cosine.weight_decay(n) == pytest.approx(0.01 + 0.09 * coefficient, abs=1e-12)
    assert linear.weight_decay(51) == cosine.weight_decay(51) == 0.1


def test_scheduler_writes_into_param_groups():
    decoupled = {
        "lr_mult": 0.5,
        "wd_mult": 1.0,
        "is_decoupled_lr": True,
        "max_lr": 1e-2,
        "min_lr": 0.0,
    }
    param_groups = make_groups(decoupled)
    scheduler = OptimizerParamScheduler(
        param_groups,
        make_schedule_of("linear", start_wd=0.1, end_wd=0.1),
    )
    assert [group["lr"] for group in param_groups] == [0, 0, 0]
    scheduler.step(40)
    scheduler.step(8)
    assert [group["lr"] for group in param_groups] == pytest.approx(
        [MIN + (MAX - MIN) / 2] * 2 + [0.5 * 5e-3]
    )
    assert [group["weight_decay"] for group in param_groups] == [0.1, 0.0, 0.1]
    assert [(group["max_lr"], group["min_lr"]) for group in param_groups] == [(MAX, MIN)] * 2 + [
        (1e-2, 0.0)
    ]


def test_make_schedule_in_iterations_and_samples():
    config = OptimizerConfig(lr=MAX, min_lr=MIN, weight_decay=0.1)
    iters = make_schedule(
        config,
        SchedulerConfig(lr_warmup_iters=2),
        global_batch_size=8,
        train_iters=10,
    )
    samples = make_schedule(
        config,
        SchedulerConfig(lr_warmup_samples=16),
        global_batch_size=8,
        train_samples=80,
    )
    fraction = make_schedule(
        config,
        SchedulerConfig(lr_warmup_fraction=0.2),
        global_batch_size=8,
        train_iters=10,
    )
    assert (
        iters
        == samples
        == fraction
        == make_schedule_of("linear", start_wd=0.1, end_wd=0.1, wd_incr_steps=80)
    )
    flags = SchedulerConfig(lr_decay_style="WSD", lr_decay_iters=9, lr_wsd_decay_iters=3)
    wsd = make_schedule(config, flags, global_batch_size=8, train_iters=10)
    assert (wsd.lr_decay_steps, wsd.wsd_decay_steps, wsd.wd_incr_steps) == (72, 24, 80)
    ramp = OptimizerConfig(
        lr=MAX,
        start_weight_decay=0.0,
        end_weight_decay=0.1,
        weight_decay_incr_style="linear",
        weight_decay=7.0,
    )
    assert (
        make_schedule(ramp, SchedulerConfig(), global_batch_size=8, train_iters=10).weight_decay(40)
        == 0.05
    )


@pytest.mark.parametrize(
    ("flags", "length", "message"),
    [
        ({"lr_decay_samples": 5}, {"train_iters": 10}, "--lr-decay-samples 5 .* --lr-decay-iters"),
        (
            {"lr_warmup_iters": 5},
            {"train_samples": 10},
            "--lr-warmup-iters 5 .* --lr-warmup-samples",
        ),
        ({}, {}, "one of --train-iters"),
        ({}, {"train_iters": 1, "train_samples": 1}, "one of --train-iters"),
        ({"lr_warmup_iters": 10}, {"train_iters": 10}, r"\(80 samples\) .* sample 80"),
        ({"lr_decay_style": "WSD"}, {"train_iters": 10}, "--lr-wsd-decay-iters"),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 11}, {"train_iters": 10}, "got 88"),
        ({"lr_warmup_init": 1.0}, {"train_iters": 10}, "--lr-warmup-init 1.0"),
    ],
)
def test_invalid_schedules(flags, length, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(
            OptimizerConfig(lr=MAX),
            SchedulerConfig(**flags),
            global_batch_size=8,
            **length,
        )


def save_at_40():
    first = OptimizerParamScheduler(
        make_groups(),
        make_schedule_of("cosine", start_wd=0.1, end_wd=0.1, wd_incr_steps=80),
    )
    first.step(40)
    return first.state_dict()


def test_state_dict_has_megatron_lms_fields_and_ours():
    ours = {"init_lr": 0.0, "wsd_decay_steps": None, "wsd_decay_style": "exponential"}
    assert save_at_40() == ours | {
        "max_lr": MAX,
        "lr_warmup_steps": 16,
        "num_steps": 40,
        "lr_decay_style": "cosine",
        "lr_decay_steps": 80,
        "min_lr": MIN,
        "start_wd": 0.1,
        "end_wd": 0.1,
        "wd_incr_style": "constant",
        "wd_incr_steps": 80,
    }


def test_resume_with_the_same_schedule():
    param_groups = make_groups()
    resumed = OptimizerParamScheduler(
        param_groups,
        make_schedule_of("cosine", start_wd=0.1, end_wd=0.1, wd_incr_steps=80),
    )
    resumed.load_state_dict(save_at_40())
    assert resumed.num_steps == 40
    assert param_groups[0]["lr"] == 0.001444415089128581


def make_longer_scheduler(**options):
    later = Schedule(
        max_lr=1e-3,
        min_lr=MIN,
        lr_warmup_steps=16,
        lr_decay_steps=160,
        lr_decay_style="linear",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=160,
    )
    param_groups = make_groups()
    return param_groups, OptimizerParamScheduler(param_groups, later, **options)


def test_different_schedule_is_an_error():
    _, scheduler = make_longer_scheduler()
    with pytest.raises(ValueError) as error:
        scheduler.load_state_dict(save_at_40())
    for text in (
        "max_lr: 0.002 (now 0.001)",
        "lr_decay_steps: 80 (now 160)",
        "lr_decay_style: cosine (now linear)",
    ):
        assert text in str(error.value)
    assert "min_lr" not in str(error.value)
    assert "--override-opt_param-scheduler" in str(error.value)


def make_decoupled_group(max_lr, min_lr):
    return {"lr_mult": 1.0, "wd_mult": 1.0, "is_decoupled_lr": True} | {
        "max_lr": max_lr,
        "min_lr": min_lr,
    }


def test_other_decoupled_learning_rate_is_another_schedule():
    """The separate learning rate is stored in the parameter groups, not in the schedule."""
    same = make_schedule_of("cosine", start_wd=0.1, end_wd=0.1, wd_incr_steps=80)
    saved_groups = make_groups(make_decoupled_group(0.02, 0.001))

    def resume(*decoupled, **options):
        groups = make_groups(*decoupled)
        OptimizerParamScheduler(groups, same, **options).load_state_dict(save_at_40(), saved_groups)
        return groups[-1]

    unchanged = resume(make_decoupled_group(0.02, 0.001))
    other = make_decoupled_group(0.04, 0.0)
    with pytest.raises(
        ValueError,
        match=r"--decoupled-lr.*: \(0.02, 0.001\) \(now \(0.04, 0.0\)\)",
    ):
        resume(other)
    with pytest.raises(ValueError, match=r"--decoupled-lr.*: \(0.02, 0.001\) \(now None\)"):
        resume()
    assert resume(dict(other), override=True)["max_lr"] == 0.04
    assert resume(dict(other), use_checkpoint=True) == unchanged
    with pytest.raises(ValueError, match=r"give --decoupled-lr 0.02 --decoupled-min-lr 0.001"):
        resume(use_checkpoint=True)
    # Another program may not store the limits.
    saved_groups[-1].pop("max_lr")
    assert resume(dict(other))["max_lr"] == 0.04


def test_constant_schedule_may_be_extended():
    same = {"max_lr": MAX, "min_lr": MIN, "lr_warmup_steps": 16}
    wd = {"start_wd": 0.1, "end_wd": 0.1}
    longer_wd = Schedule(
        **same,
        **wd,
        lr_decay_steps=80,
        lr_decay_style="cosine",
        wd_incr_steps=160,
    )
    OptimizerParamScheduler(make_groups(), longer_wd).load_state_dict(save_at_40())
    constant = Schedule(
        **same,
        **wd,
        lr_decay_steps=160,
        lr_decay_style="constant",
        wd_incr_steps=160,
    )
    scheduler = OptimizerParamScheduler(make_groups(), constant)
    scheduler.load_state_dict(save_at_40() | {"lr_decay_style": "constant"})
    assert scheduler.num_steps == 40
    assert scheduler.schedule == constant
    with pytest.raises(
        ValueError,
        match=r"another schedule: lr_decay_style: cosine \(now constant\)",
    ):
        scheduler.load_state_dict(save_at_40())
    rising = Schedule(
        **same,
        **wd,
        lr_decay_steps=80,
        lr_decay_style="cosine",
        wd_incr_steps=160,
        wd_incr_style="linear",
    )
    with pytest.raises(ValueError, match=r"wd_incr_steps: 80 \(now 160\)"):
        OptimizerParamScheduler(make_groups(), rising).load_state_dict(save_at_40())


@pytest.mark.parametrize(
    "style,change,message",
    [
        ("WSD", {"wsd_decay_steps": 40}, r"wsd_decay_steps: 20 \(now 40\)"),
        ("WSD", {"wsd_decay_style": "linear"}, r"wsd_decay_style: cosine \(now linear\)"),
        ("cosine", {"init_lr": 1e-4}, r"init_lr: 0.0 \(now 0.0001\)"),
        (
            "cosine",
            {"wsd_decay_steps": 40, "wsd_decay_style": "linear"},
            None,
        ),  # no effect without WSD
        ("cosine", {"init_lr": 1e-4, "lr_warmup_steps": 0}, None),
    ],
)
def test_all_effective_fields_are_compared(style, change, message):
    flags = {"max_lr": MAX, "min_lr": MIN, "lr_decay_steps": 80, "lr_decay_style": style}
    flags |= {
        "wsd_decay_steps": 20,
        "wsd_decay_style": "cosine",
        "lr_warmup_steps": change.get("lr_warmup_steps", 16),
    }
    saved = OptimizerParamScheduler(make_groups(), Schedule(**flags)).state_dict()
    changed = Schedule(**flags | change)
    if message is None:
        OptimizerParamScheduler(make_groups(), changed).load_state_dict(saved)
        return
    with pytest.raises(ValueError, match=message):
        OptimizerParamScheduler(make_groups(), changed).load_state_dict(saved)
    scheduler = OptimizerParamScheduler(make_groups(), changed, use_checkpoint=True)
    scheduler.load_state_dict(saved)
    assert scheduler.schedule == Schedule(**flags)


def test_override_uses_the_flags(caplog):
    param_groups, scheduler = make_longer_scheduler(override=True)
    scheduler.load_state_dict(save_at_40())
    assert (
        param_groups[0]["lr"]
        == scheduler.schedule.learning_rate(40)
        == pytest.approx(1e-3 - 8e-4 * 24 / 144)
    )
    assert "lr_decay_steps" in caplog.text
    assert scheduler.state_dict()["lr_decay_steps"] == 160


def test_use_checkpoint_uses_the_stored_schedule(caplog):
    param_groups, scheduler = make_longer_scheduler(use_checkpoint=True)
    scheduler.load_state_dict(save_at_40())
    assert param_groups[0]["lr"] == 0.001444415089128581
    assert param_groups[0]["max_lr"] == MAX
    assert "lr_decay_steps" in caplog.text
    assert scheduler.state_dict() == save_at_40()
