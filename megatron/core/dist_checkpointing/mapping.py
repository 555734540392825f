"""Named global tensors, and the boxes of them that a rank holds.

Every piece of training state is a named global tensor. A rank holds a list of *boxes* of it, i.e.,
axis-aligned pieces: each is an offset and a live view of local memory. TP, PP, DP and ZeRO are only
different tilings, so this module does not depend on them. It has one pure function for each
operation on boxes: overlap, narrow, cut into rows, list runs of bytes. `box_table.py` has those on
many boxes at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

Shape = tuple[int, ...]
Extent = tuple[Shape, Shape]  # offset and shape of a box
ReadBox = Callable[[Shape, Shape], torch.Tensor]  # (offset, extent) -> tensor


class Overlap(NamedTuple):
    """The common part of two boxes: its offset in each of them, and its shape."""

    in_first: Shape
    in_second: Shape
    shape: Shape


def to_relative(offset: Shape, origin: Shape) -> Shape:
    """Return `offset` relative to `origin`."""
    return tuple(a - b for a, b in zip(offset, origin, strict=True))


def to_absolute(offset: Shape, origin: Shape) -> Shape:
    """Return `offset` plus `origin`, the inverse of `to_relative`."""
    return tuple(a + b for a, b in zip(offset, origin, strict=True))


def narrow(tensor: torch.Tensor, offset: Shape, shape: Shape) -> torch.Tensor:
    """Return a box of `tensor` as a view."""
    for axis, (start, extent) in enumerate(zip(offset, shape, strict=True)):
        if extent != tensor.shape[axis]:
            tensor = tensor.narrow(axis, start, extent)
    return tensor


def find_row_axis(shape: Shape) -> int | None:
    """Return the first axis with more than one index, or None if there is none.

    Its indices are called rows. Ranges of rows are contiguous in a row-major tensor.
    """
    for axis, extent in enumerate(shape):
        if extent > 1:
            return axis
    return None


def locate_rows(shape: Shape, first: int, count: int) -> Extent:
    """Return rows `[first, first + count)` of a tensor; a tensor of one element has one row."""
    offset = [0] * len(shape)
    extent = list(shape)
    axis = find_row_axis(shape)
    if axis is not None:
        offset[axis] = first
        extent[axis] = count
    return tuple(offset), tuple(extent)


def cut_rows(shape: Shape, itemsize: int, nbytes: int) -> Iterator[Extent]:
    """Cut a tensor into consecutive runs of whole rows of about `nbytes` each, at least one row."""
    axis = find_row_axis(shape)
    rows = 1 if axis is None else shape[axis]
    # As many rows as fit into `nbytes`; an empty tensor is one run.
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
    """List the bytes of a box inside a row-major tensor of shape `whole`, in order."""
    if not shape:
        return [Runs(0, itemsize, itemsize, 1)]
    strides = [math.prod(whole[i + 1 :]) * itemsize for i in range(len(shape))]
    start = sum(o * s for o, s in zip(offset, strides, strict=True))
    # Find the last axis that the box does not span: a range of its indices is contiguous.
    axis = len(shape) - 1
    while axis > 0 and shape[axis] == whole[axis]:
        axis -= 1
    length = shape[axis] * strides[axis]
    if axis == 0:
        return [Runs(start, length, length, 1)]
    # One entry for each index of the axes before the innermost strided one
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
    is_inside = 0 <= start <= stop <= math.prod(shape)
    assert data.dim() == 1 and is_inside, (shape, start, tuple(data.shape))
    if start == stop:
        return
    # A range of a vector, or the element of a scalar, is a box.
    if len(shape) <= 1:
        yield (start,) * len(shape), data.view((stop - start,) * len(shape))
        return
    # Find the whole rows.
    row_size = math.prod(shape[1:])  # elements
    first_whole = -(-start // row_size)  # first row that begins inside of the range
    last_whole = stop // row_size  # first row that does not end inside of the range
    if first_whole > last_whole:  # the range is part of one row
        row = last_whole
        for offset, view in split_flat_range(shape[1:], start - row * row_size, data):
            yield (row, *offset), view.unsqueeze(0)
        return
    # Partial row at the start
    head = data[: first_whole * row_size - start]
    for offset, view in split_flat_range(shape[1:], row_size - head.numel(), head):
        yield (first_whole - 1, *offset), view.unsqueeze(0)
    # Whole rows
    if first_whole < last_whole:
        whole = data[head.numel() : last_whole * row_size - start]
        offset = (first_whole,) + (0,) * (len(shape) - 1)
        yield offset, whole.view(last_whole - first_whole, *shape[1:])
    # Partial row at the end
    tail = data[last_whole * row_size - start :]
    for offset, view in split_flat_range(shape[1:], 0, tail):
        yield (last_whole, *offset), view.unsqueeze(0)


@dataclass(frozen=True)
class Box:
    """An axis-aligned piece of a global tensor: `tensor` is a live view of the data at `offset`.

    The shape of `tensor` is the shape of the box, with as many dimensions as the global tensor.
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
    # Whether the boxes have another dtype, from which a save casts while it copies them.
    is_cast: bool = False
    # Factor of the values of a cast: one element, on the device of the boxes.
    scale: torch.Tensor | None = None
    # Reads (offset, shape) of a `lazy` tensor.
    read: ReadBox | None = None
    # Values that follow from the other fields, for callers that save the same entry repeatedly.
    derived: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def lazy(cls, key: str, tensor: LazyTensor) -> ShardedTensor:
        """Make a whole tensor that is not in memory.

        A save reads it a few rows at a time, from several threads.
        """
        meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        box = Box((0,) * len(tensor.shape), meta)
        return cls(key, tensor.shape, tensor.dtype, (box,), read=tensor.read)

    @classmethod
    def replicated(cls, key: str, tensor: torch.Tensor) -> ShardedTensor:
        """Make a tensor of which every rank that has this key has a replica."""
        shape = tuple(tensor.shape)
        return cls(key, shape, tensor.dtype, (Box((0,) * len(shape), tensor.detach()),), tensor)

    @classmethod
    def split(cls, key: str, tensor: torch.Tensor, dim: int, rank: int, size: int) -> ShardedTensor:
        """Make a tensor split evenly along `dim`: part `rank` of `size` is `tensor`."""
        shape = list(tensor.shape)
        offset = [0] * len(shape)
        offset[dim] = rank * shape[dim]
        shape[dim] *= size
        return cls(key, tuple(shape), tensor.dtype, (Box(tuple(offset), tensor.detach()),), tensor)

    def flat_range(self, key: str, start: int, data: torch.Tensor) -> ShardedTensor:
        """Return optimizer state for local elements `[start, start + len(data))` of a parameter.

        `data` (1-D, contiguous) is a ZeRO-1 shard of main parameters or moments: one value per
        element of the row-major local tensor. The result has the global shape of the parameter and
        views `data` without a copy.
        """
        boxes: list[Box] = []
        box_start = 0
        for box in self.boxes:
            numel = box.tensor.numel()
            # Part of the range that is in this box, in local elements
            lo = max(start, box_start)
            hi = min(start + data.numel(), box_start + numel)
            if lo < hi:
                box_data = data[lo - start : hi - start]
                cut = split_flat_range(box.shape, lo - box_start, box_data)
                boxes += [Box(to_absolute(box.offset, offset), view) for offset, view in cut]
            box_start += numel
        return ShardedTensor(key, self.global_shape, data.dtype, tuple(boxes))


