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

import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.commands.conversion_options import (
    MergeOptions,
    parse_options,
    print_report,
    reported_errors,
)
from megatron.conversion.huggingface.config_fields import start_transformers
from megatron.conversion.options import ReadOptions, WriteOptions
from megatron.core.imports import program_imports


def parse(argv: Sequence[str]) -> tuple[MergeOptions, ReadOptions, WriteOptions]:
    """Return the options of the merge."""
    return parse_options(argv, MergeOptions, __doc__)


def may_need_transformers(options: MergeOptions) -> bool:
    """Return whether the result or a local input is a Hugging Face model."""
    if options.saver == "hf":
        return True
    for word in options.input:
        path, _, _ = word.rpartition(":")  # before the weight
        for candidate in (word, path or word):
            if (Path(candidate) / "config.json").is_file():
                return True
    return False


def main() -> None:
    """Run this process's command line; also the console entry point."""
    with reported_errors():
        options, read_options, write_options = parse(sys.argv[1:])
        if may_need_transformers(options):
            start_transformers()

        # Imported after parsing, because importing torch takes seconds.
        with program_imports():
            from megatron.commands.merging import run

        notes: list[str] = []
        outcome = run(options, read_options, write_options, notes.append)
    print_report(outcome, write_options, notes)


if __name__ == "__main__":
    main()
