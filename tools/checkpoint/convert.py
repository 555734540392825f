"""Convert a checkpoint: torch_dist, legacy (mp_rank_XX), Hugging Face, DeepSpeed universal;
optimizer included.

    python tools/checkpoint/convert.py --saver hf --load-dir run/checkpoints --save-dir model
    python tools/checkpoint/convert.py --saver legacy --load-dir run/checkpoints --save-dir old \\
        --target-tensor-parallel-size 2 --target-pipeline-parallel-size 4

Runs in one process, without a GPU and without torchrun. The source's format and the model's
arguments are found in the files. Arguments that the files lack are given as the flags of training
(--num-attention-heads 16 --position-embedding-type rope ...).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron.conversion.command_line import (
    add_edit_flags,
    add_read_flags,
    add_target_flags,
    make_read_options,
    make_write_options,
    print_report,
    reported_errors,
)
from megatron.conversion.formats import FORMATS
from megatron.core.dist_checkpointing.format.links import allow_links
from megatron.core.lazy_import import lazy_module
from megatron.core.object_storage import path_of
from megatron.core.parallel_state import ParallelConfig
from megatron.core.progress import ProgressBar
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.arguments import FlagParser, parse_flags

if TYPE_CHECKING:
    from megatron.conversion import convert as conversion
else:  # errors in the command line are reported before torch is imported
    conversion = lazy_module("megatron.conversion.convert")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the tool's own flags."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument

    # Source.
    source_help = "a run's --save directory, an iteration, or a model"
    add("--load-dir", type=path_of, required=True, help=source_help)
    add("--loader", choices=["auto", *FORMATS], default="auto", help="format of the source")
    add("--ckpt-step", type=int, help="iteration to convert; default: the newest")
    add("--no-optim", action="store_true", help="leave the optimizer state out")
    add_read_flags(parser)

    # Target.
    add("--save-dir", type=path_of, required=True, help="directory of the result; must not exist")
    add("--saver", choices=[*FORMATS], required=True, help="format of the result")
    add_target_flags(parser)
    add_edit_flags(parser)
    add("--overwrite", action="store_true", help="replace an existing --save-dir")
    return parser


def parse(argv: list[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Return the options of the conversion, and the model's arguments on the command line."""
    args, rest = make_parser().parse_known_args(argv)
    if args.follow_links:
        allow_links()
    sections = {"model": TransformerConfig, "layout": ParallelConfig}
    given, ignored = parse_flags(FlagParser(sections), rest)
    if ignored:
        raise ValueError(f"{', '.join(ignored)}: no effect on a conversion")
    return args, given


def run(
    args: argparse.Namespace, given: dict[str, Any], note: Callable[[str], None] = lambda text: None
) -> conversion.ConversionReport:
    """Convert as the command line specifies."""
    with ProgressBar(f"-> {args.saver}") as progress:
        return conversion.convert(
            args.load_dir,
            args.save_dir,
            args.saver,
            loader=args.loader,
            step=args.ckpt_step,
            read_options=make_read_options(args, given, optimizer=not args.no_optim),
            options=make_write_options(args, not args.no_optim, note),
            overwrite=args.overwrite,
            verify=args.verify_target,
            progress=progress.add,
            starting=progress.restart,
        )


def main() -> None:
    """Run this process's command line; also the console entry point."""
    with reported_errors():
        args, given = parse(sys.argv[1:])
        notes: list[str] = []
        outcome = run(args, given, notes.append)
    print_report(outcome, args, notes)


if __name__ == "__main__":
    main()
