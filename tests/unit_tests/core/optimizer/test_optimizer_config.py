"""Invalid and contradictory options are rejected; the error names the flags."""

import pytest

from megatron.core.optimizer import OptimizerConfig, SchedulerConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "--lr must be at least 0, got -1.0"),
        ({"lr": 1e-3, "min_lr": 1e-2}, "--min-lr 0.01"),
        ({"decoupled_min_lr": 1e-3}, "--decoupled-lr None"),
        ({"decoupled_lr": 1e-4, "decoupled_min_lr": 1e-3}, "--decoupled-min-lr 0.001"),
        ({"adam_beta2": 1.0}, "--adam-beta2 must be less than 1, got 1.0"),
        ({"clip_grad": -1.0}, "--clip-grad"),
        ({"loss_scale": 0.0}, "--loss-scale must be positive, got 0.0"),
        ({"initial_loss_scale": 0.5}, "--initial-loss-scale 0.5"),
        ({"hysteresis": 0}, "--hysteresis must be positive, got 0"),
        ({"start_weight_decay": 0.1}, "--weight-decay-incr-style"),
        ({"exp_avg_dtype": "fp8", "optimizer": "lion"}, "--exp-avg-dtype fp8.*--optimizer adam"),
        (
            {"main_params_dtype": "fp16", "ema_decay": 0.9},
            "--main-params-dtype fp16 and --ema-decay 0.9 are mutually exclusive: .* the average",
        ),
        ({"weight_decay_incr_style": "linear"}, "--start-weight-decay"),
        (
            {
                "weight_decay_incr_style": "linear",
                "start_weight_decay": 0.2,
                "end_weight_decay": 0.1,
            },
            "got 0.2 and 0.1",
        ),
    ],
)
def test_invalid_optimizer_options(options, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"override_opt_param_scheduler": True, "use_checkpoint_opt_param_scheduler": True},
            "mutually exclusive",
        ),
        ({"lr_warmup_fraction": 1.0}, "got 1.0"),
        ({"lr_warmup_fraction": 0.1, "lr_warmup_iters": 5}, "--lr-warmup-iters 5"),
    ],
)
def test_invalid_scheduler_options(options, message):
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(**options)


def test_weight_decay_range():
    assert OptimizerConfig(weight_decay=0.3).weight_decay_range == (0.3, 0.3)
    ramp = OptimizerConfig(
        weight_decay_incr_style="cosine", start_weight_decay=0.0, end_weight_decay=0.2
    )
    assert ramp.weight_decay_range == (0.0, 0.2)
