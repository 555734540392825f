"""A digest of a global tensor that does not depend on how it is cut.

Element number i (row-major in the global tensor) is an unsigned integer e_i of b bits: its bytes, little-endian. With
f_i = e_i xor (e_i >> b / 2),

    digest = sum over i of  f_i * T[i mod 65536] * A(i div 65536)   mod 2^64
    T[r] = splitmix64(r) | 1        A(q) = splitmix64(2^32 + q) | 1

where 16-byte elements count as two of 8 bytes. A sum does not care about order, so any tiling gives the same number and
partial sums of boxes just add up. All weights are odd and f is one-to-one, so a change of a single element always
changes the digest. Changes of several are missed with a probability of 2^-64, at most 2^-33 if all of them are
multiples of a high power of two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from megatron.core.dist_checkpointing.loading.reader import Reader
from megatron.core.dist_checkpointing.mapping import Shape

_BLOCK = 1 << 16  # elements that share a block weight
_LONG = 1 << 13  # elements: runs from here on are handled one by one, shorter ones many at once
_STEP = 1 << 17  # elements handled at once
_SLICE = 64 << 20  # bytes of a stored chunk in memory at once


def splitmix64(x: np.ndarray) -> np.ndarray:
    """Vigna's generator as a function of its counter, on uint64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _block_weights(numbers: np.ndarray) -> np.ndarray:
    return splitmix64(numbers.astype(np.uint64) + np.uint64(1 << 32)) | np.uint64(1)


_WEIGHTS = splitmix64(np.arange(_BLOCK, dtype=np.uint64)) | np.uint64(1)
_CYCLE = np.concatenate([_WEIGHTS, _WEIGHTS[:_LONG]])  # the weights of a run that crosses into the next block


def partial_digest(tensor: torch.Tensor, offset: Shape, global_shape: Shape) -> int:
    """What the box `tensor` (CPU) at `offset` adds to the digest of its global tensor; sum these modulo 2^64."""
    words, offset, shape, global_shape = _as_words(tensor, offset, global_shape)
    if words.size == 0:
        return 0
    run = _run_length(shape, global_shape)
    rows = words.reshape(-1, run)
    starts = _run_starts(offset, shape, global_shape, rows.shape[0])
    alone = (starts % _BLOCK + run > _BLOCK) if run < _LONG else np.ones(len(rows), dtype=bool)
    total = sum(_weigh_run(rows[i], int(starts[i])) for i in np.flatnonzero(alone))
    if not alone.all():
        total += _weigh_short_runs(rows, starts, alone)
    return total % (1 << 64)


def tensor_digest(reader: Reader, key: str) -> int:
    """The digest of a stored tensor, chunk by chunk: no more than a chunk's slice is in memory."""
    stored = reader.metadata.tensors[key]
    total = 0
    for chunk in stored.chunks:
        for offset, shape in row_slices(chunk.shape, stored.dtype.itemsize, _SLICE):
            place = tuple(a + b for a, b in zip(chunk.offset, offset, strict=True))
            total += partial_digest(reader.read(key, place, shape), place, stored.shape)
    return total % (1 << 64)


def row_slices(shape: Shape, itemsize: int, nbytes: int) -> Iterator[tuple[Shape, Shape]]:
    """(offset, shape) of consecutive rows of a tensor, about `nbytes` at a time."""
    axis = next((i for i, extent in enumerate(shape) if extent > 1), None)
    if axis is None:
        yield (0,) * len(shape), shape
        return
    step = max(1, shape[axis] * nbytes // max(1, math.prod(shape) * itemsize))
    for first in range(0, shape[axis], step):
        offset = tuple(first * (i == axis) for i in range(len(shape)))
        yield offset, tuple(min(step, n - first) if i == axis else n for i, n in enumerate(shape))


def format_digest(value: int) -> str:
    return f"{value % (1 << 64):016x}"


def _weigh_run(row: np.ndarray, start: int) -> int:
    """Contiguous elements, block by block."""
    total = position = 0
    while position < len(row):
        number, first = divmod(start + position, _BLOCK)
        count = min(len(row) - position, _BLOCK - first)
        block = _block_weights(np.array([number]))[0]
        total += int(np.dot(_mix(row[position : position + count]), _WEIGHTS[first : first + count])) * int(block)
        position += count
    return total


def _weigh_short_runs(rows: np.ndarray, starts: np.ndarray, alone: np.ndarray) -> int:
    """All runs that lie in one block each (not `alone`), many at a time."""
    run = rows.shape[1]
    windows = np.lib.stride_tricks.sliding_window_view(_CYCLE, run)
    total, step = 0, max(1, _STEP // run)
    for first in range(0, len(rows), step):
        place = starts[first : first + step]
        sums = np.einsum("ij,ij->i", _mix(rows[first : first + step]), windows[place % _BLOCK])
        sums[alone[first : first + step]] = 0
        total += int(np.dot(sums, _block_weights(place // _BLOCK)))
    return total


def _mix(words: np.ndarray) -> np.ndarray:
    """f as above: high bits, like signs, reach the low ones, which a product modulo 2^64 preserves best."""
    return (words ^ (words >> words.dtype.type(4 * words.itemsize))).astype(np.uint64)


def _as_words(tensor: torch.Tensor, offset: Shape, global_shape: Shape) -> tuple[np.ndarray, Shape, Shape, Shape]:
    """The elements as unsigned integers, and the box in terms of them."""
    flat = tensor.detach().contiguous().reshape(-1)
    size = min(8, tensor.dtype.itemsize)
    words = flat.view(torch.uint8).numpy().view(f"<u{size}")
    if tensor.dtype.itemsize == 16:
        return words, (*offset, 0), (*tensor.shape, 2), (*global_shape, 2)
    return words, offset, tuple(tensor.shape), global_shape


def _run_length(shape: Shape, global_shape: Shape) -> int:
    """How many elements of the box are neighbours in the global tensor, too."""
    axis = len(shape) - 1
    while axis > 0 and shape[axis] == global_shape[axis]:
        axis -= 1
    return math.prod(shape[max(axis, 0) :])


def _run_starts(offset: Shape, shape: Shape, global_shape: Shape, count: int) -> np.ndarray:
    """The global element number at which each run of the box begins."""
    strides = [math.prod(global_shape[axis + 1 :]) for axis in range(len(shape))]
    base = sum(o * s for o, s in zip(offset, strides, strict=True))
    starts = np.full(1, base, dtype=np.int64)
    for extent, stride in zip(shape, strides, strict=True):
        if len(starts) == count:
            break
        starts = (starts[:, None] + np.arange(extent, dtype=np.int64) * stride).ravel()
    assert len(starts) == count, (offset, shape, global_shape)
    return starts
