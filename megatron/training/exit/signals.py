"""Signals that ask a run to end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

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
