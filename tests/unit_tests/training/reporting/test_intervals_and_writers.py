"""Intervals, the log line, and the scalars of TensorBoard."""

import dataclasses
import math
import re
import sys
from unittest import mock

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.core.optimizer import StepResult
from megatron.core.parallel_config import ParallelConfig
from megatron.core.parallel_state import ParallelState
from megatron.training.config.run_options import LoggingConfig
from megatron.training.reporting.dashboards import make_iteration_scalars
from megatron.training.reporting.intervals import Interval, Iteration, OnDevice, TrainingLog
from megatron.training.reporting.writers import format_log_line, make_writers

CPU = torch.device("cpu")


def pending(iteration, loss, skipped=False):
    step = StepResult(
        torch.tensor(float(iteration)),
        torch.tensor(skipped),
        held_back=False,
        num_zeros=None,
    )
    return Iteration(iteration, 8 * iteration, 8, 1e-3, 1.0), OnDevice(loss.unsqueeze(0), step)


def closed_interval(rank, world_size, tp=1, pp=1):
    ps = ParallelState.create(ParallelConfig(tp, pp))
    times = iter([10.0, 11.0, 15.0, 17.0])  # the start, the pause, the end
    log = TrainingLog(ps, CPU, flops_per_token=1e6, seq_length=16, clock=lambda: next(times))
    for iteration in (1, 2):
        loss_and_count = torch.zeros(2)
        if ps.pp.is_last:
            loss = float(iteration + ps.dp.rank)
            loss_and_count = torch.tensor([2 * loss, 2.0])
        log.record(*pending(iteration, loss_and_count))

    with log.paused():
        pass
    return log.close_interval()


@pytest.mark.parametrize(
    ("tp", "pp", "losses"),
    [(1, 1, [1.5, 2.5]), (2, 1, [1.0, 2.0]), (1, 2, [1.0, 2.0])],
)
def test_losses_are_means_over_replicas_known_to_every_rank(pool, tp, pp, losses):
    for interval in pool.run(closed_interval, 2, tp, pp):
        actual_losses = [iteration.lm_loss for iteration in interval.iterations]
        assert actual_losses == losses
        grad_norms = [iteration.grad_norm for iteration in interval.iterations]
        assert grad_norms == [1.0, 2.0]
        assert interval.tokens == 256  # 2 iterations of 8 samples of 16 tokens
        assert interval.flops == 256e6
        assert interval.seconds == 3.0  # without the pause


def interval_with_data(rank, world_size):
    now = 0.0

    def batches():
        nonlocal now
        for _ in range(2):
            now += 1.0 + rank  # the rank waits
            yield {}

    ps = ParallelState.create(ParallelConfig())
    log = TrainingLog(ps, CPU, flops_per_token=1e6, seq_length=16, clock=lambda: now)
    intervals = []
    timed = log.time_input(batches())
    for iteration in (1, 2):
        next(timed)
        now += 5.0  # the rank computes
        log.record(*pending(iteration, torch.tensor([2.0, 1.0])))
        intervals.append(log.close_interval())
    return intervals


def test_memory_and_input_waits_are_those_of_all_ranks(pool):
    for intervals in pool.run(interval_with_data, 2):
        for interval in intervals:
            assert list(interval.input_seconds) == [1.0, 2.0]
            fields = interval.as_fields()
            assert fields["input_seconds"] == 2.0
            assert fields["input_rank"] == 1
            memory = interval.max_memory_bytes
            assert len(memory) == 2
            assert min(memory) > 1e6
            assert fields["max_memory_bytes"] == max(memory) == memory[fields["max_memory_rank"]]
            assert fields["min_memory_bytes"] == min(memory)


def interval_of(rank, world_size, rows):
    times = iter([0.0, 3.0 * len(rows)])
    log = TrainingLog(
        ParallelState.create(ParallelConfig()),
        CPU,
        1e6,
        16,
        clock=lambda: next(times),
    )
    for iteration, loss, skipped in rows:
        log.record(*pending(iteration, torch.tensor([loss, 1.0]), skipped))
    return log.close_interval()


