"""When a run saves and when it ends: flags, signals and clocks, a failed save, a loss that is no longer finite.

All ranks must save and exit at the same iteration, but a signal may reach one rank only, clocks differ, and a rank
may notice alone that a save failed. So the ranks exchange votes and act on their maximum, if a flag needs it. The votes
of an iteration are counted after the next one, so that nobody waits for the exchange.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron.core.optimizer import StepResult
from megatron.core.parallel_state import ParallelState
from megatron.training.checkpoint.saver import CheckpointSaver
from megatron.training.config.options import CheckpointConfig, TrainingConfig
from megatron.training.reporting.logging import Interval

EXIT_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # what job schedulers send before they kill


class ExitSignals:
    """Remembers the first exit signal of this process instead of terminating; a context manager.

    torchrun passes SIGTERM to its workers and kills them 30 seconds later; Slurm sends SIGUSR1 (`--signal`) ahead of
    the time limit.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)

    @contextmanager
    def installed(self, wanted: bool) -> Iterator[ExitSignals]:
        """Handle the signals inside the block if `wanted`; the previous handlers return at its end."""
        before = {number: signal.signal(number, self._remember) for number in EXIT_SIGNALS} if wanted else {}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Exit(NamedTuple):
    """Why a run ends early."""

    reason: str
    urgent: bool = False  # the scheduler is about to kill the run: save at once


class SaveAndExit(NamedTuple):
    """The same on every rank."""

    save: bool
    save_locally: bool
    leave: Exit | None


class _Votes(NamedTuple):
    signal: int = 0  # its number
    late: int = 0
    save: int = 0
    failed: int = 0


