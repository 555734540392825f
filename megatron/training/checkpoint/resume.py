"""Where a run goes on: which checkpoint, decided once for all ranks, and what the run takes from it."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from megatron.conversion.megatron_lm.args import read_common
from megatron.conversion.megatron_lm.objects import is_extra_state
from megatron.conversion.model_space.load import load_from_source
from megatron.conversion.model_space.model import WORD_EMBEDDINGS
from megatron.conversion.model_space.source import Source, optimizer_key
from megatron.conversion.open_checkpoint import Found, Hints, find_checkpoint, open_found
from megatron.core.dist_checkpointing import load, read_metadata
from megatron.core.dist_checkpointing.format.schema import COUNT, number, record
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.training.checkpoint.args import check_same_model, stored_args
from megatron.training.checkpoint.checkpointing import model_state
from megatron.training.checkpoint.rng_state import rng_key, set_rng_state
from megatron.training.config.options import CheckpointConfig
from megatron.training.launch.initialize import seed_everything
from megatron.training.run import Run, TrainState

logger = logging.getLogger(__name__)


_POSITION = record({"iteration": COUNT, "num_floating_point_operations_so_far": number(0)})
_CONSUMED = record({"consumed_train_samples": COUNT, "consumed_valid_samples": COUNT})


class Start(NamedTuple):
    """The checkpoint that a run begins with."""

    directory: Path
    weights_only: bool
    source: Source | None  # of another program; None: our own


def find_start(config: CheckpointConfig) -> Start | None:
    """The checkpoint to go on from; None: from scratch, if that is what the flags mean. Collective.

    Rank 0 looks, so that a shared file system that lags cannot make the ranks disagree. ValueError for a --load without
    a checkpoint, unless it is the restart idiom: the same directory as --save, and nothing was saved yet.
    """
    answer = Coordination.of(None).at_coordinator(lambda: _prepare(config))
    if answer is None:
        return None
    found, weights_only = answer
    own = found.format == "torch_dist" and read_common(found.directory).get("content_metadata")
    if own and own.get("non_homogeneous_layers"):
        return Start(found.directory, weights_only, None)
    return Start(
        found.directory, weights_only, open_found(found, Hints(optimizer=not (weights_only or config.no_load_optim)))
    )


def _prepare(config: CheckpointConfig) -> tuple[Found, bool] | None:
    """On rank 0: what to load, and whether only its weights count."""
    found = None if config.load is None else find_checkpoint(config.load, config.ckpt_step)
    if found is not None:
        if found.note is not None:
            logger.warning(found.note)
        return found, config.finetune
    if config.pretrained_checkpoint is not None:
        found = find_checkpoint(config.pretrained_checkpoint)
        if found is None:
            raise ValueError(f"--pretrained-checkpoint {config.pretrained_checkpoint} holds no checkpoint")
        return found, True
    if config.load is None:
        return None
    if config.exit_on_missing_checkpoint:
        raise ValueError(f"--load {config.load} holds no checkpoint (--exit-on-missing-checkpoint)")
    if config.save is None or Path(config.save).resolve() != Path(config.load).resolve():
        _start_from_random_weights(config, Path(config.load))
    else:
        logger.info(f"{config.load} holds no checkpoint yet: starting from scratch")
    return None


def _start_from_random_weights(config: CheckpointConfig, directory: Path) -> None:
    """Job scripts for Megatron-LM name a --load that nothing was saved to yet; ValueError if a checkpoint is meant."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(
            f"--load {directory} holds no checkpoint, but it is not empty. Training would start from random weights; "
            "if that is meant, leave --load away"
        )
    meant = {"--finetune": config.finetune, "--ckpt-step": config.ckpt_step is not None}
    meant["--use-checkpoint-args"] = config.use_checkpoint_args
    said = [name for name, given in meant.items() if given]
    if said:
        raise ValueError(f"--load {directory} holds no checkpoint, which {' and '.join(said)} would need")
    logger.warning(
        f"NO CHECKPOINT: --load {directory} {'is empty' if directory.exists() else 'does not exist'}.\n"
        "   Training starts from RANDOM WEIGHTS, as Megatron-LM does.\n"
        "   If a checkpoint is meant, stop this run; --exit-on-missing-checkpoint makes it an error."
    )


def stored_vocab_size(start: Start | None) -> int | None:
    """Tokens of the model in the checkpoint to load; None if there is none.

    Megatron-LM trains the rows that pad its vocabulary, and its softmax counts them: they are part of its model.
    """
    if start is None:
        return None
    if start.source is not None:
        return start.source.tensors[WORD_EMBEDDINGS].shape[0]
    common = read_common(start.directory)
    return vars(common["args"]).get("model_vocab_size") if "args" in common else None


