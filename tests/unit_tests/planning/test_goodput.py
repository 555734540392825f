"""Simulated runs, compared with runs worked out by hand and with the exponential failure law."""

import math

import pytest

from megatron.planning.goodput import (
    Failure,
    SaveTier,
    choose_intervals,
    draw_failures,
    simulate_run,
)
from megatron.planning.save_intervals import find_best_interval

PERSISTENT = SaveTier("--save-interval", interval=10, blocking=1.0, total=4.0, loading=3.0)
LOCAL = SaveTier("--non-persistent-save-interval", interval=4, blocking=1.0, total=2.0, loading=1.0)


def simulate(tiers, failures, duration):
    """Return (training, repeated, saving, restarting) with steps of 1 s and restarts of 5 s."""
    spent = simulate_run(tiers, 1.0, 5.0, failures, duration)
    assert sum(vars(spent).values()) == pytest.approx(duration)
    return spent.training, spent.repeated, spent.saving, spent.restarting


def test_run_without_failures():
    # Start 0-5, iterations 1-10 5-15, save 15-16, iterations 11-20 16-26, save 26-27, 3 iterations
    assert simulate([PERSISTENT], [], 30.0) == (23, 0, 2, 5)


def test_failure_repeats_iterations_after_the_newest_save():
    # At 22 iteration 16 is done, and the save of iteration 10 is durable since 19. Restart and load
    # take 8 s; 10 iterations and a save 11 s.
    assert simulate([PERSISTENT], [Failure(22.0, False)], 41.0) == (20, 6, 2, 13)


def test_save_counts_only_once_it_is_durable():
    # The save begins at 15 and is durable at 19.
    assert simulate([PERSISTENT], [Failure(18.0, False)], 28.0) == (5, 12, 1, 10)


def test_failure_during_a_restart_begins_it_again():
    failures = [Failure(3.0, False), Failure(4.0, False)]
    assert simulate([PERSISTENT], failures, 12.0) == (3, 0, 0, 9)


def test_failure_during_a_blocking_save():
    assert simulate([PERSISTENT], [Failure(15.5, False)], 20.5) == (0, 10, 0.5, 10)


def test_next_save_waits_for_the_previous_one():
    slow = SaveTier("--save-interval", interval=2, blocking=1.0, total=6.0, loading=0.0)
    # Saves begin at 7 and, instead of at 10, at 13.
    assert simulate([slow], [], 14.0) == (4, 0, 5, 5)


def test_lost_node_continues_from_the_persistent_tier():
    # Saves of iteration 4 at 9, 8 at 14, and 10, persistent, at 17: durable on the nodes at 19, in
    # the storage at 23. Iteration 12 is saved locally at 20.
    tiers = [PERSISTENT, LOCAL]
    kept = simulate(tiers, [Failure(24.0, False)], 31.0)
    assert kept == (12 + 1, 3, 4, 11)
    lost = simulate(tiers, [Failure(24.0, True)], 33.0)
    assert lost == (10 + 1, 5, 4, 13)


@pytest.mark.parametrize(("interval", "blocking", "mtbf"), [(100, 2.0, 1000.0), (30, 5.0, 400.0)])
def test_goodput_follows_the_exponential_failure_law(interval, blocking, mtbf):
    """Mean time per interval of training, with failures during saves and restarts (Daly 2006)."""
    restart = 20.0
    tier = SaveTier("--save-interval", interval, blocking, total=blocking, loading=0.0)
    duration = 20_000 * mtbf
    failures = list(draw_failures(duration, mtbf, 10 * mtbf))
    spent = simulate_run([tier], 1.0, restart, failures, duration)
    mean = mtbf * math.exp(restart / mtbf) * math.expm1((interval + blocking) / mtbf)
    assert spent.goodput == pytest.approx(interval / mean, rel=0.02)


def test_chosen_interval_is_that_of_daly():
    tier = SaveTier("--save-interval", 1, 2.0, total=2.0, loading=0.0)
    duration = 5_000 * 1000.0
    failures = list(draw_failures(duration, 1000.0, 1e9))
    (chosen,) = choose_intervals([tier], 1.0, 20.0, failures, duration)
    assert chosen.interval == pytest.approx(find_best_interval(2.0, 1000.0), rel=0.3)


def test_number_of_failures():
    failures = list(draw_failures(1e6, 100.0, 1000.0))
    assert len(failures) == pytest.approx(10_000, rel=0.03)
    assert sum(failure.loses_node for failure in failures) == pytest.approx(1_000, rel=0.1)
    assert failures == sorted(failures, key=lambda failure: failure.time)