class SaveAndExitPolicy:
    """Call `after` once per iteration on all ranks, `finish` after the last.

    `clock` gives the time in seconds; --exit-duration-in-mins counts from `started`.
    """

    def __init__(
        self,
        signals: ExitSignals,
        training: TrainingConfig,
        checkpoint: CheckpointConfig,
        saver: CheckpointSaver,
        device: torch.device,
        started: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._signals, self._saver = signals, saver
        self._handles_signals = training.exit_signal_handler
        self._minutes = training.exit_duration_in_mins
        self._exit_interval = training.exit_interval
        self._save_interval, self._save_secs = checkpoint.save_interval, checkpoint.save_interval_secs
        self._local_interval = checkpoint.non_persistent_save_interval
        saves_behind_training = checkpoint.save is not None and checkpoint.async_save
        self._may_fail = checkpoint.exit_on_save_failure and saves_behind_training
        self._clock, self._start, self._last_save = clock, started, clock()
        self._needs_votes = (
            self._handles_signals or self._minutes is not None or self._save_secs is not None or self._may_fail
        )
        self._exchange = _VoteExchange(device)

    def after(self, iteration: int, seconds: float = 0.0) -> SaveAndExit:
        """What to do after `iteration`, which took `seconds`. Signals and timers take effect one iteration later.

        Raises SaveFailedError on all ranks together if a save behind training has failed (--exit-on-save-failure).
        """
        votes = self._exchange.take() if self._needs_votes else _Votes()
        if votes.failed:
            self._saver.stop()
        leave = self._leave(iteration, votes)
        save = bool(votes.save) or is_multiple(iteration, self._save_interval)
        if save:
            self._last_save = self._clock()
        if self._needs_votes and leave is None:
            self._exchange.start(self._votes(seconds))
        return SaveAndExit(save, is_multiple(iteration, self._local_interval) and not save, leave)

    def finish(self) -> None:
        """Complete the last exchange, which other ranks may be waiting in."""
        self._exchange.take()

    def _leave(self, iteration: int, votes: _Votes) -> Exit | None:
        if votes.signal:
            return Exit(f"{signal.Signals(votes.signal).name} was received", urgent=True)
        if votes.late:
            return Exit(f"{self._minutes:g} minutes are over (--exit-duration-in-mins)", urgent=True)
        if is_multiple(iteration, self._exit_interval):
            return Exit(f"iteration {iteration} is a multiple of --exit-interval {self._exit_interval}")
        return None

    def _votes(self, seconds: float) -> _Votes:
        now = self._clock()
        # The vote takes effect after the next iteration, and then the last save must still fit in.
        end = now - self._start + 2 * seconds + self._saver.expected_seconds
        return _Votes(
            signal=int(self._signals.received or 0),
            late=self._minutes is not None and end > 60 * self._minutes,
            save=self._save_secs is not None and now - self._last_save >= self._save_secs,
            failed=self._may_fail and self._saver.failure is not None,
        )


@dataclass(frozen=True)
class HostCopy:
    """A small number on its way from the device to the host, read later without waiting for newer work."""

    _host: torch.Tensor
    _copied: torch.cuda.Event | None

    @classmethod
    def start(cls, tensor: torch.Tensor) -> HostCopy:
        if tensor.device.type != "cuda":
            return cls(tensor, None)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return cls(host, event)

    def wait(self) -> torch.Tensor:
        if self._copied is not None:
            self._copied.synchronize()
        return self._host


class _VoteExchange:
    """The maxima of all ranks' votes, without waiting."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._work: dist.Work | None = None
        self._votes: torch.Tensor | HostCopy | None = None

    def start(self, votes: _Votes) -> None:
        if dist.get_backend() == "nccl":
            # Queued behind the work of the device and copied back without waiting for it.
            on_device = torch.tensor(votes, dtype=torch.int32, device=self._device)
            dist.all_reduce(on_device, op=dist.ReduceOp.MAX)
            self._votes = HostCopy.start(on_device)
        else:
            self._votes = torch.tensor(votes, dtype=torch.int32)
            self._work = dist.all_reduce(self._votes, op=dist.ReduceOp.MAX, async_op=True)

    def take(self) -> _Votes:
        """The maxima of the last `start`; zeros before it."""
        votes, self._votes = self._votes, None
        if votes is None:
            return _Votes()
        if isinstance(votes, HostCopy):
            return _Votes(*votes.wait().tolist())
        assert self._work is not None
        self._work.wait()
        return _Votes(*votes.tolist())


def is_multiple(iteration: int, interval: int | None) -> bool:
    """Whether something that is due every `interval` iterations (None or 0: never) is due now."""
    return bool(interval) and iteration % interval == 0  # type: ignore[operator]


class NotFiniteError(ValueError):
    """A loss or gradient is NaN or infinite."""


@dataclass(frozen=True)
class _Submitted:
    iteration: int
    loss: torch.Tensor
    step: StepResult
    skipped: HostCopy


class NanCheck:
    """Checks every iteration one iteration later, so that the host never waits for the device.

    The optimizer leaves out every update whose gradient norm is not finite, so nothing is damaged in the meantime. With
    a dynamic loss scale an overflow of the gradient is expected; a loss that is not finite is not.
    """

    def __init__(self, ps: ParallelState, wanted: bool, dynamic_loss_scale: bool) -> None:
        self._ps = ps
        self._wanted = wanted
        self._dynamic_loss_scale = dynamic_loss_scale
        self._last: _Submitted | None = None

    def submit(self, iteration: int, loss: torch.Tensor, step: StepResult) -> None:
        """Check the iteration before this one, and keep this one for the next call."""
        self.finish()
        if self._wanted:
            self._last = _Submitted(iteration, loss, step, HostCopy.start(step.skipped))

    def finish(self) -> None:
        """Check what is still unchecked. Raises NotFiniteError on every rank that names the ranks where it began."""
        last, self._last = self._last, None
        if last is None or not last.skipped.wait():  # the same on all ranks: the norm is over all gradients
            return
        # The norm says that something is wrong on all ranks; only the ranks with the loss can say where it began.
        finite = bool(torch.isfinite(last.loss).all())
        places: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(places, None if finite else self._place())
        where = ", ".join(place for place in places if place is not None)
        if where:
            raise NotFiniteError(f"iteration {last.iteration}: the loss is not finite on {where}. {_ADVICE}")
        if not self._dynamic_loss_scale:
            norm = last.step.grad_norm.item()
            raise NotFiniteError(
                f"iteration {last.iteration}: the gradient norm is {norm}, the loss is finite on all ranks. {_ADVICE}"
            )

    def check_interval(self, interval: Interval) -> None:
        """Check the losses of a closed interval: one may be NaN while its gradient is finite."""
        for iteration in interval.iterations:
            if self._wanted and not iteration.skipped and not math.isfinite(iteration.lm_loss):
                raise NotFiniteError(f"iteration {iteration.iteration}: the loss is {iteration.lm_loss}. {_ADVICE}")

    def _place(self) -> str:
        ps = self._ps
        return f"rank {ps.rank} ({ps.place})"


_ADVICE = (
    "No checkpoint was written since. Inspect the data of that iteration, lower --lr, or skip "
    "such iterations with --no-check-for-nan-in-loss-and-grad"
)
