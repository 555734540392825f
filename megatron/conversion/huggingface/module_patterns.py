"""Patterns of module names in a LoRA adapter, matched in linear time.

PEFT matches a name with `re.match(rf"(.*\\.)?({pattern})$", name)`. The time of `re` may be
exponential in a pattern, which comes from a file. Supported are the forms in use: names,
`.`, `\\d`, `\\w`, `[abc]`, escaped characters, each with `*`, `+` or `?`, and alternatives, also in
groups without repetition: `layers\\.(0|1)\\..*\\.down_proj`, `^model\\.layers\\.[0-3]\\.`.

A set of positions in a name is an int with one bit per position.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping
from typing import Generic, NamedTuple, NoReturn, TypeVar

from megatron.core.safe_files.errors import CheckpointError
from megatron.core.safe_files.schema import format_value

Value = TypeVar("Value", int, float)

# Characters of all patterns of an adapter that are more than names: each is evaluated per module.
_MAX_PATTERN_LENGTH = 1024

_PLAIN_NAME = re.compile(r"\w[\w-]*(\.\w[\w-]*)*", re.ASCII)
_TOKEN = re.compile(
    r"(?P<atom>\\[dw.\-]|\[[\w.-]+\]|[\w.-])(?P<repetition>[*+?]?)|(?P<syntax>\((\?:)?|[|)^$])",
    re.ASCII,
)
_WORD_CHARS = frozenset(string.ascii_letters + string.digits + "_")
_CHAR_CLASSES = {r"\d": frozenset(string.digits), r"\w": _WORD_CHARS}


class _Characters(NamedTuple):
    """One character of a set, or any character if the set is None."""

    accepted: frozenset[str] | None
    repetition: str  # "", "*", "+" or "?"


class _Sequence(NamedTuple):
    """Items that match one after the other. A group is a list of alternatives."""

    items: list[_Characters | list[_Sequence]]
    at_start: bool = False  # begins with ^


class ModulePatterns(Generic[Value]):
    """Values by pattern of module names; the first pattern that matches applies."""

    def __init__(self, values: Mapping[str, Value], location: str) -> None:
        """Raises CheckpointError naming `location` for a pattern that is not supported."""
        # Adapters may name each module: these are looked up.
        self._plain: dict[str, tuple[int, Value]] = {}
        self._patterns: list[tuple[int, list[_Sequence], Value]] = []
        length = 0
        for order, (pattern, value) in enumerate(values.items()):
            if _PLAIN_NAME.fullmatch(pattern):
                self._plain[pattern] = (order, value)
                continue
            length += len(pattern)
            if length > _MAX_PATTERN_LENGTH:
                raise CheckpointError(
                    f"{location} has patterns of more than {_MAX_PATTERN_LENGTH} characters: "
                    "replace them by the names of modules"
                )
            self._patterns.append((order, _parse_pattern(pattern, location), value))

    def find(self, module: str) -> Value | None:
        """Return the value of the first pattern that matches the end of a name, or None."""
        matches = [self._plain[name] for name in _iterate_ends(module) if name in self._plain]
        first = min(matches, default=None)
        chars = _locate_characters(module)
        for order, alternatives, value in self._patterns:
            if first is not None and first[0] < order:
                break
            if _matches(alternatives, module, chars):
                return value
        return None if first is None else first[1]


def _iterate_ends(module: str) -> Iterator[str]:
    """Yield a name, and its ends after each dot."""
    yield module
    for index, char in enumerate(module):
        if char == ".":
            yield module[index + 1 :]


# Parsing


def _parse_pattern(pattern: str, location: str) -> list[_Sequence]:
    """Return the alternatives of a pattern."""
    tokens = []
    position = 0
    while position < len(pattern):
        token = _TOKEN.match(pattern, position)
        if token is None:
            _refuse_pattern(pattern, location)
        tokens.append(token)
        position = token.end()

    alternatives = [_Sequence([])]
    group: list[_Sequence] | None = None
    for index, token in enumerate(tokens):
        current = alternatives if group is None else group
        syntax = token["syntax"]
        if syntax is None:
            accepted = _read_characters(token["atom"], pattern, location)
            current[-1].items.append(_Characters(accepted, token["repetition"]))
        elif syntax == "|":
            current.append(_Sequence([]))
        elif syntax == "^" and group is None and not current[-1].items:
            current[-1] = current[-1]._replace(at_start=True)
        elif syntax == "$" and _ends_alternative(tokens, index) and group is None:
            pass  # every pattern must match to the end
        elif syntax == ")" and group is not None:
            alternatives[-1].items.append(group)
            group = None
        elif syntax.startswith("(") and group is None:
            group = [_Sequence([])]
        else:
            _refuse_pattern(pattern, location)
    if group is not None:
        _refuse_pattern(pattern, location)
    return alternatives


def _ends_alternative(tokens: list[re.Match[str]], index: int) -> bool:
    return index + 1 == len(tokens) or tokens[index + 1].group() == "|"


def _read_characters(atom: str, pattern: str, location: str) -> frozenset[str] | None:
    """Return the characters that an atom accepts, None for all."""
    if atom == ".":
        return None
    if atom.startswith("\\"):
        return _CHAR_CLASSES.get(atom, frozenset(atom[1]))
    if not atom.startswith("["):
        return frozenset(atom)

    # Single characters and ranges such as 0-9
    accepted: set[str] = set()
    for first, last in re.findall(r"([\w.-])(?:-([\w.]))?", atom[1:-1], re.ASCII):
        codes = range(ord(first), ord(last or first) + 1)
        if not codes:
            _refuse_pattern(pattern, location)
        accepted.update(map(chr, codes))
    return frozenset(accepted)


def _refuse_pattern(pattern: str, location: str) -> NoReturn:
    raise CheckpointError(
        f"{location} has the pattern {format_value(pattern)}, which is not "
        "supported. Supported are "
        r"names of modules, ., \d, \w, [abc] and escaped characters, each followed by *, + or ? if "
        "they are repeated, and groups (a|b) without repetition"
    )


# Matching


def _locate_characters(name: str) -> dict[str, int]:
    """Return the positions of each character of a name."""
    positions: dict[str, int] = {}
    for index, char in enumerate(name):
        positions[char] = positions.get(char, 0) | 1 << index
    return positions


def _matches(alternatives: list[_Sequence], name: str, chars: Mapping[str, int]) -> bool:
    """Return whether an alternative matches a name from its start, or the end after a dot."""
    starts = 1 | chars.get(".", 0) << 1
    ends = 0
    for sequence in alternatives:
        ends |= _advance(sequence, 1 if sequence.at_start else starts, len(name), chars)
    return bool(ends >> len(name) & 1)


def _advance(sequence: _Sequence, starts: int, length: int, chars: Mapping[str, int]) -> int:
    """Return the positions after a match of `sequence` from one of the positions `starts`."""
    positions = starts
    for item in sequence.items:
        if isinstance(item, list):
            ends = 0
            for alternative in item:
                ends |= _advance(alternative, positions, length, chars)
            positions = ends
            continue
        accepted = (1 << length) - 1
        if item.accepted is not None:
            accepted = 0
            for char in item.accepted:
                accepted |= chars.get(char, 0)
        after_one = (positions & accepted) << 1
        if item.repetition == "":
            positions = after_one
        elif item.repetition == "?":
            positions |= after_one
        elif item.repetition == "+":
            positions = _extend(after_one, accepted)
        else:
            positions = _extend(positions, accepted)
    return positions


def _extend(positions: int, accepted: int) -> int:
    """Return the positions that any number of accepted characters leads to.

    The carry of the sum runs from a position to the end of the accepted characters after it.
    """
    return positions | (((positions & accepted) + accepted) ^ accepted)
