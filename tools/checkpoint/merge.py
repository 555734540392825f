"""Merge checkpoints of one model: a weighted sum of their parameters.

    python tools/checkpoint/merge.py --input a:0.25 b:0.75 --output merged
    python tools/checkpoint/merge.py --input run/checkpoints --average-last 5 --output merged
    python tools/checkpoint/merge.py --input run/checkpoints --average-last 8 \\
        --schedule one_minus_sqrt --output model --saver hf

Inputs may have different formats, layouts and dtypes; the result is written in any format that
convert.py writes. Runs in one process, without a GPU and without torchrun, with memory for a few
blocks of a tensor. Arguments that the files lack are given as the flags of training.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.conversion.command_line import (
    add_edit_flags,
    add_read_flags,
    add_target_flags,
    make_read_options,
    make_write_options,
    parse_positive,
    print_report,
    reported_errors,
)
from megatron.conversion.formats import FORMATS, require_checkpoint
from megatron.core.dist_checkpointing.format.links import allow_links
from megatron.core.lazy_import import lazy_module
from megatron.core.object_storage import path_of
from megatron.core.parallel_state import ParallelConfig
from megatron.core.progress import ProgressBar
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.arguments import FlagParser, parse_flags

if TYPE_CHECKING:
    from megatron.conversion import convert as conversion
    from megatron.conversion import merge as merging
else:  # errors in the command line are reported before torch is imported
    conversion = lazy_module("megatron.conversion.convert")
    merging = lazy_module("megatron.conversion.merge")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the tool's own flags."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument

    # Inputs.
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH[:WEIGHT]",
        help="checkpoints to merge; each is a run's --save directory, an iteration, or a model",
    )
    add(
        "--average-last",
        type=parse_positive,
        metavar="N",
        help="merge the last N complete checkpoints of the run in --input",
    )
    add("--ckpt-step", type=int, help="for --average-last: the last iteration to merge")
    add(
        "--schedule",
        metavar="NAME",
        help="weights of inputs that have none, in the order of --input, oldest first: uniform, "
        "linear or one_minus_sqrt (as after a learning rate decay of that shape), ema:DECAY",
    )
    add("--normalize", action="store_true", help="divide the weights by their sum")
    add(
        "--optimizer",
        metavar="from=INPUT",
        help="keep the optimizer state of one input: from=LAST, from=FIRST or from=N, the number "
        "of an input; default: drop it",
    )
    add(
        "--no-optim",
        action="store_true",
        help="do not read optimizer state: merge the weights even if inputs have main parameters",
    )
    add_read_flags(parser)

    # Target.
    add(
        "--output",
        "--save-dir",
        dest="save_dir",
        type=path_of,
        required=True,
        help="directory of the result; must not exist",
    )
    add("--saver", choices=[*FORMATS], help="format of the result; default: as the last input")
    add_target_flags(parser)
    add_edit_flags(parser)
    add("--overwrite", action="store_true", help="replace an existing --output")
    return parser


def parse(argv: list[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Return the options of the merge, and the model's arguments on the command line."""
    args, rest = make_parser().parse_known_args(argv)
    if args.follow_links:
        allow_links()
    given, ignored = parse_flags(
        FlagParser({"model": TransformerConfig, "layout": ParallelConfig}), rest
    )
    if ignored:
        raise ValueError(f"{', '.join(ignored)}: no effect on a merge")
    if args.ckpt_step is not None and args.average_last is None:
        raise ValueError(
            f"--ckpt-step {args.ckpt_step} needs --average-last; to merge one iteration of a run, "
            "give its directory to --input"
        )
    if args.optimizer is not None and args.no_optim:
        raise ValueError(f"--optimizer {args.optimizer} and --no-optim are mutually exclusive")
    return args, given


def choose_inputs(args: argparse.Namespace) -> tuple[list[Path], list[float]]:
    """Return the paths of the checkpoints to merge and their weights."""
    inputs = [merging.parse_input(text) for text in args.input]

    # Each input is a checkpoint.
    if args.average_last is None:
        paths = [path_of(item.path) for item in inputs]
        return paths, merging.resolve_weights(inputs, args.schedule, args.normalize)

    # The input is a run, of which the last checkpoints are merged.
    if len(inputs) > 1 or inputs[0].weight is not None:
        raise ValueError(
            f"--average-last {args.average_last} takes one --input, the directory of a run, "
            f"without a weight; got {' '.join(args.input)}"
        )
    root = path_of(inputs[0].path)
    paths = merging.find_last_checkpoints(root, args.average_last, args.ckpt_step)
    inputs = [merging.WeightedInput(str(path), None) for path in paths]
    schedule = args.schedule or "uniform"
    return paths, merging.resolve_weights(inputs, schedule, args.normalize)


def find_base(optimizer: str | None, count: int) -> int:
    """Return the index of the input whose training state, and with --optimizer state, is kept."""
    if optimizer is None or optimizer == "from=LAST":
        return count - 1
    if optimizer == "from=FIRST":
        return 0
    match = re.fullmatch(r"from=(\d+)", optimizer)
    if match is None or not 1 <= int(match[1]) <= count:
        raise ValueError(
            f"--optimizer {optimizer}: give from=LAST, from=FIRST or from=N with N from 1 to "
            f"{count}"
        )
    return int(match[1]) - 1


def run(
    args: argparse.Namespace, given: dict[str, Any], note: Callable[[str], None] = lambda text: None
) -> conversion.ConversionReport:
    """Merge as the command line specifies."""
    paths, weights = choose_inputs(args)
    base = find_base(args.optimizer, len(paths))
    for path, weight in zip(paths, weights, strict=True):
        note(f"{weight:.6g} x {path}")

    # Open the inputs. Their main parameters are part of the optimizer state.
    read_options = make_read_options(args, given, optimizer=not args.no_optim)
    found = [require_checkpoint(path) for path in paths]
    sources = [conversion.open_found(checkpoint, read_options) for checkpoint in found]
    saver = args.saver or found[base].format
    options = make_write_options(args, True, note)
    source = merging.MergedSource(
        sources, weights, base, options.dtype, keep_optimizer=args.optimizer is not None
    )

    with ProgressBar(f"-> {saver}") as progress:
        return conversion.write_checkpoint(
            source,
            paths,
            args.save_dir,
            saver,
            options,
            overwrite=args.overwrite,
            verify=args.verify_target,
            progress=progress.add,
            starting=progress.restart,
        )


def main() -> None:
    """Run this process's command line."""
    with reported_errors():
        args, given = parse(sys.argv[1:])
        notes: list[str] = []
        outcome = run(args, given, notes.append)
    print_report(outcome, args, notes)


if __name__ == "__main__":
    main()
