"""What of a run is no tensor in model space: random number generators, and the scales of fp8.

At the same layout a run continues with the same numbers, bit by bit. Another layout has other generators: every rank is
then seeded anew as a function of seed, iteration and place, so that such a run, too, can be repeated. Scales of fp8
stand under Megatron-core's keys of extra states, as tensors that no code is needed to read; where recipe or place
differ they start anew, which costs a few steps of precision.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch

from megatron.conversion.megatron_lm.args import initial_cuda_state
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.dist_checkpointing.format.schema import integer
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict, ShardedTensor
from megatron.core.parallel_state import ParallelState
from megatron.core.tensor_parallel import TensorParallelRng
from megatron.core.transformer.layer_spec import Quantized
from megatron.training.run import Run

logger = logging.getLogger(__name__)

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


def fp8_state(run: Run, model: ShardedStateDict) -> dict[str, ShardedObject]:
    """What of the run's modules is to be stored; every rank of a stage has the same, but for the experts of others."""
    scales = {key: module.scales() for key, module in _quantized(run, model).items()}
    return {key: ShardedObject(key, state) for key, state in scales.items() if state is not None}


def fp8_state_to_load(run: Run, model: ShardedStateDict, stored: Collection[str]) -> dict[str, ShardedObject]:
    """What to ask a checkpoint with these objects for."""
    if run.config.model.fp8 is None:
        return {}
    return {key: ShardedObject(key, None) for key in _quantized(run, model) if key in stored}


def restore_fp8_state(
    run: Run, model: ShardedStateDict, objects: Mapping[str, Any], source_args: Mapping[str, Any]
) -> None:
    """Take what fits, and say in one line what does not."""
    config, modules = run.config.model, _quantized(run, model)
    restored = [
        isinstance(objects.get(key), dict) and module.restore_scales(objects[key], config)
        for key, module in modules.items()
    ]
    if any(restored):
        run.optimizer.requantize()
    if source_args.get("fp8") and not any(restored):
        now = f"of --fp8-recipe {config.fp8_recipe}" if config.fp8 is not None else "without fp8"
        logger.info(f"the scales of fp8 in the checkpoint are not used: this run is {now}, or of another layout")


def _quantized(run: Run, model: ShardedStateDict) -> dict[str, Quantized]:
    """The modules by the keys of their state, which follow from those of their weights."""
    keys = {id(entry.local): key for key, entry in model.items() if isinstance(entry, ShardedTensor)}
    found: dict[str, Quantized] = {}
    for chunk in run.chunks:
        for module in chunk.modules():
            if isinstance(module, Quantized):
                key = keys[id(module.weight)]
                ep = run.ps.ep if ".experts." in key else None
                place = f"{ep.rank}_{ep.size}" if ep is not None else "0_1"
                found[f"{key.removesuffix('weight')}_extra_state/shard_{place}"] = module
    return found