def load_checkpoint(run: Run, start: Start | None) -> None:
    """Continue where a checkpoint ended. Whatever layout wrote it: every rank reads the boxes it holds. Collective."""
    if start is None:
        return
    found, weights_only = start.directory, start.weights_only
    if not weights_only:
        run.saver.continue_from(found)
    if start.source is not None:
        load_foreign(run, start.source, weights_only, model_state(run))
        return
    config, began = run.config.checkpoint, time.perf_counter()
    common = read_common(found, verify=config.ckpt_verify)
    if "args" not in common:
        raise ValueError(f"{found} holds tensors, but not the arguments and the state of a training run")
    stored = stored_args(vars(common["args"]))
    for note in check_same_model(run.config.flags(), stored, str(found)):
        logger.info(note)
    model = model_state(run)
    with_optimizer = not (weights_only or config.no_load_optim)
    wanted = _optimizer_state(run, model, common, found) if with_optimizer else dict(model)
    in_files = read_metadata(found)
    if not (weights_only or config.no_load_rng) and rng_key(run.ps) in in_files.objects:
        wanted[rng_key(run.ps)] = ShardedObject(rng_key(run.ps), None)
    objects = load(
        wanted,
        found,
        strictness=config.dist_ckpt_strictness,
        skip=lambda key: _left_out(key, with_optimizer, in_files.tensors),
        verify=config.ckpt_verify,
        exchange_group=run.ps.dp.group if config.ckpt_fully_parallel_load else None,
    ).objects
    if with_optimizer:
        run.optimizer.load_state_dict(common["optimizer"], model)
        run.scheduler.load_state_dict(common["opt_param_scheduler"])
    else:
        run.optimizer.reload_model_params(model)
    if not weights_only:
        _take_position(run, common, stored)
        if not with_optimizer:
            run.scheduler.step(run.state.consumed_train_samples)
        _restore_generators(run, objects)
    run.loaded = str(found)
    logger.info(f"loaded {found} at iteration {run.state.iteration} in {time.perf_counter() - began:.2f} s")


def _optimizer_state(run: Run, model: ShardedStateDict, common: dict[str, Any], found: Path) -> ShardedStateDict:
    if "optimizer" not in common or "opt_param_scheduler" not in common:
        raise ValueError(
            f"{found} holds no optimizer: go on with a fresh one (--no-load-optim), or start a new run from its "
            "weights (--finetune)"
        )
    return run.optimizer.state_to_load(model)


def _left_out(key: str, with_optimizer: bool, stored: Collection[str]) -> bool:
    """Keys of a checkpoint that a load passes over on purpose.

    Weights that have a main parameter in `stored` or an optimizer that is not wanted, generators of other places, and
    what is there for Megatron-core only.
    """
    if key.startswith("optimizer."):
        return not with_optimizer
    if with_optimizer and optimizer_key("param", key) in stored:
        return True
    return key.startswith("rng_state/") or is_extra_state(key)


def _take_position(run: Run, common: dict[str, Any], stored: dict[str, Any]) -> None:
    """Iteration and consumed samples; they decide which data comes next."""
    _POSITION(common, "the state of the run")
    _CONSUMED(stored, "the arguments of the run")
    run.state = TrainState(
        iteration=common["iteration"],
        consumed_train_samples=stored["consumed_train_samples"],
        consumed_valid_samples=stored["consumed_valid_samples"],
        num_floating_point_operations_so_far=common["num_floating_point_operations_so_far"],
    )
    run.train_data_fingerprint = stored.get("train_data_fingerprint")


def _restore_generators(run: Run, objects: dict[str, Any]) -> None:
    key = rng_key(run.ps)
    if key in objects:
        set_rng_state(objects[key], run.rng)
        return
    seed_everything(run.config.training.seed, run.ps, run.rng, run.state.iteration)
    if not run.config.checkpoint.no_load_rng:
        logger.info(
            "the checkpoint has no random number generators of this layout: they are seeded anew from --seed and "
            "the iteration"
        )


def load_foreign(run: Run, source: Source, weights_only: bool, model: ShardedStateDict) -> None:
    """Continue another program's run; without its optimizer (Hugging Face) start at iteration 0 from its weights.

    `model` is the sharded state of the weights. Generators of random numbers are seeded anew: other programs use other
    streams. Collective.
    """
    config, start = run.config.checkpoint, time.perf_counter()
    stored, training = stored_args(source.args), source.training
    for note in check_same_model(run.config.flags(), stored, source.description):
        logger.info(note)
    has_optimizer = training is not None and training.param_groups is not None
    weights_only = weights_only or training is None
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
    run.loaded = source.description
    what = "weights and optimizer" if with_optimizer else "weights"
    logger.info(
        f"loaded {what} of {source.description} at iteration {run.state.iteration} in "
        f"{time.perf_counter() - start:.2f} s"
    )
