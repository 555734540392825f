"""The state of one rank as boxes; boxes of all ranks as one table with the replicas among them."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from megatron.core.dist_checkpointing.box_table import BoxTable
from megatron.core.dist_checkpointing.mapping import (
    Extent,
    Shape,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
)
from megatron.core.safe_files.errors import CheckpointError
from megatron.core.safe_files.schema import abbreviate

# ---- Structure of one rank's state: the boxes of its tensors, and the keys of its objects ----
#
# Every rank describes its state with `describe`, and sends the structure to rank 0 in the form of
# `pack`.

TensorType = tuple[str, Shape, torch.dtype]  # key, global shape, dtype


class LocalSpec(NamedTuple):
    """The structure of one rank's state; a plan is valid while it is unchanged on every rank."""

    tensors: tuple[TensorType, ...]
    boxes: tuple[tuple[Extent, ...], ...]  # of each tensor
    objects: tuple[str, ...]  # keys


class PackedSpec(NamedTuple):
    """A `LocalSpec` as compact arrays, to be sent to rank 0."""

    # Pickled tuple of TensorType. Many ranks (e.g., those of a TP group) have equal ones, which
    # rank 0 reads once.
    types: bytes
    objects: tuple[str, ...]  # keys
    boxes: BoxTable  # with the column `tensor`

    def read_types(self) -> tuple[TensorType, ...]:
        """Return key, global shape and dtype of each tensor."""
        types: tuple[TensorType, ...] = pickle.loads(self.types)
        return types


def describe(state: ShardedStateDict) -> LocalSpec:
    """Return the structure of `state`. Raises CheckpointError for an inconsistent tensor."""
    tensors = []
    boxes = []
    objects = []
    for name, entry in state.items():
        if isinstance(entry, ShardedObject):
            objects.append(entry.key)
            continue
        if not isinstance(entry, ShardedTensor):
            raise CheckpointError(
                f"{name}: {type(entry).__name__} is neither ShardedTensor nor ShardedObject"
            )
        # The boxes are kept with the entry.
        if _select_boxes not in entry.derived:
            entry.derived[_select_boxes] = _select_boxes(entry)
        tensors.append((entry.key, entry.global_shape, entry.dtype))
        boxes.append(entry.derived[_select_boxes])

    tensor_keys = [key for key, _, _ in tensors]
    _check_unique_keys(tensor_keys + objects)
    return LocalSpec(tuple(tensors), tuple(boxes), tuple(objects))


def _select_boxes(entry: ShardedTensor) -> tuple[Extent, ...]:
    """Return the boxes of a tensor that contain elements. Raises CheckpointError for a wrong one.

    An empty box is kept if the whole tensor is empty, so that some rank writes it.
    """
    is_empty = 0 in entry.global_shape
    boxes = []
    for box in entry.boxes:
        offset = box.offset
        shape = box.shape
        dtype = box.tensor.dtype
        if dtype != entry.dtype and not entry.is_cast:
            raise CheckpointError(f"{entry.key}: a box is {dtype}, the tensor {entry.dtype}")
        if not _is_inside(offset, shape, entry.global_shape):
            raise CheckpointError(
                f"{entry.key}: the box at {offset} of shape {shape} is not inside "
                f"{entry.global_shape}"
            )
        # Other empty boxes do not have to be written.
        if is_empty or 0 not in shape:
            boxes.append((offset, shape))
    return tuple(boxes)


def _is_inside(offset: Shape, shape: Shape, whole: Shape) -> bool:
    """Return whether a box is inside a tensor of shape `whole`, with the same dimensions."""
    if not len(offset) == len(shape) == len(whole):
        return False
    for start, size, limit in zip(offset, shape, whole, strict=True):
        if start + size > limit:
            return False
    return True


