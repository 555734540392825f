"""Distribution of bytes over ranks: pure functions on numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def level_loads(loads: list[int], total: int) -> list[int]:
    """Return the part of `total` bytes that each rank takes so that loads become equal."""
    # The ranks with the lowest loads are filled up to a common level, the others get no bytes.
    # `filled` is the sum of the loads of the first `count` ranks afterwards.
    order = sorted(range(len(loads)), key=lambda index: (loads[index], index))
    filled = total
    count = 0
    for index in order:
        load = loads[index]
        if count and filled <= load * count:
            break
        filled += load
        count += 1

    # The first ranks get the remainder of the division, one byte each.
    level, rest = divmod(filled, count)
    shares = [0] * len(loads)
    for position, index in enumerate(order[:count]):
        target = level
        if position < rest:
            target += 1
        shares[index] = target - loads[index]
    assert sum(shares) == total, (shares, total)
    return shares


def cut_into_shares(
    shares: list[int], sizes: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int, int, int]]:
    """Cut a sequence of boxes (rows, bytes) into shares of the given bytes, between rows.

    Yields (number of the share, number of the box, first row, count).
    """
    # The shares that are not empty, (number, bytes)
    due = []
    for member, share in enumerate(shares):
        if share:
            due.append((member, share))
    if not due:
        due.append((0, 0))  # without any bytes, the first one gets all rows

    current = 0
    last = len(due) - 1
    member, left = due[current]
    for number, (num_rows, nbytes) in enumerate(sizes):
        row_bytes = nbytes // num_rows
        done = 0
        while done < num_rows:
            count = num_rows - done
            if row_bytes and current < last:
                rows_left = _divide_to_nearest(left, row_bytes)
                count = min(count, rows_left)
            if count > 0:
                yield member, number, done, count
                done += count
                left -= count * row_bytes
            if done < num_rows:
                # The share is complete. The remainder of rounding to a row goes to the next one.
                current += 1
                member, share = due[current]
                left += share
    assert current <= last


def _divide_to_nearest(nbytes: int, row_bytes: int) -> int:
    """Return the number of rows nearest to `nbytes`, the smaller one of two.

    Rounding down would add all remainders to the last share.
    """
    doubled = 2 * nbytes - row_bytes
    return -(-doubled // (2 * row_bytes))
