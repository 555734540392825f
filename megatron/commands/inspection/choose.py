"""The `choose` command: which checkpoint a launch would start from, without launching."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from megatron.core.dist_checkpointing.choice import choose
from megatron.core.dist_checkpointing.files import read_run_name
from megatron.core.dist_checkpointing.local_checkpoints import (
    LocalInventory,
    find_local_checkpoints,
)
from megatron.core.dist_checkpointing.ownership import identify_job
from megatron.core.dist_checkpointing.tiers.local_tier import LocalTier, Replication
from megatron.core.flags import raise_problems
from megatron.core.object_path import path_of
from megatron.core.terminal import print_text
from megatron.training.checkpoint.launch import check_random_weights, describe_launch
from megatron.training.config.arguments import build
from megatron.training.config.options import CheckpointConfig
from megatron.training.config.parsing import make_flag_parser


def run_choose(args: argparse.Namespace) -> int:
    """Print the choice and the reasons, without writing any file.

    Only the local checkpoints of this node are read. The environment variables of torchrun and
    Slurm determine whether the launch is an automatic restart.
    """
    command_line = make_flag_parser().parse(args.flags)
    raise_problems(command_line.problems)
    config = build(CheckpointConfig, command_line.flag_values)
    save = None
    if config.save is not None and not command_line.flag_values.get("skip_train"):
        save = path_of(config.save)

    # Describe the existing checkpoints, and apply the rule of `pretrain_gpt.py`.
    local = _find_on_this_node(config, save)
    description = describe_launch(config, save, identify_job(), local)
    choice = choose(description.launch, description.inventory)
    if choice.candidate is not None:
        print_text(f"the launch starts from {choice.candidate.description}: {choice.reason}")
    else:
        if config.load is not None:
            check_random_weights(config, path_of(config.load))
        print_text(f"the launch starts from random weights: {choice.reason}")
    for text in choice.explain_passed_over():
        print_text(text)
    if config.non_persistent_ckpt_type is not None:
        print_text(
            "of the checkpoints on the disks of the nodes, only those of this node were read"
        )
    return 0


def _find_on_this_node(config: CheckpointConfig, save: Path | None) -> LocalInventory:
    """Return the checkpoints on the disk of this node, without creating its directory."""
    directory = config.non_persistent_local_ckpt_dir
    if save is None or config.non_persistent_ckpt_type is None or directory is None:
        return LocalInventory()
    parent = Path(os.path.expandvars(directory))
    # Without a name the run has none, but there may be some of the same run under another name.
    root = parent / (read_run_name(save) or "unnamed")
    return find_local_checkpoints(LocalTier(root, 0, [0], Replication()))