def _check_unique_keys(keys: Sequence[str]) -> None:
    """Raise CheckpointError if two entries of a rank have the same key."""
    duplicates = []
    for key, count in Counter(keys).items():
        if count > 1:
            duplicates.append(key)
    if duplicates:
        raise CheckpointError(
            f"one rank holds several entries with the same key: {abbreviate(duplicates, 10, ', ')}"
        )


def pack(spec: LocalSpec) -> PackedSpec:
    """Convert a spec to arrays in which all boxes have the same number of dimensions."""
    # Dimensions that a tensor lacks have the offset 0 and the size 1.
    dims = max((len(shape) for _, shape, _ in spec.tensors), default=0)
    extents: list[Extent] = []
    for (_, global_shape, _), boxes_of_tensor in zip(spec.tensors, spec.boxes, strict=True):
        missing = dims - len(global_shape)
        offset_end = (0,) * missing
        shape_end = (1,) * missing
        for offset, shape in boxes_of_tensor:
            padded_offset = offset + offset_end
            padded_shape = shape + shape_end
            extents.append((padded_offset, padded_shape))

    boxes = BoxTable.of(extents, dims)
    counts = list(map(len, spec.boxes))
    boxes = replace(boxes, tensor=np.repeat(np.arange(len(counts)), counts))
    return PackedSpec(pickle.dumps(spec.tensors), spec.objects, boxes.compact())


# ---- Collection of the boxes of all ranks ----


def collect_boxes(specs: Sequence[PackedSpec]) -> tuple[list[TensorType], BoxTable]:
    """Return the tensors and the boxes of all ranks, sorted by rank.

    Raises CheckpointError if the tensors of two ranks conflict.
    """
    tensors, indices = _list_tensors(specs)

    # The boxes of each rank are consecutive.
    num_boxes = np.array([len(spec.boxes) for spec in specs])
    end_of_rank = np.cumsum(num_boxes)
    first_of_rank = end_of_rank - num_boxes
    box = np.arange(num_boxes.sum())
    box -= np.repeat(first_of_rank, num_boxes)

    offset, shape = _concatenate_boxes(specs)
    tensor_of_rank = []
    for spec, index_of_tensor in zip(specs, indices, strict=True):
        tensor_of_rank.append(index_of_tensor[spec.boxes.tensor])
    tensor = np.concatenate(tensor_of_rank)
    itemsize = np.array([dtype.itemsize for _, _, dtype in tensors], dtype=np.int64)
    boxes = BoxTable(
        offset=offset,
        shape=shape,
        tensor=tensor,
        rank=np.repeat(np.arange(len(specs)), num_boxes),
        box=box,
        nbytes=shape.prod(axis=1) * itemsize[tensor],
    )
    return tensors, boxes


def _concatenate_boxes(specs: Sequence[PackedSpec]) -> tuple[np.ndarray, np.ndarray]:
    """Return offset and shape of the boxes of all ranks, each [boxes, dimensions]."""
    dims = 1
    for spec in specs:
        dims_of_rank = spec.boxes.offset.shape[1]
        dims = max(dims, dims_of_rank)

    # The ranks may differ in the number of dimensions.
    offsets = []
    shapes = []
    for spec in specs:
        offsets.append(_pad_dimensions(spec.boxes.offset, dims, value=0))
        shapes.append(_pad_dimensions(spec.boxes.shape, dims, value=1))
    offset = np.concatenate(offsets, dtype=np.int64)
    shape = np.concatenate(shapes, dtype=np.int64)
    return offset, shape


def _pad_dimensions(columns: np.ndarray, dims: int, value: int) -> np.ndarray:
    """Return `[boxes, fewer]` as `[boxes, dims]`, with `value` at the end."""
    missing = dims - columns.shape[1]
    if not missing:
        return columns
    return np.pad(columns, ((0, 0), (0, missing)), constant_values=value)


# ---- Tensors ----


