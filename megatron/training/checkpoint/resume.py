"""Where a run continues: which checkpoint, decided once for all ranks, and what the run takes from
it.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron.conversion.convert import load_from_source, open_found
from megatron.conversion.formats import (
    CheckpointRef,
    NoCheckpointError,
    find_checkpoint,
    is_extra_state,
)
from megatron.conversion.megatron_lm.torch_dist import RunCheckpoint
from megatron.conversion.model_space.source import WORD_EMBEDDINGS, Source, TrainingState
from megatron.conversion.options import ReadOptions
from megatron.core.dist_checkpointing import CheckpointError, ShardedObject, read_lineage
from megatron.core.dist_checkpointing.loading.distributed_local_checkpoint import (
    DistributedLocalCheckpoint,
    LocalCheckpointInfo,
    find_local_checkpoints,
)
from megatron.core.dist_checkpointing.loading.load import RAISE, STRICTNESS
from megatron.core.dist_checkpointing.local_tier import LocalTier
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.object_storage import path_of
from megatron.core.optimizer import UPDATE_RULES, OptimizerConfig
from megatron.core.transformer.transformer_config import is_used, select_architecture_fields
from megatron.training.checkpoint.checkpointing import (
    fp8_state_to_load,
    model_state,
    restore_fp8_state,
    rng_key,
    set_rng_state,
)
from megatron.training.config.options import CheckpointConfig
from megatron.training.config.run_config import Config
from megatron.training.config.stored_args import normalize_stored_args
from megatron.training.launch import seed_everything
from megatron.training.run import Run, TrainState

logger = logging.getLogger(__name__)


class Start(NamedTuple):
    """The checkpoint that a run begins with."""

    directory: Path
    source: Source
    weights_only: bool
    local: DistributedLocalCheckpoint | None = None  # it lies on the nodes' disks, and is open
    damaged: frozenset[str] = frozenset()  # newer ones there that could not be used


def find_start(
    config: CheckpointConfig, tier: LocalTier | None = None, damaged: frozenset[str] = frozenset()
) -> Start | None:
    """The checkpoint to continue from; None: from scratch, if that is what the flags mean.
    Collective.

    Rank 0 looks, so that a shared file system that lags cannot make the ranks disagree. ValueError
    for a --load without a checkpoint, unless it is the restart idiom: the same directory as --save,
    and nothing was saved yet. A run that continues itself also takes what the nodes have on their
    disks (`tier`), if that is newer; not the `damaged` ones.
    """
    coordination = Coordination.of(None)
    held = [] if tier is None or not _continues_itself(config) else find_local_checkpoints(tier)
    held = [checkpoint for checkpoint in held if checkpoint.name not in damaged]
    answer = coordination.run_on_rank0(lambda: _choose(config, held))
    if answer is None:
        if damaged:
            raise CheckpointError(
                f"{config.load} holds no checkpoint to take instead of the damaged ones"
            )
        return None
    found, weights_only = answer
    if isinstance(found, LocalCheckpointInfo):
        assert tier is not None
        start = _open_local(config, tier, found, damaged)
        return start or find_start(config, tier, damaged | {found.name})
    read_options = ReadOptions(
        optimizer=not (weights_only or config.no_load_optim),
        as_saved=True,
        verify=config.ckpt_verify,
    )
    source = coordination.run_on_all(lambda: open_found(found, read_options))
    return Start(found.directory, source, weights_only)


def _continues_itself(config: CheckpointConfig) -> bool:
    """Whether the newest of what this run has saved is meant."""
    if (
        config.load is None
        or config.save is None
        or config.finetune
        or config.ckpt_step is not None
    ):
        return False
    return path_of(config.load).resolve() == path_of(config.save).resolve()


def _open_local(
    config: CheckpointConfig, tier: LocalTier, held: LocalCheckpointInfo, damaged: frozenset[str]
) -> Start | None:
    """None if it cannot be used, as rank 0 says then. Collective."""
    local = DistributedLocalCheckpoint(tier, held)
    # `DistributedLocalCheckpoint` verifies everything that it reads.
    read_options = ReadOptions(optimizer=not config.no_load_optim, as_saved=True, verify=False)
    try:
        source = Coordination.of(None).run_on_all(
            lambda: open_found(CheckpointRef(local.directory, "torch_dist"), read_options)
        )
    except CheckpointError as refusal:
        local.close()
        logger.warning(f"{refusal}: taking an older checkpoint")
        return None
    return Start(local.directory, source, False, local, damaged)


def _choose(
    config: CheckpointConfig, held: list[LocalCheckpointInfo]
) -> tuple[CheckpointRef | LocalCheckpointInfo, bool] | None:
    """On rank 0: what to load, and whether only its weights count. `held`: what the nodes have,
    newest first.
    """
    # 1. What this run, or the one before it, has saved.
    try:
        found = None if config.load is None else find_checkpoint(config.load, config.ckpt_step)
    except NoCheckpointError as error:
        if not held:
            raise
        logger.warning(str(error))
        found = None
    if held and (found is None or held[0].order > read_lineage(found.directory).branch[-1]):
        return held[0], False
    if found is not None:
        if found.note is not None:
            logger.warning(found.note)
        return found, config.finetune
    # 2. What it starts from the first time.
    if config.pretrained_checkpoint is not None:
        found = find_checkpoint(config.pretrained_checkpoint)
        if found is None:
            raise ValueError(
                f"--pretrained-checkpoint {config.pretrained_checkpoint} holds no checkpoint"
            )
        return found, True
    # 3. Nothing: is that meant?
    if config.load is None:
        return None
    if config.exit_on_missing_checkpoint:
        raise ValueError(f"--load {config.load} holds no checkpoint (--exit-on-missing-checkpoint)")
    if config.save is None or path_of(config.save).resolve() != path_of(config.load).resolve():
        _start_from_random_weights(config, path_of(config.load))
    else:
        logger.info(f"{config.load} holds no checkpoint yet: starting from scratch")
    return None


def _start_from_random_weights(config: CheckpointConfig, directory: Path) -> None:
    """Warn: scripts for Megatron-LM name a --load before anything is saved. ValueError if a
    checkpoint is expected.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(
            f"--load {directory} holds no checkpoint, but it is not empty. Training would start from random weights; "
            "if that is what you want, leave out --load"
        )
    needing = {
        "--finetune": config.finetune,
        "--ckpt-step": config.ckpt_step is not None,
        "--use-checkpoint-args": config.use_checkpoint_args,
    }
    given = [name for name, is_given in needing.items() if is_given]
    if given:
        raise ValueError(
            f"--load {directory} holds no checkpoint, but {' and '.join(given)} would need one"
        )
    logger.warning(
        f"NO CHECKPOINT: --load {directory} {'is empty' if directory.exists() else 'does not exist'}.\n"
        "   Training starts from RANDOM WEIGHTS, as Megatron-LM does.\n"
        "   If you expected a checkpoint, stop this run; --exit-on-missing-checkpoint makes this an error."
    )


