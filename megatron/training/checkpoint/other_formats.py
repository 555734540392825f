"""Checkpoints of other programs as a start: Megatron-LM's (torch_dist, legacy), Hugging Face, DeepSpeed universal."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from megatron.conversion.model_space.load import load_from_source
from megatron.conversion.model_space.model import WORD_EMBEDDINGS
from megatron.conversion.model_space.source import Source
from megatron.conversion.open_checkpoint import Hints, NoCheckpointError, detect, locate, open_checkpoint
from megatron.core.dist_checkpointing import CheckpointError, ShardedStateDict, load_common
from megatron.training.checkpoint.args import check_same_model, stored_args
from megatron.training.checkpoint.directory import find_checkpoint
from megatron.training.config.options import CheckpointConfig
from megatron.training.launch.initialize import seed_everything
from megatron.training.run import Run, TrainState

logger = logging.getLogger(__name__)


def foreign_source(config: CheckpointConfig) -> Source | None:
    """What --load names, if another program wrote it; None for our own form, and where there is nothing.

    Raises ValueError for one that is damaged or unsupported.
    """
    if config.load is None:
        return None
    try:
        directory = locate(Path(config.load), config.ckpt_step)
        form = detect(directory)
    except (NoCheckpointError, CheckpointError):
        return None  # whoever looks for our own form explains what is wrong
    if form == "torch_dist" and load_common(directory).get("content_metadata", {}).get("non_homogeneous_layers"):
        return None
    return open_checkpoint(directory, hints=Hints(optimizer=not config.finetune))


def stored_vocab_size(config: CheckpointConfig, source: Source | None) -> int | None:
    """Tokens of the model in the checkpoint to load; None if there is none.

    Megatron-LM trains the rows that pad its vocabulary, and its softmax counts them: they are part of its model.
    """
    if source is not None:
        return source.tensors[WORD_EMBEDDINGS].shape[0]
    if config.load is None:
        return None
    try:
        found, _ = find_checkpoint(config.load, config.ckpt_step)
    except ValueError:
        return None  # the load itself will tell
    common = load_common(found) if found is not None else {}
    return vars(common["args"]).get("model_vocab_size") if "args" in common else None


def load_foreign(run: Run, source: Source, model: ShardedStateDict) -> None:
    """Continue another program's run; without its optimizer (Hugging Face) start at iteration 0 from its weights.

    `model` is the sharded state of the weights. Generators of random numbers are seeded anew: other programs use other
    streams. Collective.
    """
    config, start = run.config.checkpoint, time.perf_counter()
    stored, training = stored_args(source.args), source.training
    for note in check_same_model(run.config.flags(), stored, source.description):
        logger.info(note)
    has_optimizer = training is not None and training.param_groups is not None
    weights_only = config.finetune or training is None
    with_optimizer = has_optimizer and not (weights_only or config.no_load_optim)
    if not (has_optimizer or weights_only or config.no_load_optim):
        raise ValueError(
            f"{source.description} holds no optimizer: go on with a fresh one (--no-load-optim), or start a new run "
            "from its weights (--finetune)"
        )
    load_from_source(run.optimizer.state_to_load(model) if with_optimizer else model, source)
    if with_optimizer:
        assert training is not None
        state = {"optimizer": {"param_groups": training.param_groups}, "grad_scaler": training.grad_scaler or {}}
        run.optimizer.load_state_dict(state, model)
        if training.scheduler is not None:
            run.scheduler.load_state_dict(training.scheduler)
    else:
        run.optimizer.reload_model_params(model)
    if not weights_only:
        assert training is not None
        run.state = TrainState(
            training.iteration,
            training.consumed_train_samples,
            training.consumed_valid_samples,
            training.num_floating_point_operations_so_far,
        )
        seed_everything(run.config.training.seed, run.ps, run.rng, run.state.iteration)
    what = "weights and optimizer" if with_optimizer else "weights"
    run.loaded = source.description
    logger.info(
        f"loaded {what} of {source.description} at iteration {run.state.iteration} in "
        f"{time.perf_counter() - start:.2f} s"
    )
