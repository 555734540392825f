"""Distribution of bytes over ranks: pure functions on numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def level_loads(loads: list[int], total: int) -> list[int]:
    """Return the part of `total` bytes that each rank takes so that loads become equal."""
    order = sorted(range(len(loads)), key=lambda index: (loads[index], index))
    # The ranks with the lowest loads are filled up to a common level, the others get no bytes.
    # `filled` is the sum of the loads of the first `count` ranks afterwards.
    filled = total
    count = 0
    for index in order:
        if count and filled <= loads[index] * count:
            break
        filled += loads[index]
        count += 1
    # The first ranks get the remainder of the division, one byte each.
    level, rest = divmod(filled, count)
    shares = [0] * len(loads)
    for position, index in enumerate(order[:count]):
        shares[index] = level + (position < rest) - loads[index]
    assert sum(shares) == total, (shares, total)
    return shares


def cut_into_shares(
    shares: list[int], sizes: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int, int, int]]:
    """Cut a sequence of boxes (rows, bytes) into shares of the given bytes, between rows.

    Yields (number of the share, number of the box, first row, count).
    """
    # The shares that are not empty, (number, bytes); without any bytes the first one gets all rows.
    due = [(member, share) for member, share in enumerate(shares) if share] or [(0, 0)]
    current = 0
    member, left = due[current]
    for number, (num_rows, nbytes) in enumerate(sizes):
        row_bytes = nbytes // num_rows
        done = 0
        while done < num_rows:
            count = num_rows - done
            is_last = current == len(due) - 1
            if row_bytes and not is_last:
                # Round to the nearest row: rounding down would add all remainders to the last
                # share.
                rows_left = -(-(2 * left - row_bytes) // (2 * row_bytes))
                count = min(count, rows_left)
            if count > 0:
                yield member, number, done, count
                done += count
                left -= count * row_bytes
            if done < num_rows:
                # The share is complete. What was rounded to a row goes to the next one.
                current += 1
                member, share = due[current]
                left += share
    assert current < len(due)
