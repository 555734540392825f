"""Random number generators as Megatron-LM stores them: where they belong, and their state at the start of a run."""

from __future__ import annotations

import random
import struct
from typing import Any

import numpy as np
import torch

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