@dataclass(frozen=True)
class ShardedObject:
    """A small Python value of plain types under its own key (e.g., RNG state, schedule).

    Ranks with the same key hold replicas. Megatron-core stores a list that contains the value, and
    plain DCP the value itself; `in_list` selects the former.
    """

    key: str
    value: Any
    in_list: bool = True
    # Whether the value stays the same, so that a save may encode it in the background.
    is_constant: bool = False
    # Whether `value` is a function that returns the value, which is called in the background.
    is_deferred: bool = False

    def read_value(self) -> Any:
        """Return the value, which may wait for the device."""
        return self.value() if self.is_deferred else self.value


ShardedStateDict = dict[str, ShardedTensor | ShardedObject]


# ---- Global tensors that can be read by box ----


@dataclass(frozen=True)
class TensorInfo:
    """Global shape and dtype of one tensor."""

    shape: Shape
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class LazyTensor(TensorInfo):
    """A tensor that is read when needed. Tensors with equal shape and dtype are equal."""

    # (offset, extent) -> the box, on CPU; raises ValueError where the file is damaged.
    read: ReadBox = field(repr=False, compare=False)
    # Rows that are read together, because a part of them costs as much as all.
    min_rows: int = field(default=1, repr=False, compare=False)

    def read_all(self) -> torch.Tensor:
        """Return the whole tensor."""
        return self.read((0,) * len(self.shape), self.shape)
