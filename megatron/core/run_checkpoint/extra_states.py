"""Empty extra states, which Megatron-core's reader requires.

Its modules request an `_extra_state` each (the scales of FP8 training), and its reader stops at the
first one that is missing, although all of them are empty in other precisions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

from megatron.core.dist_checkpointing.mapping import ShardedObject

# Modules that have an extra state, by their weight. Attention and norms have one in Transformer
# Engine; Megatron-core's own do not request it. Each expert of a layer is a module.
_STATEFUL = re.compile(
    r"((?:decoder\.layers\.\d+|mtp\.layers\.\d+\.transformer_layer)\."
    r"(?:self_attention\.linear_(?:qkv|proj|q_proj|(?:q|kv)_(?:down|up)_proj)"
    r"|mlp\.(?:shared_experts\.|experts\.experts\.)?linear_fc[12]"
    r"|(?:self_attention\.[qk]|input|pre_mlp)_layernorm)"
    r"|mtp\.layers\.\d+\.(?:enorm|hnorm|eh_proj|final_layernorm)"
    r"|decoder\.final_layernorm)\.weight"
)
_EMPTY_NORM_STATE = torch.empty(0, dtype=torch.uint8)  # of other modules it is None


def build_extra_states(keys: Iterable[str], experts: int = 0) -> dict[str, ShardedObject]:
    """Return an entry for each module of the model with these weights.

    `experts` is the number of experts per layer.
    """
    states: dict[str, ShardedObject] = {}

    def add(module: str, index: int, count: int, value: torch.Tensor | None) -> None:
        key = f"{module}._extra_state/shard_{index}_{count}"
        states[key] = ShardedObject(key, value, is_constant=True)

    for key in keys:
        match = _STATEFUL.fullmatch(key)
        if match is None:
            continue
        module = match[1]
        count = 1
        if ".experts.experts." in module:
            count = experts
        value = None
        if module.endswith("norm"):
            value = _EMPTY_NORM_STATE
        for index in range(count):
            add(module, index, count, value)
        if module.endswith("self_attention.linear_proj"):
            # Attention itself has an extra state, but no weight.
            add(module.replace("linear_proj", "core_attention"), 0, 1, None)
    return states


def is_extra_state(key: str) -> bool:
    """Return whether an object is the state that a module of Megatron-core keeps per module."""
    return "._extra_state/shard_" in key
