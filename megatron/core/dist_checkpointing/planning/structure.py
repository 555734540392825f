"""Structure of one rank's state: the boxes of its tensors, and the keys of its objects.

Every rank describes its state with `describe`, and sends the structure to rank 0 in the form of
`pack`.
"""

from __future__ import annotations

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

TensorType = tuple[str, Shape, torch.dtype]  # key, global shape, dtype


class TensorSpec(NamedTuple):
    """The boxes of one tensor on one rank."""

    key: str
    shape: Shape  # global
    dtype: torch.dtype
    boxes: tuple[Extent, ...]  # (offset, shape) of each


class LocalSpec(NamedTuple):
    """The structure of one rank's state; a plan is valid while it is unchanged on every rank."""

    tensors: tuple[TensorSpec, ...]
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
    objects = []
    for name, entry in state.items():
        if isinstance(entry, ShardedObject):
            objects.append(entry.key)
            continue
        if not isinstance(entry, ShardedTensor):
            raise CheckpointError(
                f"{name}: {type(entry).__name__} is neither ShardedTensor nor ShardedObject"
            )
        tensors.append(_describe_tensor(entry))

    tensor_keys = [tensor.key for tensor in tensors]
    _check_unique_keys(tensor_keys + objects)
    return LocalSpec(tuple(tensors), tuple(objects))


def _describe_tensor(entry: ShardedTensor) -> TensorSpec:
    """Return the structure of a tensor, which is kept with the entry."""
    spec: TensorSpec | None = entry.derived.get(TensorSpec)
    if spec is None:
        boxes = _select_boxes(entry)
        spec = TensorSpec(entry.key, entry.global_shape, entry.dtype, boxes)
        entry.derived[TensorSpec] = spec
    return spec


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
    types: list[TensorType] = []
    counts: list[int] = []
    dims = 0  # of the tensor that has the most
    for tensor in spec.tensors:
        types.append((tensor.key, tensor.shape, tensor.dtype))
        counts.append(len(tensor.boxes))
        dims = max(dims, len(tensor.shape))

    # Dimensions that a tensor lacks have the offset 0 and the size 1.
    extents: list[Extent] = []
    for tensor in spec.tensors:
        missing = dims - len(tensor.shape)
        offset_end = (0,) * missing
        shape_end = (1,) * missing
        for offset, shape in tensor.boxes:
            padded_offset = offset + offset_end
            padded_shape = shape + shape_end
            extents.append((padded_offset, padded_shape))

    boxes = BoxTable.of(extents, dims)
    boxes = replace(boxes, tensor=np.repeat(np.arange(len(types)), counts))
    return PackedSpec(pickle.dumps(tuple(types)), spec.objects, boxes.compact())
