"""What to read: the parsing of --data-path lists and --split fractions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, Split, Split] = ("train", "valid", "test")

Fractions = tuple[float, float]


@dataclass(frozen=True)
class Blend:
    """Data sets to mix: `weights` sum to 1, or are None for a mix in proportion to their sizes, each read once."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None


def parse_blend(values: Sequence[str], flag: str) -> Blend:
    """`path`, `path path ...` or `weight path weight path ...`.

    A list of even length whose every other value is a number carries weights.
    """
    if not values:
        raise ValueError(f"{flag} is empty: give a path, paths, or weights and paths in turn")
    numbers = [_number(value) for value in values[::2]]
    if len(values) % 2 or all(number is None for number in numbers):
        return Blend(tuple(values))
    for value, number in zip(values[::2], numbers, strict=True):
        if number is None:
            raise ValueError(
                f"{flag}: {value!r} stands where a weight is expected in {' '.join(values)!r}: give either paths only, "
                "or a weight before every path"
            )
        if not 0 < number < float("inf"):
            raise ValueError(
                f"{flag}: weight {value} of {' '.join(values)!r} must be positive and finite; leave out what is "
                "not wanted"
            )
    weights = [number for number in numbers if number is not None]
    total = sum(weights)
    return Blend(tuple(values[1::2]), tuple(weight / total for weight in weights))


def _number(value: str) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None


def parse_split(text: str) -> tuple[Fractions | None, Fractions | None, Fractions | None]:
    """`a,b,c` (shares, missing ones are 0) as intervals of [0, 1] for train, valid and test; None where empty."""
    shares = [_number(part) for part in text.split(",")]
    if len(shares) > 3 or any(share is None or not 0 <= share < float("inf") for share in shares):
        raise ValueError(f"--split {text!r}: expected up to three non-negative numbers such as 969,30,1")
    values = [share for share in shares if share is not None] + [0.0] * (3 - len(shares))
    total = sum(values)
    if total == 0:
        raise ValueError(f"--split {text!r}: at least one share must be positive")
    bounds = [0.0]
    for value in values:
        bounds.append(bounds[-1] + value / total)
    intervals = [(low, high) if high > low else None for low, high in zip(bounds, bounds[1:], strict=False)]
    return intervals[0], intervals[1], intervals[2]


def sequence_range(fractions: Fractions, num_sequences: int) -> tuple[int, int]:
    """`[first, last)` sequences of a split: both ends rounded to the nearest, halves to even, as Megatron-LM does."""
    return round(fractions[0] * num_sequences), round(fractions[1] * num_sequences)
