"""Lazy tensors: a shape, a dtype and a function that reads any box, and operations on them.

An operation returns a lazy tensor that reads its operands when a box of it is read. So a layout
that is stated once, as a composition of operations, serves reading and writing, and memory is that
of the boxes that are read. Functions that read are not closures, because ranks receive sources as
pickles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import NamedTuple

import torch

from megatron.conversion.model_space.pieces import (
    RowMap,
    count_stored_rows,
    is_bitwise_equal,
    make_region_reader,
    map_unchanged,
    pack_rows,
    read_stored_rows,
    unpack_rows,
)
from megatron.core.dist_checkpointing.mapping import Shape, TensorSource, cut_rows, narrow
from megatron.core.safe_files import FileTensor

ReadBox = Callable[[Shape, Shape], torch.Tensor]  # (offset, extent) -> tensor

_BLOCK = 16 << 20  # bytes that are compared at once


class LazyTensor(NamedTuple):
    """A tensor that is read when needed; `read(offset, shape)` returns any box of it."""

    shape: Shape
    dtype: torch.dtype
    read: ReadBox
    # Rows that are read together, because a part of them costs as much as all.
    min_rows: int = 1

    def read_all(self) -> torch.Tensor:
        """Return the whole tensor."""
        return self.read((0,) * len(self.shape), self.shape)


def view_source(source: TensorSource, key: str) -> LazyTensor:
    """Return the tensor `key` of a source."""
    info = source.tensors[key]
    return LazyTensor(info.shape, info.dtype, partial(source.read, key))


def view_tensor(tensor: torch.Tensor) -> LazyTensor:
    """Return a tensor in memory; boxes are copies."""
    return LazyTensor(tuple(tensor.shape), tensor.dtype, partial(_read_copy, tensor))


def _read_copy(tensor: torch.Tensor, offset: Shape, shape: Shape) -> torch.Tensor:
    return narrow(tensor, offset, shape).clone()


def view_stored(tensor: FileTensor | torch.Tensor) -> LazyTensor:
    """Return a tensor in a file of torch.save."""
    if isinstance(tensor, torch.Tensor):
        return view_tensor(tensor)
    return LazyTensor(tuple(tensor.shape), tensor.dtype, partial(_read_stored, tensor))


def _read_stored(tensor: FileTensor, offset: Shape, shape: Shape) -> torch.Tensor:
    return make_region_reader(tensor.read_flat, 0, tensor.shape)(offset, shape)


def make_zeros(shape: Shape, dtype: torch.dtype) -> LazyTensor:
    """Return a tensor of zeros."""
    return LazyTensor(shape, dtype, partial(_read_zeros, dtype))


def _read_zeros(dtype: torch.dtype, _: Shape, shape: Shape) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def cast(tensor: LazyTensor, dtype: torch.dtype) -> LazyTensor:
    """Return the tensor in another dtype."""
    if dtype == tensor.dtype:
        return tensor
    return tensor._replace(dtype=dtype, read=partial(_read_cast, tensor, dtype))


def _read_cast(tensor: LazyTensor, dtype: torch.dtype, offset: Shape, shape: Shape) -> torch.Tensor:
    return tensor.read(offset, shape).to(dtype)


def transpose(tensor: LazyTensor) -> LazyTensor:
    """Return a transposed matrix. Its rows are columns, which files have to read together."""
    rows = tensor.shape[1]
    read = partial(_read_transposed, tensor)
    return LazyTensor(tensor.shape[::-1], tensor.dtype, read, min_rows=rows)


def _read_transposed(tensor: LazyTensor, offset: Shape, shape: Shape) -> torch.Tensor:
    return tensor.read(offset[::-1], shape[::-1]).t().contiguous()


def reshape(tensor: LazyTensor, shape: Shape) -> LazyTensor:
    """Return a small tensor with another shape; all of it is read for each box."""
    return tensor._replace(shape=shape, read=partial(_read_reshaped, tensor, shape))


def _read_reshaped(
    tensor: LazyTensor, new_shape: Shape, offset: Shape, shape: Shape
) -> torch.Tensor:
    return narrow(tensor.read_all().view(new_shape), offset, shape).contiguous()


def select(tensor: LazyTensor, index: int) -> LazyTensor:
    """Return `tensor[index]`."""
    return LazyTensor(tensor.shape[1:], tensor.dtype, partial(_read_selected, tensor, index))


def _read_selected(tensor: LazyTensor, index: int, offset: Shape, shape: Shape) -> torch.Tensor:
    return tensor.read((index, *offset), (1, *shape)).squeeze(0)


def stack(tensors: Sequence[LazyTensor]) -> LazyTensor:
    """Return tensors of the same shape along a new first axis."""
    dtype = _promote(tensors)
    shape = (len(tensors), *tensors[0].shape)
    return LazyTensor(shape, dtype, partial(_read_stacked, tensors, dtype))


def _read_stacked(
    tensors: Sequence[LazyTensor], dtype: torch.dtype, offset: Shape, shape: Shape
) -> torch.Tensor:
    first = offset[0]
    selected = tensors[first : first + shape[0]]
    return torch.stack([tensor.read(offset[1:], shape[1:]).to(dtype) for tensor in selected])


def concatenate(tensors: Sequence[LazyTensor], axis: int) -> LazyTensor:
    """Return tensors one after the other along an axis; the other axes are equal."""
    if len(tensors) == 1:
        return tensors[0]
    shape = list(tensors[0].shape)
    shape[axis] = sum(tensor.shape[axis] for tensor in tensors)
    read = partial(_read_concatenated, tensors, axis)
    return LazyTensor(tuple(shape), _promote(tensors), read)


def _read_concatenated(
    tensors: Sequence[LazyTensor], axis: int, offset: Shape, shape: Shape
) -> torch.Tensor:
    # Read the overlap of the box with each tensor. Only their ranges along the axis differ.
    blocks = []
    first = 0  # of the tensor along the axis
    for tensor in tensors:
        start = max(offset[axis] - first, 0)
        stop = min(offset[axis] + shape[axis] - first, tensor.shape[axis])
        if start < stop:
            inner_offset = (*offset[:axis], start, *offset[axis + 1 :])
            inner_shape = (*shape[:axis], stop - start, *shape[axis + 1 :])
            blocks.append(tensor.read(inner_offset, inner_shape))
        first += tensor.shape[axis]
    if not blocks:
        return torch.empty(shape, dtype=tensors[0].dtype)
    return torch.cat(blocks, dim=axis)


def gather_rows(tensors: Sequence[LazyTensor], row_map: RowMap) -> LazyTensor:
    """Return the model's tensor with the rows that `row_map` takes from the stored `tensors`."""
    if len(tensors) == 1 and row_map == map_unchanged(tensors[0].shape[0]):
        return tensors[0]
    num_rows = sum(run.rows for run in row_map)
    dtype = _promote(tensors)
    read = partial(_read_gathered, tensors, row_map, dtype)
    return LazyTensor((num_rows, *tensors[0].shape[1:]), dtype, read)


