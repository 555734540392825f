"""Progress bars for long operations."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from tqdm import tqdm

# Seconds.
SILENT_PERIOD = 2.0  # shorter operations have no output
REDRAW_INTERVAL = 0.5  # on a terminal
LINE_INTERVAL = 10.0  # in a log file


class ProgressBar:
    """Progress of a long operation, formatted by tqdm and printed by a background thread.

    Usage::

        with ProgressBar("reading", total) as progress:
            progress.add(len(block))

    Because a thread prints it, an operation that cannot report its progress still shows the elapsed
    time. tqdm itself prints only when it is updated, and redraws its line in log files, too.
    Operations shorter than `SILENT_PERIOD` have no output. A terminal has one line that is redrawn
    and cleared at the end; any other `file` gets one line per `LINE_INTERVAL`, so that logs stay
    readable.

    Amounts are in bytes by default; `total` is None if unknown. With `count`, the amount done is
    polled instead of accumulated by `add`.
    """

    def __init__(
        self,
        description: str,
        total: int | None = None,
        unit: str = "B",
        *,
        count: Callable[[], int] | None = None,
        quiet: bool = False,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._description = description
        self._total = total
        self._unit = unit
        self._count = count
        self.quiet = quiet
        self._file = sys.stderr if file is None else file
        self._is_terminal = self._file.isatty()
        self._clock = clock
        self._start = clock()
        self._last_line = self._start
        self._done = 0
        self._line_length = 0  # of the line on the terminal
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._print_until_end, name="progress", daemon=True)

    def add(self, amount: int) -> None:
        """Record progress by `amount`; safe to call from any thread."""
        with self._lock:
            self._done += amount

    def restart(self, total: int | None) -> None:
        """Count from 0 again, towards `total`."""
        with self._lock:
            self._done = 0
            self._total = total
            self._start = self._clock()

    def __str__(self) -> str:
        in_bytes = self._unit == "B"
        return tqdm.format_meter(
            n=self._done if self._count is None else self._count(),
            total=self._total,  # type: ignore[arg-type]
            elapsed=self._clock() - self._start,
            prefix=self._description,
            unit=self._unit if in_bytes else f" {self._unit}",
            unit_scale=in_bytes,
        )

    def print_if_due(self) -> None:
        """Print the current state unless it is too early for the first or the next time."""
        now = self._clock()
        if self.quiet or now - self._start < SILENT_PERIOD:
            return
        if self._is_terminal:
            self._overwrite_line(str(self))
        elif now - self._last_line >= LINE_INTERVAL:
            self._last_line = now
            self._print(f"{self}\n")

    def _overwrite_line(self, text: str) -> None:
        self._print("\r" + text.ljust(self._line_length))
        self._line_length = len(text)

    def _print(self, text: str) -> None:
        # An operation does not fail because its progress cannot be shown.
        with contextlib.suppress(OSError):
            print(text, end="", file=self._file, flush=True)

    def _print_until_end(self) -> None:
        while not self._ended.wait(REDRAW_INTERVAL):
            self.print_if_due()

    def __enter__(self) -> ProgressBar:
        if not self.quiet:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if not self.quiet:
            self._thread.join()
        if self._line_length:  # leave an empty line for the next output
            self._overwrite_line("")
            self._print("\r")
