"""The empty entries without which Megatron-core does not load a checkpoint.

Its modules ask for an `_extra_state` each (the scales of FP8 training), and its reader stops at the first one that is
not there, even though all of them are empty in other precisions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

from megatron.core.dist_checkpointing.mapping import ShardedObject

# Weight -> the modules beside it that have a state. Transformer Engine's attention and norms have one, Megatron-core's
# own do not ask for it.
_LINEAR = re.compile(r"(decoder\.layers\.\d+\.(?:self_attention\.linear_(?:qkv|proj)|mlp\.linear_fc[12]))\.weight")
_ATTENTION = re.compile(r"(decoder\.layers\.\d+\.self_attention)\.linear_proj\.weight")
_NORM = re.compile(r"(decoder\.final_layernorm|decoder\.layers\.\d+\.self_attention\.[qk]_layernorm)\.weight")

_EMPTY = torch.empty(0, dtype=torch.uint8)  # how norms say it; the others say None


def extra_states(keys: Iterable[str]) -> dict[str, ShardedObject]:
    """One entry per module, of the model whose weights are among `keys`."""
    entries: dict[str, ShardedObject] = {}
    for key in keys:
        if match := _LINEAR.fullmatch(key):
            _add(entries, match[1], None)
        if match := _ATTENTION.fullmatch(key):
            _add(entries, f"{match[1]}.core_attention", None)
        if match := _NORM.fullmatch(key):
            _add(entries, match[1], _EMPTY)
    return entries


def is_extra_state(key: str) -> bool:
    return "._extra_state/shard_" in key


def _add(entries: dict[str, ShardedObject], module: str, value: torch.Tensor | None) -> None:
    key = f"{module}._extra_state/shard_0_1"
    entries[key] = ShardedObject(key, value)
