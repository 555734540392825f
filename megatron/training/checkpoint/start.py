"""Choose the checkpoint that a run starts from, once for all ranks, and open it.

This module describes the flags and the existing checkpoints; the rules are in
`dist_checkpointing.choice`.
"""

from __future__ import annotations

import dataclasses
import logging
from functools import partial
from pathlib import Path
from typing import NamedTuple

from megatron.core.dist_checkpointing import (
    CheckpointDirectory,
    CheckpointError,
    Lineage,
    read_lineage,
)
from megatron.core.dist_checkpointing.choice import (
    Candidate,
    Choice,
    Inventory,
    Launch,
    abbreviate,
    choose,
)
from megatron.core.dist_checkpointing.lineage import Origin, Segment, identify_checkpoint
from megatron.core.dist_checkpointing.local_checkpoints import (
    LocalCheckpointInfo,
    LocalInventory,
    OpenLocalCheckpoint,
    Tier,
    find_local_checkpoints,
    open_local_checkpoint,
)
from megatron.core.dist_checkpointing.ownership import Job, PreviousOwner, read_previous_owner
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.dist_checkpointing.visibility import wait_until_all_ranks_see
from megatron.core.object_path import path_of
from megatron.core.run_checkpoint.formats import (
    CheckpointRef,
    NoCheckpointError,
    find_checkpoint,
    find_problem,
    open_found,
)
from megatron.core.run_checkpoint.keys import WORD_EMBEDDINGS
from megatron.core.run_checkpoint.source import Source
from megatron.training.checkpoint.damage import damage_explained
from megatron.training.config.options import CheckpointConfig
from megatron.training.config.run_config import Config
from megatron.training.config.stored_args import normalize_stored_args

logger = logging.getLogger(__name__)


class Start(NamedTuple):
    """The checkpoint that a run begins with.

    The checkpoints of the run descend from `lineage`; its branch is empty if the run begins
    a new one. `continues` is true if the run goes on from its own checkpoint although the flags
    name another one: --finetune and --no-load-optim then do not apply.
    """

    directory: Path
    source: Source
    weights_only: bool
    lineage: Lineage
    continues: bool = False
    local: OpenLocalCheckpoint | None = None  # an open checkpoint on the disks of the nodes
    damaged: frozenset[str] = frozenset()  # newer ones there that could not be used


def find_start(
    config: CheckpointConfig,
    save: Path | None = None,
    tier: Tier | None = None,
    job: Job | None = None,
    damaged: frozenset[str] = frozenset(),
) -> Start | None:
    """Return the checkpoint to start from; None for random weights, if the flags allow that.

    Collective. Rank 0 decides, so that a shared file system that lags cannot make the ranks
    disagree. `save` is the directory of checkpoints that the run will own. A run that continues
    its own checkpoints considers those on the disks of the nodes (`tier`), except `damaged` ones.

    Raises ValueError for a --load without a checkpoint where one is required, and for a --save that
    contains another run.
    """
    # Collect the checkpoints of the nodes, and let rank 0 choose.
    coordination = Coordination.of(None)
    local = find_local_checkpoints(tier)
    job = job or Job()
    choice, checkpoint = coordination.run_on_rank0(
        lambda: _choose(config, save, job, local, damaged)
    )
    if checkpoint is None:
        if damaged:
            raise CheckpointError(
                f"{config.load or save} contains no checkpoint to use instead of the damaged ones"
            )
        return None
    # As in `resume`, --no-load-optim does not apply to a run that continues its own checkpoint.
    without_optimizer = choice.weights_only or (config.no_load_optim and not choice.continues)
    if isinstance(checkpoint, LocalCheckpointInfo):
        assert tier is not None
        start = _open_local(tier, choice, checkpoint, damaged, without_optimizer)
        if start is not None:
            return start
        # Choose again without it: the next one may be another local checkpoint or a shared one.
        return find_start(config, save, tier, job, damaged | {checkpoint.name})
    # Open it on every rank. An error on any rank is raised on all.
    open_source = partial(
        open_found,
        checkpoint,
        optimizer=not without_optimizer,
        verify=config.ckpt_verify,
        waits_for_shards=not coordination.is_coordinator,  # rank 0 has seen them
    )
    wait_until_all_ranks_see(checkpoint.directory, coordination)
    with damage_explained(checkpoint.directory):
        source = coordination.run_on_all(open_source)
    if coordination.is_coordinator:
        _warn_of_unused(source)
    lineage = coordination.run_on_rank0(lambda: _base_lineage(choice, checkpoint.directory))
    return Start(checkpoint.directory, source, choice.weights_only, lineage, choice.continues)


def _warn_of_unused(source: Source) -> None:
    """Name the parts of a checkpoint that the model does not have."""
    if source.unused:
        logger.warning(
            f"{source.description}: {len(source.unused)} unused parts: {abbreviate(source.unused)}"
        )


def _base_lineage(choice: Choice, directory: Path) -> Lineage:
    """Return the lineage from which the checkpoints of the run descend."""
    # A new branch has no ancestors; a continued one keeps those of its newest checkpoint.
    if not choice.extends_branch:
        return Lineage((), choice.origin)
    lineage = read_lineage(directory)
    if choice.origin is None:
        return lineage
    return lineage._replace(origin=choice.origin)