def stored_vocab_size(start: Start | None) -> int | None:
    """Vocabulary size of the model in the checkpoint to load; None if there is none, or it does not
    say.

    Megatron-LM trains the rows that pad its vocabulary, and its softmax counts them: they are part
    of its model.
    """
    if start is None:
        return None
    embedding = start.source.tensors.get(WORD_EMBEDDINGS)
    return start.source.args.get("model_vocab_size") if embedding is None else embedding.shape[0]


def adopt_end_of_document(config: Config, start: Start | None) -> bool:
    """NullTokenizer ends documents with the token of the run that is loaded, unless
    --null-tokenizer-eod-id says.

    Returns whether that changes the tokenizer.
    """
    flags = config.tokenizer
    if start is None or flags.kind != "NullTokenizer" or flags.null_tokenizer_eod_id is not None:
        return False
    stored = normalize_stored_args(start.source.args).get("null_tokenizer_eod_id")
    if stored is None or flags.vocab_size is None or stored >= flags.vocab_size:
        return False
    config.tokenizer = dataclasses.replace(flags, null_tokenizer_eod_id=stored)
    config.notes.append(f"--null-tokenizer-eod-id {stored}, as in {start.source.description}")
    return True


def may_leave_weights(config: CheckpointConfig) -> bool:
    """Whether --dist-ckpt-strictness lets weights that a checkpoint lacks keep their first values."""
    unexpected, _ = STRICTNESS[config.dist_ckpt_strictness]
    return unexpected != RAISE


def load_checkpoint(run: Run, start: Start | None, tier: LocalTier | None = None) -> None:
    """Continue where a checkpoint ended, whatever layout or program wrote it. Collective.

    Every rank reads the boxes it holds. From a checkpoint without training state (Hugging Face) a
    run takes the weights and starts at iteration 0. In place of one on the nodes' disks that turns
    out to be damaged the next older one is taken.
    """
    while start is not None and start.local is not None:
        try:
            _load(run, start)
            return
        except CheckpointError as error:
            logger.warning(f"{error}\n   taking an older checkpoint")
            damaged = start.damaged | {start.directory.name}
        finally:
            start.local.close()
        start = find_start(run.config.checkpoint, tier, damaged)
    if start is not None:
        _load(run, start)


