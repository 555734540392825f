"""Saves by the clock, and runs that are asked to end: by a signal or by the time."""

import re
import signal
import time
from itertools import pairwise

import pytest
from training_harness import COMMON, LAYOUTS, LLAMA

from megatron.core.dist_checkpointing import is_complete

LONG = f"{COMMON} {LLAMA} --num-layers 2 --mock-data --train-iters 1000000 --save {{directory}} --load {{directory}} "
TRACKER = "latest_checkpointed_iteration.txt"


def assert_saved_where_it_left(job, directory):
    last = job.iterations()[-1]
    assert (directory / TRACKER).read_text() == str(last)
    assert is_complete(directory / f"iter_{last:07d}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("mode", ["", "--async-save --save-interval 1"])
def test_a_signal_to_one_rank(launcher, tmp_path, number, mode):
    flags = f"{LONG.format(directory=tmp_path)} {mode} --exit-signal-handler"
    job = launcher.start(2, flags)
    job.until_iteration(5)
    job.signal(1, number)
    job.succeed()
    assert f"exiting after iteration {job.iterations()[-1]}: {number.name} was received" in job.output()
    assert_saved_where_it_left(job, tmp_path)
    again = launcher.start(2, flags)
    again.until(again.iterations)
    assert again.resumed_at() == job.iterations()[-1]
    again.signal(0, number)
    again.succeed()


def test_without_the_flag_a_signal_ends_the_process(launcher, tmp_path):
    job = launcher.start(1, LONG.format(directory=tmp_path))
    job.until_iteration(2)
    job.signal(0, signal.SIGTERM)
    assert job.wait() == [-signal.SIGTERM]


@pytest.mark.parametrize("mode", ["", "--async-save"])
def test_saves_by_the_clock(launcher, tmp_path, mode):
    flags = f"{LONG.format(directory=tmp_path)} {mode} --save-interval-secs 0.4 --exit-duration-in-mins 0.06"
    job = launcher.run(2, flags + " " + LAYOUTS["dp2_distributed_optimizer"][1])
    *timed, last = job.saved()
    assert 3 <= len(timed) <= 9
    assert_saved_where_it_left(job, tmp_path)
    times = [(tmp_path / f"iter_{iteration:07d}/.metadata").stat().st_mtime for iteration in timed]
    assert all(later - earlier > 0.3 for earlier, later in pairwise(times))


def test_the_time_limit_has_room_for_the_save(launcher, tmp_path):
    """It ends within the limit although the last save comes after the decision."""
    began = time.monotonic()
    job = launcher.run(1, f"{LONG.format(directory=tmp_path)} --save-interval 20 --exit-duration-in-mins 0.04")
    assert time.monotonic() - began < 60 * 0.04 + 1.0  # the start and the end of the process
    assert "0.04 minutes are over (--exit-duration-in-mins)" in job.output()
    assert_saved_where_it_left(job, tmp_path)


def test_the_log_says_where_the_time_of_a_save_went(launcher, tmp_path):
    job = launcher.run(1, f"{LONG.format(directory=tmp_path)} --exit-interval 3 --tensorboard-dir {tmp_path}/events")
    number = r"[\d.]+"
    stages = ("blocking", "staged after", "written after", "commit", "in all")
    times = ", ".join(rf"{stage} {number} ms" for stage in stages)
    assert re.search(rf"> saved \S+iter_0000003: {times}; {number} GB at {number} GB/s", job.output())

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    names = ("blocking-time", "staging-time", "writing-time", "commit-time", "total-time", "gigabytes")
    values = {name: events.Scalars(f"save-{name}")[0] for name in (*names, "gigabytes-per-second")}
    assert all(value.step == 3 and value.value > 0 for value in values.values())
    assert values["total-time"].value >= values["writing-time"].value >= values["staging-time"].value
    size = sum(path.stat().st_size for path in (tmp_path / "iter_0000003").glob("*.distcp"))
    assert values["gigabytes"].value == pytest.approx(size / 1e9, rel=0.1)
