"""Which bytes of a stored chunk a box needs: pure functions on shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron.core.dist_checkpointing.format.metadata import StoredChunk
from megatron.core.dist_checkpointing.mapping import Shape

READ_THROUGH = 16 << 10  # bytes: smaller gaps are read rather than skipped, a read of its own costs more


class Overlap(NamedTuple):
    """The common part of a chunk and a box: its place in each, and its extent."""

    chunk: StoredChunk
    in_chunk: Shape
    in_box: Shape
    shape: Shape


class Runs(NamedTuple):
    """`repeats` contiguous runs of `length` bytes, `stride` bytes apart, from byte `start` of the chunk's data."""

    start: int
    length: int
    stride: int
    repeats: int


class ChunkIndex:
    """The chunks of one tensor, prepared for finding those that a box meets."""

    def __init__(self, chunks: Sequence[StoredChunk]) -> None:
        self._chunks = chunks
        dims = len(chunks[0].offset) if chunks else 0
        self._start = np.array([chunk.offset for chunk in chunks], dtype=np.int64).reshape(len(chunks), dims)
        self._stop = self._start + np.array([chunk.shape for chunk in chunks], dtype=np.int64).reshape(
            len(chunks), dims
        )

    def overlaps(self, offset: Shape, shape: Shape) -> list[Overlap]:
        if 0 in shape:
            return []
        low = np.maximum(self._start, np.array(offset, dtype=np.int64))
        high = np.minimum(self._stop, np.array(offset, dtype=np.int64) + np.array(shape, dtype=np.int64))
        result = []
        for i in np.flatnonzero((low < high).all(axis=1)).tolist():
            first = tuple(low[i].tolist())
            in_chunk = tuple((low[i] - self._start[i]).tolist())
            in_box = tuple(a - b for a, b in zip(first, offset, strict=True))
            result.append(Overlap(self._chunks[i], in_chunk, in_box, tuple((high[i] - low[i]).tolist())))
        return result


def byte_runs(chunk_shape: Shape, offset: Shape, shape: Shape, itemsize: int) -> list[Runs]:
    """The bytes of the box at `offset` of extent `shape` inside a row-major chunk of `chunk_shape`, in order."""
    if not shape:
        return [Runs(0, itemsize, itemsize, 1)]
    strides = [math.prod(chunk_shape[i + 1 :]) * itemsize for i in range(len(shape))]
    start = sum(o * s for o, s in zip(offset, strides, strict=True))
    axis = len(shape) - 1  # all axes behind it are whole, so an index range of it is contiguous
    while axis > 0 and shape[axis] == chunk_shape[axis]:
        axis -= 1
    length = shape[axis] * strides[axis]
    if axis == 0:
        return [Runs(start, length, length, 1)]
    outer = [start]
    for i in range(axis - 1):
        outer = [base + j * strides[i] for base in outer for j in range(shape[i])]
    return [Runs(base, length, strides[axis - 1], shape[axis - 1]) for base in outer]