def _load(run: Run, start: Start) -> None:
    config = run.config.checkpoint
    source = start.source
    began = time.perf_counter()

    # Decide what to take, and check that it fits before anything changes.
    for warning in check_same_model(
        run.config.flags(), normalize_stored_args(source.args), source.description
    ):
        logger.warning(warning)
    training = None if start.weights_only else source.training
    with_optimizer = training is not None and not config.no_load_optim
    if with_optimizer:
        _check_optimizer(run.config.optimizer, source)

    # Read into the live tensors. With an optimizer the weights follow from its main parameters,
    # which are more precise.
    model = model_state(run)
    rng = rng_key(run.ps)
    wanted = (
        run.optimizer.state_to_load(model)
        if with_optimizer
        else run.optimizer.weights(model, live=True)
    )
    if training is not None and not config.no_load_rng and rng in training.rng:
        wanted[rng] = ShardedObject(rng, None)
    if training is not None and isinstance(source, RunCheckpoint):
        wanted |= fp8_state_to_load(run, model, source.reader.metadata.objects)
    objects = load_from_source(
        wanted,
        source,
        strictness=config.dist_ckpt_strictness,
        skip=lambda key: _is_left_out(key, with_optimizer, source.tensors),
        parallelization_group=run.ps.dp_cp.group if config.ckpt_fully_parallel_load else None,
    ).objects

    # Bring everything that is not a tensor to the same point.
    if with_optimizer:
        assert training is not None
        state = {
            "optimizer": {"param_groups": training.param_groups},
            "grad_scaler": training.grad_scaler or {},
        }
        run.optimizer.load_state_dict(state, model)
    else:
        run.optimizer.reload_model_params(model)
    if training is not None:
        _take_position(run, training, source.args.get("train_data_fingerprint"), with_optimizer)
        _restore_generators(run, objects.get(rng))
        restore_fp8_state(run, model, objects, source.args)
    if not start.weights_only:
        run.saver.continue_from(start.directory, start.local is not None)
    run.loaded = source.description
    what = "weights and optimizer" if with_optimizer else "weights"
    seconds = run.loading_seconds = time.perf_counter() - began
    logger.info(
        f"loaded {what} of {source.description} at iteration {run.state.iteration} in {seconds:.2f} s"
    )


def check_same_model(flags: Mapping[str, Any], stored: Mapping[str, Any], source: str) -> list[str]:
    """Warnings about other mathematics; ValueError that names every argument by which the shape
    differs.
    """
    flags = normalize_stored_args(flags)

    def differing(what: str) -> list[str]:
        names = [
            field.name
            for field in select_architecture_fields(what)
            if field.name in stored and is_used(field, flags)
        ]
        pairs = {name: (stored[name], flags[name]) for name in names}
        return [
            f"{name}: {old} in the checkpoint, {new} now"
            for name, (old, new) in pairs.items()
            if old != new
        ]

    wrong = differing("shapes")
    if wrong:
        lines = "\n  ".join(wrong)
        raise ValueError(
            f"{source} holds another model:\n  {lines}\nchange these flags, or take them from the checkpoint with "
            "--use-checkpoint-args"
        )
    return [
        f"{source} was trained with other mathematics: {line}" for line in differing("mathematics")
    ]


def _check_optimizer(config: OptimizerConfig, source: Source) -> None:
    """Raises ValueError unless the checkpoint has the state of this optimizer."""
    ways_out = "continue with a fresh one (--no-load-optim), or start a new run from its weights (--finetune)"
    if source.training is None or source.training.param_groups is None:
        raise ValueError(f"{source.description} holds no optimizer: {ways_out}")
    stored = source.args.get("optimizer", config.optimizer)
    if stored != config.optimizer:
        raise ValueError(
            f"{source.description} holds the optimizer state of --optimizer {stored}, which --optimizer "
            f"{config.optimizer} cannot use: {ways_out}, or continue with --optimizer {stored}"
        )
    conflict = UPDATE_RULES[stored].find_conflict(config, source.training.param_groups)
    if conflict is not None:
        flag, old, new = conflict
        raise ValueError(
            f"{source.description} holds the state of {flag} {old}, which {flag} {new} cannot use: "
            f"{ways_out}, or continue with {flag} {old}"
        )


def _is_left_out(key: str, with_optimizer: bool, stored: Collection[str]) -> bool:
    """Keys of a checkpoint that a load passes over on purpose.

    Weights that have a main parameter in `stored` or an optimizer that is not wanted, generators of
    other places, and what is there for Megatron-core only.
    """
    if key.startswith("optimizer."):
        return not with_optimizer
    if with_optimizer and f"optimizer.state.param.{key}" in stored:
        return True
    return key.startswith("rng_state/") or is_extra_state(key)


def _take_position(
    run: Run, training: TrainingState, fingerprint: str | None, with_optimizer: bool
) -> None:
    """Iteration and consumed samples, which decide what data comes next, and where the schedule
    stands.
    """
    run.state = TrainState(
        training.iteration,
        training.consumed_train_samples,
        training.consumed_valid_samples,
        training.num_floating_point_operations_so_far,
    )
    run.train_data_fingerprint = fingerprint
    if with_optimizer and training.scheduler is not None:
        run.scheduler.load_state_dict(training.scheduler)
    else:
        run.scheduler.step(run.state.consumed_train_samples)


def _restore_generators(run: Run, state: Any) -> None:
    """Restore what fits; the rest (other layout, device or program) is seeded again, so that the
    run is repeatable.
    """
    seed_everything(run.config.training.seed, run.ps, run.rng, run.state.iteration)
    # Megatron-LM stores a list with the state of each data-parallel rank that shares the key.
    while isinstance(state, list) and len(state) == 1:
        state = state[0]
    unfit = ["of this layout"] if state is None else set_rng_state(state, run.rng)
    if unfit and not run.config.checkpoint.no_load_rng:
        logger.info(
            f"the checkpoint has no random number generators {' and '.join(unfit)}: they are seeded anew from --seed "
            "and the iteration"
        )
