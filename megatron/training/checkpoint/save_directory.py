"""The directory that a run saves to, and the checkpoints that it already contains."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

from megatron.core.dist_checkpointing.files import run_name
from megatron.core.dist_checkpointing.lineage import identify_checkpoint
from megatron.core.dist_checkpointing.local_checkpoints import Tier, create_tier
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.object_path import path_of
from megatron.core.run_checkpoint.formats import CheckpointRef, NoCheckpointError, find_checkpoint
from megatron.training.config.options import CheckpointConfig
from megatron.training.config.run_config import Config


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


def find_saved(root: Path) -> CheckpointRef | None:
    """Return the newest complete checkpoint of the run in `root`, None if there is none."""
    try:
        checkpoint = find_checkpoint(root)
    except NoCheckpointError:
        return None
    # A path can also name a checkpoint itself, or contain a model of another format.
    if checkpoint is None or checkpoint.directory.parent != root:
        return None
    return checkpoint


def identify_newest(root: Path | None) -> tuple[str, str] | None:
    """Return the name and the identity of the newest complete checkpoint in `root`, if any.

    Two runs can save checkpoints of the same name. Collective.
    """

    def find() -> tuple[str, str] | None:
        if root is None:
            return None
        checkpoint = find_saved(root)
        if checkpoint is None:
            return None
        return checkpoint.directory.name, identify_checkpoint(checkpoint.directory)

    return Coordination.of(None).run_on_rank0(find)


def open_local_tier(config: CheckpointConfig, save: Path | None) -> Tier | None:
    """Return the checkpoints of `save` on the disks of the nodes. Collective.

    None without --non-persistent-ckpt-type, and for a run without --save.
    """
    directory = config.non_persistent_local_ckpt_dir
    if save is None or config.non_persistent_ckpt_type is None or directory is None:
        return None
    run = Coordination.of(None).run_on_rank0(lambda: run_name(save))
    return create_tier(
        Path(os.path.expandvars(directory)) / run,
        config.replication_factor if config.replication else 1,
        config.replication_jump,
        timedelta(minutes=config.ckpt_save_timeout_minutes),
    )
