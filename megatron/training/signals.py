"""When to end a run early, decided by all ranks together."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron.training.config import TrainingConfig

EXIT_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # what job schedulers send before they kill


class ExitSignals:
    """Remembers the first exit signal of this process in place of dying from it; a context manager.

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
        """Handle the signals inside the block if `wanted`; the handlers of before return at its end."""
        before = {number: signal.signal(number, self._remember) for number in EXIT_SIGNALS} if wanted else {}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Exit(NamedTuple):
    """Why a run ends early."""

    reason: str
    urgent: bool  # somebody waits: save, and do nothing else


class ExitDecision:
    """Why the run should end after an iteration, the same answer on every rank.

    A signal may reach one rank only and clocks differ, so the ranks agree by one small all-reduce per iteration, and
    only when a signal handler or a time limit was asked for.
    """

    def __init__(self, signals: ExitSignals, config: TrainingConfig, device: torch.device) -> None:
        self._signals = signals
        self._handle_signals = config.exit_signal_handler
        self._minutes = config.exit_duration_in_mins
        self._interval = config.exit_interval
        self._device = device
        self._start = time.monotonic()

    def after(self, iteration: int) -> Exit | None:
        """Whether to save and end after `iteration`. Collective."""
        if self._handle_signals or self._minutes is not None:
            number, late = self._agree()
            if number:
                return Exit(f"{signal.Signals(number).name} was received", urgent=True)
            if late:
                return Exit(f"{self._minutes:g} minutes have passed (--exit-duration-in-mins)", urgent=True)
        if self._interval is not None and iteration % self._interval == 0:
            return Exit(f"iteration {iteration} is a multiple of --exit-interval {self._interval}", urgent=False)
        return None

    def _agree(self) -> tuple[int, int]:
        number = 0 if self._signals.received is None else int(self._signals.received)
        late = self._minutes is not None and time.monotonic() - self._start > 60 * self._minutes
        votes = torch.tensor([number, int(late)], device=self._device)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        agreed_number, agreed_late = votes.tolist()
        return agreed_number, agreed_late
