"""Validation of untrusted values: composable checks for their type, size and content.

A check is a function `(value, where) -> value` that raises CheckpointError with file, field and
value. A check does not trust the value: it never calls `repr` on a container, which might unfold
without end.

    TRAINING = record({"iteration": COUNT, "note?": text()})
    STATE = record({"files": sequence(file_name), "training": TRAINING})
    STATE(read_json(path), str(path))
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from megatron.core.safe_files.errors import CheckpointError
from megatron.core.terminal import escape_control_chars

Check = Callable[[Any, str], Any]
Shape = tuple[int, ...]  # of a tensor


def limit(name: str, default: int) -> int:
    """Return a sanity limit. The environment variable MEGATRON_MAX_<name> overrides it."""
    value = os.environ.get(f"MEGATRON_MAX_{name}", str(default))
    if not value.isdecimal():
        raise ValueError(f"MEGATRON_MAX_{name}={value!r} must be a whole number")
    return int(value)


MAX_COUNT = 2**53 - 1  # the largest integer that every JSON parser represents exactly
MAX_RANK = limit("DIMENSIONS", 64)  # dimensions of a tensor, as in torch and numpy
MAX_DEPTH = 200  # nested containers
_MAX_FORMATTED = 60  # characters of a text in a message
_MAX_LISTED = 8  # entries of a container in a message

# Values for messages


def format_value(value: Any) -> str:
    """Return one short printable line for any value, without trusting it."""
    value_type = type(value)
    if isinstance(value, str | bytes):
        shortened = repr(value[:_MAX_FORMATTED])
        if len(value) > _MAX_FORMATTED:
            shortened += "..."
        return shortened

    # `repr` of a huge integer takes quadratic time.
    if value_type is int and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    if value is None or value_type in (bool, int, float, complex) or is_dtype(value):
        return repr(value)

    # `repr` of a container may unfold without end.
    if isinstance(value, list | tuple | dict | set | frozenset):
        if value_type is not dict and _is_short_and_flat(value):
            return escape_control_chars(str(value))[:200]
        return f"a {value_type.__name__} of {len(value)} entries"

    # `repr` of any other object could run code of a hostile file.
    return escape_control_chars(f"a {value_type.__module__}.{value_type.__qualname__}")[:200]


def _is_short_and_flat(values: Any) -> bool:
    """Return whether a container has few entries, which are numbers and texts."""
    is_flat = all(type(item) in (int, float, str) for item in values)
    return len(values) <= _MAX_LISTED and is_flat


def abbreviate(entries: Sequence[str], limit: int = 20, between: str = "\n  ") -> str:
    """Join the first `limit` lines, and append the number of the others."""
    text = between.join(entries[:limit])
    if len(entries) > limit:
        text += f" ... and {len(entries) - limit} more"
    return text


def is_dtype(value: Any) -> bool:
    """Return whether `value` is a dtype of torch, without importing torch."""
    value_type = type(value)
    return value_type.__qualname__ == "dtype" and value_type.__module__ == "torch"


def refuse(location: str, value: Any, requirement: str) -> NoReturn:
    """Raise CheckpointError for a value that does not meet `requirement`."""
    raise CheckpointError(f"{location} is {format_value(value)}, but must be {requirement}")


# Checks


def anything(value: Any, location: str) -> Any:
    """Accept any value."""
    return value


def boolean(value: Any, location: str) -> Any:
    """Accept True or False."""
    if type(value) is not bool:
        refuse(location, value, "true or false")
    return value


def integer(low: int = 0, high: int = MAX_COUNT) -> Check:
    """Accept a whole number from `low` to `high`."""

    def check(value: Any, location: str) -> Any:
        if type(value) is not int or not low <= value <= high:
            refuse(location, value, f"a whole number from {low} to {high}")
        return value

    return check


COUNT = integer()


def plausible(name: str, default: int, low: int = 1) -> Check:
    """Accept a whole number up to a `limit`."""
    high = limit(name, default)
    check_range = integer(low, high)

    def check(value: Any, location: str) -> Any:
        if type(value) is int and value > high:
            variable = f"MEGATRON_MAX_{name}"
            requirement = f"at most {high} (the environment variable {variable} raises the limit)"
            refuse(location, value, requirement)
        return check_range(value, location)

    return check


def number(low: float = -math.inf, high: float = math.inf) -> Check:
    """Accept a finite number from `low` to `high`."""
    limits = ""
    if (low, high) != (-math.inf, math.inf):
        limits = f" from {low:g} to {high:g}"

    def check(value: Any, location: str) -> Any:
        is_finite = type(value) in (int, float) and -math.inf < value < math.inf
        if not is_finite or not low <= value <= high:
            refuse(location, value, f"a finite number{limits}")
        return value

    return check


def text(limit: int = 4096) -> Check:
    """Accept a text of at most `limit` characters."""

    def check(value: Any, location: str) -> Any:
        if type(value) is not str or len(value) > limit:
            refuse(location, value, f"a text of at most {limit} characters")
        return value

    return check


def one_of(*choices: Any) -> Check:
    """Accept a value that is equal to a choice and has the same type."""

    def check(value: Any, location: str) -> Any:
        for choice in choices:
            if type(value) is type(choice) and value == choice:
                return value
        refuse(location, value, f"one of {', '.join(map(str, choices))}")

    return check


def optional(check: Check) -> Check:
    """Accept None in addition to the values that `check` accepts."""

    def check_optional(value: Any, location: str) -> Any:
        if value is None:
            return None
        return check(value, location)

    return check_optional


def sequence(check: Check, limit: int = 10**7, least: int = 0) -> Check:
    """Accept a list or tuple of `least` to `limit` entries."""

    def check_all(value: Any, location: str) -> Any:
        if not isinstance(value, list | tuple) or not least <= len(value) <= limit:
            refuse(location, value, f"a list of {least} to {limit} entries")
        for index, item in enumerate(value):
            check(item, f"{location}[{index}]")
        return value

    return check_all


def mapping(check: Check, keys: Check = text()) -> Check:  # noqa: B008 (a check has no state)
    """Accept a dictionary whose values pass `check`."""

    def check_all(value: Any, location: str) -> Any:
        if not isinstance(value, Mapping):
            refuse(location, value, "a dictionary")
        for name, item in value.items():
            keys(name, f"{location}: a key")
            check(item, f"{location}: {escape_control_chars(str(name))}")
        return value

    return check_all


def record(fields: Mapping[str, Check], closed: bool = False) -> Check:
    """Accept a dictionary with these fields.

    A name that ends in `?` is optional. If `closed`, other fields are an error.
    """
    checks = {name.removesuffix("?"): check for name, check in fields.items()}
    required = [name for name in fields if not name.endswith("?")]

    def check_fields(value: Any, location: str) -> Any:
        if not isinstance(value, Mapping):
            refuse(location, value, "a dictionary")
        for name in required:
            if name not in value:
                raise CheckpointError(f"{location} has no {name!r}")
        for name, check in checks.items():
            if name in value:
                check(value[name], f"{location}: {name}")
        if closed:
            unknown = [name for name in value if name not in checks]
            if unknown:
                name = format_value(unknown[0])
                raise CheckpointError(f"{location} has a field {name}, which is not known")
        return value

    return check_fields


def key(value: Any, location: str) -> Any:
    """Accept the name of a tensor or an object, which a terminal prints unchanged."""
    text(1024)(value, location)
    if not value.isprintable():
        refuse(location, value, "a printable name")
    return value


def file_name(value: Any, location: str) -> Any:
    """Accept the name of a file in the same directory, which a terminal prints unchanged."""
    text(255)(value, location)
    is_path = value in ("", ".", "..") or "/" in value or "\\" in value
    if is_path or not value.isprintable():
        refuse(location, value, "the name of a file, without a path")
    return value


_EXTENTS = sequence(integer(), MAX_RANK)


def tensor_shape(value: Any, location: str) -> Any:
    """Accept the shape of a tensor whose strides are plausible, even if it has no elements.

    The size of its file does not limit the extents of a tensor without elements.
    """
    _EXTENTS(value, location)
    if math.prod(max(extent, 1) for extent in value) > MAX_COUNT:
        refuse(location, value, f"a shape whose extents multiply to at most {MAX_COUNT}")
    return value


def plain(value: Any, location: str) -> Any:
    """Accept values that JSON can represent."""
    if isinstance(value, dict):
        for name, item in value.items():
            text()(name, f"{location}: a key")
            plain(item, f"{location}: {escape_control_chars(name)}")
    elif isinstance(value, list | tuple):
        for item in value:
            plain(item, location)
    elif value is not None and type(value) not in (bool, int, float, str):
        refuse(location, value, "plain data")
    return value
