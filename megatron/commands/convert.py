"""Conversion of a checkpoint, for tools/checkpoint/convert.py."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

from megatron.commands.conversion_options import make_read_options, make_write_options
from megatron.conversion.convert import ConversionReport, convert
from megatron.core.progress import ProgressBar
from megatron.core.safe_files.reading import allow_links


def run(
    args: argparse.Namespace,
    model_args: dict[str, Any],
    note: Callable[[str], None] = lambda text: None,
) -> ConversionReport:
    """Convert as the command line specifies."""
    if args.follow_links:
        allow_links()
    options = make_write_options(args, not args.no_optim, note)
    options = dataclasses.replace(options, average=args.weights == "ema")
    read_options = make_read_options(args, model_args, optimizer=not args.no_optim)
    # Everything is checked before the first tensor is read.
    with ProgressBar(f"-> {args.saver}") as progress:
        report = convert(
            args.load_dir,
            args.save_dir,
            args.saver,
            loader=args.loader,
            step=args.ckpt_step,
            read_options=read_options,
            options=options,
            overwrite=args.overwrite,
            verify=args.verify_target,
            progress=progress.add,
            starting=progress.restart,
        )
    if report.unused and not args.keep_foreign:
        note("unused tensors are copied with --keep-foreign")
    return report
