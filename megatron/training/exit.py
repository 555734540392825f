"""When a run saves and when it ends: flags, signals, clocks, failed saves and non-finite losses.

All ranks must save and exit at the same iteration, but a signal may reach only one rank, clocks
differ, and one rank may be the first to notice that a save has failed. If a flag requires it, the
ranks exchange votes and act on their maximum. The votes of an iteration are counted after the next
one, so that no rank waits for the exchange.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron.core.deferred import start_copy, start_max_reduce
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.dist_checkpointing.saving.run_saver import RunSaver
from megatron.core.optimizer import StepResult
from megatron.core.parallel_state import ParallelState
from megatron.training.config.options import CheckpointConfig, TrainingConfig
from megatron.training.reporting.intervals import Interval

EXIT_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # sent by job schedulers before they kill


@contextmanager
def exit_signals(enabled: bool) -> Iterator[list[signal.Signals]]:
    """Record the exit signals that arrive inside the block, in order, instead of terminating.

    Unless `enabled`, signals are handled as usual. torchrun passes SIGTERM to its workers and kills
    them 30 seconds later; Slurm sends SIGUSR1 (`--signal`) before the time limit.
    """
    received: list[signal.Signals] = []

    def remember(signum: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(signum))

    previous = {}
    if enabled:
        for signum in EXIT_SIGNALS:
            previous[signum] = signal.signal(signum, remember)
    try:
        yield received
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


class Exit(NamedTuple):
    """The reason for which a run ends early."""

    reason: str
    urgent: bool = False  # the scheduler is about to kill the run: save at once


class SaveAndExit(NamedTuple):
    """The decision after an iteration; the same on every rank."""

    save: bool
    save_locally: bool
    leave: Exit | None


class _Votes(NamedTuple):
    """The votes of one rank, or their maxima over all ranks."""

    signal: int = 0  # its number
    late: int = 0
    save: int = 0
    failed: int = 0


class SaveAndExitPolicy:
    """Decides after every iteration whether to save and whether to exit.

    Call `after` once per iteration on all ranks, and `finish` after the last. `clock` returns the
    time in seconds; --exit-duration-in-mins counts from `started`.
    """

    def __init__(
        self,
        signals: Sequence[signal.Signals],
        training: TrainingConfig,
        checkpoint: CheckpointConfig,
        saver: RunSaver,
        device: torch.device,
        started: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._signals = signals
        self._saver = saver
        self._device = device
        self._training = training
        self._checkpoint = checkpoint
        self._clock = clock
        self._start = started
        self._last_save = clock()
        # A synchronous save fails on all ranks together, which needs no vote.
        self._may_fail = (
            checkpoint.exit_on_save_failure
            and checkpoint.save is not None
            and checkpoint.async_save
        )
        self._needs_votes = (
            training.exit_signal_handler
            or training.exit_duration_in_mins is not None
            or checkpoint.save_interval_secs is not None
            or self._may_fail
        )
        self._exchange: Callable[[], list[int]] | None = None  # in progress

    def after(self, iteration: int, seconds: float = 0.0) -> SaveAndExit:
        """Decide whether to save and exit after `iteration`, which took `seconds`.

        Signals and timers take effect one iteration later. Raises SaveFailedError on all ranks
        together if a background save has failed (--exit-on-save-failure).
        """
        votes = self.finish()
        if votes.failed:
            self._saver.stop()
        leave = self._find_exit(iteration, votes)
        save = bool(votes.save) or is_multiple(iteration, self._checkpoint.save_interval)
        if save:
            self._last_save = self._clock()
        if self._needs_votes and leave is None:
            self._exchange = start_max_reduce(self._make_votes(seconds), self._device)
        locally = is_multiple(iteration, self._checkpoint.non_persistent_save_interval)
        return SaveAndExit(save, locally and not save, leave)

    def finish(self) -> _Votes:
        """Complete the last exchange, for which other ranks may be waiting."""
        if self._exchange is None:
            return _Votes()
        exchange = self._exchange
        self._exchange = None
        return _Votes(*exchange())

    def _find_exit(self, iteration: int, votes: _Votes) -> Exit | None:
        """Return the reason to exit after `iteration`, if any."""
        training = self._training
        if votes.signal:
            return Exit(f"{signal.Signals(votes.signal).name} was received", urgent=True)
        if votes.late:
            return Exit(
                f"{training.exit_duration_in_mins:g} minutes are over (--exit-duration-in-mins)",
                urgent=True,
            )
        if is_multiple(iteration, training.exit_interval):
            return Exit(
                f"iteration {iteration} is a multiple of --exit-interval {training.exit_interval}"
            )
        return None

    def _make_votes(self, seconds: float) -> _Votes:
        """Return this rank's votes; the last iteration took `seconds`."""
        now = self._clock()
        # The number of the signal, so that the maximum over ranks names one that arrived.
        received = 0
        if self._signals:
            received = int(self._signals[0])

        # The vote takes effect after the next iteration, and then the last save must still fit in.
        minutes = self._training.exit_duration_in_mins
        end = now - self._start + 2 * seconds + self._saver.expected_seconds
        is_late = minutes is not None and end > 60 * minutes

        interval = self._checkpoint.save_interval_secs
        is_save_due = interval is not None and now - self._last_save >= interval
        has_failed = self._may_fail and self._saver.failure is not None
        return _Votes(received, is_late, is_save_due, has_failed)


def is_multiple(iteration: int, interval: int | None) -> bool:
    """Return whether something with this interval is due; None and 0 mean never."""
    return bool(interval) and iteration % interval == 0  # type: ignore[operator]


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
        failed_ranks = [""] * dist.get_world_size()
        dist.all_gather_object(failed_ranks, failed_rank)
        listed = ", ".join(filter(None, failed_ranks))
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
