"""Choose the checkpoint that a run starts from, once for all ranks.

The rules, in this order:

1. An automatic restart of a job continues from the newest checkpoint that the job has saved.
2. With the same directory as --load and --save, and neither --ckpt-step nor --finetune, a run
   continues from the newest checkpoint there, or starts from random weights if there is none.
3. If --save contains a branch that began with the very checkpoint that --load, --ckpt-step and
   --finetune name, the run continues from the newest checkpoint of that branch.
4. Otherwise the run starts from the named checkpoint, or from random weights. If --save already
   contains a run, this one would replace it, which requires --override-existing-run. Returning to
   an earlier checkpoint of the same directory by --ckpt-step does not require it.
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
from megatron.core.dist_checkpointing.lineage import Origin, identify_checkpoint
from megatron.core.dist_checkpointing.loading.distributed_local_checkpoint import (
    DistributedLocalCheckpoint,
    LocalCheckpointInfo,
    find_local_checkpoints,
)
from megatron.core.dist_checkpointing.local_tier import LocalTier
from megatron.core.dist_checkpointing.ownership import Job, read_previous_owner
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.dist_checkpointing.visibility import wait_until_all_ranks_see
from megatron.core.object_storage import path_of
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
from megatron.training.checkpoint.save_directory import find_saved
from megatron.training.config.options import CheckpointConfig
from megatron.training.config.run_config import Config
from megatron.training.config.stored_args import normalize_stored_args

logger = logging.getLogger(__name__)

_SHOWN = 5  # checkpoints in a message


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
    local: DistributedLocalCheckpoint | None = None  # an open checkpoint on the disks of the nodes
    damaged: frozenset[str] = frozenset()  # newer ones there that could not be used


class _Choice(NamedTuple):
    """The decision of rank 0. With `extends_branch`, the run continues a branch in --save."""

    found: CheckpointRef | LocalCheckpointInfo
    weights_only: bool = False
    extends_branch: bool = False
    continues: bool = False
    origin: Origin | None = None


def find_start(
    config: CheckpointConfig,
    save: Path | None = None,
    tier: LocalTier | None = None,
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
    held: list[LocalCheckpointInfo] = []
    if tier is not None:
        found_locally = find_local_checkpoints(tier)
        held = [checkpoint for checkpoint in found_locally if checkpoint.name not in damaged]
    chooser = _Chooser(config, save, job or Job(), held)
    choice = coordination.run_on_rank0(chooser.choose)
    if choice is None:
        if damaged:
            raise CheckpointError(
                f"{config.load or save} contains no checkpoint to use instead of the damaged ones"
            )
        return None
    if isinstance(choice.found, LocalCheckpointInfo):
        assert tier is not None
        start = _open_local(config, tier, choice, choice.found, damaged)
        if start is not None:
            return start
        # Choose again without it: the next one may be another local checkpoint or a shared one.
        return find_start(config, save, tier, job, damaged | {choice.found.name})
    # Open it on every rank. An error on any rank is raised on all.
    found = choice.found
    # As in `resume`, --no-load-optim does not apply to a run that continues its own checkpoint.
    without_optimizer = choice.weights_only or (config.no_load_optim and not choice.continues)
    open_source = partial(
        open_found,
        found,
        optimizer=not without_optimizer,
        verify=config.ckpt_verify,
        waits_for_shards=not coordination.is_coordinator,  # rank 0 has seen them
    )
    wait_until_all_ranks_see(found.directory, coordination)
    with damage_explained(found.directory):
        source = coordination.run_on_all(open_source)
    if coordination.is_coordinator:
        _warn_of_unused(source)
    lineage = coordination.run_on_rank0(lambda: _base_lineage(choice, found.directory))
    return Start(found.directory, source, choice.weights_only, lineage, choice.continues)


def _warn_of_unused(source: Source) -> None:
    """Name the parts of a checkpoint that the model does not have."""
    if source.unused:
        logger.warning(
            f"{source.description}: {len(source.unused)} unused parts: {_abbreviate(source.unused)}"
        )


def _base_lineage(choice: _Choice, directory: Path) -> Lineage:
    """Return the lineage from which the checkpoints of the run descend."""
    # A new branch has no ancestors; a continued one keeps those of its newest checkpoint.
    if not choice.extends_branch:
        return Lineage((), choice.origin)
    lineage = read_lineage(directory)
    if choice.origin is None:
        return lineage
    return lineage._replace(origin=choice.origin)


def _open_local(
    config: CheckpointConfig,
    tier: LocalTier,
    choice: _Choice,
    held: LocalCheckpointInfo,
    damaged: frozenset[str],
) -> Start | None:
    """Open a checkpoint on the disks of the nodes; None if it cannot be used. Collective."""
    local = DistributedLocalCheckpoint(tier, held)
    without_optimizer = config.no_load_optim and not choice.continues
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


def is_restart_idiom(config: CheckpointConfig) -> bool:
    """Return whether --load and --save request the newest checkpoint of this run."""
    if config.finetune or config.ckpt_step is not None:
        return False
    return _is_same_directory(config)


def _is_same_directory(config: CheckpointConfig) -> bool:
    if config.load is None or config.save is None:
        return False
    return path_of(config.load).resolve() == path_of(config.save).resolve()


class _Chooser:
    """Chooses the checkpoint to start from, on rank 0; `held` are on the nodes, newest first."""

    def __init__(
        self, config: CheckpointConfig, save: Path | None, job: Job, held: list[LocalCheckpointInfo]
    ) -> None:
        self._config = config
        self._save = save
        self._job = job
        self._held = held

    def choose(self) -> _Choice | None:
        """Return the choice by the rules above; None for random weights."""
        config = self._config
        saved = None if self._save is None else find_saved(self._save)

        # Rule 1: an automatic restart.
        own = self._find_own(saved)
        if own is not None:
            return own

        # Rule 2: --load and --save are the same directory.
        if is_restart_idiom(config):
            return self._continue_newest()

        # Rule 3: a branch in --save that began with the named checkpoint.
        named, weights_only = self._find_named()
        if named is None:
            self._check_replaced(saved, 0, "random weights")
            return None
        origin = Origin(identify_checkpoint(named.directory), weights_only, config.ckpt_step)
        if saved is not None and self._continues(saved, origin):
            return self._continue_branch(saved, named)

        # Rule 4: the named checkpoint.
        returns = _is_same_directory(config) and config.ckpt_step is not None and not weights_only
        if returns:
            self._warn_of_return(named)
        else:
            self._check_replaced(saved, 0, str(named.directory))
        return _Choice(named, weights_only, extends_branch=returns, origin=origin)

    def _continues(self, saved: CheckpointRef, origin: Origin) -> bool:
        """Return whether `saved` is of a branch that began with the same flags as this start."""
        if self._config.override_existing_run:
            return False
        stored = read_lineage(saved.directory).origin
        # A branch that began with random weights has no origin.
        if stored is None or stored == origin:
            return stored == origin
        # With --finetune in the directory of --load, the newest checkpoint is one of the branch.
        in_place = _is_same_directory(self._config) and origin.weights_only
        return in_place and stored.weights_only and stored.step == origin.step

    def _find_own(self, saved: CheckpointRef | None) -> _Choice | None:
        """Return the newest checkpoint of this job, if this is an automatic restart of it."""
        if self._save is None:
            return None
        previous = read_previous_owner(self._save, self._job)
        if previous.job_id is None:
            return None
        # The newest checkpoint is of an earlier job if this one has not saved any yet.
        if saved is not None and read_lineage(saved.directory).job != previous.job_id:
            saved = None
        found: CheckpointRef | LocalCheckpointInfo | None = saved
        # Local checkpoints may be of earlier jobs, too. Their order begins with the fencing number.
        of_job = [held for held in self._held if held.order[0] >= previous.first_generation]
        if of_job and (saved is None or of_job[0].order > _order(saved)):
            found = of_job[0]
        if found is None:
            return None
        if not is_restart_idiom(self._config):
            logger.warning(
                f"restart of job {self._job.run_id}: continuing from {_describe(found)}, which an "
                "earlier start of this job has saved, and not from the checkpoint that --load, "
                "--ckpt-step and --finetune name"
            )
        return _Choice(found, extends_branch=True, continues=True)

    def _continue_newest(self) -> _Choice | None:
        """Return the newest checkpoint of --load, which is the same directory as --save."""
        config = self._config
        assert config.load is not None
        try:
            found = find_checkpoint(config.load)
        # No complete checkpoint in the directory; the disks of the nodes may still have one.
        except NoCheckpointError as error:
            if not self._held:
                raise
            logger.warning(str(error))
            found = None
        if self._held and (found is None or not self._returns_to(found)):
            return _Choice(self._held[0], extends_branch=True)
        if found is not None:
            if found.note is not None:
                logger.warning(found.note)
            _warn_of_newer(found)
            return _Choice(found, extends_branch=True)
        # The first start of the run: --pretrained-checkpoint, or random weights.
        named, weights_only = self._find_first()
        if named is None:
            return None
        origin = Origin(identify_checkpoint(named.directory), weights_only)
        return _Choice(named, weights_only, origin=origin)

    def _returns_to(self, found: CheckpointRef) -> bool:
        """Return whether `found` is used although the nodes have checkpoints.

        They are older, or the tracker has been edited to return to `found`.
        """
        newest = self._held[0]
        if newest.order <= _order(found):
            return True
        # After a crash between a commit and the move of the tracker, one checkpoint is newer.
        if len(_list_newer(found)) <= 1:
            return False
        logger.warning(
            f"{_describe(newest)} is not used: the tracker has been edited to return to "
            f"{found.directory}"
        )
        return True

    def _continue_branch(self, saved: CheckpointRef, named: CheckpointRef) -> _Choice:
        """Return the newest checkpoint of the branch that began with `named`."""
        found: CheckpointRef | LocalCheckpointInfo = saved
        if self._held and self._held[0].order > _order(saved):
            found = self._held[0]
        logger.warning(
            f"continuing from {_describe(found)}: this run began with {named.directory}, which the "
            "flags name, and has saved newer checkpoints since. To begin again from there, add "
            "--override-existing-run"
        )
        return _Choice(found, extends_branch=True, continues=True)

    def _find_named(self) -> tuple[CheckpointRef | None, bool]:
        """Return the checkpoint that the flags name, and whether only its weights are loaded."""
        config = self._config
        if config.load is None:
            return self._find_first()
        found = find_checkpoint(config.load, config.ckpt_step)
        if found is None:
            return self._find_first()
        if found.note is not None:
            logger.warning(found.note)
        return found, config.finetune

    def _find_first(self) -> tuple[CheckpointRef | None, bool]:
        """Return the checkpoint for the first start of a run, whose --load contains none yet."""
        config = self._config
        if config.pretrained_checkpoint is not None:
            found = find_checkpoint(config.pretrained_checkpoint)
            if found is None:
                raise ValueError(
                    f"--pretrained-checkpoint {config.pretrained_checkpoint} contains no checkpoint"
                )
            return found, True
        if config.load is not None:
            _check_random_weights(config, path_of(config.load))
        return None, False

    def _warn_of_return(self, named: CheckpointRef) -> None:
        later = _name_later(named.directory.parent, read_lineage(named.directory).iteration)
        if later:
            logger.warning(
                f"returning to {named.directory} (--ckpt-step): {later} are left in place until "
                "this run saves the same iterations; then they are replaced"
            )

    def _check_replaced(self, saved: CheckpointRef | None, first: int, source: str) -> None:
        """Raise ValueError if the run would replace another one in --save without permission."""
        if saved is None or self._save is None:
            return
        message = (
            f"--save {self._save} contains {saved.directory.name} of a run that this one, which "
            f"starts from {source}, does not continue. The tracker would return to an earlier "
            f"iteration, and checkpoints of the same number would be replaced "
            f"({_name_later(self._save, first)})"
        )
        if not self._config.override_existing_run:
            raise ValueError(
                f"{message}. To continue that run, give --load {self._save}; to keep it, give "
                "another --save; to replace it, add --override-existing-run"
            )
        logger.warning(f"{message} (--override-existing-run)")


def _order(found: CheckpointRef) -> tuple[int, int]:
    lineage = read_lineage(found.directory)
    return lineage.generation, lineage.iteration


def _list_newer(named: CheckpointRef) -> list[str]:
    """Return the complete checkpoints that are newer than `named`, in the same directory."""
    root = named.directory.parent
    checkpoints = CheckpointDirectory(root)
    newer = []
    for iteration in _list_later(root, read_lineage(named.directory).iteration):
        path = checkpoints.path(iteration)
        # Those of an abandoned branch are older: this run has returned before.
        is_newer = _order(CheckpointRef(path, named.format)) > _order(named)
        if is_newer and find_problem(path) is None:
            newer.append(path.name)
    return newer


def _warn_of_newer(named: CheckpointRef) -> None:
    """Warn if the tracker names `named` although newer checkpoints exist: it has been edited."""
    newer = _list_newer(named)
    if newer:
        logger.warning(
            f"continuing from {named.directory}, which the tracker names, although there are newer "
            f"ones: {_abbreviate(newer)}. Each is left in place until this run saves the same "
            "iteration; then it is replaced"
        )


def _describe(found: CheckpointRef | LocalCheckpointInfo) -> str:
    if isinstance(found, LocalCheckpointInfo):
        return f"{found.name} on the disks of the nodes"
    return str(found.directory)


def _list_later(root: Path, iteration: int) -> list[int]:
    """Return the iterations of the checkpoints in `root` above `iteration`."""
    return [number for number in CheckpointDirectory(root).list_iterations() if number > iteration]


def _name_later(root: Path, iteration: int) -> str:
    """Return the names of the checkpoints in `root` above `iteration`, abbreviated."""
    checkpoints = CheckpointDirectory(root)
    return _abbreviate([checkpoints.path(number).name for number in _list_later(root, iteration)])


def _abbreviate(names: list[str]) -> str:
    text = ", ".join(names[:_SHOWN])
    if len(names) > _SHOWN:
        text += f" and {len(names) - _SHOWN} more"
    return text


def _check_random_weights(config: CheckpointConfig, directory: Path) -> None:
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
    # The restart idiom gives --use-checkpoint-args on the first start, too.
    is_first_start = _is_same_directory(config)
    if not is_first_start:
        requirements["--use-checkpoint-args"] = config.use_checkpoint_args
        if directory.exists() and any(directory.iterdir()):
            raise ValueError(
                f"--load {directory} holds no checkpoint, but it is not empty. Training would "
                "start from random weights; if that is intended, leave out --load"
            )
    given = [name for name, is_given in requirements.items() if is_given]
    if given:
        raise ValueError(
            f"--load {directory} holds no checkpoint, but {' and '.join(given)} would need one"
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
    stored = normalize_stored_args(start.source.args).get("null_tokenizer_eod_id")
    if stored is None or flags.vocab_size is None or stored >= flags.vocab_size:
        return False
    config.tokenizer = dataclasses.replace(flags, null_tokenizer_eod_id=stored)
    config.notes.append(f"--null-tokenizer-eod-id {stored}, as in {start.source.description}")
    return True
