"""What a checkpoint of a run holds, where it goes, and what a load takes from it.

Weights, optimizer and generators are boxes and objects in model space; everything else is in `common`: arguments,
iteration, schedules. The tracker moves when all of it is durable.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.conversion.megatron_lm.extra_states import extra_states, is_extra_state
from megatron.conversion.megatron_lm.rng import rng_key as megatron_rng_key
from megatron.conversion.model_space.source import Source, optimizer_key
from megatron.core.dist_checkpointing import clean_up, load, load_common, read_metadata
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from megatron.training.checkpoint.args import check_same_model, make_namespace, stored_args
from megatron.training.checkpoint.directory import check_writable, find_checkpoint
from megatron.training.checkpoint.legacy_save import rewriting_as_legacy
from megatron.training.checkpoint.other_formats import load_foreign
from megatron.training.checkpoint.retention import VALIDATION_LOSS, remove_leftovers
from megatron.training.checkpoint.rng_state import get_rng_state, megatron_rng_state, rng_key, set_rng_state
from megatron.training.config.options import CheckpointConfig
from megatron.training.data.tokenizer import padded_vocab_size
from megatron.training.launch.initialize import seed_everything
from megatron.training.run import Run, TrainState

logger = logging.getLogger(__name__)

CHECKPOINT_VERSION = 3.0  # Megatron-LM's, since it groups QKV rows by query group

# How the optimizer state lies in the files, in the terms of Megatron-core: one key per layer, at the parameter's shape.
CONTENT_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
    "non_homogeneous_layers": True,
}


def save_checkpoint(run: Run, root: str, ckpt_format: str) -> None:
    """Save the run under `root` and move the tracker. Collective."""
    config = run.config.checkpoint
    model = model_state(run)
    state: ShardedStateDict = {**model, **extra_states(model)}
    if not config.no_save_optim:
        state |= run.optimizer.sharded_state_dict(model)
    if not config.no_save_rng:
        state |= _generators(run)
    rewrite = rewriting_as_legacy(run.config) if ckpt_format == "torch" else None
    run.saver.save(state, Path(root), run.state.iteration, common_state(run), rewrite)


def _generators(run: Run) -> ShardedStateDict:
    """Those of this rank for us, those of the model-parallel rank for Megatron-LM."""
    ps, ours = run.ps, get_rng_state(run.rng)
    generators: ShardedStateDict = {rng_key(ps): ShardedObject(rng_key(ps), ours)}
    if ps.dp.rank == 0:
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
    common = {
        "args": make_namespace(config.flags(), derived),
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": state.iteration,
        "num_floating_point_operations_so_far": state.num_floating_point_operations_so_far,
        "content_metadata": CONTENT_METADATA,
    }
    if not config.checkpoint.no_save_optim:
        common["optimizer"] = run.optimizer.state_dict()
        common["opt_param_scheduler"] = run.scheduler.state_dict()
    if run.validated is not None and run.validated[0] == state.iteration:
        common[VALIDATION_LOSS] = run.validated[1]
    return common


def load_checkpoint(run: Run, source: Source | None = None) -> None:
    """Continue where a checkpoint ended, or start fresh where that is what the flags mean. Collective.

    Whatever layout wrote it: every rank reads the boxes it holds. `source` is the checkpoint of another program.
    """
    found, weights_only = prepare_directories(run, source)
    if source is not None:
        load_foreign(run, source, model_state(run))
        return
    config, start = run.config.checkpoint, time.perf_counter()
    if found is None:
        if config.load is not None:
            logger.info(f"{config.load} holds no checkpoint yet: starting from scratch")
        return
    common = load_common(found, verify=config.ckpt_verify)
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
    logger.info(f"loaded {found} at iteration {run.state.iteration} in {time.perf_counter() - start:.2f} s")


def _optimizer_state(run: Run, model: ShardedStateDict, common: dict[str, Any], found: Path) -> ShardedStateDict:
    if "optimizer" not in common:
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


def prepare_directories(run: Run, source: Source | None) -> tuple[Path | None, bool]:
    """The checkpoint to load and whether only its weights count; (None, False): from scratch, or `source`. Collective.

    Rank 0 looks, so that a shared file system that lags cannot make the ranks disagree; it also makes sure that --save
    can be written to, and removes what saves and removals that were cut off left there. ValueError for a --load without
    a checkpoint, unless it is the restart idiom: the same directory as --save, and nothing was saved yet.
    """
    answer: list[tuple[Path | None, bool] | ValueError | None] = [None]
    if run.ps.rank == 0:
        try:
            if run.config.checkpoint.save is not None:
                check_writable(run.config.checkpoint.save)
                clean_up(run.config.checkpoint.save)
                remove_leftovers(run.config.checkpoint.save)
            answer = [_find(run.config.checkpoint) if source is None else (None, False)]
        except ValueError as error:
            answer = [error]
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], ValueError):
        raise answer[0]
    assert answer[0] is not None
    return answer[0]


def _find(config: CheckpointConfig) -> tuple[Path | None, bool]:
    if config.load is not None:
        found, note = find_checkpoint(config.load, config.ckpt_step)
        if note is not None:
            logger.warning(note)
        if found is not None:
            return found, config.finetune
    if config.pretrained_checkpoint is not None:
        found, _ = find_checkpoint(config.pretrained_checkpoint, None)
        if found is None:
            raise ValueError(f"--pretrained-checkpoint {config.pretrained_checkpoint} holds no checkpoint")
        return found, True
    if config.load is None:
        return None, False
    if config.exit_on_missing_checkpoint:
        raise ValueError(f"--load {config.load} holds no checkpoint (--exit-on-missing-checkpoint)")
    if config.save is None or Path(config.save).resolve() != Path(config.load).resolve():
        _start_from_random_weights(config, Path(config.load))
    return None, False


def _start_from_random_weights(config: CheckpointConfig, directory: Path) -> None:
    """Job scripts of Megatron-LM name a --load that nothing was saved to yet; ValueError if a checkpoint is meant."""
    if directory.exists() and any(directory.iterdir()):
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


def _take_position(run: Run, common: dict[str, Any], stored: dict[str, Any]) -> None:
    """Iteration and consumed samples; they decide which data comes next."""
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
