"""What content from outside may be: small checks that compose, used once where a file is read.

A check is a function `(value, where) -> value`; it raises CheckpointError that names file, field and value. No check
trusts the value: nothing here calls `repr` on a container, so a structure that unfolds without end costs nothing.

    STATE = record({"files": sequence(file_name), "training": record({"iteration": COUNT, "note?": text()})})
    STATE(read_json(path), str(path))
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read; the message names the file or key, the reason and the way out."""


class UnsafePickleError(CheckpointError):
    """A pickle names something that a checkpoint has no reason to contain. Nothing of it was executed."""


Check = Callable[[Any, str], Any]


def limit(name: str, default: int) -> int:
    """What is plausible; the environment variable MEGATRON_MAX_<name> says otherwise."""
    value = os.environ.get(f"MEGATRON_MAX_{name}", str(default))
    if not value.isdecimal():
        raise ValueError(f"MEGATRON_MAX_{name}={value!r} must be a whole number")
    return int(value)


MAX_COUNT = 2**53 - 1  # what every program that reads JSON has exactly
MAX_RANK = limit("DIMENSIONS", 64)  # of a tensor: what torch and numpy take
MAX_DEPTH = 200  # of nested containers
_SHOWN = 60


def shown(value: Any) -> str:
    """A value for a message: one short printable line, whatever it is."""
    if isinstance(value, str | bytes):
        return repr(value[:_SHOWN]) + ("..." if len(value) > _SHOWN else "")
    if type(value) is int and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    if value is None or type(value) in (bool, int, float, complex, torch.dtype):
        return repr(value)
    if isinstance(value, list | tuple | dict | set | frozenset):
        flat = type(value) is not dict and len(value) <= 8 and all(type(item) in (int, float, str) for item in value)
        return printable(str(value))[:200] if flat else f"a {type(value).__name__} of {len(value)} entries"
    return printable(f"a {type(value).__module__}.{type(value).__qualname__}")[:200]


def printable(text: str) -> str:
    """`text` with everything escaped that could move the cursor of a terminal or forge another line."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def message_of(error: BaseException) -> str:
    """What an error says, for a terminal: its own lines, and nothing in them that is not printable."""
    return "\n".join(map(printable, str(error).split("\n")))


def refuse(where: str, value: Any, wanted: str) -> NoReturn:
    raise CheckpointError(f"{where} is {shown(value)}, but must be {wanted}")


def anything(value: Any, where: str) -> Any:
    return value


def boolean(value: Any, where: str) -> Any:
    return value if type(value) is bool else refuse(where, value, "true or false")


def integer(low: int = 0, high: int = MAX_COUNT) -> Check:
    def check(value: Any, where: str) -> Any:
        if type(value) is not int or not low <= value <= high:
            refuse(where, value, f"a whole number from {low} to {high}")
        return value

    return check


COUNT = integer()


def plausible(name: str, default: int, low: int = 1) -> Check:
    """A whole number up to a `limit`."""
    high = limit(name, default)

    def check(value: Any, where: str) -> Any:
        if type(value) is int and value > high:
            refuse(where, value, f"at most {high} (the environment variable MEGATRON_MAX_{name} raises the limit)")
        return integer(low, high)(value, where)

    return check


def number(low: float = -math.inf, high: float = math.inf) -> Check:
    """Finite, between the limits."""

    def check(value: Any, where: str) -> Any:
        if type(value) not in (int, float) or not low <= value <= high or value in (math.inf, -math.inf):
            limits = "" if (low, high) == (-math.inf, math.inf) else f" from {low:g} to {high:g}"
            refuse(where, value, f"a finite number{limits}")
        return value

    return check


def text(limit: int = 4096) -> Check:
    def check(value: Any, where: str) -> Any:
        if type(value) is not str or len(value) > limit:
            refuse(where, value, f"a text of at most {limit} characters")
        return value

    return check


def one_of(*choices: Any) -> Check:
    def check(value: Any, where: str) -> Any:
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            refuse(where, value, f"one of {', '.join(map(str, choices))}")
        return value

    return check


def optional(check: Check) -> Check:
    """None, too."""
    return lambda value, where: value if value is None else check(value, where)


def sequence(check: Check, limit: int = 10**7, least: int = 0) -> Check:
    """A list or tuple of `least` to `limit` entries."""

    def check_all(value: Any, where: str) -> Any:
        if not isinstance(value, list | tuple) or not least <= len(value) <= limit:
            refuse(where, value, f"a list of {least} to {limit} entries")
        for index, item in enumerate(value):
            check(item, f"{where}[{index}]")
        return value

    return check_all


def mapping(check: Check, keys: Check = text()) -> Check:  # noqa: B008 (a check has no state)
    """A dictionary whose values pass `check`."""

    def check_all(value: Any, where: str) -> Any:
        if not isinstance(value, Mapping):
            refuse(where, value, "a dictionary")
        for name, item in value.items():
            keys(name, f"{where}: a key")
            check(item, f"{where}: {printable(str(name))}")
        return value

    return check_all


def record(fields: Mapping[str, Check], closed: bool = False) -> Check:
    """A dictionary with these fields; a name that ends in `?` may be missing. `closed`: it has no others."""
    checks = {name.removesuffix("?"): (check, name.endswith("?")) for name, check in fields.items()}

    def check_fields(value: Any, where: str) -> Any:
        if not isinstance(value, Mapping):
            refuse(where, value, "a dictionary")
        for name, (check, may_lack) in checks.items():
            if name in value:
                check(value[name], f"{where}: {name}")
            elif not may_lack:
                raise CheckpointError(f"{where} has no {name!r}")
        unknown = [name for name in value if name not in checks] if closed else []
        if unknown:
            raise CheckpointError(f"{where} has a field {shown(unknown[0])}, which is not known")
        return value

    return check_fields


def key(value: Any, where: str) -> Any:
    """The name of a tensor or an object: a terminal prints it as it is."""
    text(1024)(value, where)
    return value if value.isprintable() else refuse(where, value, "a printable name")


def file_name(value: Any, where: str) -> Any:
    """One name in a directory: it leads nowhere else, and a terminal prints it as it is."""
    text(255)(value, where)
    if value in ("", ".", "..") or "/" in value or "\\" in value or not value.isprintable():
        refuse(where, value, "the name of a file, without a path")
    return value


SHAPE = sequence(integer(), MAX_RANK)


def plain(value: Any, where: str) -> Any:
    """Data of JSON's kinds."""
    if isinstance(value, dict):
        for name, item in value.items():
            text()(name, f"{where}: a key")
            plain(item, f"{where}: {printable(name)}")
    elif isinstance(value, list | tuple):
        for item in value:
            plain(item, where)
    elif value is not None and type(value) not in (bool, int, float, str):
        refuse(where, value, "plain data")
    return value