def _open_local(
    tier: Tier,
    choice: Choice,
    info: LocalCheckpointInfo,
    damaged: frozenset[str],
    without_optimizer: bool,
) -> Start | None:
    """Open a checkpoint on the disks of the nodes; None if it cannot be used. Collective."""
    local = open_local_checkpoint(tier, info)
    # Everything that is read from the disks of nodes is verified in any case.
    open_source = partial(
        open_found,
        CheckpointRef(local.directory, "torch_dist"),
        optimizer=not without_optimizer,
        verify=False,
    )
    try:
        source = Coordination.of(None).run_on_all(open_source)
    except CheckpointError as refusal:
        local.close()
        logger.warning(f"{refusal}: taking an older checkpoint")
        return None
    lineage = read_lineage(local.directory)
    return Start(local.directory, source, False, lineage, choice.continues, local, damaged)


# ---- Choosing, on rank 0 ----


def _choose(
    config: CheckpointConfig,
    save: Path | None,
    job: Job,
    local: LocalInventory,
    damaged: frozenset[str],
) -> tuple[Choice, CheckpointRef | LocalCheckpointInfo | None]:
    """Return the choice, and its checkpoint (None for random weights); log the reasons."""
    description = describe_launch(config, save, job, local, damaged)
    choice = choose(description.launch, description.inventory)
    if choice.candidate is None:
        # A run may have local checkpoints only, all of them damaged.
        if not damaged and config.load is not None:
            check_random_weights(config, path_of(config.load))
    elif choice.continues:
        logger.warning(f"continuing from {choice.candidate.description}: {choice.reason}")
    elif choice.origin is not None and choice.extends_branch:
        logger.warning(f"starting from {choice.candidate.description}: {choice.reason}")
    ref = description.find(choice.candidate)
    if isinstance(ref, CheckpointRef) and ref.note is not None:
        logger.warning(ref.note)
    for explanation in choice.explain_passed_over():
        logger.warning(explanation)
    # Each launch by hand would drop it again, which is easily left in a script.
    if config.no_load_optim and choice.extends_branch and not choice.continues:
        logger.warning(
            "--no-load-optim: this launch drops the optimizer of its own run, as every further one "
            "with the same flags does. Leave the flag out to keep it"
        )
    return choice, ref


class LaunchDescription(NamedTuple):
    """The request of the flags, and the existing checkpoints."""

    launch: Launch
    inventory: Inventory
    refs: dict[str, CheckpointRef | LocalCheckpointInfo]  # by name of the candidate

    def find(self, candidate: Candidate | None) -> CheckpointRef | LocalCheckpointInfo | None:
        """Return the checkpoint of a candidate."""
        return None if candidate is None else self.refs[candidate.name]


def describe_launch(
    config: CheckpointConfig,
    save: Path | None,
    job: Job,
    local: LocalInventory,
    damaged: frozenset[str] = frozenset(),
) -> LaunchDescription:
    """Describe the request of the flags and all checkpoints, for `choose`.

    `save` is the directory of checkpoints that the run will own. `damaged` are names of local
    checkpoints that have turned out to be damaged.
    """
    in_place = _is_same_directory(config)
    continues_newest = is_restart_idiom(config)
    refs: dict[str, CheckpointRef | LocalCheckpointInfo] = {}

    def add(ref: CheckpointRef) -> Candidate:
        refs[str(ref.directory)] = ref
        return Candidate(str(ref.directory), read_lineage(ref.directory))

    # The checkpoints of the run in shared storage. A run may begin in the directory of a model.
    saved = None
    root = save
    if continues_newest:
        assert config.load is not None
        root = path_of(config.load)
    shared: list[Candidate] = []
    newer: list[Candidate] = []
    if root is not None:
        try:
            saved = find_checkpoint(root)
        except NoCheckpointError as error:
            shared.append(Candidate(str(root), Lineage((Segment(0, 0),)), str(error)))
    if saved is not None and (continues_newest or saved.directory.parent == root):
        shared = [Candidate(str(path), read_lineage(path), why) for path, why in saved.damaged]
        shared.append(add(saved))
        if root is not None and saved.directory.parent == root:
            newer = CheckpointDirectory(root).list_newer(shared[-1].lineage, find_problem)

    # The checkpoint that the flags name.
    named = None
    weights_only = False
    try:
        ref, weights_only = _find_named(config, continues_newest)
        if ref is not None:
            named = add(ref)
    except ValueError as error:
        named = Candidate(str(config.load), Lineage((Segment(0, 0),)), str(error))
    origin = None
    if named is not None and named.problem is None:
        step = None if continues_newest else config.ckpt_step
        origin = Origin(identify_checkpoint(path_of(named.name)), weights_only, step)

    # The checkpoints on the disks of the nodes.
    for info in local.checkpoints:
        refs[info.name] = info
    names: tuple[str, ...] = ()
    if save is not None:
        owned = CheckpointDirectory(save)
        names = tuple(owned.path(iteration).name for iteration in owned.list_iterations())
    previous = PreviousOwner({}) if save is None else read_previous_owner(save, job)
    inventory = Inventory(
        tuple(shared),
        tuple(newer),
        tuple(info.to_candidate(damaged) for info in local.checkpoints),
        tuple(local.of_other_runs),
        named,
        weights_only,
        names,
    )
    launch = Launch(
        save=None if save is None else str(save),
        in_place=in_place,
        names_checkpoint=not continues_newest,
        origin=origin,
        override=config.override_existing_run,
        job=previous.job_id,
        first_generation=previous.first_generation,
    )
    return LaunchDescription(launch, inventory, refs)


