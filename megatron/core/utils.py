"""Small helpers that every layer may use."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any


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


Bound = tuple[Callable[[Any], bool], str]  # what a value must fulfil, and how an error says that


def bounds(metadata: Mapping[str, Any]) -> Iterator[Bound]:
    """The range of a `flag`'s number."""
    low, high = metadata["at_least"], metadata["at_most"]
    if metadata["positive"]:
        yield (lambda value: value > 0), "positive"
    if low is not None:
        yield (lambda value: value >= low), f"at least {low}"
    if high is not None:
        yield (lambda value: value <= high), f"at most {high}"


def out_of_range(config: Any) -> Iterator[str]:
    """What is wrong with the numbers of a dataclass of flags."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.metadata and isinstance(value, int | float):
            for holds, what in bounds(field.metadata):
                if not holds(value):
                    yield f"--{field.name.replace('_', '-')} must be {what}, got {value}"


def size_text(nbytes: float) -> str:
    """Such as 9.87 MB; in powers of 1000."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= limit:
            return f"{nbytes / limit:.2f} {unit}"
    return f"{nbytes:.0f} B"


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
    """A dataclass field that is also a command-line flag; the docstring under the field is its help.

    Without `names` the flag is the field's name with dashes: `--field-name VALUE`; for a bool that is False
    `--field-name`, for one that is True `--no-field-name`. `names` replaces these spellings; a bool then takes the
    opposite of its default. `parse` makes the value of a word whose form the type does not tell; that a number is
    `positive`, `at_least` or `at_most` so large is checked where the command line is read, and by `out_of_range`.

    A field of the model says what it `decides`: "shapes" (keys and shapes of the weights) or "mathematics" (what the
    same weights compute). It counts only `when` other fields have these values. `meaning` is the property that two
    spellings of the same model agree on, where that is not the field itself.
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
