"""The state of all random number generators of a rank, saved and restored.

At the same layout a run continues with the same numbers, bit by bit. Another layout has other generators: every rank is
then seeded anew as a function of seed, iteration and place, so that such a run, too, can be repeated.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from megatron.conversion.megatron_lm.args import initial_cuda_state
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.dist_checkpointing.format.schema import integer
from megatron.core.parallel_state import ParallelState
from megatron.core.tensor_parallel import TensorParallelRng

_TRACKER_STATE = "model-parallel-rng"


def rng_key(ps: ParallelState) -> str:
    """The key of this rank's state in a checkpoint: its place and the layout, as (pp, tp, dp x cp)."""
    place = f"{ps.pp.rank}.{ps.tp.rank}.{ps.dp_cp.rank}"
    return f"rng_state/shard_{place}_{ps.pp.size}.{ps.tp.size}.{ps.dp_cp.size}"


def get_rng_state(rng: TensorParallelRng) -> dict[str, Any]:
    """All generators of this process, in Megatron-LM's form."""
    algorithm, keys, *rest = np.random.get_state(legacy=True)
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": (algorithm, np.asarray(keys).tolist(), *rest),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "rng_tracker_states": {_TRACKER_STATE: rng.get_state()},
    }


def megatron_rng_state(ours: dict[str, Any], ps: ParallelState, seed: int) -> list[dict[str, Any]]:
    """`ours` as Megatron-LM can restore it: it insists on CUDA generators. Without a GPU they are those of the seed."""
    state = initial_cuda_state(seed, ps.tp.rank, ps.pp.rank)
    state |= {name: ours[name] for name in ("random_rng_state", "np_rng_state", "torch_rng_state")}
    if ours["cuda_rng_state"] is not None:
        state["cuda_rng_state"] = ours["cuda_rng_state"]
        state["rng_tracker_states"] |= ours["rng_tracker_states"]
    return [state]


def set_rng_state(state: dict[str, Any], rng: TensorParallelRng) -> list[str]:
    """Restore the generators of this process; returns which of them do not fit and stay as they are.

    Those of a GPU (16 bytes) and of the CPU (5,056) cannot stand in for each other. Raises CheckpointError for a state
    that a generator refuses.
    """
    try:
        return _set_rng_state(state, rng)
    except Exception as error:  # Python, numpy and torch check what they are given, each with errors of its own
        raise CheckpointError(f"the state of the random number generators cannot be restored: {error}") from error


def _set_rng_state(state: dict[str, Any], rng: TensorParallelRng) -> list[str]:
    # The one thing that nobody checks: numpy would read outside of its memory.
    integer(0, 624)(state["np_rng_state"][2], "np_rng_state[2]")
    unfit = []
    version, words, gauss = state["random_rng_state"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(state["np_rng_state"]))
    torch.set_rng_state(state["torch_rng_state"])
    cuda = state["cuda_rng_state"]
    if (cuda is not None) != torch.cuda.is_available():
        unfit.append("of CUDA")
    elif cuda is not None:
        torch.cuda.set_rng_state(cuda)
    tracker = state["rng_tracker_states"].get(_TRACKER_STATE)
    if tracker is None or tracker.numel() != rng.get_state().numel():
        unfit.append("of the tensor-parallel regions")
    else:
        rng.set_state(tracker)
    return unfit