def _find_named(
    config: CheckpointConfig, continues_newest: bool
) -> tuple[CheckpointRef | None, bool]:
    """Return the checkpoint that the flags name, and whether only its weights are loaded.

    A launch that `continues_newest` names one only for its first launch.
    """
    ref = None
    if config.load is not None and not continues_newest:
        ref = find_checkpoint(config.load, config.ckpt_step)
    if ref is not None:
        return ref, config.finetune
    if config.pretrained_checkpoint is None:
        return None, False
    ref = find_checkpoint(config.pretrained_checkpoint)
    if ref is None:
        raise ValueError(
            f"--pretrained-checkpoint {config.pretrained_checkpoint} contains no checkpoint"
        )
    return ref, True


def is_restart_idiom(config: CheckpointConfig) -> bool:
    """Return whether --load and --save request the newest checkpoint of this run."""
    if config.finetune or config.ckpt_step is not None:
        return False
    return _is_same_directory(config)


def _is_same_directory(config: CheckpointConfig) -> bool:
    if config.load is None or config.save is None:
        return False
    return path_of(config.load).resolve() == path_of(config.save).resolve()


def check_random_weights(config: CheckpointConfig, directory: Path) -> None:
    """Check that a run whose --load contains no checkpoint may start from random weights.

    Scripts for Megatron-LM name a --load before anything is saved, so this is a warning unless a
    flag requires a checkpoint, and normal for the restart idiom.
    """
    if directory.is_symlink() and not directory.exists():
        raise ValueError(
            f"--load {directory} is a link to {directory.readlink()}, which does not exist"
        )
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"--load {directory} is a file: give the directory of a checkpoint")
    if config.exit_on_missing_checkpoint:
        raise ValueError(f"--load {directory} holds no checkpoint (--exit-on-missing-checkpoint)")
    # Flags that make no sense without a checkpoint.
    requirements = {
        "--finetune": config.finetune,
        "--ckpt-step": config.ckpt_step is not None,
    }
    # The restart idiom gives --use-checkpoint-args on the first launch, too.
    is_first_start = _is_same_directory(config)
    if not is_first_start:
        requirements["--use-checkpoint-args"] = config.use_checkpoint_args
        if directory.exists() and any(directory.iterdir()):
            raise ValueError(
                f"--load {directory} holds no checkpoint, but it is not empty. Training would "
                "start from random weights; if that is intended, leave out --load"
            )
    flags = [name for name, is_given in requirements.items() if is_given]
    if flags:
        raise ValueError(
            f"--load {directory} holds no checkpoint, but {' and '.join(flags)} would need one"
        )
    if is_first_start:
        logger.info(f"{directory} holds no checkpoint yet: starting from scratch")
        return
    logger.warning(
        f"NO CHECKPOINT: --load {directory} "
        f"{'is empty' if directory.exists() else 'does not exist'}.\n"
        "   Training starts from RANDOM WEIGHTS, as Megatron-LM does.\n"
        "   If you expected a checkpoint, stop this run; --exit-on-missing-checkpoint makes this "
        "an error."
    )


def stored_vocab_size(start: Start | None) -> int | None:
    """Return the vocabulary size of the model in the checkpoint to load, None if it is unknown.

    Megatron-LM trains the rows that pad its vocabulary, and its softmax includes them, so that they
    are part of its model.
    """
    if start is None:
        return None
    # The shape of the embedding is more reliable than arguments: [vocabulary, h].
    embedding = start.source.tensors.get(WORD_EMBEDDINGS)
    if embedding is None:
        return start.source.args.get("model_vocab_size")
    return embedding.shape[0]


def adopt_end_of_document(config: Config, start: Start | None) -> bool:
    """Let NullTokenizer end documents with the token of the loaded run.

    --null-tokenizer-eod-id overrides that. Returns whether the tokenizer has changed.
    """
    flags = config.tokenizer
    if start is None or flags.kind != "NullTokenizer" or flags.null_tokenizer_eod_id is not None:
        return False
    # A stored id outside of --vocab-size belongs to another vocabulary.
    token_id = normalize_stored_args(start.source.args).get("null_tokenizer_eod_id")
    if token_id is None or flags.vocab_size is None or token_id >= flags.vocab_size:
        return False
    config.tokenizer = dataclasses.replace(flags, null_tokenizer_eod_id=token_id)
    config.notes.append(f"--null-tokenizer-eod-id {token_id}, as in {start.source.description}")
    return True
