"""Files of torch.save that contain DTensors, one file per rank, as the tensors of the model.

A pickled DTensor has the part of its rank, and `_spec`: the global shape, how each dimension of the
mesh splits it, and the coordinate of the rank in the mesh. (Source: `_api.py`, `_dtensor_spec.py`
and `placement_types.py` of torch.distributed.tensor, and `device_mesh.py`, in torch 2.4 to 2.13.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.conversion.model_space.lazy_tensors import join_boxes, view_stored
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.dist_checkpointing.dtensor_layout import AxisSplit, compute_shard
from megatron.core.dist_checkpointing.mapping import LazyTensor, Shape
from megatron.core.safe_files import FileTensor, safe_open, schema
from megatron.core.safe_files.safe_globals import Placeholder

# Each tensor has a position in the mesh, which may be shared: a long one would be read many times.
_MAX_MESH_DIMS = 16
_COORDINATE = schema.sequence(schema.integer(0, 2**20), _MAX_MESH_DIMS)
_DIM = schema.integer(0, schema.MAX_RANK)
_FACTOR = schema.integer(1, 2**20)
_NAMED = schema.mapping(schema.anything, keys=schema.key)


@dataclass(frozen=True)
class DTensorShard:
    """The part of a global tensor that a rank has saved."""

    local: LazyTensor
    """The elements of the rank."""
    shape: Shape
    """The shape of the global tensor."""
    coordinate: Shape
    """The position of the rank in the mesh."""
    splits: list[AxisSplit]
    """How each dimension of the mesh splits the tensor."""


def read_named(path: Path) -> dict[str, Any]:
    """Return a dictionary of torch.save with the shards of a rank by name."""
    content: dict[str, Any] = _NAMED(safe_open(path), str(path))
    return content


def is_shard(value: Any) -> bool:
    """Return whether a value in a file is a DTensor."""
    return isinstance(value, Placeholder) and type(value).__qualname__ == "DTensor"


def join_named(files: Sequence[Mapping[str, Any]], location: str) -> dict[str, LazyTensor]:
    """Return the tensors by name, of which each file has the values of one rank.

    Raises CheckpointError if the files have different names, or lack a part of a tensor.
    """
    names = files[0].keys()
    for rank, file in enumerate(files):
        differing = sorted(names ^ file.keys())
        if not differing:
            continue
        name = differing[0]
        lacking, having = (rank, 0) if name in names else (0, rank)
        raise CheckpointError(f"{location}: rank {lacking} lacks {name}, which rank {having} has")

    tensors = {}
    for name in names:
        values = [file[name] for file in files]
        tensors[name] = join_shards(values, f"{location}: {name}")
    return tensors


def join_shards(values: Sequence[Any], location: str) -> LazyTensor:
    """Return the tensor of which `values` are those of the ranks, in order.

    A plain tensor is equal on all ranks, so it is that of the first one. Raises CheckpointError if
    a part is missing, or if the parts are of different tensors.
    """
    if isinstance(values[0], FileTensor | torch.Tensor):
        return view_stored(values[0])

    shards = [_read_shard(value, location) for value in values]
    first = shards[0]
    mesh_shape = _find_mesh_shape(shards, location)

    # Find the box of each rank. Those of replicas are equal, and read once.
    boxes: dict[Shape, LazyTensor] = {}
    for rank, shard in enumerate(shards):
        offset, shape = compute_shard(
            first.shape,
            mesh_shape,
            shard.coordinate,
            first.splits,
        )
        is_same = (shard.shape, shard.splits) == (first.shape, first.splits)
        if not is_same or shard.local.shape != shape:
            raise CheckpointError(
                f"{location}: rank {rank} has shape {shard.local.shape} of {shard.shape} at "
                f"{shard.coordinate} in the mesh {mesh_shape}, but {shape} of {first.shape} is "
                "expected: the files are of different saves, or some are missing"
            )
        if 0 not in shape:
            boxes.setdefault(offset, shard.local)

    # Boxes with different offsets do not overlap, so their sizes tell whether one is missing.
    num_elements = sum(math.prod(box.shape) for box in boxes.values())
    if num_elements != math.prod(first.shape) or not boxes:
        raise CheckpointError(
            f"{location}: the files have {num_elements} of {math.prod(first.shape)} elements"
        )
    return join_boxes(list(boxes.items()), first.shape)


def _find_mesh_shape(shards: Sequence[DTensorShard], location: str) -> list[int]:
    """Return the shape of the mesh, which has the coordinates of all ranks."""
    first = shards[0]
    mesh_shape = [1] * len(first.coordinate)
    for rank, shard in enumerate(shards):
        if len(shard.coordinate) != len(mesh_shape):
            raise CheckpointError(
                f"{location}: rank {rank} is at {shard.coordinate} in its mesh, rank 0 at "
                f"{first.coordinate}: the files are of different saves"
            )
        for dim, position in enumerate(shard.coordinate):
            mesh_shape[dim] = max(mesh_shape[dim], 1 + position)
    return mesh_shape


def _read_shard(value: Any, location: str) -> DTensorShard:
    """Return the part that a pickled DTensor contains.

    Raises CheckpointError for anything else, and for attributes that do not fit together.
    """
    # The elements
    content = _read_fields(value, ("DTensor",), location)
    local = content.get("_local_tensor")
    if not isinstance(local, FileTensor | torch.Tensor):
        schema.refuse(f"{location}: its local tensor", local, "a tensor")

    # The global shape
    spec = _read_fields(content.get("_spec"), ("DTensorSpec",), f"{location}: its layout")
    meta = spec.get("tensor_meta")
    shape = meta.args[0] if isinstance(meta, Placeholder) and meta.args else None
    shape = schema.tensor_shape(shape, f"{location}: its shape")

    # The position in the mesh
    mesh = _read_fields(spec.get("mesh"), ("DeviceMesh",), f"{location}: its mesh")
    coordinate = mesh.get("_coordinate_on_dim")
    coordinate = tuple(_COORDINATE(coordinate, f"{location}: its coordinate"))

    # The splits
    placements = spec.get("placements")
    if not isinstance(placements, tuple) or len(placements) != len(coordinate):
        requirement = f"one per dimension of the mesh, {len(coordinate)}"
        schema.refuse(f"{location}: placements", placements, requirement)
    splits = []
    for placement in placements:
        splits.append(_read_split(placement, len(shape), location))
    return DTensorShard(view_stored(local), tuple(shape), coordinate, splits)


def _read_split(placement: Any, num_axes: int, location: str) -> AxisSplit:
    """Return how a placement splits a tensor of `num_axes`.

    Raises CheckpointError for placements that are neither a shard nor a replica.
    """
    location = f"{location}: a placement"
    if isinstance(placement, Placeholder) and type(placement).__qualname__ == "Replicate":
        return AxisSplit(None)
    fields = _read_fields(placement, ("Shard", "_StridedShard"), location)

    dim = _DIM(fields.get("dim"), location)
    if dim >= num_axes:
        schema.refuse(location, dim, f"one of {num_axes} axes")
    split_factor = _FACTOR(fields.get("split_factor", 1), location)
    return AxisSplit(dim, split_factor)


def _read_fields(value: Any, classes: Sequence[str], location: str) -> Mapping[str, Any]:
    """Return the attributes of an object of one of these classes of torch.

    Raises CheckpointError for any other value.
    """
    is_instance = isinstance(value, Placeholder) and type(value).__qualname__ in classes
    state = value.state if is_instance else None
    # A class with slots has the attributes in its dictionary, if any, and those in slots.
    if isinstance(state, tuple) and len(state) == 2 and state[0] is None:
        state = state[1]
    if not isinstance(state, dict):
        schema.refuse(location, value, f"a {' or '.join(classes)} of torch.distributed.tensor")
    return state
