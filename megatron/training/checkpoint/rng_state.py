"""Random number generators in a checkpoint.

At the same layout a run continues with the same numbers, bit by bit. Another layout has other
generators: every rank is then seeded again as a function of seed, iteration and its coordinates, so
that such a run can be repeated, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.dist_checkpointing.generators import (
    check_generator_states,
    check_torch_state,
    get_generator_states,
)
from megatron.core.parallel_config import ParallelConfig
from megatron.core.parallel_state import ParallelState
from megatron.core.run_checkpoint.megatron_rng_states import build_initial_cuda_state
from megatron.core.run_checkpoint.megatron_rng_states import rng_key as megatron_rng_key
from megatron.core.safe_files import schema
from megatron.core.tensor_parallel import TensorParallelRng

_TRACKER_STATE = "model-parallel-rng"
_OWN_STATE = "state_of_run"
"""Key of the state of this program's generators, by `rng_key`, in Megatron-LM's form of them, which
Megatron-LM ignores.
"""


def rng_key(ps: ParallelState) -> str:
    """Return the key of this rank's generators: its coordinates and the layout, (pp, tp, dp
    x cp).
    """
    coordinates = f"{ps.pp.rank}.{ps.tp.rank}.{ps.dp_cp.rank}"
    return f"rng_state/shard_{coordinates}_{ps.pp.size}.{ps.tp.size}.{ps.dp_cp.size}"


def get_rng_state(rng: TensorParallelRng) -> dict[str, Any]:
    """Return the states of all generators of this process, in Megatron-LM's form."""
    return {**get_generator_states(), "rng_tracker_states": {_TRACKER_STATE: rng.get_state()}}


def megatron_rng_state(
    rng_state: dict[str, Any], ps: ParallelState, seed: int
) -> list[dict[str, Any]]:
    """Return the state `rng_state` as Megatron-LM restores it.

    Megatron-LM requires the state of CUDA generators; without a GPU they are those of the seed.
    """
    # Generators that have no counterpart here (e.g. of experts) keep their initial state.
    state = build_initial_cuda_state(seed, ps.tp.rank, ps.pp.rank)
    for name in ("random_rng_state", "np_rng_state", "torch_rng_state"):
        state[name] = rng_state[name]
    if rng_state["cuda_rng_state"] is not None:
        state["cuda_rng_state"] = rng_state["cuda_rng_state"]
        state["rng_tracker_states"] |= rng_state["rng_tracker_states"]
    state[_OWN_STATE] = {rng_key(ps): rng_state}
    return [state]


def find_rng_key(
    ps: ParallelState, parallel: ParallelConfig, stored_states: Mapping[str, Any]
) -> str | None:
    """Return the key in `stored_states` of the generators of this rank, None if they are not there.

    Legacy files have those of one data-parallel rank, which several ranks do not restore.
    """
    key = rng_key(ps)
    if key not in stored_states and ps.dp_cp.size == 1:
        key = megatron_rng_key((ps.tp.rank, ps.pp.rank), parallel)
    return key if key in stored_states else None


def unpack_own_state(state: Any, ps: ParallelState) -> Any:
    """Return the state of this rank's generators from `state` or Megatron-LM's form of it.

    None if it is of another layout or program: other programs draw other numbers with it.
    """
    if not isinstance(state, list):
        return state
    if len(state) != 1 or not isinstance(state[0], Mapping):
        return None
    states_by_key = state[0].get(_OWN_STATE)
    return states_by_key.get(rng_key(ps)) if isinstance(states_by_key, Mapping) else None


def set_rng_state(state: Any, rng: TensorParallelRng) -> list[str]:
    """Restore the generators of this process; returns those that do not fit and are left alone.

    The states of a GPU (16 bytes) and of a CPU (5,056 bytes) are not interchangeable. Raises
    CheckpointError for an invalid state.
    """
    try:
        return _restore(state, rng)
    except CheckpointError as error:
        raise CheckpointError(
            f"the state of the random number generators cannot be restored: {error}. Continue "
            "with generators seeded again (--no-load-rng)"
        ) from error


def _restore(state: Any, rng: TensorParallelRng) -> list[str]:
    # Validate everything before anything changes.
    states = check_generator_states(state)
    if "rng_tracker_states" not in state:
        raise CheckpointError("it has no 'rng_tracker_states'")
    trackers = state["rng_tracker_states"]
    if not isinstance(trackers, Mapping):
        schema.refuse("rng_tracker_states", trackers, "a dictionary")
    tracker_state = None
    if trackers.get(_TRACKER_STATE) is not None:
        context = f"rng_tracker_states: {_TRACKER_STATE}"
        tracker_state = check_torch_state(trackers[_TRACKER_STATE], rng.device, context)

    # Restore.
    # Python, NumPy and the CPU generator fit every process.
    unfit = []
    states.restore()
    # The run has a GPU and the state has none, or the reverse.
    has_cuda = torch.cuda.is_available() or state["cuda_rng_state"] is not None
    if has_cuda and states.cuda is None:
        unfit.append("of CUDA")
    if tracker_state is None:
        unfit.append("of the tensor-parallel regions")
    else:
        rng.set_state(tracker_state)
    return unfit
