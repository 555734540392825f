"""Packing: which examples share a row of `--seq-length` tokens."""

from __future__ import annotations

from collections import defaultdict

import numpy as np


def pack_best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Return the row of each example, int64 [examples], by best-fit decreasing.

    Examples are placed in the order of decreasing lengths (1 to `capacity`), each into the fullest
    row that has room for it. All examples of one length are placed together: the number of steps
    depends on the number of different lengths, not on the number of examples.
    """
    assert not len(lengths) or (lengths.min() > 0 and lengths.max() <= capacity)
    rows = np.empty(len(lengths), dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    sorted_lengths = lengths[order]
    class_starts = np.flatnonzero(np.diff(sorted_lengths, prepend=capacity + 1))
    class_ends = np.append(class_starts[1:], len(lengths))
    # Rows by their room; bit r of `rooms` is set if some row has room r.
    rows_by_room: defaultdict[int, list[np.ndarray]] = defaultdict(list)
    rooms = 0
    num_rows = 0

    for position, end in zip(class_starts.tolist(), class_ends.tolist(), strict=True):
        length = int(sorted_lengths[position])
        while position < end:
            # The least room that is sufficient, or that of new rows
            sufficient = rooms >> length
            room = capacity
            if sufficient:
                room = length + (sufficient & -sufficient).bit_length() - 1
                candidates = rows_by_room[room].pop()
            else:
                num_new = -(-(end - position) // (capacity // length))  # rounded up
                candidates = np.arange(num_rows, num_rows + num_new)
                num_rows += num_new

            # Fill rows one after the other; the last one may get fewer examples.
            per_row = room // length
            num_whole = min(len(candidates), (end - position) // per_row)
            used = candidates[:num_whole]
            count = num_whole * per_row
            rows[order[position : position + count]] = np.repeat(used, per_row)
            position += count
            returned = [(room - per_row * length, used)]
            unused = candidates[num_whole:]
            if position < end and len(unused):
                count = end - position
                rows[order[position:end]] = unused[0]
                returned.append((room - count * length, unused[:1]))
                unused = unused[1:]
                position = end
            returned.append((room, unused))
            for new_room, changed in returned:
                if len(changed) and new_room:
                    rows_by_room[new_room].append(changed)
                    rooms |= 1 << new_room
            if not rows_by_room[room]:
                rooms &= ~(1 << room)
    return rows
