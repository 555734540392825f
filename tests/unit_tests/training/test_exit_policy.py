"""Ranks save and exit together, although a signal reaches one of them and clocks differ."""

import os
import signal

import pytest
import torch

from megatron.core.dist_checkpointing.saving.run_saver import SaveFailedError
from megatron.training.checkpoint.saver import make_saver
from megatron.training.config.options import CheckpointConfig, TrainingConfig
from megatron.training.exit import Exit, SaveAndExitPolicy, exit_signals


class Clock:
    """A clock that the test moves."""

    def __init__(self):
        self.seconds = 1000.0

    def __call__(self):
        return self.seconds

    def move(self, seconds):
        self.seconds += seconds


def decisions(training=None, checkpoint=None, signals=None, saver=None, clock=None):
    clock = clock or Clock()
    checkpoint = checkpoint or CheckpointConfig()
    return SaveAndExitPolicy(
        [] if signals is None else signals,
        training or TrainingConfig(),
        checkpoint,
        saver or make_saver(checkpoint),
        torch.device("cpu"),
        clock(),
        clock,
    )


def one_rank_is_signalled(rank, world_size):
    with exit_signals(True) as signals:
        decide = decisions(TrainingConfig(exit_signal_handler=True), signals=signals)
        before = decide.after(1)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return before.leave, decide.after(2).leave, decide.after(3).leave


def test_signal_on_one_rank_ends_all_at_the_same_iteration(pool):
    signalled = Exit("SIGTERM was received", urgent=True)
    assert pool.run(one_rank_is_signalled, 2) == [(None, None, signalled)] * 2


def time_is_up_on_one_rank(rank, world_size):
    clock = Clock()
    decide = decisions(TrainingConfig(exit_duration_in_mins=1.0), clock=clock)
    clock.move(60.1 if rank == 0 else 59.0)
    return decide.after(1).leave, decide.after(2).leave


def test_time_limit_on_one_rank_ends_all(pool):
    for first, second in pool.run(time_is_up_on_one_rank, 2):
        assert first is None
        assert second.urgent and "--exit-duration-in-mins" in second.reason


def the_save_takes_long(rank, world_size):
    saver = make_saver(CheckpointConfig())
    decide = decisions(TrainingConfig(exit_duration_in_mins=1.0), saver=saver)
    left = [decide.after(1).leave, decide.after(2).leave]
    saver.expected_seconds = 59.5 if rank == 1 else 0.0  # as it measured the last one
    left += [
        decide.after(3, seconds=0.2).leave,
        decide.after(4, seconds=0.3).leave,
        decide.after(5).leave,
    ]
    return [leave is not None for leave in left]


def test_time_limit_includes_the_last_save(pool):
    """The save takes 59.5 s: two iterations of 0.2 s fit into a minute, two of 0.3 s do not."""
    assert pool.run(the_save_takes_long, 2) == [[False, False, False, False, True]] * 2


def clocks_that_differ(rank, world_size):
    clock = Clock()
    decide = decisions(
        checkpoint=CheckpointConfig(save="x", save_interval_secs=0.5 if rank == 0 else 1000),
        clock=clock,
    )
    saved = []
    for iteration in range(1, 19):
        saved.append(decide.after(iteration).save)
        clock.move(0.125)
    decide.finish()
    return saved


def test_timed_saves_are_due_on_all_ranks_together(pool):
    """Due on rank 0 half a second, four iterations, after the last save; seen by both one iteration
    later.
    """
    first, second = pool.run(clocks_that_differ, 2)
    assert first == second
    assert [iteration for iteration, save in enumerate(first, 1) if save] == [6, 11, 16]


def test_save_by_iteration_resets_the_clock(pool):
    assert pool.run(both_rules, 1) == [[False, True, False, False, True]]


def both_rules(rank, world_size):
    clock = Clock()
    decide = decisions(
        checkpoint=CheckpointConfig(save="x", save_interval=2, save_interval_secs=0.25), clock=clock
    )
    saved = []
    for iteration, pause in (
        (1, 0.15),
        (2, 0.2),
        (3, 0.1),
        (5, 0.0),
        (7, 0.0),
    ):  # due at 5, seen at 7
        saved.append(decide.after(iteration).save)
        clock.move(pause)
    decide.finish()
    return saved


def a_save_fails_behind_training(rank, world_size):
    checkpoint = CheckpointConfig(save="x", async_save=True, exit_on_save_failure=True)
    saver = make_saver(checkpoint)
    decide = decisions(checkpoint=checkpoint, saver=saver)
    first = decide.after(1).leave
    if rank == 1:
        saver.failure = "the disk is full"
    decide.after(2)
    with pytest.raises(SaveFailedError) as error:
        decide.after(3)
    return first, str(error.value)


def test_all_ranks_stop_when_one_reports_a_failed_save(pool):
    (first, other_rank), (second, own) = pool.run(a_save_fails_behind_training, 2)
    assert first is second is None and own == "the disk is full" and "another rank" in other_rank


@pytest.mark.parametrize("interval", [1, 4])
def test_intervals_do_not_communicate(interval):
    assert not torch.distributed.is_initialized()
    decide = decisions(
        TrainingConfig(exit_interval=interval), CheckpointConfig(save="x", save_interval=3)
    )
    verdicts = [decide.after(i) for i in range(1, 13)]
    assert [v.leave is not None for v in verdicts] == [i % interval == 0 for i in range(1, 13)]
    assert [v.save for v in verdicts] == [i % 3 == 0 for i in range(1, 13)]
