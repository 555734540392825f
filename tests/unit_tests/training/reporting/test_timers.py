"""Timers accumulate over calls, are off below their level, and compare ranks."""

import time

import torch

from megatron.training.reporting.measurements import Timers


def timed(rank, world_size):
    timers = Timers(1, "minmax", torch.device("cpu"))
    for _ in range(2):
        with timers("sleep"):
            time.sleep(0.02 * (1 + rank))
    with timers("too detailed", level=2):
        pass
    first = timers.take()
    second = timers.take()
    return first, second, timers.report(first, 2)


def test_times_of_all_ranks_are_gathered_and_reset(pool):
    (first, second, report), (same, _, _) = pool.run(timed, 2)
    assert first == same
    assert list(first) == ["sleep"]
    assert second == {}
    fast, slow = first["sleep"]
    assert 0.04 <= fast < slow
    assert slow >= 0.08
    # Milliseconds of one of two iterations
    assert f"({500 * fast:.2f}, {500 * slow:.2f})" in report


def test_level_0_does_nothing():
    timers = Timers(0, "max", torch.device("cpu"))
    with timers("anything"):
        pass
    assert timers.take() == {}
    assert timers.report({}, 1) == ""
