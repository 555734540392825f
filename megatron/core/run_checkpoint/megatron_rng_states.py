"""Random number generators in Megatron-LM's checkpoints."""

from __future__ import annotations

import random
import struct
from typing import Any

import numpy as np
import torch

from megatron.core.parallel_config import ParallelConfig

# Offsets by which Megatron-LM derives the seeds of its ranks from one seed.
_MODEL_PARALLEL = 2718
_EXPERT_PARALLEL = 1024
_PER_STAGE = 100


def rng_key(rank: tuple[int, int], parallel: ParallelConfig) -> str:
    """Return the key in torch_dist of the generators of a model-parallel rank (tp, pp)."""
    tp, pp = rank
    return f"rng_state/shard_{pp}.{tp}_{parallel.pp_size}.{parallel.tp_size}"


def build_initial_rng_state(
    seed: int, tp: int, pp: int, expert: tuple[int, int] | None = None
) -> list[dict[str, Any]]:
    """Return the generators of a rank in Megatron-LM's form, as its `--seed` initializes them.

    `expert` is the rank's (etp, ep), by default (tp, 0).
    """
    base = seed + _PER_STAGE * pp
    state = {
        "random_rng_state": random.Random(base).getstate(),
        "np_rng_state": np.random.RandomState(base).get_state(),
        "torch_rng_state": torch.Generator().manual_seed(base).get_state(),
    }
    return [state | build_initial_cuda_state(seed, tp, pp, expert)]


def build_initial_cuda_state(
    seed: int, tp: int, pp: int, expert: tuple[int, int] | None = None
) -> dict[str, Any]:
    """Return the CUDA part of `build_initial_rng_state`."""
    base = seed + _PER_STAGE * pp
    etp, ep = expert or (tp, 0)
    model_parallel = base + _MODEL_PARALLEL + tp
    expert_parallel = base + _EXPERT_PARALLEL + _PER_STAGE * ep + etp
    return {
        "cuda_rng_state": _build_philox_state(base),
        "rng_tracker_states": {
            "data-parallel-rng": _build_philox_state(base),
            "model-parallel-rng": _build_philox_state(model_parallel),
            "expert-parallel-rng": _build_philox_state(expert_parallel),
        },
    }


def _build_philox_state(seed: int) -> torch.Tensor:
    """Return the state of a CUDA generator (Philox): a seed and an offset, 16 bytes."""
    offset = 0  # numbers drawn so far
    packed_state = struct.pack("<QQ", seed, offset)
    return torch.frombuffer(bytearray(packed_state), dtype=torch.uint8)
