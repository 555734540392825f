"""The training time that a save costs, from times of iterations."""

import itertools
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing.saving.save_cost import IterationTimes, compute_slowdown
from megatron.core.dist_checkpointing.saving.save_thread import SaveReport


def get_durations(timestamps):
    return [end - begin for begin, end in itertools.pairwise(timestamps)]


def test_slowdown_is_relative_to_the_mean_iteration_without_outliers():
    without = get_durations([0, 10, 10.2, 10.5, 10.8, 11.2])  # the first one compiles
    during = get_durations([20, 20.5, 20.9, 21.2])
    assert compute_slowdown(during, without, waited=0.0) == pytest.approx(0.2 + 0.1)


def test_delays_of_a_loaded_machine_are_not_a_cost_of_the_save():
    """Every fourth iteration is delayed, with and without a save that adds 0.25 to each."""
    loaded = [1.0, 1.0, 1.0, 1.75]
    during = [seconds + 0.25 for seconds in loaded * 3]
    assert compute_slowdown(during, loaded * 10, waited=0.0) == pytest.approx(12 * 0.25)


def test_waits_of_the_update_are_not_counted_twice():
    assert compute_slowdown([1.5, 1.25], [1.0] * 3, waited=0.5) == pytest.approx(0.25)
    assert compute_slowdown([1.5, 1.25], [1.0] * 3, waited=1.0) == 0.0


def test_slowdown_needs_iterations_without_a_save():
    assert compute_slowdown([9.0], [1.0, 1.0], waited=0.0) == 0.0
    assert compute_slowdown([], [1.0] * 3, waited=0.0) == 0.0


def test_a_baseline_follows_slow_changes():
    now = 0.0
    times = IterationTimes(lambda: now)
    save = SaveReport(Path("save"))
    for report, seconds in [*[(None, 1.0)] * 20, *[(None, 1.25)] * 16, *[(save, 1.5)] * 8]:
        with times.measure(report):
            now += seconds
    times.charge(save)
    assert save.slowdown == pytest.approx(8 * 0.25)


def test_iterations_are_charged_to_the_save_during_them():
    now = 0.0
    times = IterationTimes(lambda: now)
    saves = [SaveReport(Path(name)) for name in ("first", "second")]
    for save, seconds in [
        *[(None, 2.0)] * 3,
        (saves[0], 5.0),
        (saves[0], 3.0),
        (saves[1], 2.5),
        (None, 2.0),
    ]:
        with times.measure(save):
            now += seconds
        now += 100.0  # evaluation

    for save in saves:
        assert times.is_measured(save)
        times.charge(save)
    assert [save.slowdown for save in saves] == [4.0, 0.5]
    assert [save.blocking for save in saves] == [4.0, 0.5]
