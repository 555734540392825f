"""The contents of a run's checkpoint: tensors and objects in model space, and `common`.

Weights, optimizer and generators are tensors and objects whose names do not depend on the layout.
Everything else is in `common`: arguments, iteration, schedules.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.dist_checkpointing.files import COMMON_STATE
from megatron.core.dist_checkpointing.generators import (
    check_generator_states,
    check_torch_state,
    get_generator_states,
)
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict, ShardedTensor
from megatron.core.dist_checkpointing.saving.retention import VALIDATION_LOSS
from megatron.core.parallel_config import ParallelConfig
from megatron.core.parallel_state import ParallelState
from megatron.core.run_checkpoint.checks import COMMON
from megatron.core.run_checkpoint.common_state import (
    add_loader_defaults,
    build_initial_cuda_state,
    split_by_expert_optimizer,
)
from megatron.core.run_checkpoint.common_state import build_common_state as megatron_common_state
from megatron.core.run_checkpoint.common_state import rng_key as megatron_rng_key
from megatron.core.run_checkpoint.keys import build_extra_states
from megatron.core.safe_files import schema
from megatron.core.tensor_parallel import TensorParallelRng, compute_padded_vocab_size
from megatron.core.wings import resolve
from megatron.training.run import KnownState, Run

_GET_FP8_STATE = "megatron.training.checkpoint.fp8_state:get_fp8_state"

_SEPARATE_ADAPTERS = "megatron.training.adapters.base_model:separate_adapters"

CommonState = Callable[[], dict[str, Any]]

REFERENCE_MARGINS = "reference_margins/shard_0_1"  # of --dpo


def get_state_to_save(run: Run, common: CommonState = dict) -> ShardedStateDict:
    """Return the tensors and objects that this rank contributes to a checkpoint.

    `common` returns the common state, in the background. Releases of Megatron-LM from 0.19 on store
    it as an object instead of `common.pt`, so it is one of the objects, too.
    """
    for chunk in run.chunks:
        chunk.finish_param_sync()
    known_state = run.known_state
    # Boxes are views: entries of tensors that have moved refer to freed memory.
    if known_state is None or known_state.addresses != _list_addresses(run, known_state.model):
        # Kept, because a background save must begin within milliseconds.
        run.known_state = known_state = _describe_tensors(run)
    state: ShardedStateDict = dict(known_state.entries)
    if run.config.model.low_precision is not None:
        state |= resolve(_GET_FP8_STATE)(run.chunks, run.ps.ep, known_state.model)
    if not run.config.checkpoint.no_save_rng:
        state |= _get_generators(run)
    if run.config.data.dpo:
        state[REFERENCE_MARGINS] = ShardedObject(
            REFERENCE_MARGINS, run.reference_margins, is_constant=True
        )
    state[COMMON_STATE] = ShardedObject(COMMON_STATE, common, is_constant=True, is_deferred=True)
    return state


def _list_addresses(run: Run, model: ShardedStateDict) -> list[int]:
    """Return the addresses of all weights and optimizer tensors."""
    addresses = []
    for entry in model.values():
        assert isinstance(entry, ShardedTensor) and entry.local is not None
        addresses.append(entry.local.data_ptr())
    for shard in run.optimizer.shards:
        addresses += [tensor.data_ptr() for tensor in shard.tensors.values()]
    return addresses


def _describe_tensors(run: Run) -> KnownState:
    """Return all entries of a checkpoint that are the same for every save."""
    config = run.config.checkpoint
    model = get_model_state(run)
    # Weights, and the extra states of their modules. fp8 scales replace some of them.
    entries: ShardedStateDict = dict(run.optimizer.weights(model))
    entries |= build_extra_states(model, run.config.model.experts)
    entries |= run.optimizer.average_state(model)
    # Training state; a checkpoint without it can still be loaded with --finetune.
    if not config.no_save_optim:
        entries |= run.optimizer.sharded_state_dict(model)
    return KnownState(_list_addresses(run, model), model, entries)


def get_model_state(run: Run) -> ShardedStateDict:
    """Return the weights of all chunks of this rank; with --lora-rank, those of the adapters."""
    state: ShardedStateDict = {}
    for chunk in run.chunks:
        state |= chunk.sharded_state_dict()
    if run.config.lora.lora_rank is not None:
        state, _ = resolve(_SEPARATE_ADAPTERS)(state)
    return state


def _get_generators(run: Run) -> ShardedStateDict:
    """Return the states of this rank's random number generators, and Megatron-LM's form of them.

    Megatron-LM stores one state for each model-parallel rank.
    """
    ps = run.ps
    rng_state = get_rng_state(run.rng)
    # One entry per rank: dropout differs between data-parallel ranks.
    generators: ShardedStateDict = {
        rng_key(ps): ShardedObject(rng_key(ps), rng_state, is_constant=True)
    }
    # The other data-parallel ranks have the same key, which one rank writes.
    if ps.dp_cp.rank == 0:
        key = megatron_rng_key((ps.tp.rank, ps.pp.rank), run.config.parallel)
        megatron_state = megatron_rng_state(rng_state, ps, run.config.training.seed)
        generators[key] = ShardedObject(key, megatron_state, is_constant=True)
    return generators


def start_common_state(run: Run) -> CommonState:
    """Begin to collect the common state of this moment.

    Returns a function that waits for the device and returns the state, in any thread.
    """
    config = run.config
    state = run.state
    # Copy everything on the host now, because training continues before `finish` is called.
    padded_vocab_size = compute_padded_vocab_size(
        run.vocab_size, config.tokenizer.make_vocab_size_divisible_by, run.ps.tp.size
    )
    derived = {
        **vars(state),
        "padded_vocab_size": padded_vocab_size,
        "model_vocab_size": run.vocab_size,
        "world_size": run.ps.world_size,
        "data_parallel_size": run.ps.dp.size,
        "transformer_pipeline_model_parallel_size": run.ps.pp.size,
        "params_dtype": config.model.params_dtype,
        "skipped_train_samples": 0,
        "train_data_fingerprint": run.train_data_fingerprint,
        "train_token_digest": run.train_token_digest,
        "end_of_document": run.end_of_document,
        "lora_base_model": run.base_model and tuple(run.base_model),
    }
    common = megatron_common_state(make_namespace(config.flags(), derived), state)
    flags = config.flags()
    scheduler = run.scheduler.state_dict()
    finish_optimizer = None
    if not config.checkpoint.no_save_optim:
        finish_optimizer = run.optimizer.start_state_dict()
    loss = get_validation_loss(run)

    # The optimizer's step count may still be on its way from the device.
    @functools.cache
    def finish() -> dict[str, Any]:
        if finish_optimizer is not None:
            common["optimizer"] = split_by_expert_optimizer(finish_optimizer(), flags)
            common["opt_param_scheduler"] = scheduler
        if loss is not None:
            common[VALIDATION_LOSS] = loss
        # Loads apply this schema, so a save must fail rather than write an unloadable checkpoint.
        return COMMON(common, "the state of the run")

    return finish


def get_validation_loss(run: Run) -> float | None:
    """Return the validation loss of the present iteration, None if it was not measured."""
    if run.validated is None or run.validated[0] != run.state.iteration:
        return None
    return run.validated[1]


def make_namespace(flags: Mapping[str, Any], derived: Mapping[str, Any]) -> argparse.Namespace:
    """Return all flags and derived values under Megatron-LM's attribute names.

    Megatron-LM's tools and other readers look for these names.
    """
    # Later entries override earlier ones: derived values win.
    args = {**add_loader_defaults(flags), "layernorm_epsilon": flags["norm_epsilon"], **derived}
    if flags["null_tokenizer_eod_id"] is None:
        if flags["tokenizer_type"] == "NullTokenizer":
            # Store a size that counts the end-of-document token, as Megatron-LM since 0.19 does:
            # converters of other projects cut the embedding at `vocab_size` rows.
            end_of_document = flags["vocab_size"]
            args["null_tokenizer_eod_id"] = end_of_document
            args["vocab_size"] = derived.get("model_vocab_size", end_of_document + 1)
        else:
            # None would mean the last token of --vocab-size: see `stored_args`.
            del args["null_tokenizer_eod_id"]
    return argparse.Namespace(**args)


# ---- Random number generators ----
#
# At the same layout a run continues with the same numbers, bit by bit. Another layout has other
# generators: every rank is then seeded again as a function of seed, iteration and its coordinates,
# so that such a run can be repeated, too.

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
