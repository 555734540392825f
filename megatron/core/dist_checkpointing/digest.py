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

import numpy as np
import torch

from megatron.core.dist_checkpointing.boxes import Shape, byte_runs, cut_rows, shifted
from megatron.core.dist_checkpointing.loading.reader import Reader

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
    runs = byte_runs(global_shape, offset, shape, itemsize=1)
    run = runs[0].length
    rows = words.reshape(-1, run)
    starts = np.concatenate([first + np.arange(repeats) * stride for first, _, stride, repeats in runs])
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
        for offset, shape in cut_rows(chunk.shape, stored.dtype.itemsize, _SLICE):
            place = shifted(chunk.offset, offset)
            total += partial_digest(reader.read(key, place, shape), place, stored.shape)
    return total % (1 << 64)


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
