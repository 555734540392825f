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
from typing import Any

from megatron.conversion.command_line import (
    add_edit_flags,
    add_read_flags,
    add_target_flags,
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

    # Source.
    source_help = "a run's --save directory, an iteration, or a model"
    add("--load-dir", type=path_argument, required=True, help=source_help)
    add("--loader", choices=["auto", *FORMAT_NAMES], default="auto", help="format of the source")
    add("--ckpt-step", type=int, help="iteration to convert; default: the newest")
    add("--no-optim", action="store_true", help="leave the optimizer state out")
    add_read_flags(parser)

    # Target.
    add(
        "--save-dir",
        type=path_argument,
        required=True,
        help="directory of the result; must not exist",
    )
    add("--saver", choices=FORMAT_NAMES, required=True, help="format of the result")
    add_target_flags(parser)
    add_edit_flags(parser)
    add("--overwrite", action="store_true", help="replace an existing --save-dir")
    return parser


def parse(argv: list[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Return the options of the conversion, and the model's arguments on the command line."""
    args, model_argv = make_parser().parse_known_args(argv)
    sections = {"model": TransformerConfig, "layout": ParallelConfig}
    model_args, ignored = parse_flags(FlagParser(sections), model_argv)
    if ignored:
        raise ValueError(f"{', '.join(ignored)}: no effect on a conversion")
    return args, model_args


def main() -> None:
    """Run this process's command line; also the console entry point."""
    with reported_errors():
        args, model_args = parse(sys.argv[1:])
        if "hf" in (args.saver, args.loader) or (args.load_dir / "config.json").is_file():
            start_transformers()

        # Imported after parsing, because importing torch takes seconds.
        with program_imports():
            from megatron.commands.conversion_options import print_report
            from megatron.commands.convert import run

        notes: list[str] = []
        outcome = run(args, model_args, notes.append)
    print_report(outcome, args, notes)


if __name__ == "__main__":
    main()
