"""Operations on lazy tensors, which read any box of a tensor when it is needed.

An operation returns a lazy tensor that reads its operands when a box of it is read. So a layout
that is stated once, as a composition of operations, serves reading and writing, and memory is that
of the boxes that are read. Functions that read are not closures, so that sources can be pickled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial, reduce

import torch

from megatron.conversion.model_space.pieces import (
    RowMap,
    count_stored_rows,
    is_bitwise_equal,
    join_rows,
    map_unchanged,
    pack_rows,
    read_stored_rows,
    unpack_rows,
)
from megatron.core.dist_checkpointing.mapping import (
    LazyTensor,
    Shape,
    compute_byte_runs,
    cut_rows,
    find_row_axis,
    locate_rows,
    narrow,
    to_absolute,
)
from megatron.core.safe_files import FileTensor

_BLOCK = 16 << 20  # bytes that are compared at once
_SMALL_GAP = 4096  # elements between two rows that are read together


# ---- Tensors in memory and in files ----


def view_tensor(tensor: torch.Tensor) -> LazyTensor:
    """Return a tensor in memory; boxes are copies."""
    return LazyTensor(tuple(tensor.shape), tensor.dtype, partial(_read_copy, tensor))


def _read_copy(tensor: torch.Tensor, offset: Shape, shape: Shape) -> torch.Tensor:
    return narrow(tensor, offset, shape).clone()


def view_elements(tensor: FileTensor | torch.Tensor) -> LazyTensor:
    """Return the row-major elements of a tensor in a file of torch.save, as one axis."""
    if isinstance(tensor, torch.Tensor):
        return view_tensor(tensor.reshape(-1))
    return LazyTensor((tensor.numel(),), tensor.dtype, partial(_read_elements, tensor))


def _read_elements(tensor: FileTensor, offset: Shape, shape: Shape) -> torch.Tensor:
    return tensor.read_flat(offset[0], shape[0])


def view_stored(tensor: FileTensor | torch.Tensor) -> LazyTensor:
    """Return a tensor in a file of torch.save."""
    return unflatten(view_elements(tensor), 0, tuple(tensor.shape))


def make_zeros(shape: Shape, dtype: torch.dtype) -> LazyTensor:
    """Return a tensor of zeros."""
    return LazyTensor(shape, dtype, partial(_read_zeros, dtype))


def _read_zeros(dtype: torch.dtype, _: Shape, shape: Shape) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


# ---- Operations ----


def cast(tensor: LazyTensor, dtype: torch.dtype) -> LazyTensor:
    """Return the tensor in another dtype."""
    if dtype == tensor.dtype:
        return tensor
    return replace(tensor, dtype=dtype, read=partial(_read_cast, tensor, dtype))


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
    return replace(tensor, shape=shape, read=partial(_read_reshaped, tensor, shape))


def _read_reshaped(
    tensor: LazyTensor, new_shape: Shape, offset: Shape, shape: Shape
) -> torch.Tensor:
    return narrow(tensor.read_all().view(new_shape), offset, shape).contiguous()


def flatten(tensor: LazyTensor) -> LazyTensor:
    """Return the row-major elements as one axis; the rows that contain them are read."""
    num_elements = math.prod(tensor.shape)
    return LazyTensor((num_elements,), tensor.dtype, partial(_read_flattened, tensor))


def _read_flattened(tensor: LazyTensor, offset: Shape, shape: Shape) -> torch.Tensor:
    (start,) = offset
    (count,) = shape
    axis = find_row_axis(tensor.shape) or 0
    row_size = math.prod(tensor.shape[axis + 1 :])
    first_row = start // row_size
    end_row = -(-(start + count) // row_size)  # rounded up
    rows = tensor.read(*locate_rows(tensor.shape, first_row, end_row - first_row))
    skipped = start - first_row * row_size
    return rows.reshape(-1)[skipped : skipped + count]


def unflatten(elements: LazyTensor, start: int, shape: Shape) -> LazyTensor:
    """Return the row-major tensor that begins at element `start` of a tensor of one axis.

    Small gaps between rows are read, too; large ones are not.
    """
    return LazyTensor(shape, elements.dtype, partial(_read_unflattened, elements, start, shape))


def _read_unflattened(
    elements: LazyTensor, start: int, whole: Shape, offset: Shape, shape: Shape
) -> torch.Tensor:
    blocks: list[torch.Tensor] = []
    for runs in compute_byte_runs(whole, offset, shape, itemsize=1):
        first = start + runs.start
        # Read each run.
        if runs.repeats == 1 or runs.gap >= _SMALL_GAP:
            for index in range(runs.repeats):
                blocks.append(elements.read((first + index * runs.stride,), (runs.length,)))
            continue
        # Read all runs with the gaps between them, and view the runs: [repeats, length].
        span = elements.read((first,), ((runs.repeats - 1) * runs.stride + runs.length,))
        rows = span.as_strided((runs.repeats, runs.length), (runs.stride, 1), span.storage_offset())
        blocks.append(rows.reshape(-1))
    return join_rows(blocks).reshape(shape)


def view_box(tensor: LazyTensor, offset: Shape, shape: Shape) -> LazyTensor:
    """Return a box of a tensor."""
    return LazyTensor(shape, tensor.dtype, partial(_read_inside, tensor, offset))


def _read_inside(tensor: LazyTensor, origin: Shape, offset: Shape, shape: Shape) -> torch.Tensor:
    return tensor.read(to_absolute(offset, origin), shape)


def select(tensor: LazyTensor, index: int) -> LazyTensor:
    """Return `tensor[index]`."""
    return LazyTensor(tensor.shape[1:], tensor.dtype, partial(_read_selected, tensor, index))


def _read_selected(tensor: LazyTensor, index: int, offset: Shape, shape: Shape) -> torch.Tensor:
    return tensor.read((index, *offset), (1, *shape)).squeeze(0)


def repeat(tensor: LazyTensor, count: int) -> LazyTensor:
    """Return `count` copies of a tensor along a new first axis; one is read."""
    return LazyTensor((count, *tensor.shape), tensor.dtype, partial(_read_repeated, tensor))


def _read_repeated(tensor: LazyTensor, offset: Shape, shape: Shape) -> torch.Tensor:
    return tensor.read(offset[1:], shape[1:]).expand(shape).contiguous()


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
    num_rows = sum(len(run.rows) for run in row_map)
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
        start = offset[0] - run.rows.start
        is_inside = start >= 0 and start + shape[0] <= len(run.rows)
        if run.source == index and run.rows.step == 1 and is_inside:
            return read_rows(model_row + start, shape[0])
        model_row += len(run.rows)

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
