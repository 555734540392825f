"""Coverage: the boxes of all ranks must tile every tensor, without gap or overlap."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import numpy as np

from megatron.core.dist_checkpointing.box_table import BoxTable
from megatron.core.dist_checkpointing.mapping import Shape
from megatron.core.dist_checkpointing.planning.collection import (
    Replicas,
    number_first_elements,
    stack_shapes,
)
from megatron.core.dist_checkpointing.planning.structure import TensorType
from megatron.core.safe_files.errors import CheckpointError
from megatron.core.safe_files.schema import abbreviate


def check_coverage(tensors: Sequence[TensorType], boxes: BoxTable, replicas: Replicas) -> None:
    """Raise CheckpointError unless the boxes tile the tensors."""
    # One of the replicas of each box, sorted by tensor and position in the tensor
    distinct = boxes.take(replicas.order[replicas.starts])

    # The quick check confirms most tensors.
    is_tiled = np.zeros(len(tensors), dtype=bool)
    if len(distinct):
        is_tiled = _find_tiled_by_runs(tensors, distinct, replicas.elements)

    # The exact check finds the faults of the others, if any.
    if is_tiled.all():
        return
    faults = _find_faults(tensors, distinct, ~is_tiled)
    if faults:
        raise CheckpointError("boxes do not tile\n  " + abbreviate(faults))


def _find_faults(
    tensors: Sequence[TensorType], boxes: BoxTable, is_checked: np.ndarray
) -> list[str]:
    """Return a message for each of the checked tensors whose boxes do not tile it."""
    boxes_of_tensors = boxes.split_by_tensor([shape for _, shape, _ in tensors])
    faults = []
    # A main parameter and its moments have the same boxes, which are checked once.
    checked: dict[tuple[Shape, bytes, bytes], str | None] = {}  # faults by the content of the boxes
    for (key, global_shape, _), table in compress(
        zip(tensors, boxes_of_tensors, strict=True), is_checked
    ):
        content = (global_shape, table.offset.tobytes(), table.shape.tobytes())
        if content not in checked:
            checked[content] = table.find_gap_or_overlap(global_shape)
        fault = checked[content]
        if fault is not None:
            faults.append(f"{key} {global_shape}: {fault}")
    return faults


def _find_tiled_by_runs(
    tensors: Sequence[TensorType], boxes: BoxTable, start: np.ndarray
) -> np.ndarray:
    """Return for each tensor whether its boxes are consecutive runs of elements from start to end.

    Most tensors are tiled like that: those split along the first axis, and their shards of ZeRO-1.
    They are checked at once, which takes a tenth of the time of the exact check of each. `boxes`
    are distinct and sorted by `start`, the number of the first element of each.
    """
    tensor = boxes.tensor
    dims = boxes.shape.shape[1]
    global_shape = stack_shapes(tensors, dims)
    is_run = _find_runs(tensor, boxes.shape, global_shape)

    # A run must begin where the one before it ends. The first run of a tensor is checked below.
    stop = start + boxes.shape.prod(axis=1)
    is_consecutive = np.ones(len(tensor), dtype=bool)
    is_consecutive[1:] = start[1:] == stop[:-1]
    ends = np.searchsorted(tensor, np.arange(len(tensors) + 1))
    first_box = ends[:-1]  # [tensors]
    last_box = ends[1:] - 1
    has_boxes = last_box >= first_box
    is_consecutive[first_box[has_boxes]] = True

    # The first run of a tensor must begin at its first element, and the last one end with its last.
    first_element = number_first_elements(tensors)
    end_element = first_element + global_shape.prod(axis=1)
    # A tensor without boxes has an index that may be out of range; its result is not used.
    first_box = np.minimum(first_box, len(tensor) - 1)
    is_complete = start[first_box] == first_element
    is_complete &= stop[last_box] == end_element

    # Count the boxes of each tensor that are not runs, or not consecutive.
    is_faulty = ~(is_run & is_consecutive)  # [boxes]
    num_faults = np.bincount(tensor[is_faulty], minlength=len(tensors))
    is_without_fault = num_faults == 0  # [tensors]
    return has_boxes & is_complete & is_without_fault


def _find_runs(tensor: np.ndarray, shape: np.ndarray, global_shape: np.ndarray) -> np.ndarray:
    """Return for each box whether its elements are consecutive in its tensor.

    `tensor` is the index of each box's tensor, `shape` is [boxes, dimensions], and `global_shape`
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