def test_log_line(pool):
    (interval,) = pool.run(
        interval_of,
        1,
        [(9, 2.0, False), (10, 4.0, False), (11, 7.0, True), (12, math.nan, True)],
    )
    line = format_log_line(interval, 100)
    for text in (
        "iteration       12/     100 |",
        "consumed samples:           96 |",
        "elapsed time per iteration (ms): ",
        "throughput per GPU (TFLOP/s/GPU): ",
        "tokens/s: ",
        "learning rate: 1.000000E-03 |",
        "global batch size:     8 |",
        "lm loss: 3.000000E+00 |",  # of the iterations that counted
        "loss scale: 1.0 |",
        "grad norm: 12.000 |",
        "number of skipped iterations:   2 |",
        "number of nan iterations:   1 |",
        "ETA: 0:04:24 |",  # 88 iterations of 3 seconds
    ):
        assert text in line

    assert re.match(r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] iteration", line)
    assert "params norm" not in line


MEGATRON_LM_LINE = re.compile(
    r" \[[^]]+\] iteration +\d+/ +\d+ \| consumed samples: +\d+ \| elapsed time per iteration "
    r"\(ms\): [\d.]+ \|"
    r" throughput per GPU \(TFLOP/s/GPU\): ([\d.]+) \| learning rate: \S+ \| global batch size: "
    r"+\d+ \|"
    r" lm loss: \S+ \| loss scale: [\d.]+ \| grad norm: [\d.]+ \| number of skipped iterations: "
    r"+\d+ \|"
    r" number of nan iterations: +\d+ \|"
)


@pytest.mark.parametrize(
    ("flops", "throughput"),
    [
        (6.05e7, "0.0000605"),
        (1.234e12, "1.23"),
        (9.999e12, "10.00"),
        (4.5678e14, "456.8"),
        (0.0, "0.00"),
    ],
)
def test_log_line_begins_with_the_fields_of_megatron_lm_in_their_order(pool, flops, throughput):
    """Scripts that cut Megatron-LM's line by position or by a regular expression work unchanged."""
    (interval,) = pool.run(interval_of, 1, [(12, 2.0, False)])
    interval = dataclasses.replace(interval, flops=flops, seconds=1.0)
    match = MEGATRON_LM_LINE.match(format_log_line(interval, 100))
    assert match is not None
    assert match[1] == throughput


def test_fields_of_a_json_line(pool):
    (interval,) = pool.run(interval_of, 1, [(9, 2.0, False), (10, math.nan, False)])
    fields = interval.as_fields()
    assert fields["iteration"] == 10
    assert fields["iterations"] == 2
    assert fields["seconds"] == 6.0
    assert fields["nan"] == 1
    assert interval.estimate_remaining_seconds(100) == 270.0
    assert math.isnan(fields["lm_loss"])


def test_losses_of_further_tokens_are_logged():
    iterations = []
    for iteration, losses in ((1, [4.0, 5.0]), (2, [3.0, 4.0])):
        metrics = dict(zip(("mtp_1 loss", "mtp_2 loss"), losses, strict=True))
        iterations.append(Iteration(iteration, 8, 8, 1e-3, 1.0, lm_loss=2.0, metrics=metrics))
    interval = Interval(iterations, seconds=1.0, tokens=1, flops=1.0, world_size=1)
    line = format_log_line(interval, 100)

    assert "| lm loss: 2.000000E+00 | mtp_1 loss: 3.500000E+00 | mtp_2 loss: 4.500000E+00 |" in line
    assert interval.as_fields()["mtp_2_loss"] == 4.5
    assert make_iteration_scalars(iterations[1])["mtp_1 loss"] == 3.0


