"""Dataclass fields that are command-line flags, and the validation of their values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any


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
    """Return a dataclass field that is also a command-line flag.

    The docstring below the field is the flag's help text.

    Spelling: without `names` the flag is the field's name with dashes, `--field-name VALUE`. A bool
    that defaults to False is `--field-name`; one that defaults to True is `--no-field-name`.
    `names` overrides these spellings; a bool then takes the opposite of its default.

    Values: `parse` converts a word when the type alone does not define the conversion. The bounds
    `positive`, `at_least` and `at_most` are checked by the command line parser and by
    `find_range_problems`.

    Fields of the model specify what they decide (`decides`): "shapes" (keys and shapes of the
    weights) or "mathematics" (the function that the same weights compute). The field matters only
    `when` other fields have the given values. `meaning` names the property to compare instead of
    the field, if the same model has more than one spelling.
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
        "meaning": meaning,
    }
    return dataclasses.field(default=default, metadata=metadata)


def raise_problems(problems: Iterable[str]) -> None:
    """Raise one ValueError with all `problems`, one per line, if there are any."""
    lines = list(problems)
    if lines:
        raise ValueError("\n".join(lines))


def find_violated_bounds(value: Any, metadata: Mapping[str, Any]) -> Iterator[str]:
    """Yield a description of each bound in a flag's `metadata` that `value` violates."""
    low = metadata["at_least"]
    high = metadata["at_most"]
    # NaN is neither below nor above a bound, so finiteness is checked for every number.
    if isinstance(value, float) and not math.isfinite(value):
        yield "a finite number"
    if metadata["positive"] and value <= 0:
        yield "positive"
    if low is not None and value < low:
        yield f"at least {low}"
    if high is not None and value > high:
        yield f"at most {high}"


def find_range_problems(config: Any) -> Iterator[str]:
    """Yield an error message for each number in a dataclass of flags that is out of bounds."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if not field.metadata or not isinstance(value, int | float):
            continue
        for requirement in find_violated_bounds(value, field.metadata):
            yield f"--{field.name.replace('_', '-')} must be {requirement}, got {value}"
