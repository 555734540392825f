"""Distribution of bytes over ranks and files: pure functions on numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

# Bytes of a typical envelope around raw data: many small items fill a file, too.
_TYPICAL_ENVELOPE = 1024


def level_loads(loads: list[int], total: int) -> list[int]:
    """Return the part of `total` bytes that each rank takes so that loads become equal.

    The ranks with the lowest loads are filled up to a common level, the others get no bytes.
    """
    # Find the ranks to fill, in the order of their loads. `filled` is the sum of the loads of the
    # first `count` of them after distributing all bytes over these.
    order = sorted(range(len(loads)), key=lambda rank: (loads[rank], rank))
    filled = total
    count = 0
    for rank in order:
        load = loads[rank]
        is_above_level = count > 0 and filled <= load * count
        if is_above_level:
            break
        filled += load
        count += 1

    # The first ranks get the remainder of the division, one byte each.
    level, remainder = divmod(filled, count)
    shares = [0] * len(loads)
    for position, rank in enumerate(order[:count]):
        target = level
        if position < remainder:
            target += 1
        shares[rank] = target - loads[rank]
    assert sum(shares) == total, (shares, total)
    return shares


def cut_into_shares(
    shares: list[int], sizes: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int, int, int]]:
    """Cut a sequence of boxes into shares of the given bytes, between rows.

    `sizes` are (number of rows, bytes) of each box. Yields (index of the share, index of the box,
    first row, number of rows).
    """
    # List the shares to fill: (index, bytes).
    to_fill = []
    for index, nbytes in enumerate(shares):
        if nbytes:
            to_fill.append((index, nbytes))
    if not to_fill:
        to_fill.append((0, 0))  # without any bytes, the first share gets all rows

    # Fill one share after the other. `missing` are the bytes that the current one still needs.
    current = 0
    last = len(to_fill) - 1
    share, missing = to_fill[current]
    for box, (num_rows, nbytes) in enumerate(sizes):
        row_bytes = nbytes // num_rows
        first = 0
        while first < num_rows:
            count = num_rows - first
            # The last share takes all that is left.
            if row_bytes and current < last:
                rows_to_fill = _divide_to_nearest(missing, row_bytes)
                count = min(count, rows_to_fill)
            if count > 0:
                yield share, box, first, count
                first += count
                missing -= count * row_bytes
            if first < num_rows:
                # The share is complete. The remainder of rounding to a row goes to the next one.
                current += 1
                share, next_bytes = to_fill[current]
                missing += next_bytes
    assert current <= last


def _divide_to_nearest(nbytes: int, row_bytes: int) -> int:
    """Return `nbytes / row_bytes` rounded to the nearest number of rows, halves down.

    Rounding all quotients down would add all remainders to the last share.
    """
    # ceil(quotient - 1/2) in integers
    numerator = 2 * nbytes - row_bytes
    denominator = 2 * row_bytes
    return -(-numerator // denominator)


def spread_over_files(rank: np.ndarray, nbytes: np.ndarray, workers: int) -> np.ndarray:
    """Return the file of each item: largest items first, each into its rank's smallest file.

    `rank` and `nbytes` are [items], sorted by rank. The loop runs over turns: in each turn every
    rank places one item, so that the number of iterations does not grow with the number of ranks.
    """
    # Group the items by turn: those of turn t are `by_turn[ends[t] : ends[t + 1]]`.
    turn = _compute_turns(rank, nbytes)
    by_turn = np.argsort(turn, kind="stable")
    num_turns = turn.max(initial=-1) + 1
    ends = np.searchsorted(turn[by_turn], np.arange(num_turns + 1))

    # Place the items of one turn at a time.
    num_ranks = rank.max(initial=-1) + 1
    sizes = np.zeros((num_ranks, workers), dtype=np.int64)  # bytes of each file so far
    file = np.zeros_like(rank)
    for start, stop in itertools.pairwise(ends):
        items = by_turn[start:stop]
        ranks = rank[items]
        sizes_of_ranks = sizes[ranks]  # [items of the turn, workers]
        smallest = sizes_of_ranks.argmin(axis=1)
        file[items] = smallest
        sizes[ranks, smallest] += nbytes[items] + _TYPICAL_ENVELOPE
    return file


def _compute_turns(rank: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
    """Return the index of each item among the items of its rank, by decreasing size.

    The items are sorted by rank.
    """
    by_size = np.lexsort((-nbytes, rank))  # by rank, then by decreasing size
    first_of_rank = np.searchsorted(rank, rank)  # [items]
    turn = np.empty_like(first_of_rank)
    turn[by_size] = np.arange(len(rank)) - first_of_rank[by_size]
    return turn