def test_tensorboard(pool, tmp_path):
    config = LoggingConfig(tensorboard_dir=str(tmp_path), tensorboard_log_interval=2)
    (writer,) = make_writers(config, None, {"num_layers": 4}, 0)
    (interval,) = pool.run(
        interval_of,
        1,
        [(1, 2.0, False), (2, 4.0, False), (3, 5.0, False), (4, 6.0, False)],
    )
    writer.interval(interval)
    writer.scalars({"lm loss validation": 1.5}, 4)
    writer.close()
    events = EventAccumulator(str(tmp_path)).Reload()

    assert [(event.step, event.value) for event in events.Scalars("lm loss")] == [
        (2, 4.0),
        (4, 6.0),
    ]
    assert events.Scalars("lm loss validation")[0].value == 1.5

    tags = set(events.Tags()["scalars"])
    assert {
        "learning-rate",
        "grad-norm",
        "loss-scale",
        "batch-size",
        "iteration-time",
        "throughput",
    } <= tags


def test_tensorboard_shows_repeated_iterations_once(pool, tmp_path):
    """Launches that begin at 0, 2, again 2 (after a kill) and, on request, at 1."""
    config = LoggingConfig(tensorboard_dir=str(tmp_path), tensorboard_log_interval=1)
    values = {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}
    for launch, (first, last) in enumerate([(0, 3), (2, 4), (2, 3), (1, 3)]):
        iterations = []
        for iteration in range(first + 1, last + 1):
            values[iteration] = 10.0 * launch + iteration
            iterations.append((iteration, values[iteration], False))
        (writer,) = make_writers(config, None, {"num_layers": 4}, first, 8 * first)
        writer.interval(*pool.run(interval_of, 1, iterations))
        writer.close()

    expected = [(iteration, values[iteration]) for iteration in (1, 2, 3)]
    events = EventAccumulator(str(tmp_path)).Reload()
    curve = [(event.step, event.value) for event in events.Scalars("lm loss")]
    assert curve == expected

    events = EventAccumulator(str(tmp_path / "samples")).Reload()
    curve = [(event.step / 8, event.value) for event in events.Scalars("lm loss vs samples")]
    assert curve == expected


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_failing_writer_is_dropped_with_one_warning(pool, tmp_path, caplog):
    (interval,) = pool.run(interval_of, 1, [(1, 2.0, False)])
    directory = tmp_path / "tensorboard"
    (writer,) = make_writers(LoggingConfig(tensorboard_dir=str(directory)), None, {}, 0)
    directory.rename(tmp_path / "moved")  # at once, while threads of TensorBoard write
    for _ in range(20):  # a thread of TensorBoard reports its error with a later call
        writer.interval(interval)
        writer.scalars({"a": 1.0}, 1)
    writer.close()
    (warning,) = [record for record in caplog.records if record.name.startswith("megatron")]
    assert warning.getMessage().startswith("no more metrics are written to TensorBoard: ")


def test_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        ValueError,
        match=r"--tensorboard-dir .*/file/tensorboard cannot be written",
    ):
        config = LoggingConfig(tensorboard_dir=str(tmp_path / "file/tensorboard"))
        make_writers(config, None, {}, 0)


def test_no_writers_by_default():
    assert make_writers(LoggingConfig(), None, {}, 0) == []


def test_restart_continues_the_run_at_weights_and_biases(tmp_path, monkeypatch):
    """The library is replaced: its `init` with an id and `resume` continues the run of that id."""
    wandb = mock.Mock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    config = LoggingConfig(wandb_project="project")

    def begin(iteration, **flags):
        make_writers(config, str(tmp_path), flags, iteration)
        assert wandb.init.call_args.kwargs["resume"] == "allow"
        return wandb.init.call_args.kwargs["id"]

    first = begin(0)
    assert begin(15) == first
    assert begin(30, ckpt_step=None, finetune=False) == first

    branch = begin(10, ckpt_step=10)
    assert branch != first
    assert begin(20) == branch
    assert begin(0) not in (first, branch)

    (tmp_path / ".wandb-run").write_text("../../x")
    assert begin(20).isalnum()

    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    assert begin(25) == "mine"


def test_run_without_a_directory_has_no_id_at_weights_and_biases(tmp_path, monkeypatch):
    wandb = mock.Mock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    config = LoggingConfig(wandb_project="project", wandb_save_dir=str(tmp_path))
    make_writers(config, None, {}, 15)
    assert wandb.init.call_args.kwargs["id"] is None