def _list_tensors(specs: Sequence[PackedSpec]) -> tuple[list[TensorType], list[np.ndarray]]:
    """Return the distinct tensors of all ranks, and for each rank the indices of its tensors.

    Raises CheckpointError if shape, dtype or kind of a key differs between ranks.
    """
    # Tensors with the same key but another shape or dtype are distinct.
    index_of_tensor: dict[TensorType, int] = {}
    indices_of_types: dict[bytes, np.ndarray] = {}  # by `PackedSpec.types`
    indices_of_ranks: list[np.ndarray] = []
    object_keys: set[str] = set()
    for spec in specs:
        # Ranks with equal types are indexed once.
        indices = indices_of_types.get(spec.types)
        if indices is None:
            indices = _index_types(spec.read_types(), index_of_tensor)
            indices_of_types[spec.types] = indices
        indices_of_ranks.append(indices)
        object_keys.update(spec.objects)

    # Every key must have one shape and dtype, or be an object.
    tensors = list(index_of_tensor)
    tensor_keys = {key for key, _, _ in tensors}
    has_different_tensors = len(tensor_keys) < len(tensors)
    is_also_object = not tensor_keys.isdisjoint(object_keys)
    if has_different_tensors or is_also_object:
        raise CheckpointError(_describe_conflicts(specs))
    return tensors, indices_of_ranks


def _index_types(types: Sequence[TensorType], index_of_tensor: dict[TensorType, int]) -> np.ndarray:
    """Return the index of each tensor of a rank, and add new tensors to `index_of_tensor`."""
    indices = []
    for tensor in types:
        next_index = len(index_of_tensor)
        indices.append(index_of_tensor.setdefault(tensor, next_index))
    return np.array(indices, dtype=np.int64)


def _describe_conflicts(specs: Sequence[PackedSpec]) -> str:
    """Return a message about keys whose shape, dtype or kind differs between ranks."""
    conflicts = _find_different_tensors(specs)
    conflicts |= _find_keys_of_tensors_and_objects(specs)
    return "ranks disagree about\n  " + abbreviate(list(conflicts.values()))


def _find_different_tensors(specs: Sequence[PackedSpec]) -> dict[str, str]:
    """Return a message for each key whose shape or dtype differs between ranks."""
    first_seen: dict[str, tuple[TensorType, int]] = {}  # (tensor, rank) by key
    conflicts: dict[str, str] = {}
    for rank, spec in enumerate(specs):
        for tensor in spec.read_types():
            key, shape, dtype = tensor
            first_tensor, first_rank = first_seen.setdefault(key, (tensor, rank))
            # Name the first rank that differs; thousands more may do so.
            if tensor == first_tensor or key in conflicts:
                continue
            _, first_shape, first_dtype = first_tensor
            first_version = f"{first_shape} {first_dtype} on rank {first_rank}"
            conflicts[key] = f"{key}: {first_version}, {shape} {dtype} on rank {rank}"
    return conflicts


def _find_keys_of_tensors_and_objects(specs: Sequence[PackedSpec]) -> dict[str, str]:
    """Return a message for each key that is a tensor on one rank and an object on another one."""
    # The lowest rank that has each key as a tensor, and as an object
    rank_of_tensor: dict[str, int] = {}
    rank_of_object: dict[str, int] = {}
    for rank, spec in enumerate(specs):
        for key, _, _ in spec.read_types():
            rank_of_tensor.setdefault(key, rank)
        for key in spec.objects:
            rank_of_object.setdefault(key, rank)

    conflicts = {}
    for key in rank_of_object.keys() & rank_of_tensor.keys():
        object_rank = rank_of_object[key]
        tensor_rank = rank_of_tensor[key]
        conflicts[key] = f"{key}: an object on rank {object_rank}, a tensor on rank {tensor_rank}"
    return conflicts


# ---- Order of boxes, and replicas ----


