"""What a checkpoint of a run holds, where it goes, and what a load takes from it.

Weights, optimizer and generators are boxes and objects in model space; everything else is in `common`: arguments,
iteration, schedules. The tracker moves when all of it is durable.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from megatron.conversion.megatron_lm.args import common_state as megatron_common_state
from megatron.conversion.megatron_lm.objects import extra_states
from megatron.conversion.megatron_lm.objects import rng_key as megatron_rng_key
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from megatron.core.tensor_parallel import padded_vocab_size
from megatron.training.checkpoint.args import make_namespace
from megatron.training.checkpoint.retention import VALIDATION_LOSS
from megatron.training.checkpoint.rewrite import rewriting_as_legacy
from megatron.training.checkpoint.rng_state import get_rng_state, megatron_rng_state, rng_key
from megatron.training.run import Run

logger = logging.getLogger(__name__)


def save_checkpoint(run: Run, root: str, ckpt_format: str, since: float | None = None) -> None:
    """Save the run under `root` and move the tracker. Training waits since `since` (time.perf_counter). Collective."""
    config = run.config.checkpoint
    model = model_state(run)
    state: ShardedStateDict = {**model, **extra_states(model)}
    if not config.no_save_optim:
        state |= run.optimizer.sharded_state_dict(model)
    if not config.no_save_rng:
        state |= _generators(run)
    rewrite = rewriting_as_legacy(run.config) if ckpt_format == "torch" else None
    run.saver.save(state, Path(root), run.state.iteration, common_state(run), rewrite, since)


def _generators(run: Run) -> ShardedStateDict:
    """Those of this rank for us, those of the model-parallel rank for Megatron-LM."""
    ps, ours = run.ps, get_rng_state(run.rng)
    generators: ShardedStateDict = {rng_key(ps): ShardedObject(rng_key(ps), ours)}
    if ps.dp_cp.rank == 0:
        key = megatron_rng_key((ps.tp.rank, ps.pp.rank), run.config.parallel)
        generators[key] = ShardedObject(key, megatron_rng_state(ours, ps, run.config.training.seed))
    return generators


def model_state(run: Run) -> ShardedStateDict:
    """The weights of all chunks."""
    state: ShardedStateDict = {}
    for chunk in run.chunks:
        state |= chunk.sharded_state_dict()
    return state


def common_state(run: Run) -> dict[str, Any]:
    """What is the same on every rank, in Megatron-LM's form."""
    config, state = run.config, run.state
    derived = {
        **vars(state),
        "padded_vocab_size": padded_vocab_size(
            run.vocab_size, config.tokenizer.make_vocab_size_divisible_by, run.ps.tp.size
        ),
        "model_vocab_size": run.vocab_size,
        "world_size": run.ps.world_size,
        "data_parallel_size": run.ps.dp.size,
        "transformer_pipeline_model_parallel_size": run.ps.pp.size,
        "params_dtype": config.model.params_dtype,
        "skipped_train_samples": 0,
        "train_data_fingerprint": run.train_data_fingerprint,
    }
    common = megatron_common_state(make_namespace(config.flags(), derived), state)
    if not config.checkpoint.no_save_optim:
        common["optimizer"] = run.optimizer.state_dict()
        common["opt_param_scheduler"] = run.scheduler.state_dict()
    if run.validated is not None and run.validated[0] == state.iteration:
        common[VALIDATION_LOSS] = run.validated[1]
    return common
