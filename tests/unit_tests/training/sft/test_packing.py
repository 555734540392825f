"""Best-fit decreasing, compared with its definition."""

import numpy as np
import pytest

from megatron.training.sft.packing import pack_best_fit


def pack_one_by_one(lengths, capacity):
    """Place examples in the order of decreasing lengths, each into the fullest row with room.

    Return the room that is left in each row.
    """
    rooms = []
    for length in sorted(lengths, reverse=True):
        sufficient = [room for room in rooms if room >= length]
        if not sufficient:
            rooms.append(capacity)
            sufficient = [capacity]
        fullest_row = rooms.index(min(sufficient))
        rooms[fullest_row] -= length
    return rooms


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_as_full_as_those_of_best_fit_decreasing(seed):
    random = np.random.RandomState(seed)
    capacity = int(random.randint(1, 60))
    lengths = random.randint(1, capacity + 1, size=random.randint(1, 200))
    rows = pack_best_fit(lengths, capacity)
    used = np.bincount(rows, weights=lengths)

    assert used.max() <= capacity
    assert used.min() > 0
    assert sorted(capacity - used) == sorted(pack_one_by_one(lengths, capacity))


def test_one_length_fills_whole_rows():
    rows = pack_best_fit(np.full(7, 3), 10)
    assert np.bincount(rows).tolist() == [3, 3, 1]


def test_a_million_examples_are_packed_by_length_and_not_one_by_one():
    """The number of steps is that of lengths: a loop over examples would take minutes."""
    random = np.random.RandomState(0)
    lengths = np.minimum(random.geometric(1 / 200, size=1_000_000), 4096)
    rows = pack_best_fit(lengths, 4096)
    used = np.bincount(rows, weights=lengths)
    assert used.max() <= 4096
    assert used.mean() / 4096 > 0.999
