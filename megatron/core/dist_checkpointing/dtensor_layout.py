"""The part of a global tensor that a rank has, by the rules of DTensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron.core.dist_checkpointing.mapping import Extent, Shape


class AxisSplit(NamedTuple):
    """How a dimension of the mesh splits a tensor: along `dim`, or not at all (None).

    `split_factor` is that of a strided shard: the number of parts that the mesh dimensions on its
    right have made before.
    """

    dim: int | None
    split_factor: int = 1


def compute_shard(
    global_shape: Shape,
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    splits: list[AxisSplit],
) -> Extent:
    """Return offset and shape of the local part of a DTensor.

    Every shard splits a dimension as `torch.chunk`: all parts but the last ones have
    `ceil(size / parts)` rows, and the last ones may be smaller or empty.
    """
    offset = [0] * len(global_shape)
    shape = list(global_shape)
    for mesh_dim in _order_of_splits(splits):
        dim = splits[mesh_dim].dim
        if dim is None:
            continue
        # ceil(size / parts) rows, of which the last ranks may have fewer or none
        rows = -(-shape[dim] // mesh_shape[mesh_dim])
        first = min(shape[dim], rows * coordinate[mesh_dim])
        last = min(shape[dim], first + rows)
        offset[dim] += first
        shape[dim] = last - first
    return tuple(offset), tuple(shape)


def _order_of_splits(splits: Sequence[AxisSplit]) -> list[int]:
    """Return the mesh dimensions in the order in which they split the tensor.

    Usually that is from left to right. FSDP2 splits the shards of tensor parallelism further,
    although its mesh dimension is on the left, with a strided shard.
    """
    plain: list[int] = []
    strided: list[int] = []
    for mesh_dim, split in enumerate(splits):
        if split.split_factor > 1:
            strided.append(mesh_dim)
        else:
            plain.append(mesh_dim)
    return plain + strided[::-1]
