"""The training loop: evaluation, saves, growing batch sizes, conversion, logged norms, exit."""

import contextlib
import io
import math
import re

import pytest
import torch

from tests import ROOT
from tests.support.compare import assert_same
from tests.support.programs import run_program
from tests.support.training_harness import COMMON, LAYOUTS, MODELS, train, whole

LLAMA = f"--mock-data {MODELS['llama']} "
CLOSE = 1e-6


def list_checkpoints(directory):
    return sorted(path.name for path in directory.glob("iter_*"))


@pytest.mark.parametrize("layout", ["tp2_sp", "pp2_interleaved", "dp2_distributed_optimizer"])
def test_evaluation_is_layout_independent_and_has_no_side_effects(pool, layout):
    world_size, layout_flags = LAYOUTS[layout]
    flags = f"{LLAMA} --train-iters 5 --hidden-dropout 0 --global-batch-size 4 "
    evaluating = f"{flags} --eval-interval 2 --eval-iters 3 --log-validation-ppl-to-tensorboard "
    plain = pool.run(train, 1, flags)[0].measured
    single = pool.run(train, 1, evaluating)[0].measured
    parallel = pool.run(train, world_size, evaluating + layout_flags)[0].measured
    assert single.losses == plain.losses

    keys = {
        ("lm loss validation", 2),
        ("lm loss validation", 4),
        ("lm loss validation", 5),
        ("lm loss test", 5),
    }
    assert keys <= single.points.keys()
    assert single.points.keys() == parallel.points.keys()
    # Every evaluation continues in the validation data.
    assert len({single.points[key] for key in keys}) == 4
    for key in keys:
        assert parallel.points[key] == pytest.approx(single.points[key], rel=CLOSE)

    perplexity = single.points["lm loss validation ppl", 2]
    expected = math.exp(single.points["lm loss validation", 2])
    assert perplexity == pytest.approx(expected, rel=1e-5)


def test_schedule_does_not_advance_on_skipped_steps(pool):
    flags = f"{LLAMA} --train-iters 16 --global-batch-size 2 "
    flags += "--lr-decay-style linear --lr-warmup-iters 0 --min-lr 0 "
    plain = pool.run(train, 1, flags)[0].measured
    fp16_flags = "--fp16 --initial-loss-scale 67108864 --hysteresis 1"
    fp16 = pool.run(train, 1, f"{flags} {fp16_flags}")[0].measured

    assert fp16.skipped[0]
    assert not fp16.skipped[-1]

    # A skipped step keeps the rate of the step before; the first one that of the start.
    rate = fp16.learning_rates[0]
    schedule = iter(plain.learning_rates)
    for skipped, learning_rate in zip(fp16.skipped, fp16.learning_rates, strict=True):
        rate = rate if skipped else next(schedule)
        assert learning_rate == rate


def test_skip_train_evaluates_the_loaded_model(pool, tmp_path):
    flags = f"{LLAMA} --train-iters 4 --eval-iters 2 --eval-interval 100 --save {tmp_path} "
    trained = pool.run(train, 1, flags)[0]
    again = pool.run(train, 1, f"{flags} --load {tmp_path} --skip-train")[0]
    assert again.measured.losses == []
    assert again.iteration == 4
    assert again.measured.points["lm loss test", 4] == trained.measured.points["lm loss test", 4]


def test_saves_at_intervals_and_at_the_end(pool, tmp_path):
    pool.run(train, 1, f"{LLAMA} --train-iters 5 --save {tmp_path} --save-interval 2")
    assert list_checkpoints(tmp_path) == ["iter_0000002", "iter_0000004", "iter_0000005"]

    longer = "--train-iters 8 --override-opt_param-scheduler"
    pool.run(train, 1, f"{LLAMA} {longer} --load {tmp_path} --save {tmp_path}")
    assert list_checkpoints(tmp_path)[-1] == "iter_0000008"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "8"


def test_completed_run_does_not_save_again(pool, tmp_path):
    flags = f"{LLAMA} --train-iters 3 --save {tmp_path} --load {tmp_path}"
    pool.run(train, 1, flags)
    metadata = tmp_path / "iter_0000003" / ".metadata"
    before = metadata.stat().st_mtime_ns
    outcome = pool.run(train, 1, flags)[0]
    assert outcome.measured.losses == []
    assert metadata.stat().st_mtime_ns == before


def test_time_limit_saves_and_exits(pool, tmp_path):
    flags = f"{LLAMA} --train-iters 100000 --save {tmp_path} --exit-duration-in-mins 0.02"
    outcome, other = pool.run(train, 2, flags)
    assert outcome.iteration == other.iteration
    assert 0 < outcome.iteration < 100000
    assert list_checkpoints(tmp_path) == [f"iter_{outcome.iteration:07d}"]


