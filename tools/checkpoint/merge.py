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
import sys
from pathlib import Path
from typing import Any

from megatron.conversion.command_line import (
    add_edit_flags,
    add_read_flags,
    add_target_flags,
    parse_positive,
    reported_errors,
)
from megatron.conversion.huggingface.config_fields import start_transformers
from megatron.conversion.options import FORMAT_NAMES
from megatron.core.imports import program_imports
from megatron.core.object_path import path_argument
from megatron.core.parallel_config import ParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.arguments import FlagParser, parse_flags


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
        type=path_argument,
        required=True,
        help="directory of the result; must not exist",
    )
    add("--saver", choices=FORMAT_NAMES, help="format of the result; default: as the last input")
    add_target_flags(parser)
    add_edit_flags(parser)
    add("--overwrite", action="store_true", help="replace an existing --output")
    return parser


def parse(argv: list[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Return the options of the merge, and the model's arguments on the command line."""
    args, model_argv = make_parser().parse_known_args(argv)
    model_args, ignored = parse_flags(
        FlagParser({"model": TransformerConfig, "layout": ParallelConfig}), model_argv
    )
    if ignored:
        raise ValueError(f"{', '.join(ignored)}: no effect on a merge")
    # --input may contain several runs, for which one step has no meaning.
    if args.ckpt_step is not None and args.average_last is None:
        raise ValueError(
            f"--ckpt-step {args.ckpt_step} needs --average-last; to merge one iteration of a run, "
            "give its directory to --input"
        )
    if args.optimizer is not None and args.no_optim:
        raise ValueError(f"--optimizer {args.optimizer} and --no-optim are mutually exclusive")
    if args.optimizer is not None and args.weights == "ema":
        raise ValueError(
            f"--optimizer {args.optimizer} and --weights ema are mutually exclusive: the optimizer "
            "state belongs to the model's own weights"
        )
    return args, model_args


def may_need_transformers(args: argparse.Namespace) -> bool:
    """Return whether the result or a local input is a Hugging Face model."""
    if args.saver == "hf":
        return True
    for word in args.input:
        path, _, _ = word.rpartition(":")  # before the weight
        for candidate in (word, path or word):
            if (Path(candidate) / "config.json").is_file():
                return True
    return False


def main() -> None:
    """Run this process's command line; also the console entry point."""
    with reported_errors():
        args, model_args = parse(sys.argv[1:])
        if may_need_transformers(args):
            start_transformers()

        # Imported after parsing, because importing torch takes seconds.
        with program_imports():
            from megatron.commands.conversion_options import print_report
            from megatron.commands.merge import run

        notes: list[str] = []
        outcome = run(args, model_args, notes.append)
    print_report(outcome, args, notes)


if __name__ == "__main__":
    main()
