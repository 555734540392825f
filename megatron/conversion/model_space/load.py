"""Filling a rank's boxes from any checkpoint."""

from __future__ import annotations

import difflib

from megatron.conversion.model_space.source import Source
from megatron.core.dist_checkpointing import CheckpointError, ShardedStateDict, ShardedTensor

_SHOWN = 20


def load_from_source(state: ShardedStateDict, source: Source) -> None:
    """Fill the tensors of `state` in place, box by box, converting dtypes.

    Raises CheckpointError that lists every key that `source` lacks (with near matches) or has in another shape, before
    anything is changed.
    """
    tensors = [entry for entry in state.values() if isinstance(entry, ShardedTensor)]
    problems = []
    for entry in tensors:
        info = source.tensors.get(entry.key)
        if info is None:
            near = difflib.get_close_matches(entry.key, list(source.tensors), 1)
            problems.append(f"{entry.key} is missing" + (f" (there is {near[0]})" if near else ""))
        elif info.shape != entry.global_shape:
            problems.append(f"{entry.key} has shape {info.shape}, wanted is {entry.global_shape}")
    if problems:
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointError(f"{source.description}:\n  " + "\n  ".join(problems[:_SHOWN]) + more)
    for entry in tensors:
        for box in entry.boxes:
            box.tensor.copy_(source.read(entry.key, box.offset, box.shape))
