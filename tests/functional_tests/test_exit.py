"""Timed saves, and early exits by signals and time limits."""

import re
import shlex
import signal

import pytest

from megatron.core.dist_checkpointing import is_complete
from megatron.training.config.parsing import parse_args
from megatron.training.training import pretrain
from tests.support.training_harness import (
    COMMON,
    LAYOUTS,
    LLAMA,
    Measurements,
    datasets_provider,
    forward_step,
    model_provider,
)

LONG = (
    f"{COMMON} {LLAMA} --num-layers 2 --mock-data --train-iters 1000000 --save {{directory}} "
    f"--load {{directory}} "
)
TRACKER = "latest_checkpointed_iteration.txt"


def assert_saved_where_it_left(job, directory):
    last = job.iterations()[-1]
    assert (directory / TRACKER).read_text() == str(last)
    assert is_complete(directory / f"iter_{last:07d}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("mode", ["", "--async-save --save-interval 1"])
def test_signal_to_one_rank_saves_and_exits_on_all(launcher, tmp_path, number, mode):
    flags = f"{LONG.format(directory=tmp_path)} {mode} --exit-signal-handler"
    job = launcher.start(2, flags)
    job.until_iteration(5)
    job.signal(1, number)
    job.succeed()
    assert (
        f"exiting after iteration {job.iterations()[-1]}: {number.name} was received"
        in job.output()
    )
    assert_saved_where_it_left(job, tmp_path)
    again = launcher.start(2, flags)
    again.until(again.iterations)
    assert again.resumed_at() == job.iterations()[-1]
    again.signal(0, number)
    again.succeed()


def test_signal_without_the_flag_ends_the_process(launcher, tmp_path):
    job = launcher.start(1, LONG.format(directory=tmp_path))
    job.until_iteration(2)
    job.signal(0, signal.SIGTERM)
    assert job.wait() == [-signal.SIGTERM]


class MovedClock(Measurements):
    """A minute passes with every iteration, on rank 0."""

    seconds = 0.0

    def interval(self, interval):
        super().interval(interval)
        self.seconds += 60


def train_by_the_clock(rank, world_size, flags):
    clock = MovedClock()
    config = parse_args(shlex.split(flags), world_size)
    run = pretrain(
        config,
        model_provider,
        datasets_provider,
        forward_step,
        writers=[clock],
        clock=lambda: clock.seconds,
    )
    return run.state.iteration, run.exit_reason


@pytest.mark.parametrize("mode", ["", "--async-save"])
def test_saves_by_time_interval(pool, tmp_path, mode):
    """Every 4 minutes, and the last one within 20; timers take effect one iteration later."""
    flags = (
        f"{LONG.format(directory=tmp_path)} {mode} --save-interval-secs 240 "
        "--exit-duration-in-mins 20"
    )
    flags += " " + LAYOUTS["dp2_distributed_optimizer"][1]
    for iteration, reason in pool.run(train_by_the_clock, 2, flags):
        assert iteration == 22
        assert "20 minutes are over (--exit-duration-in-mins)" in reason
    saved = sorted(int(path.name.removeprefix("iter_")) for path in tmp_path.glob("iter_*"))
    assert saved == [6, 11, 16, 21, 22]
    assert (tmp_path / TRACKER).read_text() == "22"
    assert is_complete(tmp_path / "iter_0000022")


def test_log_reports_the_phases_of_a_save(launcher, tmp_path):
    job = launcher.run(
        1,
        f"{LONG.format(directory=tmp_path)} --exit-interval 3 --dist-ckpt-workers 2 "
        f"--tensorboard-dir {tmp_path}/events",
    )
    decimal = r"[\d.]+"
    line = (
        rf"> saved \S+iter_0000003 in {decimal} ms \(training lost {decimal} ms, of which {decimal} ms "
        rf"waiting for the end of the save\): {decimal} GB at {decimal} GB/s"
    )
    assert re.search(line, job.output())

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    names = (
        "blocking-time",
        "staging-time",
        "writing-time",
        "commit-time",
        "total-time",
        "gigabytes",
    )
    values = {name: events.Scalars(f"save-{name}")[0] for name in (*names, "gigabytes-per-second")}
    assert all(value.step == 3 and value.value > 0 for value in values.values())
    assert (
        values["total-time"].value >= values["writing-time"].value >= values["staging-time"].value
    )
    # Without --async-save training waits until the files are durable, and for the commit.
    assert values["blocking-time"].value >= values["writing-time"].value
    size = sum(path.stat().st_size for path in (tmp_path / "iter_0000003").glob("__0_[01].distcp"))
    assert values["gigabytes"].value == pytest.approx(size / 1e9, rel=0.1)
