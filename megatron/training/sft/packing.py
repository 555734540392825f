"""Packing: which examples share a row of `--seq-length` tokens."""

from __future__ import annotations

from collections import defaultdict

import numpy as np


class OpenRows:
    """Rows that have room for further examples, by their room."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_rows = 0
        self._rows_by_room: defaultdict[int, list[np.ndarray]] = defaultdict(list)
        # Bit r is set if a row has room r: the least sufficient room is the lowest bit of a shift.
        self._rooms = 0

    def take(self, length: int, num_examples: int) -> tuple[np.ndarray, int]:
        """Return rows with the least room for an example of `length`, and their room.

        Without such rows, they are new, and as many as `num_examples` of this length require.
        """
        sufficient = self._rooms >> length
        if not sufficient:
            per_row = self.capacity // length
            first = self.num_rows
            self.num_rows += -(-num_examples // per_row)  # rounded up
            return np.arange(first, self.num_rows), self.capacity

        lowest_bit = sufficient & -sufficient
        room = length + lowest_bit.bit_length() - 1
        rows = self._rows_by_room[room].pop()
        if not self._rows_by_room[room]:
            self._rooms ^= 1 << room
        return rows, room

    def put_back(self, rows: np.ndarray, room: int) -> None:
        """Add rows that have `room` left."""
        if len(rows) and room > 0:
            self._rows_by_room[room].append(rows)
            self._rooms |= 1 << room


def pack_best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Return the row of each example, int64 [examples], by best-fit decreasing.

    Examples are placed in the order of decreasing lengths (1 to `capacity`), each into the fullest
    row that has room for it. All examples of one length are placed together: the number of steps
    depends on the number of different lengths, not on the number of examples.
    """
    assert not len(lengths) or (lengths.min() > 0 and lengths.max() <= capacity)
    row_of_example = np.empty(len(lengths), dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    # Ranges of equal lengths
    sorted_lengths = lengths[order]
    starts = np.flatnonzero(np.diff(sorted_lengths, prepend=capacity + 1)).tolist()
    ends = [*starts[1:], len(lengths)]

    open_rows = OpenRows(capacity)
    for position, end in zip(starts, ends, strict=True):
        length = int(sorted_lengths[position])
        while position < end:
            rows, room = open_rows.take(length, end - position)
            # Fill the rows one after the other; the last one may get fewer examples.
            per_row = room // length
            count = min(end - position, per_row * len(rows))
            num_full, num_in_last = divmod(count, per_row)
            num_used = num_full + (num_in_last > 0)
            placed = np.repeat(rows[:num_used], per_row)[:count]
            row_of_example[order[position : position + count]] = placed
            position += count
            # Return what is left of them.
            open_rows.put_back(rows[:num_full], room - per_row * length)
            open_rows.put_back(rows[num_full:num_used], room - num_in_last * length)
            open_rows.put_back(rows[num_used:], room)
    return row_of_example
