"""FP8 scales in a checkpoint.

They are stored under Megatron-core's keys of extra states, as tensors that can be read without
running code. Where the recipe or the layout differs, the scales start again, which costs a few
steps of precision.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict, ShardedTensor
from megatron.core.module import MegatronModule
from megatron.core.parallel_state import Axis
from megatron.core.transformer.layer_spec import FP8StateMixin
from megatron.core.transformer.transformer_config import TransformerConfig


def get_fp8_state(
    chunks: Sequence[MegatronModule], ep: Axis, model: ShardedStateDict
) -> dict[str, ShardedObject]:
    """Return the scales of this rank's modules.

    All ranks of a pipeline stage have the same, except for experts of other ranks.
    """
    state = {}
    for key, module in _find_modules(chunks, ep, model).items():
        scales = module.get_fp8_state()
        if scales is not None:
            state[key] = ShardedObject(key, scales)
    return state


def fp8_state_to_load(
    chunks: Sequence[MegatronModule],
    ep: Axis,
    model: ShardedStateDict,
    stored_keys: Collection[str],
) -> dict[str, ShardedObject]:
    """Return the objects to request from a checkpoint that contains the objects `stored_keys`."""
    keys = _find_modules(chunks, ep, model)
    return {key: ShardedObject(key, None) for key in keys if key in stored_keys}


def restore_fp8_state(
    chunks: Sequence[MegatronModule],
    ep: Axis,
    model: ShardedStateDict,
    objects: Mapping[str, Any],
    config: TransformerConfig,
) -> bool:
    """Restore the scales that fit. Returns whether there were any."""
    restored = False
    for key, module in _find_modules(chunks, ep, model).items():
        scales = objects.get(key)
        if isinstance(scales, dict) and module.restore_fp8_state(scales, config):
            restored = True
    return restored


def _find_modules(
    chunks: Sequence[MegatronModule], ep: Axis, model: ShardedStateDict
) -> dict[str, FP8StateMixin]:
    """Return the modules with fp8 state by the keys of that state, derived from their weights'."""
    modules = []
    for chunk in chunks:
        modules += [module for module in chunk.modules() if isinstance(module, FP8StateMixin)]
    if not modules:
        return {}
    # The identity of a weight connects its key, which is global, with its module, which is local.
    keys = {}
    for key, entry in model.items():
        if isinstance(entry, ShardedTensor):
            keys[id(entry.local)] = key
    modules_by_key: dict[str, FP8StateMixin] = {}
    for module in modules:
        key = keys[id(module.weight)]
        # Experts of other ranks are other shards of the same key.
        shard = f"{ep.rank}_{ep.size}" if ".experts." in key else "0_1"
        modules_by_key[f"{key.removesuffix('weight')}_extra_state/shard_{shard}"] = module
    return modules_by_key
