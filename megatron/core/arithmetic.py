"""Integer arithmetic of partitions: exact division, rounding up, equal ranges."""

from __future__ import annotations


def divide(numerator: int, denominator: int, quantity: str) -> int:
    """Return the exact quotient; `quantity` describes it in the error.

    Raises ValueError when the division leaves a remainder.
    """
    if numerator % denominator != 0:
        raise ValueError(f"{quantity}: {numerator} is not divisible by {denominator}")
    return numerator // denominator


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is >= `value`."""
    return -(-value // multiple) * multiple


def even_range(length: int, rank: int, size: int) -> tuple[int, int]:
    """Return `[start, stop)` of part `rank` of `size` equal parts of `length` elements.

    `length` must be a multiple of `size`.
    """
    length_per_rank = length // size
    assert length_per_rank * size == length, (length, size)
    return rank * length_per_rank, (rank + 1) * length_per_rank
