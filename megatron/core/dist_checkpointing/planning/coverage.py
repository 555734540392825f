"""Coverage: the boxes of all ranks must tile every tensor, without gap or overlap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron.core.dist_checkpointing.mapping import BoxTable, Shape
from megatron.core.dist_checkpointing.planning.places import (
    make_shape_table,
    number_first_elements,
)
from megatron.core.dist_checkpointing.planning.replicas import Replicas
from megatron.core.dist_checkpointing.planning.segments import Segments
from megatron.core.dist_checkpointing.planning.structure import TensorType
from megatron.core.safe_files.errors import CheckpointError
from megatron.core.safe_files.schema import abbreviate


class _DistinctBoxes(NamedTuple):
    """The boxes of all ranks without replicas, sorted by tensor and by place."""

    tensor: np.ndarray  # number in `SavePlan.tensors`
    place: np.ndarray  # as from `number_places`
    offset: np.ndarray  # [boxes, dimensions]
    shape: np.ndarray  # [boxes, dimensions]
    # The boxes of tensor number i are `[ends[i], ends[i + 1])`.
    ends: np.ndarray

    def make_table(self, number: int, dims: int) -> BoxTable:
        """Return the boxes of a tensor with `dims` dimensions."""
        start = self.ends[number]
        stop = self.ends[number + 1]
        # The arrays have the dimensions of the tensor that has the most.
        offset = self.offset[start:stop, :dims]
        shape = self.shape[start:stop, :dims]
        return BoxTable(offset, shape)


def check_coverage(tensors: Sequence[TensorType], boxes: Segments, replicas: Replicas) -> None:
    """Raise CheckpointError unless the boxes tile the tensors."""
    distinct = _select_distinct_boxes(tensors, boxes, replicas)

    # The quick check confirms most tensors.
    is_tiled = np.zeros(len(tensors), dtype=bool)
    if len(distinct.tensor):
        is_tiled = _find_tiled_by_runs(tensors, distinct)

    # The exact check finds the faults of the others, if any.
    unconfirmed = np.flatnonzero(~is_tiled)
    faults = _find_faults(tensors, distinct, unconfirmed)
    if faults:
        raise CheckpointError("boxes do not tile\n  " + abbreviate(faults))


def _select_distinct_boxes(
    tensors: Sequence[TensorType], boxes: Segments, replicas: Replicas
) -> _DistinctBoxes:
    """Return one of the replicas of each box."""
    lines = replicas.order[replicas.starts]
    tensor = boxes.tensor[lines]
    numbers = np.arange(len(tensors) + 1)
    return _DistinctBoxes(
        tensor=tensor,
        place=replicas.places,
        offset=boxes.offset.take(lines, axis=0),
        shape=boxes.shape.take(lines, axis=0),
        ends=np.searchsorted(tensor, numbers),
    )


def _find_faults(
    tensors: Sequence[TensorType], boxes: _DistinctBoxes, numbers: np.ndarray
) -> list[str]:
    """Return a message for each of the numbered tensors whose boxes do not tile it."""
    faults = []
    # A main parameter and its moments have the same boxes, which are checked once.
    known_faults: dict[tuple[Shape, bytes, bytes], str | None] = {}  # by the content of the boxes
    for number in numbers.tolist():
        key, global_shape, _ = tensors[number]
        table = boxes.make_table(number, len(global_shape))
        content = (global_shape, table.offset.tobytes(), table.shape.tobytes())
        if content not in known_faults:
            known_faults[content] = table.find_gap_or_overlap(global_shape)
        fault = known_faults[content]
        if fault is not None:
            faults.append(f"{key} {global_shape}: {fault}")
    return faults


def _find_tiled_by_runs(tensors: Sequence[TensorType], boxes: _DistinctBoxes) -> np.ndarray:
    """Return for each tensor whether its boxes are consecutive runs of elements from start to end.

    Most tensors are tiled like that: those split along the first axis, and their shards of ZeRO-1.
    They are checked at once, which takes a tenth of the time of the exact check of each.
    """
    tensor = boxes.tensor
    dims = boxes.shape.shape[1]
    global_shape = make_shape_table(tensors, dims)
    is_run = _find_runs(tensor, boxes.shape, global_shape)

    # A run must begin where the one before it ends. The first run of a tensor is checked below.
    start = boxes.place
    numel = boxes.shape.prod(axis=1)
    stop = start + numel
    is_consecutive = np.ones(len(tensor), dtype=bool)
    is_consecutive[1:] = start[1:] == stop[:-1]
    first_box = boxes.ends[:-1]  # [tensors]
    last_box = boxes.ends[1:] - 1
    has_boxes = last_box >= first_box
    is_consecutive[first_box[has_boxes]] = True

    # The first run of a tensor must begin at its first element, and the last one end with its last.
    first_place = number_first_elements(tensors)
    end_place = first_place + global_shape.prod(axis=1)
    # A tensor without boxes has an index that may be out of range; its result is not used.
    first_box = np.minimum(first_box, len(tensor) - 1)
    is_complete = start[first_box] == first_place
    is_complete &= stop[last_box] == end_place

    # Count the boxes of each tensor that are not runs, or not consecutive.
    is_faulty = ~(is_run & is_consecutive)  # [boxes]
    num_faults = np.bincount(tensor[is_faulty], minlength=len(tensors))
    is_without_fault = num_faults == 0  # [tensors]
    return has_boxes & is_complete & is_without_fault


def _find_runs(tensor: np.ndarray, shape: np.ndarray, global_shape: np.ndarray) -> np.ndarray:
    """Return for each box whether its elements are consecutive in its tensor.

    `tensor` is the number of each box's tensor, `shape` is [boxes, dimensions], and `global_shape`
    [tensors, dimensions]. A run has one index on the axes before its first longer axis, any range
    of it, and all indices of the axes after it.
    """
    is_run = np.ones(len(tensor), dtype=bool)
    is_after_longer = np.zeros(len(tensor), dtype=bool)
    for axis in range(global_shape.shape[1]):
        size = shape[:, axis]
        size_of_tensor = global_shape[:, axis]
        is_whole = size == size_of_tensor[tensor]
        is_run &= ~is_after_longer | is_whole
        is_after_longer |= size > 1
    return is_run
