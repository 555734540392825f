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

import sys
from collections.abc import Sequence

from megatron.commands.conversion_options import (
    ConvertOptions,
    parse_options,
    print_report,
    reported_errors,
)
from megatron.conversion.huggingface.config_fields import start_transformers
from megatron.conversion.options import ReadOptions, WriteOptions
from megatron.core.imports import program_imports


def parse(argv: Sequence[str]) -> tuple[ConvertOptions, ReadOptions, WriteOptions]:
    """Return the options of the conversion."""
    return parse_options(argv, ConvertOptions, __doc__)


def main() -> None:
    """Run this process's command line; also the console entry point."""
    with reported_errors():
        options, read_options, write_options = parse(sys.argv[1:])
        assert options.load_dir is not None
        has_config = (options.load_dir / "config.json").is_file()
        if "hf" in (options.saver, options.loader) or has_config:
            start_transformers()

        # Imported after parsing, because importing torch takes seconds.
        with program_imports():
            from megatron.commands.conversion import run

        notes: list[str] = []
        outcome = run(options, read_options, write_options, notes.append)
    print_report(outcome, write_options, notes)


if __name__ == "__main__":
    main()
