"""Packing: the assignment of examples to rows of `--seq-length` tokens."""

from __future__ import annotations

from collections import defaultdict

import numpy as np


class OpenRows:
    """Rows that have room for further examples.

    The room of a row is the number of tokens that still fit into it.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity  # tokens of a row
        self.num_rows = 0  # that were created
        # Room -> arrays of rows that have it
        self._rows_by_room: defaultdict[int, list[np.ndarray]] = defaultdict(list)
        # Bit r is set if a row has room r: the lowest bit from r on is the least sufficient room.
        self._rooms = 0

    def take(self, length: int, num_examples: int) -> tuple[np.ndarray, int]:
        """Return rows with the least room for an example of `length`, and their room.

        If no row has room, rows are created for `num_examples` examples of this length.
        """
        sufficient = self._rooms >> length
        if not sufficient:
            examples_per_row = self.capacity // length
            first = self.num_rows
            self.num_rows += -(-num_examples // examples_per_row)  # rounded up
            return np.arange(first, self.num_rows), self.capacity

        # The least room that suffices
        lowest_bit = sufficient & -sufficient
        room = length + lowest_bit.bit_length() - 1
        rows = self._rows_by_room[room].pop()
        if not self._rows_by_room[room]:
            self._rooms ^= 1 << room
        return rows, room

    def put_back(self, rows: np.ndarray, room: int) -> None:
        """Add rows that have `room` left, unless they are full."""
        if len(rows) and room > 0:
            self._rows_by_room[room].append(rows)
            self._rooms |= 1 << room


def pack_best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Return the row of each example, int64 [examples], by best-fit decreasing.

    Examples are placed in the order of decreasing lengths, each into the fullest row that has room
    for it. All examples of one length are placed together: the number of steps depends on the
    number of different lengths, not on the number of examples.

    Args:
        lengths: number of tokens of each example, from 1 to `capacity`.
        capacity: number of tokens of a row.
    """
    num_examples = len(lengths)
    if num_examples == 0:
        return np.empty(0, dtype=np.int64)
    assert lengths.min() > 0
    assert lengths.max() <= capacity

    # Ranges of examples of equal lengths in the sorted order
    order = np.argsort(-lengths, kind="stable")
    sorted_lengths = lengths[order]
    differences = np.diff(sorted_lengths, prepend=capacity + 1)
    starts = np.flatnonzero(differences).tolist()
    ends = [*starts[1:], num_examples]

    row_of_example = np.empty(num_examples, dtype=np.int64)
    open_rows = OpenRows(capacity)
    for start, end in zip(starts, ends, strict=True):
        length = int(sorted_lengths[start])
        position = start
        while position < end:
            # Fill the rows one after the other; the last one may get fewer examples.
            rows, room = open_rows.take(length, end - position)
            examples_per_row = room // length
            count = min(end - position, examples_per_row * len(rows))
            num_full, num_in_last = divmod(count, examples_per_row)
            num_used = num_full + (num_in_last > 0)
            used_rows = np.repeat(rows[:num_used], examples_per_row)
            examples = order[position : position + count]
            row_of_example[examples] = used_rows[:count]
            position += count

            # Put back full rows, a row with fewer examples, and unused rows.
            open_rows.put_back(rows[:num_full], room - examples_per_row * length)
            open_rows.put_back(rows[num_full:num_used], room - num_in_last * length)
            open_rows.put_back(rows[num_used:], room)
    return row_of_example
