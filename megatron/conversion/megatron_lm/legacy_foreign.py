"""Foreign tensors, which the model does not have, of the ranks of a legacy checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from megatron.conversion.edit_options import ForeignSplit
from megatron.conversion.megatron_lm.legacy_files import MegatronRank
from megatron.conversion.model_space.foreign import StoredTensor, read_stored
from megatron.conversion.model_space.pieces import is_bitwise_equal
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
        """The name with the number of the layer in the model."""
        match = _LAYER.fullmatch(self.local_name)
        if match is None:
            return self.local_name
        before, layer, after = match.groups()
        if int(layer) >= len(self.layers):
            raise CheckpointError(
                f"--keep-foreign: {self.folder} has {self.local_name}, but the arguments give its "
                f"chunk {len(self.layers)} layers"
            )
        return f"{before}{self.layers[int(layer)]}{after}"


@dataclass(frozen=True)
class JoinedTensor:
    """A tensor whose parts on the tensor-parallel ranks are joined along an axis."""

    parts: tuple[StoredTensor, ...]
    axis: int

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def shape(self) -> Shape:
        shape = list(self.parts[0].shape)
        if len(self.parts) > 1:
            shape[self.axis] = sum(part.shape[self.axis] for part in self.parts)
        return tuple(shape)

    def read(self, offset: Shape, shape: Shape) -> torch.Tensor:
        """Return a box."""
        if len(self.parts) == 1:
            return read_stored(self.parts[0], offset, shape)
        axis = self.axis
        pieces = []
        first = 0  # index of the part's first element along the axis
        for part in self.parts:
            extent = part.shape[axis]
            # Overlap of the box and this part, relative to the part
            start = max(offset[axis], first) - first
            stop = min(offset[axis] + shape[axis], first + extent) - first
            if start < stop:
                part_offset = (*offset[:axis], start, *offset[axis + 1 :])
                part_shape = (*shape[:axis], stop - start, *shape[axis + 1 :])
                pieces.append(read_stored(part, part_offset, part_shape))
            first += extent
        if not pieces:
            return torch.empty(shape, dtype=self.dtype)
        return torch.cat(pieces, axis)


def join_foreign(
    parts: Iterable[ForeignPart], tp_size: int, splits: Sequence[ForeignSplit]
) -> dict[str, JoinedTensor]:
    """Return the foreign tensors of all ranks by name.

    Tensor-parallel ranks have equal tensors, or those of `splits` are joined along an axis. All
    pipeline stages and expert-parallel ranks with a tensor have the same. Raises CheckpointError
    otherwise, and for a split of a name that no tensor has.
    """
    by_name: dict[str, list[ForeignPart]] = {}
    for part in parts:
        by_name.setdefault(part.name, []).append(part)
    for split in splits:
        if not any(split.fits(name) for name in by_name):
            raise CheckpointError(
                f"--foreign-split {split.name}={split.axis}: no rank has such a tensor in addition "
                "to the model's"
            )
    result = {}
    for name, members in by_name.items():
        axes = [split.axis for split in splits if split.fits(name)]
        axis = axes[0] if axes else None
        result[name] = _join(name, members, tp_size, axis)
    return result


def _join(
    name: str, members: Sequence[ForeignPart], tp_size: int, axis: int | None
) -> JoinedTensor:
    """Return the tensor `name`, joined along `axis`; None if all ranks have the same."""
    # One part per tensor-parallel rank. Other copies must be equal.
    by_rank: dict[int, ForeignPart] = {}
    for member in members:
        known = by_rank.setdefault(member.rank.tp, member)
        if not _is_equal(known.tensor, member.tensor):
            raise CheckpointError(
                f"--keep-foreign: {name} of {known.folder} differs from that of {member.folder}: "
                "tensors that expert-parallel ranks split, or that pipeline stages have values of "
                "their own for, are not supported; save the checkpoint with Megatron-LM as "
                "torch_dist, or drop the flag to leave it out"
            )
    if len(by_rank) < tp_size:
        raise CheckpointError(
            f"--keep-foreign: {len(by_rank)} of {tp_size} tensor-parallel ranks have {name} "
            f"(e.g. {members[0].folder}): the checkpoint is incomplete, or drop the flag"
        )
    parts = [by_rank[tp] for tp in range(tp_size)]
    first = parts[0]
    if axis is None:
        for part in parts[1:]:
            if not _is_equal(first.tensor, part.tensor):
                raise CheckpointError(
                    f"--keep-foreign: {name} of {first.folder} differs from that of "
                    f"{part.folder}, so {tp_size} tensor-parallel ranks split it: give "
                    f"--foreign-split {name}=AXIS, or drop the flag to leave it out"
                )
        return JoinedTensor((first.tensor,), 0)

    # All axes but the one that is split must agree.
    for part in parts:
        fits = part.tensor.dtype == first.tensor.dtype and axis < len(part.tensor.shape)
        if not fits or _remove(part.tensor.shape, axis) != _remove(first.tensor.shape, axis):
            raise CheckpointError(
                f"--foreign-split {name}={axis}: {part.folder} has {part.tensor.dtype} of shape "
                f"{list(part.tensor.shape)}, which cannot be joined along axis {axis} with "
                f"{first.tensor.dtype} of shape {list(first.tensor.shape)} of {first.folder}"
            )
    return JoinedTensor(tuple(part.tensor for part in parts), axis)


def _remove(shape: Shape, axis: int) -> Shape:
    return (*shape[:axis], *shape[axis + 1 :])


def _is_equal(first: StoredTensor, second: StoredTensor) -> bool:
    """Return whether tensors are equal bitwise; a few rows are read at a time."""
    if first is second:
        return True
    shape = tuple(first.shape)
    if shape != tuple(second.shape) or first.dtype != second.dtype:
        return False
    for offset, extent in cut_rows(shape, first.dtype.itemsize, _COMPARED_BYTES):
        if not is_bitwise_equal(
            read_stored(first, offset, extent), read_stored(second, offset, extent)
        ):
            return False
    return True
