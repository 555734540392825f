"""Named global tensors, and the boxes of them that a rank holds: axis-aligned pieces by offset and
shape.

Every piece of training state is a named global tensor; a rank holds a list of *boxes* of it, each
an offset and a live view of local memory. TP, PP, DP and ZeRO are only different tilings, so
nothing here knows about any of them. Overlapping, narrowing, cutting into rows, runs of bytes,
tiling: each is here once, as a pure function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megatron.core.lazy_import import lazy_module

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")

Shape = tuple[int, ...]
Extent = tuple[Shape, Shape]  # offset and shape of a box


class Overlap(NamedTuple):
    """What two boxes have in common: its offset in each of them, and its shape."""

    in_first: Shape
    in_second: Shape
    shape: Shape


def compute_overlap(first: Extent, second: Extent) -> Overlap | None:
    """The common part of two boxes of one tensor; None if it has no element."""
    low = tuple(map(max, first[0], second[0]))
    high = (min(a + n, b + m) for a, n, b, m in zip(*first, *second, strict=True))
    shape = tuple(h - lo for lo, h in zip(low, high, strict=True))
    if min(shape, default=1) <= 0:
        return None
    return Overlap(to_relative(low, first[0]), to_relative(low, second[0]), shape)


def to_relative(offset: Shape, origin: Shape) -> Shape:
    """`offset` as seen from `origin`."""
    return tuple(a - b for a, b in zip(offset, origin, strict=True))


def to_absolute(offset: Shape, origin: Shape) -> Shape:
    """The inverse of `relative`."""
    return tuple(a + b for a, b in zip(offset, origin, strict=True))


def narrow(tensor: torch.Tensor, offset: Shape, shape: Shape) -> torch.Tensor:
    """The box of `tensor` as a view."""
    for axis, (start, extent) in enumerate(zip(offset, shape, strict=True)):
        if extent != tensor.shape[axis]:
            tensor = tensor.narrow(axis, start, extent)
    return tensor


def find_row_axis(shape: Shape) -> int | None:
    """The first axis with more than one index. Index ranges of it are contiguous in a row-major
    tensor: its rows.
    """
    return next((axis for axis, extent in enumerate(shape) if extent > 1), None)


def locate_rows(shape: Shape, first: int, count: int) -> Extent:
    """Rows `[first, first + count)` of a tensor of `shape`; a tensor of one element has one row."""
    axis = find_row_axis(shape)
    offset = tuple(first if i == axis else 0 for i in range(len(shape)))
    return offset, tuple(count if i == axis else extent for i, extent in enumerate(shape))


def cut_rows(shape: Shape, itemsize: int, nbytes: int) -> Iterator[Extent]:
    """A tensor of `shape` as consecutive runs of whole rows of about `nbytes` each, at least one
    row.
    """
    axis = find_row_axis(shape)
    rows = 1 if axis is None else shape[axis]
    step = max(1, rows * nbytes // max(1, math.prod(shape) * itemsize))
    for first in range(0, rows, step):
        yield locate_rows(shape, first, min(step, rows - first))


class Runs(NamedTuple):
    """`repeats` contiguous runs of `length` bytes, `stride` bytes apart, from byte `start` on."""

    start: int
    length: int
    stride: int
    repeats: int

    @property
    def gap(self) -> int:
        return self.stride - self.length if self.repeats > 1 else 0


def compute_byte_runs(whole: Shape, offset: Shape, shape: Shape, itemsize: int) -> list[Runs]:
    """The bytes of the box at `offset` of `shape` inside a row-major tensor of shape `whole`, in
    order.
    """
    if not shape:
        return [Runs(0, itemsize, itemsize, 1)]
    strides = [math.prod(whole[i + 1 :]) * itemsize for i in range(len(shape))]
    start = sum(o * s for o, s in zip(offset, strides, strict=True))
    axis = len(shape) - 1  # all axes behind it are whole, so an index range of it is contiguous
    while axis > 0 and shape[axis] == whole[axis]:
        axis -= 1
    length = shape[axis] * strides[axis]
    if axis == 0:
        return [Runs(start, length, length, 1)]
    outer = [start]
    for i in range(axis - 1):
        outer = [base + j * strides[i] for base in outer for j in range(shape[i])]
    return [Runs(base, length, strides[axis - 1], shape[axis - 1]) for base in outer]


def split_flat_range(
    shape: Shape, start: int, data: torch.Tensor
) -> Iterator[tuple[Shape, torch.Tensor]]:
    """Cut elements `[start, start + len(data))` of a row-major tensor of `shape` into boxes.

    Yields (offset, view of `data` in the shape of the box), at most `2 * len(shape) - 1` of them,
    each contiguous in `data`: partial rows at the two ends, recursively, and whole rows between.
    """
    stop = start + data.numel()
    assert data.dim() == 1 and 0 <= start <= stop <= math.prod(shape), (
        shape,
        start,
        tuple(data.shape),
    )
    if start == stop:
        return
    if len(shape) <= 1:
        yield (start,) * len(shape), data.view((stop - start,) * len(shape))
        return
    row = math.prod(shape[1:])
    # rows of the first and the last element
    first = start // row
    last = (stop - 1) // row
    head = first if start % row or stop < (first + 1) * row else None
    tail = last if stop % row and last != head else None
    if head is not None:
        part = data[: min(stop, (head + 1) * row) - start]
        for offset, view in split_flat_range(shape[1:], start - head * row, part):
            yield (head, *offset), view.unsqueeze(0)
    middle = range(first + (head is not None), last + 1 - (tail is not None or last == head))
    if len(middle):
        part = data[middle.start * row - start : middle.stop * row - start]
        yield (middle.start,) + (0,) * (len(shape) - 1), part.view(len(middle), *shape[1:])
    if tail is not None:
        part = data[tail * row - start :]
        for offset, view in split_flat_range(shape[1:], 0, part):
            yield (tail, *offset), view.unsqueeze(0)


@dataclass(frozen=True)
class BoxTable:
    """Many boxes of one tensor: int64 arrays `[boxes, dimensions]`."""

    offset: np.ndarray
    shape: np.ndarray

    @classmethod
    def of(cls, boxes: Iterable[Extent], dims: int) -> BoxTable:
        extents = list(boxes)
        table = np.array(extents, dtype=np.int64).reshape(len(extents), 2, dims)
        return cls(table[:, 0], table[:, 1])

    def __len__(self) -> int:
        return len(self.offset)

    def overlaps(self, offset: Shape, shape: Shape) -> Iterator[tuple[int, Overlap]]:
        """(number, overlap) for every box of the table that meets the given one, which is the second of the overlap."""
        if 0 in shape:
            return
        start = np.array(offset, dtype=np.int64)
        low = np.maximum(self.offset, start)
        extent = np.minimum(self.offset + self.shape, start + np.array(shape, dtype=np.int64)) - low
        hits = np.flatnonzero((extent > 0).all(axis=1))
        places = (low[hits] - self.offset[hits], low[hits] - start, extent[hits])
        for number, *rows in zip(hits.tolist(), *(place.tolist() for place in places), strict=True):
            yield number, Overlap(*map(tuple, rows))

    def find_gap_or_overlap(self, whole: Shape) -> str | None:
        """None if the boxes cover every element of `whole` exactly once; else where the first hole
        or overlap is.

        Exact and linear in the number of boxes: how often each element is covered is a function on
        the grid, and its mixed difference lives on the corners of the boxes, +1 or -1 each. Two
        such functions are equal if these differences are, and at the first corner (in row-major
        order) where they differ so do the functions, by that amount.
        """
        if 0 in whole:
            return None
        if len(self) == 1 and tuple(self.shape[0].tolist()) == whole and not self.offset.any():
            return None
        grid = tuple(extent + 1 for extent in whole)  # of corners
        if math.prod(grid) >= 1 << 63:
            return "it has more elements than 64 bits can number"
        strides = np.array(
            [math.prod(grid[axis + 1 :]) for axis in range(len(grid))], dtype=np.int64
        )
        offset = np.concatenate([self.offset, np.zeros((1, len(whole)), dtype=np.int64)])
        shape = np.concatenate([self.shape, np.array([whole], dtype=np.int64)])
        sign = np.append(np.ones(len(self)), -1)  # the whole is taken away again
        corners = []
        signs = []
        for upper in product((0, 1), repeat=len(whole)):
            corners.append((offset + shape * np.array(upper, dtype=np.int64)) @ strides)
            signs.append(-sign if sum(upper) % 2 else sign)
        distinct, number = np.unique(np.concatenate(corners), return_inverse=True)
        counts = np.bincount(number, weights=np.concatenate(signs))
        wrong = np.flatnonzero(counts)
        if not len(wrong):
            return None
        place = tuple(int(i) for i in np.unravel_index(distinct[wrong[0]], grid))
        return (
            f"element {place} is held by no rank"
            if counts[wrong[0]] < 0
            else f"different boxes overlap at {place}"
        )


@dataclass(frozen=True)
class Box:
    """An axis-aligned piece of a global tensor: `tensor` is a live view of the data at `offset`.

    Its shape is the extent of the box (same number of dimensions as the global tensor).
    """

    offset: Shape
    tensor: torch.Tensor

    @property
    def shape(self) -> Shape:
        return tuple(self.tensor.shape)


@dataclass(frozen=True)
class ShardedTensor:
    """This rank's part of the global tensor `key`.

    For a parameter, `local` is the whole local tensor and the boxes tile the leading part of its
    row-major elements, in order (a fused SwiGLU matrix is two boxes, gate then up; an embedding
    crops the rows that pad the vocabulary). Ranks that hold equal boxes are replicas of each other;
    who writes is decided by the save plan.
    """

    key: str
    global_shape: Shape
    dtype: torch.dtype
    boxes: tuple[Box, ...]
    local: torch.Tensor | None = None
    read: Callable[[Shape, Shape], torch.Tensor] | None = (
        None  # of a `lazy` one: (offset, extent) -> values
    )

    @classmethod
    def lazy(
        cls,
        key: str,
        shape: Shape,
        dtype: torch.dtype,
        read: Callable[[Shape, Shape], torch.Tensor],
    ) -> ShardedTensor:
        """A whole tensor that is not in memory: a save reads it a few rows at a time, from several
        threads.
        """
        meta = torch.empty(shape, dtype=dtype, device="meta")
        return cls(key, shape, dtype, (Box((0,) * len(shape), meta),), read=read)

    @classmethod
    def replicated(cls, key: str, tensor: torch.Tensor) -> ShardedTensor:
        """Every rank that has this key has the whole tensor."""
        shape = tuple(tensor.shape)
        return cls(key, shape, tensor.dtype, (Box((0,) * len(shape), tensor.detach()),), tensor)

    @classmethod
    def split(cls, key: str, tensor: torch.Tensor, dim: int, rank: int, size: int) -> ShardedTensor:
        """Equal parts along `dim`: part `rank` of `size` is `tensor`."""
        shape = list(tensor.shape)
        offset = [0] * len(shape)
        offset[dim] = rank * shape[dim]
        shape[dim] *= size
        return cls(key, tuple(shape), tensor.dtype, (Box(tuple(offset), tensor.detach()),), tensor)

    def flat_range(self, key: str, start: int, data: torch.Tensor) -> ShardedTensor:
        """State that belongs to local elements `[start, start + len(data))` of this parameter.

        `data` (1-D, contiguous) holds one value per element of the row-major local tensor: a ZeRO-1 shard of main
        parameters or moments. The result has the parameter's global shape and views `data`; nothing
        is copied.
        """
        boxes: list[Box] = []
        box_start = 0
        for box in self.boxes:
            numel = box.tensor.numel()
            lo = max(start, box_start)
            hi = min(start + data.numel(), box_start + numel)
            if lo < hi:
                part = data[lo - start : hi - start]
                cut = split_flat_range(box.shape, lo - box_start, part)
                boxes += [Box(to_absolute(box.offset, offset), view) for offset, view in cut]
            box_start += numel
        return ShardedTensor(key, self.global_shape, data.dtype, tuple(boxes))


@dataclass(frozen=True)
class ShardedObject:
    """A small Python value of plain types stored under its own key (RNG state, schedule); equal
    keys are replicas.
    """

    key: str
    value: Any


ShardedStateDict = dict[str, ShardedTensor | ShardedObject]
