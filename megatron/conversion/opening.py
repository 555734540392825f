"""Open a checkpoint of any format as a `Source`."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import torch.distributed as dist

from megatron.conversion.model_space.foreign import describe_foreign_mixers
from megatron.conversion.options import ReadOptions
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.dist_checkpointing.files import INTEGRITY
from megatron.core.dist_checkpointing.format.checksums import CHECKSUMS, find_checksums
from megatron.core.dist_checkpointing.policy import CheckpointRef
from megatron.core.dist_checkpointing.verification import find_integrity_problems
from megatron.core.run_checkpoint.formats import (
    FORMATS,
    NoCheckpointError,
    find_checkpoint,
)
from megatron.core.run_checkpoint.source import Source
from megatron.core.wings import resolve

_RENAMING_READERS = ("torch_dist", "hf", "deepspeed")


def open_checkpoint(
    root: Path,
    loader: str = "auto",
    step: int | None = None,
    read_options: ReadOptions | None = None,
) -> Source:
    """Open the checkpoint that `root` means (see `formats.find_checkpoint`)."""
    return open_found(require_checkpoint(root, step, loader), read_options)


def open_found(checkpoint_ref: CheckpointRef, read_options: ReadOptions | None = None) -> Source:
    """Open a checkpoint that was already found, possibly by another process."""
    read_options = read_options or ReadOptions()
    if read_options.verify_source:
        require_checksums(checkpoint_ref)
    if read_options.renames and checkpoint_ref.format not in _RENAMING_READERS:
        raise ValueError(
            f"--rename: {checkpoint_ref.directory} is a {checkpoint_ref.format} checkpoint; "
            f"tensors of {' and '.join(_RENAMING_READERS)} checkpoints can be renamed"
        )
    reader = resolve(FORMATS[checkpoint_ref.format].reader)
    source: Source = reader(checkpoint_ref.directory, read_options)
    # Arguments of the command line take precedence.
    source.args.update(read_options.args)
    if not read_options.keep_foreign:
        _refuse_foreign_mixers(source)
    return source


def _refuse_foreign_mixers(source: Source) -> None:
    """Raise ValueError for a model whose layers this program cannot run."""
    mixers = describe_foreign_mixers(source.args)
    if mixers:
        raise ValueError(
            f"{source.description} has {mixers}, which the trainer does not have: this model "
            "cannot be trained here. convert.py and merge.py copy these layers with --keep-foreign"
        )


def open_for_run(
    checkpoint_ref: CheckpointRef, optimizer: bool, verify: bool | None, waits_for_shards: bool
) -> Source:
    """Open a checkpoint for a run (see `run_checkpoint.formats.open_in_any_form`)."""
    return open_found(
        checkpoint_ref,
        ReadOptions(
            no_optim=not optimizer, verify_source=verify, waits_for_shards=waits_for_shards
        ),
    )


def require_checksums(checkpoint: CheckpointRef) -> None:
    """Raise CheckpointError unless the checkpoint contains checksums.

    Blocks are compared with `checksums.bin` when they are read. Megatron-LM's `integrity.json` has
    a hash of each file, so all files are read here, on rank 0 only.
    """
    if find_checksums(checkpoint.directory) is not None:
        return
    if not (checkpoint.directory / INTEGRITY).is_file():
        raise CheckpointError(
            f"--ckpt-verify: {checkpoint.directory} ({checkpoint.format}) has neither {CHECKSUMS} "
            f"nor {INTEGRITY} to compare it with: drop the flag, or convert the checkpoint first "
            "(tools/checkpoint/convert.py --saver torch_dist)"
        )
    if dist.is_initialized() and dist.get_rank() > 0:
        return
    problems = find_integrity_problems(checkpoint.directory)
    if problems:
        raise CheckpointError("\n".join(problems))


logger = logging.getLogger(__name__)

_HUB_NAME = re.compile(r"\w[\w-]*/\w[\w.-]*")  # organization/model


def require_checkpoint(root: Path, step: int | None = None, loader: str = "auto") -> CheckpointRef:
    """Like `find_checkpoint`, but raise NoCheckpointError if there is none, and log the note."""
    checkpoint = find_checkpoint(root, step, loader)
    if checkpoint is None:
        if not root.exists():
            hint = ""
            if _HUB_NAME.fullmatch(str(root)):
                hint = (
                    ". A model of the Hugging Face hub must be downloaded first: "
                    f"hf download {root} --local-dir DIR"
                )
            raise NoCheckpointError(f"{root}: no such directory{hint}")
        if not root.is_dir():
            raise NoCheckpointError(f"{root} is a file: give the directory of a checkpoint")
        names = sorted(path.name for path in root.iterdir())
        contents = "it is empty"
        if names:
            contents = f"it holds: {', '.join(names[:8])}"
        raise NoCheckpointError(
            f"{root} holds no checkpoint in a known format ({', '.join(FORMATS)}); {contents}"
        )
    if checkpoint.note is not None:
        logger.warning(checkpoint.note)
    return checkpoint
