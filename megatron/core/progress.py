"""How far a long piece of work is: amount, rate and time left, on a terminal a line that is written over."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TextIO

from megatron.core.utils import size_text

SILENT = 2.0  # seconds: what takes less says nothing
REDRAW = 0.5  # seconds between looks on a terminal
BETWEEN_LINES = 10.0  # seconds between lines where the output is no terminal


class Progress:
    """`with Progress("reading", total) as progress: ... progress.add(n)`; nothing for work of less than two seconds.

    A thread does the telling, so that work which cannot count says at least for how long it has been running. `count`
    is asked in place of calls of `add`. Amounts are bytes (`unit` "B"), or whatever `unit` names; `total` None is
    unknown.
    """

    def __init__(
        self,
        what: str,
        total: int | None = None,
        unit: str = "B",
        *,
        count: Callable[[], int] | None = None,
        quiet: bool = False,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.what, self.total, self.unit, self.quiet = what, total, unit, quiet
        self._count, self._done, self._clock = count, 0, clock
        self._file = sys.stderr if file is None else file
        self._terminal = self._file.isatty()
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._started = self._told = clock()
        self._shown = 0  # characters of the line on the terminal

    def add(self, amount: int) -> None:
        """So much more is done; from any thread."""
        with self._lock:
            self._done += amount

    def restart(self, total: int | None) -> None:
        """Count from 0 again, towards `total`."""
        with self._lock:
            self._done, self.total, self._started = 0, total, self._clock()

    def text(self) -> str:
        """Such as `reading: 43 %, 1.20 GB of 2.80 GB, 310.00 MB/s, 0:00:05 left`."""
        done = self._done if self._count is None else self._count()
        seconds = max(self._clock() - self._started, 1e-9)
        if done == 0:
            return f"{self.what}: {timedelta(seconds=round(seconds))}"
        rate = done / seconds
        if not self.total:
            return f"{self.what}: {self._amount(done)}, {self._amount(rate)}/s"
        left = timedelta(seconds=round(max(0, self.total - done) / rate))
        share = min(100, 100 * done // self.total)
        return (
            f"{self.what}: {share} %, {self._amount(done)} of {self._amount(self.total)}, {self._amount(rate)}/s, "
            f"{left} left"
        )

    def tell(self) -> None:
        """Show the text if it is time to."""
        now = self._clock()
        if self.quiet or now - self._started < SILENT:
            return
        if self._terminal:
            self._overwrite(self.text())
        elif now - self._told >= BETWEEN_LINES:
            self._told = now
            print(self.text(), file=self._file, flush=True)

    def _amount(self, amount: float) -> str:
        if self.unit == "B":
            return size_text(amount)
        return f"{amount:,.0f} {self.unit}" if amount >= 100 or amount == int(amount) else f"{amount:.2f} {self.unit}"

    def _overwrite(self, text: str) -> None:
        print("\r" + text.ljust(self._shown), end="", file=self._file, flush=True)
        self._shown = len(text)

    def _run(self) -> None:
        while not self._ended.wait(REDRAW):
            self.tell()

    def __enter__(self) -> Progress:
        if not self.quiet:
            self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if not self.quiet:
            self._thread.join()
        if self._shown:  # leave the terminal's line empty for what comes
            self._overwrite("")
            print("\r", end="", file=self._file, flush=True)
