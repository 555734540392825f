"""Foreign tensors, which the model does not have, of the ranks of a legacy checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from megatron.conversion.megatron_lm.legacy_files import MegatronRank
from megatron.conversion.model_space.foreign import StoredTensor, read_stored
from megatron.conversion.model_space.pieces import is_bitwise_equal
from megatron.conversion.options import ForeignSplit
from megatron.core.dist_checkpointing import CheckpointError, Shape
from megatron.core.dist_checkpointing.mapping import cut_rows

_LAYER = re.compile(r"((?:.*\.)?decoder\.layers\.)(\d{1,6})(\..+)")
_COMPARED_BYTES = 16 << 20


@dataclass(frozen=True)
class ForeignPart:
    """A tensor in the model of a rank that is not one of its parameters."""

    rank: MegatronRank
    folder: str
    layers: range  # of the chunk
    local_name: str  # with the chunk's layer numbers
    tensor: StoredTensor

    @property
    def name(self) -> str:
        """Return the name with the number of the layer in the model.

        Raises CheckpointError for a layer that the chunk does not have.
        """
        match = _LAYER.fullmatch(self.local_name)
        if match is None:
            return self.local_name
        before, local_layer, after = match.groups()
        index = int(local_layer)
        if index >= len(self.layers):
            raise CheckpointError(
                f"--keep-foreign: {self.folder} has {self.local_name}, but the arguments give its "
                f"chunk {len(self.layers)} layers"
            )
        return f"{before}{self.layers[index]}{after}"


@dataclass(frozen=True)
class JoinedTensor:
    """A tensor whose parts on the tensor-parallel ranks are joined along an axis."""

    shards: tuple[StoredTensor, ...]
    axis: int

    @property
    def dtype(self) -> torch.dtype:
        return self.shards[0].dtype

    @property
    def shape(self) -> Shape:
        shape = list(self.shards[0].shape)
        if len(self.shards) > 1:
            shape[self.axis] = sum(shard.shape[self.axis] for shard in self.shards)
        return tuple(shape)

    def read(self, offset: Shape, shape: Shape) -> torch.Tensor:
        """Return the box at `offset` of `shape`."""
        if len(self.shards) == 1:
            return read_stored(self.shards[0], offset, shape)

        # Read the overlap of the box with each part. Only their ranges along the axis differ.
        axis = self.axis
        box_start = offset[axis]
        box_stop = box_start + shape[axis]
        blocks = []
        first = 0  # index of the part's first element along the axis
        for shard in self.shards:
            extent = shard.shape[axis]
            start = max(box_start, first)
            stop = min(box_stop, first + extent)
            if start < stop:
                part_offset = _replace_axis(offset, axis, start - first)
                part_shape = _replace_axis(shape, axis, stop - start)
                block = read_stored(shard, part_offset, part_shape)
                blocks.append(block)
            first += extent
        if not blocks:
            return torch.empty(shape, dtype=self.dtype)
        return torch.cat(blocks, axis)


def _replace_axis(values: Shape, axis: int, value: int) -> Shape:
    """Return an offset or a shape with another value along an axis."""
    return (*values[:axis], value, *values[axis + 1 :])


def join_foreign(
    rank_tensors: Iterable[ForeignPart], tp_size: int, splits: Sequence[ForeignSplit]
) -> dict[str, JoinedTensor]:
    """Return the foreign tensors of all ranks by name.

    Tensor-parallel ranks have equal tensors, or those of `splits` are joined along an axis. All
    pipeline stages and expert-parallel ranks with a tensor have the same. Raises CheckpointError
    otherwise, and for a split of a name that no tensor has.
    """
    by_name: dict[str, list[ForeignPart]] = {}
    for rank_tensor in rank_tensors:
        by_name.setdefault(rank_tensor.name, []).append(rank_tensor)

    for split in splits:
        if not any(split.fits(name) for name in by_name):
            raise CheckpointError(
                f"--foreign-split {split.name}={split.axis}: no rank has such a tensor in addition "
                "to the model's"
            )

    result = {}
    for name, members in by_name.items():
        axes = [split.axis for split in splits if split.fits(name)]
        members = _select_one_per_rank(name, members, tp_size)
        if axes:
            result[name] = _join_along_axis(name, members, axes[0])
        else:
            result[name] = _take_equal(name, members)
    return result


def _select_one_per_rank(
    name: str, members: Sequence[ForeignPart], tp_size: int
) -> list[ForeignPart]:
    """Return one part per tensor-parallel rank. Raises CheckpointError if its copies differ."""
    by_rank: dict[int, ForeignPart] = {}
    for member in members:
        representative = by_rank.setdefault(member.rank.tp, member)
        if not _is_equal(representative.tensor, member.tensor):
            raise CheckpointError(
                f"--keep-foreign: {name} of {representative.folder} differs from that of "
                f"{member.folder}: tensors that expert-parallel ranks split, or that pipeline "
                "stages have values of their own for, are not supported; save the checkpoint with "
                "Megatron-LM as torch_dist, or drop the flag to leave it out"
            )
    if len(by_rank) < tp_size:
        raise CheckpointError(
            f"--keep-foreign: {len(by_rank)} of {tp_size} tensor-parallel ranks have {name} "
            f"(e.g. {members[0].folder}): the checkpoint is incomplete, or drop the flag"
        )
    return [by_rank[tp] for tp in range(tp_size)]


def _take_equal(name: str, members: Sequence[ForeignPart]) -> JoinedTensor:
    """Return the tensor that all ranks have. Raises CheckpointError if theirs differ."""
    first = members[0]
    for member in members[1:]:
        if not _is_equal(first.tensor, member.tensor):
            raise CheckpointError(
                f"--keep-foreign: {name} of {first.folder} differs from that of "
                f"{member.folder}, so {len(members)} tensor-parallel ranks split it: give "
                f"--foreign-split {name}=AXIS, or drop the flag to leave it out"
            )
    return JoinedTensor((first.tensor,), 0)


def _join_along_axis(name: str, members: Sequence[ForeignPart], axis: int) -> JoinedTensor:
    """Join the tensors of all ranks. Raises CheckpointError if their other axes differ."""
    first = members[0]
    for member in members:
        tensor = member.tensor
        fits = (
            tensor.dtype == first.tensor.dtype
            and axis < len(tensor.shape)
            and _remove_axis(tensor.shape, axis) == _remove_axis(first.tensor.shape, axis)
        )
        if not fits:
            raise CheckpointError(
                f"--foreign-split {name}={axis}: {member.folder} has {tensor.dtype} of shape "
                f"{list(tensor.shape)}, which cannot be joined along axis {axis} with "
                f"{first.tensor.dtype} of shape {list(first.tensor.shape)} of {first.folder}"
            )
    return JoinedTensor(tuple(member.tensor for member in members), axis)


def _remove_axis(shape: Shape, axis: int) -> Shape:
    """Return a shape without an axis."""
    return (*shape[:axis], *shape[axis + 1 :])


def _is_equal(first: StoredTensor, second: StoredTensor) -> bool:
    """Return whether tensors are equal bitwise; a few rows are read at a time."""
    if first is second:
        return True
    shape = tuple(first.shape)
    if shape != tuple(second.shape) or first.dtype != second.dtype:
        return False
    for offset, extent in cut_rows(shape, first.dtype.itemsize, _COMPARED_BYTES):
        rows_of_first = read_stored(first, offset, extent)
        rows_of_second = read_stored(second, offset, extent)
        if not is_bitwise_equal(rows_of_first, rows_of_second):
            return False
    return True
