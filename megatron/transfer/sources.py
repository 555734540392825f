"""The tensors of a source of weights: memory of this rank, or a checkpoint of any format."""

from __future__ import annotations

from os import PathLike

from megatron.conversion.opening import open_checkpoint
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.object_path import path_of
from megatron.core.run_checkpoint.source import Source

WeightSource = ShardedStateDict | Source | str | PathLike[str]


def to_state(source: WeightSource | None) -> ShardedStateDict:
    """Return the tensors of a source by key; those of a checkpoint are read when copied."""
    if source is None:
        return {}
    if isinstance(source, dict):
        return source
    if isinstance(source, str | PathLike):
        source = open_checkpoint(path_of(source))
    return {key: ShardedTensor.lazy(key, tensor) for key, tensor in source.tensors.items()}
