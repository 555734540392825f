"""Convert a checkpoint: torch_dist, legacy (mp_rank_XX), Hugging Face, DeepSpeed universal; optimizer included.

    python tools/checkpoint/convert.py --saver hf --load-dir run/checkpoints --save-dir model
    python tools/checkpoint/convert.py --saver legacy --load-dir run/checkpoints --save-dir old \\
        --target-tensor-parallel-size 2 --target-pipeline-parallel-size 4

One process, no GPU, no torchrun. The source's format and the model's arguments are found in the files; what these lack
is given as the flags of training (--num-attention-heads 16 --position-embedding-type rope ...).
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from megatron.conversion.convert import WRITERS, ConversionReport, Options, convert
from megatron.conversion.deepspeed.files import STYLES
from megatron.conversion.deepspeed.reader import QKV_LAYOUTS
from megatron.conversion.files import parse_size
from megatron.conversion.open_checkpoint import FORMATS, Hints
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.dist_checkpointing.format.schema import message_of, printable
from megatron.core.parallel_state import ParallelConfig
from megatron.core.progress import Progress
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.arguments import FlagParser, parse_flags

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STOPPING = (signal.SIGINT, signal.SIGTERM)

MEANT_FOR = {  # option -> the savers that it says something to
    "target_tensor_parallel_size": ("legacy", "universal"),
    "target_pipeline_parallel_size": ("legacy",),
    "target_virtual_pipeline_parallel_size": ("legacy",),
    "save_optim_sidecar": ("hf",),
    "max_shard_size": ("hf",),
    "true_vocab_size": ("hf", "universal"),
    "tokenizer": ("hf",),
    "universal_style": ("universal",),
    "target_qkv_blocks": ("universal",),
    "target_transformer_impl": ("legacy", "torch_dist"),
    "stacked_layers": ("torch_dist",),
}


def parse(argv: list[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Options of the conversion, and the model's arguments that were given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--load-dir", type=Path, required=True, help="a run's --save directory, an iteration, or a model"
    )
    parser.add_argument("--save-dir", type=Path, required=True, help="where the result goes; must not exist")
    parser.add_argument("--loader", choices=["auto", *FORMATS], default="auto", help="format of the source")
    parser.add_argument("--saver", choices=[*WRITERS], required=True, help="format of the result")
    parser.add_argument("--ckpt-step", type=int, help="iteration to convert; default: the newest")
    parser.add_argument("--target-tensor-parallel-size", type=int, help="for legacy; default: as the source")
    parser.add_argument("--target-pipeline-parallel-size", type=int, help="for legacy; default: as the source")
    parser.add_argument("--target-virtual-pipeline-parallel-size", type=int, help="for legacy: model chunks per stage")
    parser.add_argument("--dtype", choices=[*DTYPES], help="of the weights; default: as the source")
    parser.add_argument("--no-optim", action="store_true", help="leave the optimizer state out")
    parser.add_argument("--save-optim-sidecar", action="store_true", help="for hf: keep the optimizer beside the model")
    parser.add_argument("--max-shard-size", help="for hf: largest file of weights; default: 5GB")
    parser.add_argument("--true-vocab-size", type=int, help="for hf, universal: tokens to keep")
    parser.add_argument("--tokenizer", type=Path, help="for hf: tokenizer to put beside the model")
    parser.add_argument(
        "--hf-ignore-fields", nargs="+", default=[], metavar="NAME", help="fields of config.json that change nothing"
    )
    parser.add_argument(
        "--universal-qkv-layout", choices=QKV_LAYOUTS, help="of a universal source; default: what its arguments tell"
    )
    parser.add_argument(
        "--universal-style", choices=[*STYLES], help="for universal: whose parameter names; default: by the model"
    )
    parser.add_argument(
        "--target-qkv-blocks",
        action="store_true",
        help="for universal: order q, k and v for Megatron-DeepSpeed since December 2024 at the target's TP size",
    )
    parser.add_argument(
        "--target-transformer-impl",
        choices=["local", "transformer_engine"],
        help="whose modules of Megatron-LM the files are for; default: as the source, else transformer_engine",
    )
    parser.add_argument(
        "--stacked-layers", action="store_true", help="for torch_dist: one tensor for all layers, not one per layer"
    )
    parser.add_argument("--workers", type=int, default=2, help="files written at once")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing --save-dir")
    parser.add_argument("--verify", action="store_true", help="read the result back and compare it with the source")
    args, rest = parser.parse_known_args(argv)
    given, ignored = parse_flags(FlagParser({"model": TransformerConfig, "layout": ParallelConfig}), rest)
    if ignored:
        raise ValueError(f"{', '.join(ignored)}: no effect on a conversion")
    return args, given


def without_effect(args: argparse.Namespace) -> list[str]:
    """Options that were given, and mean nothing to the saver."""
    given = [name for name, savers in MEANT_FOR.items() if vars(args)[name] and args.saver not in savers]
    return [f"--{name.replace('_', '-')} (for {', '.join(MEANT_FOR[name])})" for name in given]


def run(
    args: argparse.Namespace, given: dict[str, Any], note: Callable[[str], None] = lambda text: None
) -> ConversionReport:
    options = Options(
        args.target_tensor_parallel_size,
        args.target_pipeline_parallel_size,
        args.target_virtual_pipeline_parallel_size,
        DTYPES.get(args.dtype),
        not args.no_optim,
        args.true_vocab_size,
        args.tokenizer,
        parse_size(args.max_shard_size or "5GB"),
        args.save_optim_sidecar,
        args.workers,
        args.universal_style,
        args.target_qkv_blocks,
        args.target_transformer_impl,
        args.stacked_layers,
        note=note,
    )
    hints = Hints(given, tuple(args.hf_ignore_fields), args.universal_qkv_layout, not args.no_optim)
    with Progress(f"-> {args.saver}") as progress:
        return convert(
            args.load_dir,
            args.save_dir,
            args.saver,
            args.loader,
            args.ckpt_step,
            hints,
            options,
            args.overwrite,
            args.verify,
            progress.add,
            progress.restart,
        )


def stop(number: int, frame: object) -> NoReturn:
    """What was written so far is removed on the way out, which a second Ctrl-C does not cut short."""
    for each in STOPPING:
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + number)


def main() -> None:
    for number in STOPPING:
        signal.signal(number, stop)
    try:
        args, given = parse(sys.argv[1:])
        notes: list[str] = []
        outcome = run(args, given, notes.append)
    except (ValueError, CheckpointError, OSError) as error:
        sys.exit(f"error: {message_of(error)}")
    except SystemExit as error:
        if error.code in [128 + number for number in STOPPING]:
            print("interrupted: nothing was written", file=sys.stderr)
        raise
    print(f"{outcome.source}\n-> {outcome.target} ({args.saver}, {outcome.num_tensors} tensors)")
    for text in notes:
        print(f"   {printable(text)}")
    for name in without_effect(args):
        print(f"   no effect: {name}")
    for name in outcome.not_carried:
        print(f"   not carried: {printable(name)}")
    if outcome.verified is not None:
        print(f"   verified: {outcome.verified} tensors are bitwise those of the source")


if __name__ == "__main__":
    main()
