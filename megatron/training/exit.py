"""When a run saves and when it ends: flags, signals, and losses that are not finite.

`dist_checkpointing.policy.SavePolicy` makes the ranks decide together.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from megatron.core.deferred import start_copy
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.dist_checkpointing.policy import (
    Decision,
    SavePolicy,
    SignalRecorder,
    is_multiple,
)
from megatron.core.dist_checkpointing.saving.run_saver import RunSaver
from megatron.core.optimizer import StepResult
from megatron.core.parallel_state import ParallelState, gather_objects
from megatron.training.checkpoint.save_options import make_options
from megatron.training.config.run_options import CheckpointConfig, TrainingConfig
from megatron.training.reporting.intervals import Interval

EXIT_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # sent by job schedulers before they kill


def record_exit_signals(enabled: bool) -> SignalRecorder:
    """Record the exit signals that arrive from now on, if `enabled`, instead of terminating.

    torchrun passes SIGTERM to its workers and kills them 30 seconds later; Slurm sends SIGUSR1
    (`--signal`) before the time limit.
    """
    return SignalRecorder(EXIT_SIGNALS if enabled else ())


class Exit(NamedTuple):
    """The reason for which a run ends early."""

    reason: str
    urgent: bool = False  # the scheduler is about to kill the run: save at once


def make_save_policy(
    config: CheckpointConfig,
    training: TrainingConfig,
    saver: RunSaver,
    signals: SignalRecorder,
    device: torch.device,
    started: float,
    clock: Callable[[], float] = time.monotonic,
) -> SavePolicy:
    """Return the policy of the flags; --exit-duration-in-mins counts from `started`."""
    minutes = training.exit_duration_in_mins
    # A synchronous save fails on all ranks together, which needs no vote.
    is_in_background = config.save is not None and config.async_save
    return SavePolicy(
        make_options(config),
        saver,
        signals,
        device,
        clock,
        started,
        max_seconds=None if minutes is None else 60 * minutes,
        votes_on_failure=config.exit_on_save_failure and is_in_background,
    )


def find_exit(training: TrainingConfig, decision: Decision, iteration: int) -> Exit | None:
    """Return the reason to exit after `iteration`, if any."""
    if decision.signal is not None:
        return Exit(f"{decision.signal.name} was received", urgent=True)
    if decision.is_late:
        return Exit(
            f"{training.exit_duration_in_mins:g} minutes are over (--exit-duration-in-mins)",
            urgent=True,
        )
    if is_multiple(iteration, training.exit_interval):
        return Exit(
            f"iteration {iteration} is a multiple of --exit-interval {training.exit_interval}"
        )
    return None


class NotFiniteError(ValueError):
    """A loss or gradient is NaN or infinite."""


class NanCheck:
    """Check of losses and gradients one iteration later, so that the host never waits.

    The optimizer skips every update whose gradient norm is not finite, so the parameters stay
    finite in the meantime. With a dynamic loss scale, an overflow of the gradient is expected; a
    loss that is not finite is not.
    """

    def __init__(self, ps: ParallelState, enabled: bool, dynamic_loss_scale: bool) -> None:
        self._ps = ps
        self._enabled = enabled
        self._dynamic_loss_scale = dynamic_loss_scale
        self._last: tuple[int, torch.Tensor, StepResult, Callable[[], torch.Tensor]] | None = None

    def submit(self, iteration: int, loss: torch.Tensor, step: StepResult) -> None:
        """Check the iteration before this one, and keep this one for the next call."""
        self.finish()
        if self._enabled:
            self._last = iteration, loss, step, start_copy(step.skipped)

    def finish(self) -> None:
        """Check the last submitted iteration, if any.

        Raises NotFiniteError on every rank, naming the ranks with a loss that is not finite.
        """
        if self._last is None:
            return
        iteration, loss, step, skipped = self._last
        self._last = None
        if not skipped():  # the same on all ranks: the norm is over all gradients
            return
        # The norm is the same on all ranks; only the loss shows on which ranks the problem began.
        failed_rank = ""
        if not bool(torch.isfinite(loss).all()):
            failed_rank = f"rank {self._ps.rank} ({self._ps.place})"
        failed_ranks = filter(None, gather_objects(failed_rank))
        listed = ", ".join(failed_ranks)
        if listed:
            raise NotFiniteError(
                f"iteration {iteration}: the loss is not finite on {listed}. {_ADVICE}"
            )
        if not self._dynamic_loss_scale:
            norm = step.grad_norm.item()
            raise NotFiniteError(
                f"iteration {iteration}: the gradient norm is {norm}, the loss is finite on all "
                f"ranks. {_ADVICE}"
            )

    def start_check(self) -> Callable[[], None]:
        """Return a check of the last submitted iteration for another thread, which may wait.

        It raises CheckpointError; `finish` then raises NotFiniteError after the next iteration. A
        dynamic loss scale requires the losses of all ranks, so `finish` is called at once.
        """
        if self._dynamic_loss_scale:
            self.finish()
        if self._last is None:
            return lambda: None
        iteration, _, _, skipped = self._last

        def check() -> None:
            if skipped():
                raise CheckpointError(f"the gradient of iteration {iteration} is not finite")

        return check

    def check_interval(self, interval: Interval) -> None:
        """Check the losses of a closed interval: one may be NaN while its gradient is finite."""
        for iteration in interval.iterations:
            if self._enabled and not iteration.skipped and not math.isfinite(iteration.lm_loss):
                raise NotFiniteError(
                    f"iteration {iteration.iteration}: the loss is {iteration.lm_loss}. {_ADVICE}"
                )


_ADVICE = (
    "No checkpoint was written since. Inspect the data of that iteration, lower --lr, or skip "
    "such iterations with --no-check-for-nan-in-loss-and-grad"
)
