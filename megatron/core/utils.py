"""Small helpers that every layer may use."""

from __future__ import annotations

import dataclasses
import importlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, TextIO

SILENT = 2.0  # seconds: what takes less says nothing
REDRAW = 0.5  # seconds between looks on a terminal
BETWEEN_LINES = 10.0  # seconds between lines where the output is no terminal


def divide(numerator: int, denominator: int, what: str) -> int:
    """Exact division; `what` names the quantity in the error.

    Raises ValueError when it does not divide evenly.
    """
    if numerator % denominator != 0:
        raise ValueError(f"{what}: {numerator} is not divisible by {denominator}")
    return numerator // denominator


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is >= `value`."""
    return -(-value // multiple) * multiple


def even_range(length: int, rank: int, size: int) -> tuple[int, int]:
    """`[start, stop)` of equal part `rank` of `size`; `length` must be a multiple of `size`."""
    part = length // size
    assert part * size == length, (length, size)
    return rank * part, (rank + 1) * part


def import_apex(module: str, flag: str) -> Any:
    """A module of apex for `flag`, which also takes `torch`. ValueError where it was not built."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{flag} apex: {module} cannot be imported ({error}). Build apex with its C++ and CUDA extensions "
            f"(docs/gpu.md), or take {flag} torch"
        ) from error


def raise_problems(problems: Iterable[str]) -> None:
    """ValueError that says all of `problems`, one a line; nothing where there is none."""
    lines = list(problems)
    if lines:
        raise ValueError("\n".join(lines))


def out_of_range(value: Any, metadata: Mapping[str, Any]) -> Iterator[str]:
    """What the value of a `flag` must be and is not."""
    low = metadata["at_least"]
    high = metadata["at_most"]
    for wrong, wanted in (
        # In any case: NaN is neither above nor below anything.
        (isinstance(value, float) and not math.isfinite(value), "a finite number"),
        (metadata["positive"] and value <= 0, "positive"),
        (low is not None and value < low, f"at least {low}"),
        (high is not None and value > high, f"at most {high}"),
    ):
        if wrong:
            yield wanted


def range_problems(config: Any) -> Iterator[str]:
    """What is wrong with the numbers of a dataclass of flags."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.metadata and isinstance(value, int | float):
            for wanted in out_of_range(value, field.metadata):
                yield f"--{field.name.replace('_', '-')} must be {wanted}, got {value}"


def size_text(nbytes: float) -> str:
    """Such as 9.87 MB; in powers of 1000."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= limit:
            return f"{nbytes / limit:.2f} {unit}"
    return f"{nbytes:.0f} B"


class Progress:
    """`with Progress("reading", total) as progress: ... progress.add(n)`; nothing for work of less than two seconds.

    A thread does the telling, so that work which cannot count says at least for how long it has
    been running. `count` is asked in place of calls of `add`. Amounts are bytes (`unit` "B"), or
    whatever `unit` names; `total` None is unknown.
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
        self.what = what
        self.total = total
        self.unit = unit
        self.quiet = quiet
        self._count = count
        self._done = 0
        self._clock = clock
        self._file = sys.stderr if file is None else file
        self._terminal = self._file.isatty()
        self._lock = threading.Lock()
        self._ended = threading.Event()
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
        return (
            f"{amount:,.0f} {self.unit}"
            if amount >= 100 or amount == int(amount)
            else f"{amount:.2f} {self.unit}"
        )

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


def flag(
    default: Any,
    *names: str,
    choices: tuple[str, ...] | None = None,
    parse: Callable[[str], Any] | None = None,
    positive: bool = False,
    at_least: float | None = None,
    at_most: float | None = None,
    decides: str | None = None,
    when: Mapping[str, Any] | None = None,
    meaning: str | None = None,
) -> Any:
    """A dataclass field that is also a command-line flag; the docstring under the field is its
    help.

    Without `names` the flag is the field's name with dashes: `--field-name VALUE`; for a bool that
    is False `--field-name`, for one that is True `--no-field-name`. `names` replaces these
    spellings; a bool then takes the opposite of its default. `parse` makes the value of a word
    whose form the type does not tell; that a number is `positive`, `at_least` or `at_most` so large
    is checked where the command line is read, and by `range_problems`.

    A field of the model says what it `decides`: "shapes" (keys and shapes of the weights) or
    "mathematics" (what the same weights compute). It counts only `when` other fields have these
    values. `meaning` is the property that two spellings of the same model agree on, where that is
    not the field itself.
    """
    metadata = {
        "flags": names,
        "choices": choices,
        "parse": parse,
        "positive": positive,
        "at_least": at_least,
        "at_most": at_most,
        "decides": decides,
        "when": when or {},
    }
    return dataclasses.field(default=default, metadata=metadata | {"meaning": meaning})
