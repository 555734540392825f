"""Choose the checkpoint that a run starts from, once for all ranks, and open it.

This module describes the flags and the existing checkpoints; the rules are in
`dist_checkpointing.choice`, and the policy in `dist_checkpointing.policy`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path

from megatron.core.dist_checkpointing import (
    CheckpointDirectory,
    DamagedError,
    Lineage,
    read_lineage,
)
from megatron.core.dist_checkpointing.choice import (
    Candidate,
    Choice,
    Inventory,
    Launch,
    abbreviate,
)
from megatron.core.dist_checkpointing.local_checkpoints import LocalInventory
from megatron.core.dist_checkpointing.ownership.lineage import Origin, Segment, identify_checkpoint
from megatron.core.dist_checkpointing.ownership.takeover import (
    Job,
    PreviousOwner,
    read_previous_owner,
)
from megatron.core.dist_checkpointing.policy import (
    CheckpointRef,
    ChosenCheckpoint,
    LaunchDescription,
    RunDirectory,
)
from megatron.core.object_path import path_of
from megatron.core.run_checkpoint.formats import (
    NoCheckpointError,
    find_checkpoint,
    find_problem,
    open_found,
)
from megatron.core.run_checkpoint.keys import WORD_EMBEDDINGS
from megatron.core.run_checkpoint.source import Source
from megatron.core.wings import resolve
from megatron.training.checkpoint.save_options import make_options
from megatron.training.config.run_config import Config
from megatron.training.config.run_options import CheckpointConfig
from megatron.training.config.stored_args import normalize_stored_args

logger = logging.getLogger(__name__)

_FIND_OLDER_INTACT = "megatron.training.checkpoint.damage:find_older_intact"


@contextlib.contextmanager
def damage_explained(directory: Path) -> Iterator[None]:
    """Add the fix to a DamagedError of the block, which all ranks raise together.

    The fix is the newest older checkpoint of the same run whose checksums match. All ranks share
    the reading of it, so that this takes about as long as a load.
    """
    try:
        yield
    except DamagedError as error:
        root = directory.parent
        intact: Path | None = resolve(_FIND_OLDER_INTACT)(directory)
        if intact is None:
            raise
        raise DamagedError(
            f"{error}\n{intact.name} is intact: continue from it with --load {root} --ckpt-step "
            f"{int(intact.name.removeprefix('iter_'))}"
        ) from error


def saves_to(config: Config) -> Path | None:
    """Return the directory of checkpoints that the run will own, None if it saves none."""
    # A conversion writes to --ckpt-convert-save, which no run owns.
    checkpoint = config.checkpoint
    if (
        checkpoint.save is None
        or config.training.skip_train
        or checkpoint.ckpt_convert_format is not None
    ):
        return None
    return path_of(checkpoint.save)


class TrainingDirectory(RunDirectory[Source]):
    """The directory `save` of a training run, and the checkpoint that its flags request.

    `choose` raises ValueError for a --load without a checkpoint where one is required, and for
    a --save that contains another run.
    """

    def __init__(self, config: CheckpointConfig, save: Path | None = None) -> None:
        super().__init__(save, make_options(config))
        self._config = config

    def find_saved(self) -> Path | None:
        assert self.root is not None
        try:
            checkpoint = find_checkpoint(self.root)
        except NoCheckpointError:
            return None
        # A path can also name a checkpoint itself, or contain a model of another format.
        if checkpoint is None or checkpoint.directory.parent != self.root:
            return None
        return checkpoint.directory

    def describe(
        self, job: Job, local: LocalInventory, damaged: frozenset[str]
    ) -> LaunchDescription:
        return describe_launch(self._config, self.root, job, local, damaged)

    def report(
        self, choice: Choice, checkpoint: CheckpointRef | None, damaged: frozenset[str]
    ) -> None:
        config = self._config
        if choice.candidate is None:
            # A run may have local checkpoints only, all of them damaged.
            if not damaged and config.load is not None:
                check_random_weights(config, path_of(config.load))
        elif choice.continues:
            logger.warning(f"continuing from {choice.candidate.description}: {choice.reason}")
        elif choice.origin is not None and choice.extends_branch:
            logger.warning(f"starting from {choice.candidate.description}: {choice.reason}")
        if checkpoint is not None and checkpoint.note is not None:
            logger.warning(checkpoint.note)
        super().report(choice, checkpoint, damaged)
        # Each launch by hand would drop it again, which is easily left in a script.
        if config.no_load_optim and choice.extends_branch and not choice.continues:
            logger.warning(
                "--no-load-optim: this launch drops the optimizer of its own run, as every further "
                "one with the same flags does. Leave the flag out to keep it"
            )

    def open(
        self, checkpoint: CheckpointRef, choice: Choice, *, verify: bool, waits_for_shards: bool
    ) -> Source:
        config = self._config
        # As in `resume`, --no-load-optim does not apply to a run that continues its own checkpoint.
        drops_optimizer = config.no_load_optim and not choice.continues
        return open_found(
            checkpoint,
            optimizer=not choice.weights_only and not drops_optimizer,
            verify=config.ckpt_verify if verify else False,
            waits_for_shards=waits_for_shards,
        )

    def open_shared(self, ref: CheckpointRef, choice: Choice) -> ChosenCheckpoint[Source]:
        with damage_explained(ref.directory):
            checkpoint = super().open_shared(ref, choice)
        # The parts of a checkpoint that the model does not have.
        source = checkpoint.source
        if self._ranks.is_coordinator and source.unused:
            logger.warning(
                f"{source.description}: {len(source.unused)} unused parts: "
                f"{abbreviate(source.unused)}"
            )
        return checkpoint


# ---- Description of a launch, on rank 0 ----


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
    continues_newest = is_restart_idiom(config)
    root = save
    if continues_newest:
        assert config.load is not None
        root = path_of(config.load)
    refs: dict[str, CheckpointRef] = {}
    shared, newer = _describe_shared(root, continues_newest, refs)
    named, weights_only = _describe_named(config, continues_newest, refs)
    origin = None
    if named is not None and named.problem is None:
        step = None if continues_newest else config.ckpt_step
        origin = Origin(identify_checkpoint(path_of(named.name)), weights_only, step)

    names: tuple[str, ...] = ()
    previous = PreviousOwner({})
    if save is not None:
        directory = CheckpointDirectory(save)
        names = tuple(directory.path(iteration).name for iteration in directory.list_iterations())
        previous = read_previous_owner(save, job)
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
        in_place=_is_same_directory(config),
        names_checkpoint=not continues_newest,
        origin=origin,
        override=config.override_existing_run,
        job=previous.job_id,
        first_generation=previous.first_generation,
    )
    return LaunchDescription(launch, inventory, refs)


def _describe_shared(
    root: Path | None, continues_newest: bool, refs: dict[str, CheckpointRef]
) -> tuple[list[Candidate], list[Candidate]]:
    """Return the checkpoints of the run in `root` as in `Inventory`: shared and newer ones.

    The usable one is added to `refs`.
    """
    if root is None:
        return [], []
    try:
        saved = find_checkpoint(root)
    except NoCheckpointError as error:
        return [_make_problem(str(root), error)], []
    # A run may begin in the directory of a model.
    is_inside = saved is not None and saved.directory.parent == root
    if saved is None or not (continues_newest or is_inside):
        return [], []
    shared = [Candidate(str(path), read_lineage(path), why) for path, why in saved.damaged]
    shared.append(_add_candidate(saved, refs))
    newer = []
    if is_inside:
        newer = CheckpointDirectory(root).list_newer(shared[-1].lineage, find_problem)
    return shared, newer


def _describe_named(
    config: CheckpointConfig, continues_newest: bool, refs: dict[str, CheckpointRef]
) -> tuple[Candidate | None, bool]:
    """Return the checkpoint that the flags name, and whether only its weights are loaded."""
    try:
        ref, weights_only = _find_named(config, continues_newest)
        return (None if ref is None else _add_candidate(ref, refs)), weights_only
    except ValueError as error:
        return _make_problem(str(config.load), error), False


def _add_candidate(ref: CheckpointRef, refs: dict[str, CheckpointRef]) -> Candidate:
    refs[str(ref.directory)] = ref
    return Candidate(str(ref.directory), read_lineage(ref.directory))


def _make_problem(name: str, error: ValueError) -> Candidate:
    """Return an entry for a directory without a checkpoint that can be loaded."""
    return Candidate(name, Lineage((Segment(0, 0),)), str(error))


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

    That is normal for the restart idiom, a warning for an empty directory, which scripts for
    Megatron-LM create before anything is saved, and an error for one that does not exist.
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
        if not directory.exists():
            raise ValueError(
                f"--load {directory} does not exist. To start from random weights, leave out "
                "--load, or give --save the same directory"
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
        f"NO CHECKPOINT: --load {directory} is empty.\n"
        "   Training starts from RANDOM WEIGHTS, as Megatron-LM does.\n"
        "   If you expected a checkpoint, stop this run; --exit-on-missing-checkpoint makes this "
        "an error."
    )


def stored_vocab_size(checkpoint: ChosenCheckpoint[Source] | None) -> int | None:
    """Return the vocabulary size of the model in the checkpoint to load, None if it is unknown.

    Megatron-LM trains the rows that pad its vocabulary, and its softmax includes them, so that they
    are part of its model.
    """
    if checkpoint is None:
        return None
    # The shape of the embedding is more reliable than arguments: [vocabulary, h].
    embedding = checkpoint.source.tensors.get(WORD_EMBEDDINGS)
    if embedding is None:
        return checkpoint.source.args.get("model_vocab_size")
    return embedding.shape[0]


def adopt_end_of_document(config: Config, checkpoint: ChosenCheckpoint[Source] | None) -> bool:
    """Let NullTokenizer end documents with the token of the loaded run.

    --null-tokenizer-eod-id overrides that. Returns whether the tokenizer has changed.
    """
    flags = config.tokenizer
    if (
        checkpoint is None
        or flags.kind != "NullTokenizer"
        or flags.null_tokenizer_eod_id is not None
    ):
        return False
    # A stored id outside of --vocab-size belongs to another vocabulary.
    token_id = normalize_stored_args(checkpoint.source.args).get("null_tokenizer_eod_id")
    if token_id is None or flags.vocab_size is None or token_id >= flags.vocab_size:
        return False
    config.tokenizer = dataclasses.replace(flags, null_tokenizer_eod_id=token_id)
    config.notes.append(
        f"--null-tokenizer-eod-id {token_id}, as in {checkpoint.source.description}"
    )
    return True
