"""Foreign tensors, which the model does not have, of the ranks of a legacy checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron.conversion.megatron_lm.legacy_files import MegatronRank
from megatron.conversion.model_space.lazy_tensors import are_equal, concatenate
from megatron.conversion.options import ForeignSplit
from megatron.core.dist_checkpointing import CheckpointError, Shape
from megatron.core.dist_checkpointing.mapping import LazyTensor

_LAYER = re.compile(r"((?:.*\.)?decoder\.layers\.)(\d{1,6})(\..+)")


@dataclass(frozen=True)
class ForeignPart:
    """A tensor in the model of a rank that is not one of its parameters."""

    rank: MegatronRank
    folder: str
    layers: range  # of the chunk
    local_name: str  # with the chunk's layer numbers
    tensor: LazyTensor

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


def join_foreign(
    rank_tensors: Iterable[ForeignPart], tp_size: int, splits: Sequence[ForeignSplit]
) -> dict[str, LazyTensor]:
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
        is_copy = member is not representative
        if is_copy and not are_equal(representative.tensor, member.tensor):
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


def _take_equal(name: str, members: Sequence[ForeignPart]) -> LazyTensor:
    """Return the tensor that all ranks have. Raises CheckpointError if theirs differ."""
    first = members[0]
    for member in members[1:]:
        if not are_equal(first.tensor, member.tensor):
            raise CheckpointError(
                f"--keep-foreign: {name} of {first.folder} differs from that of "
                f"{member.folder}, so {len(members)} tensor-parallel ranks split it: give "
                f"--foreign-split {name}=AXIS, or drop the flag to leave it out"
            )
    return first.tensor


def _join_along_axis(name: str, members: Sequence[ForeignPart], axis: int) -> LazyTensor:
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
    return concatenate([member.tensor for member in members], axis)


def _remove_axis(shape: Shape, axis: int) -> Shape:
    """Return a shape without an axis."""
    return (*shape[:axis], *shape[axis + 1 :])
