"""Strided views of a row-major tensor as ranges of its indices, and their intersections.

For example, rows 1, 3, 5 of a matrix [6, 4], transposed, are a view [4, 3] at position 4 with the
strides (1, 8). As a grid they have the ranges (1, 3, 5) and (0, 1, 2, 3), along axes 1 and 0 of the
view. A view that is not a grid, e.g., elements 2 to 9 of the flattened matrix, is cut into several.
Two views of the same tensor have those elements in common whose indices are in both of their
ranges, along every axis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron.core.dist_checkpointing.mapping import Shape


class StridedView(NamedTuple):
    """A view of a tensor, which is never indexed: only its layout is known."""

    position: int
    """Elements of the tensor before the first one of the view."""
    shape: Shape
    strides: Sequence[int]
    """Elements of the tensor between neighbors along each axis of the view."""


class Slices(NamedTuple):
    """Part of a view."""

    start: Shape
    """First index along each axis."""
    shape: Shape
    """Number of indices along each axis."""
    steps: Shape
    """Distance of neighboring indices along each axis."""


class Grid(NamedTuple):
    """Part of a view, with a range of indices along each axis of the tensor."""

    ranges: tuple[range, ...]
    axes: tuple[int | None, ...]
    """Axis of the view that runs along each axis of the tensor."""
    start: Shape
    """Index of the first element in the view."""

    def locate(self, selected: Sequence[range]) -> Slices:
        """Return where the view has some of the indices of the grid."""
        start = list(self.start)
        shape = [1] * len(start)
        steps = [1] * len(start)
        for axis, whole, part in zip(self.axes, self.ranges, selected, strict=True):
            if axis is None:
                continue
            start[axis] += (part.start - whole.start) // whole.step
            shape[axis] = len(part)
            steps[axis] = part.step // whole.step
        return Slices(tuple(start), tuple(shape), tuple(steps))


class _Part(NamedTuple):
    """Part of a view, which may be more than a grid."""

    position: int
    """Elements of the tensor before its first one."""
    start: Shape
    """Index of its first element in the view."""
    shape: Shape

    def split(self, axis: int, count: int, stride: int) -> tuple[_Part, _Part]:
        """Return the first `count` indices along an axis, and the others."""
        first_shape = _replace(self.shape, axis, count)
        rest_shape = _replace(self.shape, axis, self.shape[axis] - count)
        rest_start = _replace(self.start, axis, self.start[axis] + count)
        rest_position = self.position + count * stride
        first = _Part(self.position, self.start, first_shape)
        rest = _Part(rest_position, rest_start, rest_shape)
        return first, rest


def _replace(shape: Shape, axis: int, value: int) -> Shape:
    """Return a shape with another value along an axis."""
    return (*shape[:axis], value, *shape[axis + 1 :])


def cut_into_grids(view: StridedView, tensor_shape: Shape) -> Iterator[Grid]:
    """Cut a view of a row-major tensor of this shape into grids, as few as its strides allow."""
    if 0 in view.shape:
        return
    num_axes = len(view.shape)
    pending = [_Part(view.position, (0,) * num_axes, view.shape)]
    while pending:
        part = pending.pop()
        result = _make_grid(view, part, tensor_shape)
        if isinstance(result, Grid):
            yield result
        else:
            # Continue with the first of the two parts.
            first, rest = result
            pending.append(rest)
            pending.append(first)


def _make_grid(view: StridedView, part: _Part, tensor_shape: Shape) -> Grid | tuple[_Part, _Part]:
    """Return a part of a view as a grid, or two smaller parts if it is not one."""
    # Begin with the first element.
    tensor_strides = _compute_strides(tensor_shape)
    ranges = []
    for size, stride in zip(tensor_shape, tensor_strides, strict=True):
        index = part.position // stride % size
        ranges.append(range(index, index + 1))
    axes: list[int | None] = [None] * len(tensor_shape)

    # Longest axes first: of two axes along the same one of the tensor, the shorter one is cut.
    for axis in sorted(range(len(part.shape)), key=lambda axis: -view.shape[axis]):
        length = part.shape[axis]
        if length == 1:
            continue
        # Count the indices inside of the bounds of the tensor.
        count = 1
        stride = view.strides[axis]
        along = _find_axis(stride, tensor_strides)
        if along is not None and axes[along] is None:
            step = stride // tensor_strides[along]
            bounds = range(ranges[along].start, tensor_shape[along], step)
            count = min(len(bounds), length)
            ranges[along] = bounds[:count]
            axes[along] = axis
        if count < length:
            return part.split(axis, count, stride)
    return Grid(tuple(ranges), tuple(axes), part.start)


def _compute_strides(shape: Shape) -> Shape:
    """Return the strides of a row-major tensor."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _find_axis(stride: int, tensor_strides: Sequence[int]) -> int | None:
    """Return the first axis of a tensor along which `stride` is a step."""
    for axis, tensor_stride in enumerate(tensor_strides):
        if 0 < tensor_stride <= stride and stride % tensor_stride == 0:
            return axis
    return None


def intersect(first: Grid, second: Grid) -> Iterator[tuple[range, ...]]:
    """Yield the common indices as ranges along each axis of the tensor.

    Ranges have the step of `first`, or one index.
    """
    choices = []
    for first_range, second_range in zip(first.ranges, second.ranges, strict=True):
        common = _intersect_ranges(first_range, second_range)
        if len(common) == 0:
            return
        if common.step == first_range.step:
            choices.append([common])
        else:
            choices.append([range(index, index + 1) for index in common])
    yield from itertools.product(*choices)


def _intersect_ranges(first: range, second: range) -> range:
    """Return the common elements of two ranges with positive steps."""
    step = math.lcm(first.step, second.step)
    start = max(first.start, second.start)
    start += (first.start - start) % first.step
    stop = min(first.stop, second.stop)
    # The common elements are `step` apart: one of the next ones is the first.
    for candidate in range(start, min(stop, start + step), first.step):
        if candidate in second:
            return range(candidate, stop, step)
    return range(0)
