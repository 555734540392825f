"""The boxes of all ranks as arrays with a line per box: at 16,384 ranks there are millions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.core.dist_checkpointing.planning.structure import PackedSpec, TensorType
from megatron.core.dist_checkpointing.planning.tensor_numbers import number_tensors


@dataclass(frozen=True)
class Segments:
    """Columns with a line per segment: rows `[first, first + count)` of a box of a rank.

    Lines are sorted by rank and box. Planning begins with the whole boxes of all ranks and selects
    the segments to write from them.
    """

    rank: np.ndarray
    box: np.ndarray  # number among the rank's boxes
    tensor: np.ndarray  # number in `SavePlan.tensors`
    first: np.ndarray  # first row
    count: np.ndarray  # number of rows
    offset: np.ndarray  # [lines, dimensions], as in PackedSpec
    shape: np.ndarray  # [lines, dimensions]
    nbytes: np.ndarray

    def select(self, line: np.ndarray, first: np.ndarray, count: np.ndarray) -> Segments:
        """Return `count` rows from row `first` on of each of the given lines, whole boxes."""
        num_rows = self.count[line]
        row_bytes = self.nbytes[line] // num_rows
        offset = self.offset.take(line, axis=0)  # copies, [lines, dimensions]
        shape = self.shape.take(line, axis=0)

        # Most boxes are written as a whole: only the others are narrowed.
        partial = np.flatnonzero(count != num_rows)
        axis = _find_row_axes(shape[partial])
        offset[partial, axis] += first[partial]
        shape[partial, axis] = count[partial]
        return Segments(
            rank=self.rank[line],
            box=self.box[line],
            tensor=self.tensor[line],
            first=first,
            count=count,
            offset=offset,
            shape=shape,
            nbytes=row_bytes * count,
        )


def collect_boxes(specs: Sequence[PackedSpec]) -> tuple[list[TensorType], Segments]:
    """Return the tensors and the whole boxes of all ranks.

    Raises CheckpointError if the tensors of two ranks conflict.
    """
    # The tensor of each box
    tensors, number_of_spec = number_tensors(specs)
    counts = np.concatenate([spec.counts for spec in specs])
    tensor = np.repeat(number_of_spec, counts)  # [boxes]

    # The boxes of each rank are consecutive, and numbered from 0.
    boxes_of_rank = np.array([len(spec.boxes) for spec in specs])
    end_of_rank = np.cumsum(boxes_of_rank)
    first_of_rank = end_of_rank - boxes_of_rank
    rank = np.repeat(np.arange(len(specs)), boxes_of_rank)
    box = np.arange(len(rank))
    box -= np.repeat(first_of_rank, boxes_of_rank)

    # A scalar or an empty box is one row.
    offset, shape = _concatenate_boxes(specs)
    row_axis = _find_row_axes(shape)
    num_rows = shape[np.arange(len(shape)), row_axis]
    num_rows = np.maximum(1, num_rows)

    itemsizes = np.array([dtype.itemsize for _, _, dtype in tensors], dtype=np.int64)
    numel = shape.prod(axis=1)
    boxes = Segments(
        rank=rank,
        box=box,
        tensor=tensor,
        first=np.zeros_like(num_rows),
        count=num_rows,
        offset=offset,
        shape=shape,
        nbytes=numel * itemsizes[tensor],
    )
    return tensors, boxes


def _concatenate_boxes(specs: Sequence[PackedSpec]) -> tuple[np.ndarray, np.ndarray]:
    """Return offset and shape of the boxes of all ranks, each [boxes, dimensions]."""
    dims = 1
    for spec in specs:
        dims_of_rank = spec.boxes.shape[2]
        dims = max(dims, dims_of_rank)

    # The ranks may differ in the number of dimensions.
    offsets = []
    shapes = []
    for spec in specs:
        boxes = _pad_dimensions(spec.boxes, dims)
        offsets.append(boxes[:, 0])
        shapes.append(boxes[:, 1])
    # Two contiguous arrays: `take` selects their rows in a quarter of the time.
    offset = np.concatenate(offsets, dtype=np.int64)
    shape = np.concatenate(shapes, dtype=np.int64)
    return offset, shape


def _pad_dimensions(boxes: np.ndarray, dims: int) -> np.ndarray:
    """Return `[boxes, 2, fewer]` as `[boxes, 2, dims]`, with offset 0 and size 1 at the end."""
    num_boxes = len(boxes)
    missing = dims - boxes.shape[2]
    if not missing:
        return boxes
    offset_and_size = np.array([[0], [1]])
    ends = np.broadcast_to(offset_and_size, (num_boxes, 2, missing))
    return np.concatenate([boxes, ends], axis=2)


def _find_row_axes(shape: np.ndarray) -> np.ndarray:
    """Return the axis along which the rows of each box are counted: the first longer than 1.

    `shape` is [boxes, dimensions]. A box without such an axis has axis 0.
    """
    is_longer = shape > 1
    return is_longer.argmax(axis=1)
