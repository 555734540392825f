"""Plain tensors, DTensors and torch's `CheckpointableTensor`s as `ShardedTensor`s, without
communication.

A `CheckpointableTensor` (torch 2.14, `torch.distributed.checkpoint.protocol`) is any tensor with
the attributes of `_PROTOCOL`, which map slices of it to slices of a global tensor.
"""

from __future__ import annotations

import operator
import sys
from typing import TYPE_CHECKING, TypeGuard

import torch

from megatron.core.dist_checkpointing.dtensor_layout import AxisSplit, compute_shard
from megatron.core.dist_checkpointing.mapping import Box, Shape, ShardedTensor, narrow
from megatron.core.safe_files.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


def is_dtensor(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Return whether `tensor` is a DTensor.

    This does not import DTensor, which takes as long as a dozen small saves: a program that has a
    DTensor has imported it.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


# Shape of the global tensor, and of each slice its offset there, its offset in the local tensor,
# and its shape
_PROTOCOL = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


def is_checkpointable(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` has the attributes of torch's protocol."""
    return all(hasattr(tensor, name) for name in _PROTOCOL)


def mark_checkpointable(tensor: torch.Tensor, layout: ShardedTensor) -> None:
    """Give `tensor` the attributes of torch's protocol, so that DCP saves the boxes of `layout`.

    Raises ValueError for a box that is not a slice of `tensor` with the axes of the global tensor.
    """
    local_offsets = [_find_slice(tensor, box, layout.key) for box in layout.boxes]
    values = (
        tuple(layout.global_shape),
        tuple(tuple(box.offset) for box in layout.boxes),
        tuple(local_offsets),
        tuple(tuple(box.tensor.shape) for box in layout.boxes),
    )
    for name, value in zip(_PROTOCOL, values, strict=True):
        setattr(tensor, name, value)


def copy_layout(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return `target` with the slices of `source`, if it has any and their shapes are equal."""
    if is_checkpointable(source) and source.shape == target.shape:
        for name in _PROTOCOL:
            setattr(target, name, getattr(source, name))
    return target


def _find_slice(tensor: torch.Tensor, box: Box, key: str) -> Shape:
    """Return the offset of a box, a view of the same memory, in `tensor`."""
    view = box.tensor
    distance = (view.data_ptr() - tensor.data_ptr()) // tensor.element_size()
    offset = []
    for stride in tensor.stride():
        offset.append(distance // max(stride, 1))
        distance %= max(stride, 1)
    is_slice = view.stride() == tensor.stride() and view.dim() == len(box.offset)
    if is_slice:
        last = [first + size for first, size in zip(offset, view.shape, strict=True)]
        is_slice = min(offset, default=0) >= 0 and all(map(operator.le, last, tensor.shape))
    if not is_slice:
        raise ValueError(
            f"{key}: the box at {tuple(box.offset)} of shape {tuple(view.shape)} is not a slice of "
            f"the tensor of shape {tuple(tensor.shape)}, as torch's protocol requires: save it "
            "with make_sharded_tensor and megatron.core.dist_checkpointing"
        )
    return tuple(offset)


def _make_boxes(key: str, tensor: torch.Tensor) -> ShardedTensor:
    """Return a tensor with the attributes of torch's protocol; its slices become boxes."""
    global_shape, *columns = (tuple(getattr(tensor, name)) for name in _PROTOCOL)
    local = tensor.detach()
    boxes = []
    if len(set(map(len, columns))) > 1:
        raise CheckpointError(f"{key}: {', '.join(_PROTOCOL[1:])} have different lengths")
    for global_offset, local_offset, size in zip(*columns, strict=True):
        for offset, shape in ((global_offset, global_shape), (local_offset, local.shape)):
            is_inside = len(offset) == len(size) == len(shape) and min(offset, default=0) >= 0
            if not is_inside or any(map(operator.gt, map(operator.add, offset, size), shape)):
                raise CheckpointError(
                    f"{key}: a slice of shape {tuple(size)} at {tuple(offset)} is not part of a "
                    f"tensor of shape {tuple(shape)}: correct its global_offsets, local_offsets or "
                    "local_sizes"
                )
        if 0 not in size:
            boxes.append(Box(tuple(global_offset), narrow(local, local_offset, size)))
    return ShardedTensor(key, global_shape, tensor.dtype, tuple(boxes))


def make_sharded_tensor(key: str, tensor: torch.Tensor) -> ShardedTensor:
    """Return `tensor` under the name `key`; its boxes are views of this rank's memory.

    A plain tensor is replicated on all ranks that have the key. Slices of a `CheckpointableTensor`
    are where its attributes place them. A DTensor (FSDP2, tensor
    parallelism by `parallelize_module`, or both) is split as its placements describe. Raises
    CheckpointError for a placement that is neither a shard nor a replica.
    """
    if is_checkpointable(tensor):
        return _make_boxes(key, tensor)
    if not is_dtensor(tensor):
        return ShardedTensor.replicated(key, tensor)
    mesh = tensor.device_mesh
    with torch.no_grad():  # otherwise, autograd takes ten times as long
        local = tensor.to_local().detach()
    global_shape = tuple(tensor.shape)
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # this rank is not in the mesh
        return ShardedTensor(key, global_shape, tensor.dtype, ())
    try:
        splits = []
        for placement in tensor.placements:
            splits.append(_read_placement(placement))
    except CheckpointError as error:
        raise CheckpointError(f"{key}: {error}") from error
    offset, shape = compute_shard(global_shape, tuple(mesh.shape), coordinate, splits)
    if tuple(local.shape) != shape:
        raise CheckpointError(
            f"{key}: the local tensor has shape {tuple(local.shape)}, but a DTensor of shape "
            f"{global_shape} with placements {tensor.placements} on a mesh of {tuple(mesh.shape)} "
            f"has {shape} at coordinate {tuple(coordinate)}: it was not created by DTensor's rules"
        )
    if local.numel() == 0 and 0 not in global_shape:  # fewer rows than ranks
        return ShardedTensor(key, global_shape, tensor.dtype, ())
    return ShardedTensor(key, global_shape, tensor.dtype, (Box(offset, local),))


def _read_placement(placement: Placement) -> AxisSplit:
    """Return how a placement splits a tensor.

    Raises CheckpointError for placements that are neither a shard nor a replica, e.g., Partial.
    """
    if placement.is_replicate():
        return AxisSplit(None)

    # Plain and strided shards
    dim = getattr(placement, "dim", None)
    if dim is None:
        raise CheckpointError(
            f"a DTensor with placement {placement} cannot be saved; redistribute it first"
        )
    split_factor = getattr(placement, "split_factor", 1)
    return AxisSplit(dim, split_factor)
