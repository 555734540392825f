"""Items: the parts of boxes that a rank writes, or receives and sends while loading."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron.core.dist_checkpointing.mapping import (
    Shape,
    find_row_axis,
    locate_rows,
    to_absolute,
)
from megatron.core.dist_checkpointing.planning.balancing import cut_into_shares, level_loads


class Item(NamedTuple):
    """The box at `offset` of `shape`, a range of rows of this rank's box at `box`."""

    key: str
    dtype: torch.dtype
    box: Shape
    offset: Shape
    shape: Shape

    @property
    def nbytes(self) -> int:
        numel = math.prod(self.shape)
        return numel * self.dtype.itemsize

    def select_rows(self, first: int, count: int) -> Item:
        """Return the item of `count` rows from row `first` on."""
        start, shape = locate_rows(self.shape, first, count)
        offset = to_absolute(self.offset, start)
        return self._replace(offset=offset, shape=shape)


def share_evenly(items: Sequence[Item], size: int) -> list[list[Item]]:
    """Split boxes that all `size` ranks have into shares of equal bytes, up to a row.

    Returns the parts of boxes of each rank.
    """
    # (rows, bytes) of each box, and the bytes of all boxes
    sizes = []
    total = 0
    for item in items:
        nbytes = item.nbytes
        axis = find_row_axis(item.shape)
        num_rows = 1
        if axis is not None:
            num_rows = item.shape[axis]
        sizes.append((num_rows, nbytes))
        total += nbytes

    # Unlike in a save, no rank has other boxes to begin with.
    no_loads = [0] * size
    bytes_of_ranks = level_loads(no_loads, total)
    shares: list[list[Item]] = [[] for _ in range(size)]
    for rank, number, first, count in cut_into_shares(bytes_of_ranks, sizes):
        part = items[number].select_rows(first, count)
        shares[rank].append(part)
    return shares
