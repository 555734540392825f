"""`repair`: a copy of a checkpoint with its shifted optimizer state put back."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron.commands.inspection.view import READ_EVERYTHING
from megatron.conversion.checkpoint_conversion import write_checkpoint
from megatron.conversion.megatron_lm.shifted_optimizer import RepairedOptimizer
from megatron.conversion.megatron_lm.torch_dist import TorchDistSource
from megatron.conversion.opening import open_checkpoint, require_checkpoint
from megatron.core.progress import ProgressBar
from megatron.core.terminal import print_json, print_line


def run_repair(args: argparse.Namespace) -> int:
    """Write a copy of a checkpoint with its shifted optimizer state put back."""
    path, checkpoint_format, *_ = require_checkpoint(args.path, args.ckpt_step)
    if checkpoint_format != "torch_dist":
        raise ValueError(
            f"{path} is a {checkpoint_format} checkpoint; only torch_dist can be repaired"
        )
    source = open_shifted_checkpoint(path)
    with ProgressBar("repair", 0, quiet=args.quiet or args.json) as progress:
        write_checkpoint(
            source,
            [path],
            args.output,
            "torch_dist",
            verify=True,
            progress=progress.add,
            starting=progress.restart,
        )

    # Report.
    if args.json:
        result = {"path": str(path), "output": str(args.output)}
        print_json(result | {"moved": source.moved, "lost": source.lost}, indent=1)
        return 0
    print_line(f"{path} -> {args.output}")
    print_line(f"  put back   {source.moved} elements of each optimizer state")
    print_line(
        f"  lost       {source.lost} elements of each state: main parameters are taken from the "
        "weights, moments are zero"
    )
    return 0


def open_shifted_checkpoint(path: Path) -> RepairedOptimizer:
    """Open a checkpoint with shifted optimizer state. Raises ValueError if it is not shifted."""
    try:
        open_checkpoint(path, "torch_dist", read_options=READ_EVERYTHING)
    except ValueError:
        shifted = TorchDistSource(path, compares_weights=False)
        return RepairedOptimizer(shifted, shifted.config)
    raise ValueError(f"{path} needs no repair: the main parameters equal the weights")