def number_elements(
    tensors: Sequence[TensorType], tensor: np.ndarray, offset: np.ndarray
) -> np.ndarray:
    """Return a number for the first element of each box, unique among the elements of all tensors.

    The elements are numbered by tensor, and row-major in each of them: sorting boxes by this number
    sorts them by tensor, and by position in each tensor. `tensor` is the index of each box's
    tensor, and `offset` is [boxes, dimensions].
    """
    dims = offset.shape[1]
    shapes = stack_shapes(tensors, dims)

    # Elements between neighbors along each axis, from the last axis, where it is one, to the first
    strides = np.ones_like(shapes)  # [tensors, dimensions]
    for axis in range(dims - 1, 0, -1):
        strides[:, axis - 1] = strides[:, axis] * shapes[:, axis]

    elements = number_first_elements(tensors)[tensor]  # [boxes]
    # One axis at a time: this needs a third of the time of a product of [boxes, dims].
    for axis in range(dims):
        stride = strides[:, axis]
        elements += offset[:, axis] * stride[tensor]
    return elements


def number_first_elements(tensors: Sequence[TensorType]) -> np.ndarray:
    """Return the number of the first element of each tensor; an empty one uses up a number, too."""
    first_elements = []
    next_number = 0
    for _, shape, _ in tensors:
        first_elements.append(next_number)
        next_number += max(1, math.prod(shape))
    assert next_number < 1 << 63, f"{next_number} elements are more than 64 bits can number"
    return np.array(first_elements, dtype=np.int64)


def stack_shapes(tensors: Sequence[TensorType], dims: int) -> np.ndarray:
    """Return the global shapes, [tensors, dims], with the size 1 at the end."""
    padded = []
    for _, shape, _ in tensors:
        missing = dims - len(shape)
        padded.append(shape + (1,) * missing)
    table = np.array(padded, dtype=np.int64)
    return table.reshape(-1, dims)  # also for zero tensors


class Replicas(NamedTuple):
    """The entries of a table of the boxes of all ranks, grouped by box."""

    order: np.ndarray  # entries sorted by first element; those of one box are in rank order
    starts: np.ndarray  # the positions in `order` where a new box begins
    elements: np.ndarray  # the number of the first element of each box (`number_elements`)

    def count_ranks(self) -> np.ndarray:
        """Return the number of ranks that have each box."""
        return np.diff(self.starts, append=len(self.order))


def group_replicas(tensors: Sequence[TensorType], boxes: BoxTable) -> Replicas:
    """Find the boxes that several ranks have.

    Raises CheckpointError if a rank has a box twice.
    """
    # Replicas become neighbors. The sort is stable: they stay in rank order.
    elements = number_elements(tensors, boxes.tensor, boxes.offset)
    order = np.argsort(elements, kind="stable")
    elements = elements[order]
    shape = boxes.shape.take(order, axis=0)  # [boxes, dimensions]
    rank = boxes.rank[order]

    # An entry begins a new box if its first element or shape differs from the previous entry's.
    differs = _differs_from_previous(elements)  # [boxes - 1]
    for axis in range(shape.shape[1]):
        differs |= _differs_from_previous(shape[:, axis])

    # Replicas are in rank order, so two of the same rank are neighbors.
    is_duplicate = ~differs
    is_duplicate &= ~_differs_from_previous(rank)
    duplicates = np.flatnonzero(is_duplicate)
    if len(duplicates):
        first = order[duplicates[0]]
        key, global_shape, _ = tensors[boxes.tensor[first]]
        dims = len(global_shape)
        offset = tuple(boxes.offset[first, :dims].tolist())
        raise CheckpointError(f"{key}: rank {boxes.rank[first]} holds the box at {offset} twice")

    is_new = np.ones(len(order), dtype=bool)  # the first entry begins a box
    is_new[1:] = differs
    starts = np.flatnonzero(is_new)
    return Replicas(order, starts, elements[starts])


def _differs_from_previous(values: np.ndarray) -> np.ndarray:
    """Return for each value but the first whether it differs from the one before it."""
    current = values[1:]
    previous = values[:-1]
    is_different: np.ndarray = current != previous
    return is_different
