"""The `choose` command: which checkpoint a launch would start from, without launching."""

from __future__ import annotations

import argparse

from megatron.core.flags import raise_problems
from megatron.core.object_path import path_of
from megatron.core.terminal import print_text
from megatron.planning.launch_check import preview_choice
from megatron.training.config.arguments import build
from megatron.training.config.parsing import make_flag_parser
from megatron.training.config.run_options import CheckpointConfig


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

    choice = preview_choice(config, save)
    if choice.candidate is not None:
        print_text(f"the launch starts from {choice.candidate.description}: {choice.reason}")
    else:
        print_text(f"the launch starts from random weights: {choice.reason}")
    for text in choice.explain_passed_over():
        print_text(text)
    if config.non_persistent_ckpt_type is not None:
        print_text(
            "of the checkpoints on the disks of the nodes, only those of this node were read"
        )
    return 0
