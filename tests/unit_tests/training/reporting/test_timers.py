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
    assert first == same and list(first) == ["sleep"] and second == {}
    fast, slow = first["sleep"]
    assert 0.04 <= fast < slow and slow >= 0.08
    assert f"({1000 * fast / 2:.2f}, {1000 * slow / 2:.2f})" in report


def test_level_0_does_nothing():
    timers = Timers(0, "max", torch.device("cpu"))
    with timers("anything"):
        pass
    assert timers.take() == {} and timers.report({}, 1) == ""