def test_time_limit_at_the_last_iteration_keeps_the_final_validation(pool):
    """The time limit ends at the last iteration: the run saves, and then evaluates as without it."""
    flags = (
        f"{LLAMA} --train-iters 2 --eval-interval 2 --eval-iters 1 --exit-duration-in-mins "
        "1e-9 --lr-warmup-iters 0"
    )
    measured = pool.run(train, 1, flags)[0].measured
    assert {("lm loss validation", 2), ("lm loss test", 2)} <= measured.points.keys()


def test_batch_size_ramps_up(pool, tmp_path):
    """Four iterations of 4, then of 8; interrupted while it grows, it goes on growing."""
    common = COMMON.replace("--lr-warmup-iters 2", "")
    flags = f"{LLAMA} --rampup-batch-size 4 4 16 --train-samples 32 "
    straight = pool.run(train, 1, flags, common)[0]

    assert straight.iteration == 6
    assert straight.consumed_train_samples == 32

    first = pool.run(train, 1, f"{flags} --save {tmp_path} --exit-interval 3", common)[0]
    assert first.consumed_train_samples == 12

    second = pool.run(train, 2, f"{flags} --load {tmp_path}", common)[0]
    assert second.iteration == 6
    assert second.consumed_train_samples == 32

    losses = first.measured.losses + second.measured.losses
    assert losses == pytest.approx(straight.measured.losses, rel=CLOSE)


@pytest.mark.parametrize("form", ["torch_dist", "torch"])
def test_ckpt_convert_format_does_not_train(pool, tmp_path, form):
    """The result is in a subdirectory named after the format, as in Megatron-LM."""
    flags = f"{LLAMA} --train-iters 4 "
    before = pool.run(train, 1, f"{flags} --save {tmp_path}/a --exit-interval 2")
    convert = f"--load {tmp_path}/a --ckpt-convert-format {form} --ckpt-convert-save {tmp_path}/b"
    pool.run(train, 2, f"{flags} {convert} --tensor-model-parallel-size 2")
    converted = tmp_path / "b" / form
    assert list_checkpoints(converted) == ["iter_0000002"]

    after = pool.run(train, 1, f"{flags} --load {converted} --skip-train")
    assert_same(whole(after), whole(before))


def train_and_log(rank, world_size, flags):
    """Return the log with the norms and zero counts, and the final state of the run."""
    log_flags = "--log-params-norm --log-num-zeros-in-grad --timing-log-level 2"
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        outcome = train(rank, world_size, f"{flags} {log_flags}")
    return log.getvalue(), outcome


def find_zero_counts(log):
    return [int(count) for count in re.findall(r"num zeros: (\d+)", log)]


@pytest.mark.parametrize("layout", ["single", "tp2_pp2", "dp2_distributed_optimizer"])
@pytest.mark.parametrize("model", MODELS)
def test_norms_and_zeros_count_every_parameter_once(pool, layout, model):
    world_size, layout_flags = {"single": (1, ""), **LAYOUTS}[layout]
    flags = f"--mock-data --train-iters 3 {MODELS[model]}"
    results = pool.run(train_and_log, world_size, f"{flags} {layout_flags}")
    log, *other_logs = [log for log, _ in results]
    assert set(other_logs) <= {""}, "only rank 0 prints"

    squares = []
    for key, tensor in whole([outcome for _, outcome in results]).items():
        if not key.startswith("optimizer."):
            squares.append(tensor.double().square().sum())
    norm = torch.stack(squares).sum().sqrt().item()
    logged_norms = re.findall(r"params norm: ([\d.]+)", log)
    assert float(logged_norms[-1]) == pytest.approx(norm, abs=6e-4)

    ((reference_log, _),) = pool.run(train_and_log, 1, flags)
    zeros = find_zero_counts(log)
    rounding = 4 * 32 if model == "gpt2" else 0  # the gradient of a key bias is zero up to rounding

    assert len(zeros) == 3
    assert zeros == pytest.approx(find_zero_counts(reference_log), abs=rounding)

    for timer in (
        "forward-backward",
        "finalize-model-grads",
        "optimizer",
        "forward-compute",
        "batch-generator",
    ):
        assert re.search(rf"{timer} \.+: \(\d+\.\d\d, \d+\.\d\d\)", log)


def test_help_is_grouped_and_has_no_requirements(tmp_path):
    result = run_program(ROOT / "pretrain_gpt.py", "--help", directory=tmp_path)
    assert result.returncode == 0, result.stderr

    groups = [
        "Model",
        "Parallelism",
        "Training",
        "Optimizer",
        "Data",
        "Tokenizer",
        "Checkpoints",
        "Logging",
    ]
    assert all(f"\n{group}:" in result.stdout for group in groups)
    assert "--tensor-model-parallel-size N" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 120
