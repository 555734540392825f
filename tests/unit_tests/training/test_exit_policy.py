"""Ranks save and exit together, although a signal reaches one of them and clocks differ."""

import os
import signal

import pytest
import torch

from megatron.core.dist_checkpointing.saving.run_saver import SaveFailedError
from megatron.training.checkpoint.save_options import make_saver
from megatron.training.config.run_options import CheckpointConfig, TrainingConfig
from megatron.training.exit import Exit, find_exit, make_save_policy, record_exit_signals


class Clock:
    """A clock that the test moves."""

    def __init__(self):
        self.seconds = 1000.0

    def __call__(self):
        return self.seconds

    def move(self, seconds):
        self.seconds += seconds


class Run:
    """The loop of a run without training: decides after each iteration."""

    def __init__(self, training=None, checkpoint=None, signals=None, saver=None, clock=None):
        clock = clock or Clock()
        checkpoint = checkpoint or CheckpointConfig()
        self.training = training or TrainingConfig()
        saver = saver or make_saver(checkpoint)
        signals = signals or record_exit_signals(False)
        self.policy = make_save_policy(
            checkpoint, self.training, saver, signals, torch.device("cpu"), clock(), clock
        )

    def after(self, iteration, seconds=0.0):
        """Return whether to save after an iteration, and why to exit, if so."""
        decision = self.policy.after(iteration, seconds)
        return decision.save, find_exit(self.training, decision, iteration)

    def exits(self, *iterations, seconds=0.0):
        return [self.after(iteration, seconds)[1] for iteration in iterations]


def one_rank_is_signalled(rank, world_size):
    with record_exit_signals(True) as signals:
        run = Run(TrainingConfig(exit_signal_handler=True), signals=signals)
        before = run.exits(1)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return before + run.exits(2, 3)


def test_signal_on_one_rank_ends_all_at_the_same_iteration(pool):
    signalled = Exit("SIGTERM was received", urgent=True)
    assert pool.run(one_rank_is_signalled, 2) == [[None, None, signalled]] * 2


def time_is_up_on_one_rank(rank, world_size):
    clock = Clock()
    run = Run(TrainingConfig(exit_duration_in_mins=1.0), clock=clock)
    clock.move(60.1 if rank == 0 else 59.0)
    return run.exits(1, 2)


def test_time_limit_on_one_rank_ends_all(pool):
    for first, second in pool.run(time_is_up_on_one_rank, 2):
        assert first is None
        assert second.urgent
        assert "--exit-duration-in-mins" in second.reason


def the_save_takes_long(rank, world_size):
    saver = make_saver(CheckpointConfig())
    run = Run(TrainingConfig(exit_duration_in_mins=1.0), saver=saver)
    exits = run.exits(1, 2)
    saver.expected_seconds = 59.5 if rank == 1 else 0.0  # as it measured the last one
    exits += run.exits(3, seconds=0.2)
    exits += run.exits(4, seconds=0.3)
    exits += run.exits(5)
    return [reason is not None for reason in exits]


def test_time_limit_includes_the_last_save(pool):
    """The save takes 59.5 s: two iterations of 0.2 s fit into a minute, two of 0.3 s do not."""
    assert pool.run(the_save_takes_long, 2) == [[False, False, False, False, True]] * 2


def clocks_that_differ(rank, world_size):
    clock = Clock()
    run = Run(
        checkpoint=CheckpointConfig(save="x", save_interval_secs=0.5 if rank == 0 else 1000),
        clock=clock,
    )
    saved = []
    for iteration in range(1, 19):
        saved.append(run.after(iteration)[0])
        clock.move(0.125)
    run.policy.finish()
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
    run = Run(
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
        saved.append(run.after(iteration)[0])
        clock.move(pause)
    run.policy.finish()
    return saved


def a_save_fails_behind_training(rank, world_size):
    checkpoint = CheckpointConfig(save="x", async_save=True, exit_on_save_failure=True)
    saver = make_saver(checkpoint)
    run = Run(checkpoint=checkpoint, saver=saver)
    exits = run.exits(1)
    if rank == 1:
        saver.failure = "the disk is full"
    run.after(2)
    with pytest.raises(SaveFailedError) as error:
        run.after(3)
    return exits, str(error.value)


def test_all_ranks_stop_when_one_reports_a_failed_save(pool):
    (first, other_rank), (second, own) = pool.run(a_save_fails_behind_training, 2)
    assert first == second == [None]
    assert own == "the disk is full"
    assert "another rank" in other_rank


@pytest.mark.parametrize("interval", [1, 4])
def test_intervals_do_not_communicate(interval):
    assert not torch.distributed.is_initialized()
    run = Run(TrainingConfig(exit_interval=interval), CheckpointConfig(save="x", save_interval=3))
    iterations = range(1, 13)
    decisions = [run.after(i) for i in iterations]
    assert [leave is not None for _, leave in decisions] == [i % interval == 0 for i in iterations]
    assert [save for save, _ in decisions] == [i % 3 == 0 for i in iterations]
