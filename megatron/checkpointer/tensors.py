"""Plain tensors and DTensors as `ShardedTensor`s, without communication."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch

from megatron.core.dist_checkpointing.mapping import Box, Extent, Shape, ShardedTensor
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


def make_sharded_tensor(key: str, tensor: torch.Tensor) -> ShardedTensor:
    """Return `tensor` under the name `key`; its boxes are views of this rank's memory.

    A plain tensor is replicated on all ranks that have the key. A DTensor (FSDP2, tensor
    parallelism by `parallelize_module`, or both) is split as its placements describe. Raises
    CheckpointError for a placement that is neither a shard nor a replica.
    """
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
        offset, shape = compute_shard(
            global_shape, tuple(mesh.shape), coordinate, tuple(tensor.placements)
        )
    except CheckpointError as error:
        raise CheckpointError(f"{key}: {error}") from error
    if tuple(local.shape) != shape:
        raise CheckpointError(
            f"{key}: the local tensor has shape {tuple(local.shape)}, but a DTensor of shape "
            f"{global_shape} with placements {tensor.placements} on a mesh of {tuple(mesh.shape)} "
            f"has {shape} at coordinate {tuple(coordinate)}: it was not created by DTensor's rules"
        )
    if local.numel() == 0 and 0 not in global_shape:  # fewer rows than ranks
        return ShardedTensor(key, global_shape, tensor.dtype, ())
    return ShardedTensor(key, global_shape, tensor.dtype, (Box(offset, local),))


def compute_shard(
    global_shape: Shape,
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> Extent:
    """Return offset and shape of the local part of a DTensor, by the rules of DTensor.

    Every shard splits a dimension as `torch.chunk`: all parts but the last ones have
    `ceil(size / parts)` rows, and the last ones may be smaller or empty.
    """
    offset = [0] * len(global_shape)
    shape = list(global_shape)
    for mesh_dim in _order_of_splits(placements):
        placement = placements[mesh_dim]
        if placement.is_replicate():
            continue
        dim = getattr(placement, "dim", None)
        if dim is None:  # e.g., Partial
            raise CheckpointError(
                f"a DTensor with placement {placement} cannot be saved; redistribute it first"
            )
        # ceil(size / parts) rows, of which the last ranks may have fewer or none
        rows = -(-shape[dim] // mesh_shape[mesh_dim])
        first = min(shape[dim], rows * coordinate[mesh_dim])
        last = min(shape[dim], first + rows)
        offset[dim] += first
        shape[dim] = last - first
    return tuple(offset), tuple(shape)


def _order_of_splits(placements: Sequence[Placement]) -> list[int]:
    """Return the mesh dimensions in the order in which they split the tensor.

    Usually that is from left to right. FSDP2 splits the shards of tensor parallelism further,
    although its mesh dimension is on the left: DTensor marks such a placement with a
    `split_factor`, the number of parts that the dimensions on its right have made before.
    """
    plain: list[int] = []
    strided: list[int] = []
    for mesh_dim, placement in enumerate(placements):
        if getattr(placement, "split_factor", 1) > 1:
            strided.append(mesh_dim)
        else:
            plain.append(mesh_dim)
    return plain + strided[::-1]
