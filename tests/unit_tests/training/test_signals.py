"""Ranks end a run together, whichever of them got the signal or whose clock is ahead."""

import os
import signal

import torch

from megatron.training.config import TrainingConfig
from megatron.training.signals import Exit, ExitDecision, ExitSignals

CPU = torch.device("cpu")


def one_rank_is_signalled(rank, world_size):
    with ExitSignals().installed(True) as signals:
        decision = ExitDecision(signals, TrainingConfig(exit_signal_handler=True), CPU)
        before = decision.after(1)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return before, decision.after(2), decision.after(3)


def test_a_signal_on_one_rank_ends_all(pool):
    signalled = Exit("SIGTERM was received", urgent=True)
    assert pool.run(one_rank_is_signalled, 2) == [(None, signalled, signalled)] * 2


def time_is_up_on_one_rank(rank, world_size):
    decision = ExitDecision(ExitSignals(), TrainingConfig(exit_duration_in_mins=0.0 if rank == 0 else 60.0), CPU)
    return decision.after(1)


def test_a_time_limit_on_one_rank_ends_all(pool):
    for leave in pool.run(time_is_up_on_one_rank, 2):
        assert leave.urgent and "--exit-duration-in-mins" in leave.reason


def test_exit_interval_needs_no_communication():
    decision = ExitDecision(ExitSignals(), TrainingConfig(exit_interval=4), CPU)
    assert [decision.after(i) is not None for i in range(1, 9)] == [False, False, False, True] * 2


def test_handlers_return_at_the_end():
    before = signal.getsignal(signal.SIGTERM)
    with ExitSignals().installed(True) as signals:
        assert signal.getsignal(signal.SIGTERM) != before
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received is signal.SIGUSR1  # the first one is the reason
    assert signal.getsignal(signal.SIGTERM) == before
    with ExitSignals().installed(False):
        assert signal.getsignal(signal.SIGTERM) == before
