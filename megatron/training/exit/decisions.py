"""Whether to save, and whether to end, after an iteration; decided by all ranks together.

A signal may reach one rank only, clocks differ, and only some ranks may have noticed that a save failed. So the ranks
take the maximum of their votes, and only if a flag asks for something that needs it. The votes of an iteration are
counted after the next one: nobody waits for the exchange.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron.training.checkpoint.saver import CheckpointSaver
from megatron.training.config.options import CheckpointConfig, TrainingConfig
from megatron.training.exit.signals import ExitSignals
from megatron.training.reporting.measurements import HostCopy


class Exit(NamedTuple):
    """Why a run ends early."""

    reason: str
    urgent: bool = False  # somebody waits: save, and do nothing else
    failed: bool = False  # it ends because saving fails


class Verdict(NamedTuple):
    """The same on every rank."""

    save: bool
    leave: Exit | None


class _Votes(NamedTuple):
    signal: int = 0  # its number
    late: int = 0
    save: int = 0
    failed: int = 0


class Decisions:
    """Call `after` once per iteration on all ranks, `finish` after the last.

    `clock` tells the time in seconds; `started` is its reading when the time of --exit-duration-in-mins began.
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
        saves_behind_training = checkpoint.save is not None and checkpoint.async_save
        self._may_fail = checkpoint.exit_on_save_failure and saves_behind_training
        self._clock, self._start, self._last_save = clock, started, clock()
        self._needs_votes = (
            self._handles_signals or self._minutes is not None or self._save_secs is not None or self._may_fail
        )
        self._exchange = _Exchange(device)

    def after(self, iteration: int, seconds: float = 0.0) -> Verdict:
        """What to do after `iteration`, which took `seconds`. Signals and timers take effect one iteration later."""
        votes = self._exchange.take() if self._needs_votes else _Votes()
        leave = self._leave(iteration, votes)
        save = bool(votes.save) or _is_multiple(iteration, self._save_interval)
        if save:
            self._last_save = self._clock()
        if self._needs_votes and leave is None:
            self._exchange.start(self._votes(seconds))
        return Verdict(save, leave)

    def finish(self) -> None:
        """Take part in the last exchange."""
        self._exchange.take()

    def _leave(self, iteration: int, votes: _Votes) -> Exit | None:
        if votes.failed:
            return Exit("a checkpoint was not saved (--exit-on-save-failure)", failed=True)
        if votes.signal:
            return Exit(f"{signal.Signals(votes.signal).name} was received", urgent=True)
        if votes.late:
            return Exit(f"{self._minutes:g} minutes are over (--exit-duration-in-mins)", urgent=True)
        if _is_multiple(iteration, self._exit_interval):
            return Exit(f"iteration {iteration} is a multiple of --exit-interval {self._exit_interval}")
        return None

    def _votes(self, seconds: float) -> _Votes:
        now = self._clock()
        # The vote counts after the next iteration; then the last save follows.
        end = now - self._start + 2 * seconds + self._saver.expected_seconds
        return _Votes(
            signal=int(self._signals.received or 0),
            late=self._minutes is not None and end > 60 * self._minutes,
            save=self._save_secs is not None and now - self._last_save >= self._save_secs,
            failed=self._may_fail and self._saver.failure is not None,
        )


class _Exchange:
    """The maxima of all ranks' votes, without waiting."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._work: dist.Work | None = None
        self._votes: torch.Tensor | HostCopy | None = None

    def start(self, votes: _Votes) -> None:
        if dist.get_backend() == "nccl":
            on_device = torch.tensor(votes, dtype=torch.int32, device=self._device)
            dist.all_reduce(on_device, op=dist.ReduceOp.MAX)
            self._votes = HostCopy.start(on_device)
        else:
            self._votes = torch.tensor(votes, dtype=torch.int32)
            self._work = dist.all_reduce(self._votes, op=dist.ReduceOp.MAX, async_op=True)

    def take(self) -> _Votes:
        """Those of the last `start`; none before it."""
        votes, self._votes = self._votes, None
        if votes is None:
            return _Votes()
        if isinstance(votes, HostCopy):
            return _Votes(*votes.wait().tolist())
        assert self._work is not None
        self._work.wait()
        return _Votes(*votes.tolist())


def _is_multiple(iteration: int, interval: int | None) -> bool:
    return interval is not None and iteration % interval == 0
