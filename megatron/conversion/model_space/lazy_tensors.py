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
    paste_boxes,
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
    shape = tuple(tensor.shape)
    read = partial(_read_copy, tensor)
    return LazyTensor(shape, tensor.dtype, read)


def _read_copy(tensor: torch.Tensor, offset: Shape, shape: Shape) -> torch.Tensor:
    """Return a box as a copy on the CPU, which the caller may change."""
    return narrow(tensor, offset, shape).to("cpu", copy=True)


def view_elements(tensor: FileTensor | torch.Tensor) -> LazyTensor:
    """Return the row-major elements of a tensor in a file of torch.save, as one axis."""
    if isinstance(tensor, torch.Tensor):
        return view_tensor(tensor.reshape(-1))
    shape = (tensor.numel(),)
    read = partial(_read_elements, tensor)
    return LazyTensor(shape, tensor.dtype, read)


def _read_elements(tensor: FileTensor, offset: Shape, shape: Shape) -> torch.Tensor:
    """Return a range of the elements."""
    (start,) = offset
    (count,) = shape
    return tensor.read_flat(start, count)


def view_stored(tensor: FileTensor | torch.Tensor) -> LazyTensor:
    """Return a tensor in a file of torch.save."""
    elements = view_elements(tensor)
    return unflatten(elements, 0, tuple(tensor.shape))


def make_zeros(shape: Shape, dtype: torch.dtype) -> LazyTensor:
    """Return a tensor of zeros."""
    read = partial(_read_zeros, dtype)
    return LazyTensor(shape, dtype, read)


def _read_zeros(dtype: torch.dtype, _: Shape, shape: Shape) -> torch.Tensor:
    """Return a box of zeros."""
    return torch.zeros(shape, dtype=dtype)


# ---- Operations ----


def cast(tensor: LazyTensor, dtype: torch.dtype) -> LazyTensor:
    """Return the tensor in another dtype."""
    if dtype == tensor.dtype:
        return tensor
    read = partial(_read_cast, tensor, dtype)
    return replace(tensor, dtype=dtype, read=read)


def _read_cast(tensor: LazyTensor, dtype: torch.dtype, offset: Shape, shape: Shape) -> torch.Tensor:
    """Return a box in another dtype."""
    return tensor.read(offset, shape).to(dtype)


def transpose(tensor: LazyTensor) -> LazyTensor:
    """Return a transposed matrix. Its rows are columns, which files have to read together."""
    rows = tensor.shape[1]
    read = partial(_read_transposed, tensor)
    return LazyTensor(tensor.shape[::-1], tensor.dtype, read, min_rows=rows)


def _read_transposed(tensor: LazyTensor, offset: Shape, shape: Shape) -> torch.Tensor:
    """Return a box, which is a transposed box of the operand."""
    # Offset and shape of the box in the operand
    box = (offset[::-1], shape[::-1])
    return tensor.read(*box).t().contiguous()


def reshape(tensor: LazyTensor, shape: Shape) -> LazyTensor:
    """Return a small tensor with another shape; all of it is read for each box."""
    read = partial(_read_reshaped, tensor, shape)
    return replace(tensor, shape=shape, read=read)


def _read_reshaped(
    tensor: LazyTensor, new_shape: Shape, offset: Shape, shape: Shape
) -> torch.Tensor:
    """Return a box of the reshaped tensor."""
    whole = tensor.read_all().view(new_shape)
    return narrow(whole, offset, shape).contiguous()


def flatten(tensor: LazyTensor) -> LazyTensor:
    """Return the row-major elements as one axis; the rows that contain them are read."""
    num_elements = math.prod(tensor.shape)
    read = partial(_read_flattened, tensor)
    return LazyTensor((num_elements,), tensor.dtype, read)