def _read_gathered(
    tensors: Sequence[LazyTensor],
    row_map: RowMap,
    dtype: torch.dtype,
    offset: Shape,
    shape: Shape,
) -> torch.Tensor:
    all_rows: dict[int, torch.Tensor] = {}
    for index, tensor in enumerate(tensors):
        if tensor.min_rows > 1:  # read them once, not once per run
            all_rows[index] = _read_rows(tensor, 0, tensor.shape[0], offset, shape)

    def read_rows(source: int, first: int, count: int) -> torch.Tensor:
        if source in all_rows:
            return all_rows[source][first : first + count].to(dtype)
        return _read_rows(tensors[source], first, count, offset, shape).to(dtype)

    return unpack_rows(row_map, offset[0], offset[0] + shape[0], read_rows).contiguous()


def scatter_rows(tensor: LazyTensor, row_map: RowMap, index: int) -> LazyTensor:
    """Return stored tensor `index` of the model's `tensor`, the inverse of `gather_rows`.

    Rows that the model does not have are zero.
    """
    if row_map == map_unchanged(tensor.shape[0]):
        return tensor
    shape = (count_stored_rows(row_map)[index], *tensor.shape[1:])
    return LazyTensor(shape, tensor.dtype, partial(_read_scattered, tensor, row_map, index))


def _read_scattered(
    tensor: LazyTensor, row_map: RowMap, index: int, offset: Shape, shape: Shape
) -> torch.Tensor:
    # All rows of the model, in another order: read them once, not once per run.
    if [shape[0]] == count_stored_rows(row_map):
        return pack_rows(row_map, index, _read_rows(tensor, 0, tensor.shape[0], offset, shape))

    def read_rows(first: int, count: int) -> torch.Tensor:
        return _read_rows(tensor, first, count, offset, shape)

    # Rows of a single run, e.g. of gate or up, need no copy.
    model_row = 0  # first row of the run in the model
    for run in row_map:
        start = offset[0] - run.start
        is_inside = start >= 0 and start + shape[0] <= run.rows
        if run.source == index and run.step == 1 and is_inside:
            return read_rows(model_row + start, shape[0])
        model_row += run.rows

    result = torch.zeros(shape, dtype=tensor.dtype)
    read_stored_rows(row_map, index, offset[0], result, read_rows)
    return result


def _read_rows(
    tensor: LazyTensor, first: int, count: int, offset: Shape, shape: Shape
) -> torch.Tensor:
    """Return rows of a tensor, with the columns of a box."""
    return tensor.read((first, *offset[1:]), (count, *shape[1:]))


def _promote(tensors: Sequence[LazyTensor]) -> torch.dtype:
    """Return the dtype that the dtypes of all tensors are promoted to."""
    return reduce(torch.promote_types, {tensor.dtype for tensor in tensors})


def cut_blocks(tensor: LazyTensor, num_elements: int) -> Iterator[tuple[Shape, Shape]]:
    """Yield the boxes of a tensor, each some rows of at most `num_elements` or `min_rows`."""
    if not tensor.shape:
        yield (), ()
        return
    rows, *row_shape = tensor.shape
    row_elements = math.prod(row_shape)
    if row_elements == 0:
        return
    step = max(num_elements // row_elements, 1)
    step = max(step - step % tensor.min_rows, tensor.min_rows)
    for first in range(0, rows, step):
        yield (first, *(0,) * len(row_shape)), (min(step, rows - first), *row_shape)


def are_equal(first: LazyTensor, second: LazyTensor) -> bool:
    """Return whether two tensors are equal bitwise; a few rows are read at a time."""
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    for offset, shape in cut_rows(first.shape, first.dtype.itemsize, _BLOCK):
        if not is_bitwise_equal(first.read(offset, shape), second.read(offset, shape)):
            return False
    return True
