"""The objects beside the tensors of Megatron-LM's checkpoints: generators, and the empty states of its modules."""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.parallel_state import ParallelConfig

_MODEL_PARALLEL, _EXPERT_PARALLEL, _PER_STAGE = 2718, 1024, 100  # how Megatron-LM spreads one seed over its ranks


def rng_key(rank: tuple[int, int], parallel: ParallelConfig) -> str:
    """The key in torch_dist of the generators of a model-parallel rank (tp, pp)."""
    tp, pp = rank
    return f"rng_state/shard_{pp}.{tp}_{parallel.pp_size}.{parallel.tp_size}"


def initial_rng_state(seed: int, tp: int, pp: int) -> list[dict[str, Any]]:
    """The generators of a rank in Megatron-LM's form, as its `--seed` sets them before any number is drawn."""
    base = seed + _PER_STAGE * pp
    host = {
        "random_rng_state": random.Random(base).getstate(),
        "np_rng_state": np.random.RandomState(base).get_state(),
        "torch_rng_state": torch.Generator().manual_seed(base).get_state(),
    }
    return [host | initial_cuda_state(seed, tp, pp)]


def initial_cuda_state(seed: int, tp: int, pp: int) -> dict[str, Any]:
    """The part of it that belongs to CUDA."""
    base = seed + _PER_STAGE * pp
    seeds = {
        "data-parallel-rng": base,
        "model-parallel-rng": base + _MODEL_PARALLEL + tp,
        "expert-parallel-rng": base + _EXPERT_PARALLEL + tp,
    }
    states = {name: _cuda_state(value) for name, value in seeds.items()}
    return {"cuda_rng_state": _cuda_state(base), "rng_tracker_states": states}


def _cuda_state(seed: int) -> torch.Tensor:
    """A CUDA generator (Philox) is a seed and an offset."""
    return torch.frombuffer(bytearray(struct.pack("<QQ", seed, 0)), dtype=torch.uint8)


# Megatron-core's modules ask for an `_extra_state` each (the scales of FP8 training), and its reader stops at the first
# one that is not there, even though all of them are empty in other precisions.

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