def _read_flattened(tensor: LazyTensor, offset: Shape, shape: Shape) -> torch.Tensor:
    """Return a range of the elements, cut out of rows."""
    (start,) = offset
    (count,) = shape
    # Read the rows that contain the elements.
    axis = find_row_axis(tensor.shape) or 0
    row_size = math.prod(tensor.shape[axis + 1 :])
    first_row = start // row_size
    end_row = -(-(start + count) // row_size)  # rounded up
    box = locate_rows(tensor.shape, first_row, end_row - first_row)
    rows = tensor.read(*box)
    # Cut off the elements before and after the requested ones.
    skipped = start - first_row * row_size
    return rows.reshape(-1)[skipped : skipped + count]


def unflatten(elements: LazyTensor, start: int, shape: Shape) -> LazyTensor:
    """Return the row-major tensor that begins at element `start` of a tensor of one axis.

    Small gaps between rows are read, too; large ones are not.
    """
    read = partial(_read_unflattened, elements, start, shape)
    return LazyTensor(shape, elements.dtype, read)


def _read_unflattened(
    elements: LazyTensor, start: int, whole: Shape, offset: Shape, shape: Shape
) -> torch.Tensor:
    """Return a box, joined from the runs of its elements."""
    blocks: list[torch.Tensor] = []
    for runs in compute_byte_runs(whole, offset, shape, itemsize=1):
        first = start + runs.start
        # Read each run.
        if runs.repeats == 1 or runs.gap >= _SMALL_GAP:
            for index in range(runs.repeats):
                position = first + index * runs.stride
                blocks.append(elements.read((position,), (runs.length,)))
            continue
        # Read all runs with the gaps between them, and view the runs: [repeats, length].
        length = (runs.repeats - 1) * runs.stride + runs.length
        span = elements.read((first,), (length,))
        size = (runs.repeats, runs.length)
        rows = span.as_strided(size, (runs.stride, 1), span.storage_offset())
        blocks.append(rows.reshape(-1))
    return join_rows(blocks).reshape(shape)


def view_box(tensor: LazyTensor, offset: Shape, shape: Shape) -> LazyTensor:
    """Return a box of a tensor."""
    read = partial(_read_inside, tensor, offset)
    return LazyTensor(shape, tensor.dtype, read)


def _read_inside(tensor: LazyTensor, origin: Shape, offset: Shape, shape: Shape) -> torch.Tensor:
    """Return a box at an offset from `origin`."""
    return tensor.read(to_absolute(offset, origin), shape)


def select(tensor: LazyTensor, index: int) -> LazyTensor:
    """Return `tensor[index]`."""
    read = partial(_read_selected, tensor, index)
    return LazyTensor(tensor.shape[1:], tensor.dtype, read)


def _read_selected(tensor: LazyTensor, index: int, offset: Shape, shape: Shape) -> torch.Tensor:
    """Return a box of one of the stacked tensors."""
    box = tensor.read((index, *offset), (1, *shape))
    return box.squeeze(0)


def repeat(tensor: LazyTensor, count: int) -> LazyTensor:
    """Return `count` copies of a tensor along a new first axis; one is read."""
    shape = (count, *tensor.shape)
    read = partial(_read_repeated, tensor)
    return LazyTensor(shape, tensor.dtype, read)


def _read_repeated(tensor: LazyTensor, offset: Shape, shape: Shape) -> torch.Tensor:
    """Return a box of the copies, of which one is read."""
    box = tensor.read(offset[1:], shape[1:])
    return box.expand(shape).contiguous()


def stack(tensors: Sequence[LazyTensor]) -> LazyTensor:
    """Return tensors of the same shape along a new first axis."""
    dtype = _promote(tensors)
    shape = (len(tensors), *tensors[0].shape)
    read = partial(_read_stacked, tensors, dtype)
    return LazyTensor(shape, dtype, read)


def _read_stacked(
    tensors: Sequence[LazyTensor], dtype: torch.dtype, offset: Shape, shape: Shape
) -> torch.Tensor:
    """Return the same box of several tensors."""
    first, *inner_offset = offset
    count, *inner_shape = shape
    boxes = []
    for tensor in tensors[first : first + count]:
        box = tensor.read(tuple(inner_offset), tuple(inner_shape))
        boxes.append(box.to(dtype))
    return torch.stack(boxes)


def concatenate(tensors: Sequence[LazyTensor], axis: int) -> LazyTensor:
    """Return tensors one after the other along an axis; the other axes are equal."""
    if len(tensors) == 1:
        return tensors[0]
    shape = list(tensors[0].shape)
    shape[axis] = sum(tensor.shape[axis] for tensor in tensors)
    dtype = _promote(tensors)
    read = partial(_read_concatenated, tensors, axis)
    return LazyTensor(tuple(shape), dtype, read)


def _read_concatenated(
    tensors: Sequence[LazyTensor], axis: int, offset: Shape, shape: Shape
) -> torch.Tensor:
    """Return a box, joined from its overlap with each tensor."""
    # Only the ranges along the axis differ.
    box_start = offset[axis]
    box_stop = box_start + shape[axis]
    blocks = []
    first = 0  # of the tensor along the axis
    for tensor in tensors:
        length = tensor.shape[axis]
        # The part of the box in this tensor, in its coordinates.
        start = max(box_start - first, 0)
        stop = min(box_stop - first, length)
        if start < stop:
            inner_offset = (*offset[:axis], start, *offset[axis + 1 :])
            inner_shape = (*shape[:axis], stop - start, *shape[axis + 1 :])
            blocks.append(tensor.read(inner_offset, inner_shape))
        first += length
    if not blocks:
        return torch.empty(shape, dtype=tensors[0].dtype)
    return torch.cat(blocks, dim=axis)


def join_boxes(boxes: Sequence[tuple[Shape, LazyTensor]], shape: Shape) -> LazyTensor:
    """Return the tensor that boxes cover without overlap.

    Each of `boxes` is the offset of a box in the tensor, and its content. Only those that overlap
    a box that is read are read themselves.
    """
    dtype = _promote([tensor for _, tensor in boxes])
    read = partial(_read_joined, boxes, dtype)
    return LazyTensor(shape, dtype, read)


def _read_joined(
    boxes: Sequence[tuple[Shape, LazyTensor]], dtype: torch.dtype, offset: Shape, shape: Shape
) -> torch.Tensor:
    """Return a box, joined from its overlap with each of the boxes."""
    result, _ = paste_boxes(boxes, dtype, offset, shape)
    return result


def gather_rows(tensors: Sequence[LazyTensor], row_map: RowMap) -> LazyTensor:
    """Return the model's tensor with the rows that `row_map` takes from the stored `tensors`."""
    stored_rows, *row_shape = tensors[0].shape
    if len(tensors) == 1 and row_map == map_unchanged(stored_rows):
        return tensors[0]
    num_rows = sum(len(run.rows) for run in row_map)
    shape = (num_rows, *row_shape)
    dtype = _promote(tensors)
    read = partial(_read_gathered, tensors, row_map, dtype)
    return LazyTensor(shape, dtype, read)


def _read_gathered(
    tensors: Sequence[LazyTensor],
    row_map: RowMap,
    dtype: torch.dtype,
    offset: Shape,
    shape: Shape,
) -> torch.Tensor:
    """Return a box in the order of the model."""
    all_rows: dict[int, torch.Tensor] = {}
    for index, tensor in enumerate(tensors):
        if tensor.min_rows > 1:  # read them once, not once per run
            all_rows[index] = _read_rows(tensor, 0, tensor.shape[0], offset, shape)

    def read_rows(source: int, first: int, count: int) -> torch.Tensor:
        if source in all_rows:
            source_rows = all_rows[source]
            rows = source_rows[first : first + count]
        else:
            rows = _read_rows(tensors[source], first, count, offset, shape)
        return rows.to(dtype)

    start = offset[0]
    box = unpack_rows(row_map, start, start + shape[0], read_rows)
    return box.contiguous()


def scatter_rows(tensor: LazyTensor, row_map: RowMap, index: int) -> LazyTensor:
    """Return stored tensor `index` of the model's `tensor`, the inverse of `gather_rows`.

    Rows that the model does not have are zero.
    """
    if row_map == map_unchanged(tensor.shape[0]):
        return tensor
    num_rows = count_stored_rows(row_map)[index]
    shape = (num_rows, *tensor.shape[1:])
    read = partial(_read_scattered, tensor, row_map, index)
    return LazyTensor(shape, tensor.dtype, read)


def _read_scattered(
    tensor: LazyTensor, row_map: RowMap, index: int, offset: Shape, shape: Shape
) -> torch.Tensor:
    """Return a box in the order of the file."""
    # All rows of the model, in another order: read them once, not once per run.
    if [shape[0]] == count_stored_rows(row_map):
        all_rows = _read_rows(tensor, 0, tensor.shape[0], offset, shape)
        return pack_rows(row_map, index, all_rows)

    def read_rows(first: int, count: int) -> torch.Tensor:
        return _read_rows(tensor, first, count, offset, shape)

    # Rows of a single run, e.g. of gate or up, need no copy.
    first = offset[0]
    num_rows = shape[0]
    model_row = 0  # first row of the run in the model
    for run in row_map:
        start = first - run.rows.start
        is_inside = start >= 0 and start + num_rows <= len(run.rows)
        if run.source == index and run.rows.step == 1 and is_inside:
            return read_rows(model_row + start, num_rows)
        model_row += len(run.rows)

    # Other rows are put together, e.g. those of alternating runs.
    result = torch.zeros(shape, dtype=tensor.dtype)
    read_stored_rows(row_map, index, first, result, read_rows)
    return result


def _read_rows(
    tensor: LazyTensor, first: int, count: int, offset: Shape, shape: Shape
) -> torch.Tensor:
    """Return rows of a tensor, with the columns of a box."""
    row_offset = (first, *offset[1:])
    row_shape = (count, *shape[1:])
    return tensor.read(row_offset, row_shape)


def _promote(tensors: Sequence[LazyTensor]) -> torch.dtype:
    """Return the dtype that the dtypes of all tensors are promoted to."""
    dtypes = {tensor.dtype for tensor in tensors}
    return reduce(torch.promote_types, dtypes)


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
    origin = (0,) * len(row_shape)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        yield (first, *origin), (count, *row_shape)


def are_equal(first: LazyTensor, second: LazyTensor) -> bool:
    """Return whether two tensors are equal bitwise; a few rows are read at a time."""
    if first != second:  # in shape or dtype
        return False
    for offset, shape in cut_rows(first.shape, first.dtype.itemsize, _BLOCK):
        first_box = first.read(offset, shape)
        second_box = second.read(offset, shape)
        if not is_bitwise_equal(first_box, second_box):
            return False
    return True
