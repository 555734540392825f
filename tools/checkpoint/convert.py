"""Convert a checkpoint: torch_dist, legacy (mp_rank_XX), Hugging Face, DeepSpeed universal;
optimizer included.

    python tools/checkpoint/convert.py --saver hf --load-dir run/checkpoints --save-dir model
    python tools/checkpoint/convert.py --saver legacy --load-dir run/checkpoints --save-dir old \\
        --target-tensor-parallel-size 2 --target-pipeline-parallel-size 4

One process, no GPU, no torchrun. The source's format and the model's arguments are found in the
files; what these lack is given as the flags of training (--num-attention-heads 16
--position-embedding-type rope ...).
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megatron.conversion.formats import FORMATS
from megatron.conversion.options import (
    QKV_LAYOUTS,
    UNIVERSAL_STYLES,
    ReadOptions,
    WriteOptions,
    parse_size,
)
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.dist_checkpointing.format.links import allow_links
from megatron.core.lazy_import import lazy_module
from megatron.core.object_storage import path_of
from megatron.core.parallel_state import ParallelConfig
from megatron.core.progress import ProgressBar
from megatron.core.terminal import format_error, print_line
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.arguments import FlagParser, parse_flags

if TYPE_CHECKING:
    import torch

    from megatron.conversion import convert as conversion
else:  # a command line is judged without torch
    torch, conversion = map(lazy_module, ("torch", "megatron.conversion.convert"))

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
STOPPING = (signal.SIGINT, signal.SIGTERM)

ALL = " ".join(FORMATS)
AS_SOURCE = "default: as the source"


def positive(text: str) -> int:
    """The type of sizes and numbers: 0 would say nothing."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


INT = {"type": positive}
SWITCH = {"action": "store_true"}
QKV_BLOCKS = "order q, k and v for Megatron-DeepSpeed since December 2024 at the target's TP size"
WHOSE_MODULES = "whose modules of Megatron-LM the files are for; default: as the source, else transformer_engine"
# Flag -> the field of Options that it sets, the savers that it says something to, its help, and how
# it is parsed.
TARGET_FLAGS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "--target-tensor-parallel-size": ("tensor_parallel", "legacy universal", AS_SOURCE, INT),
    "--target-pipeline-parallel-size": ("pipeline_parallel", "legacy", AS_SOURCE, INT),
    "--target-virtual-pipeline-parallel-size": ("virtual_pipeline_parallel", "legacy", "model chunks per stage", INT),
    "--target-expert-model-parallel-size": ("expert_parallel", "legacy", AS_SOURCE, INT),
    "--target-expert-tensor-parallel-size": ("expert_tensor_parallel", "legacy", AS_SOURCE, INT),
    "--dtype": ("dtype", ALL, "of the weights; default: as the source", {"choices": [*DTYPES]}),
    "--save-optim-sidecar": ("optim_sidecar", "hf", "keep the optimizer beside the model", SWITCH),
    "--max-shard-size": ("max_shard_size", "hf", "largest file; default: 5GB", {}),
    "--true-vocab-size": ("vocab_size", "hf universal", "tokens to keep", INT),
    "--tokenizer": ("tokenizer", "hf", "tokenizer to put beside the model", {"type": Path}),
    "--universal-style": (
        "universal_style", "universal", "style of names; default: by the model", {"choices": UNIVERSAL_STYLES},
    ),
    "--target-qkv-blocks": ("qkv_blocks", "universal", QKV_BLOCKS, SWITCH),
    "--target-transformer-impl": (
        "transformer_impl", "legacy torch_dist", WHOSE_MODULES, {"choices": ["local", "transformer_engine"]},
    ),
    "--stacked-layers": ("stacked_layers", "torch_dist", "one tensor for all layers, not one per layer", SWITCH),
    "--workers": ("workers", ALL, "files written at once", {"type": positive, "default": 2}),
}  # fmt: skip


def parse(argv: list[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Options of the conversion, and the model's arguments that were given."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--load-dir",
        type=path_of,
        required=True,
        help="a run's --save directory, an iteration, or a model",
    )
    add("--save-dir", type=path_of, required=True, help="where the result goes; must not exist")
    add("--loader", choices=["auto", *FORMATS], default="auto", help="format of the source")
    add("--saver", choices=[*FORMATS], required=True, help="format of the result")
    add("--ckpt-step", type=int, help="iteration to convert; default: the newest")
    add("--no-optim", action="store_true", help="leave the optimizer state out")
    add(
        "--hf-ignore-fields",
        nargs="+",
        default=[],
        metavar="NAME",
        help="fields of config.json that change nothing",
    )
    add(
        "--universal-qkv-layout",
        choices=QKV_LAYOUTS,
        help="of a universal source; default: what its arguments tell",
    )
    for flag, (_, savers, text, how) in TARGET_FLAGS.items():
        add(flag, help=text if savers == ALL else f"for {savers.replace(' ', ', ')}: {text}", **how)
    add("--overwrite", action="store_true", help="replace an existing --save-dir")
    add("--follow-links", action="store_true", help="follow links that leave --load-dir")
    add(
        "--no-verify-source",
        action="store_true",
        help="do not compare the blocks that are read with the source's checksums (checksums.bin)",
    )
    add(
        "--verify-target",
        "--verify",
        action="store_true",
        help="read the result back and compare it with the source, tensor by tensor",
    )
    args, rest = parser.parse_known_args(argv)
    if args.follow_links:
        allow_links()
    given, ignored = parse_flags(
        FlagParser({"model": TransformerConfig, "layout": ParallelConfig}), rest
    )
    if ignored:
        raise ValueError(f"{', '.join(ignored)}: no effect on a conversion")
    return args, given


def given_for_target(args: argparse.Namespace) -> dict[str, Any]:
    """Flags of TARGET_FLAGS that were given."""
    values = {flag: vars(args)[flag[2:].replace("-", "_")] for flag in TARGET_FLAGS}
    return {flag: value for flag, value in values.items() if value}


def without_effect(args: argparse.Namespace) -> list[str]:
    """Flags that were given, and mean nothing to the saver."""
    meant = {flag: TARGET_FLAGS[flag][1].split() for flag in given_for_target(args)}
    return [
        f"{flag} (for {', '.join(savers)})"
        for flag, savers in meant.items()
        if args.saver not in savers
    ]


def run(
    args: argparse.Namespace, given: dict[str, Any], note: Callable[[str], None] = lambda text: None
) -> conversion.ConversionReport:
    parsed: dict[str, Callable[[str], Any]] = {
        "--dtype": lambda name: getattr(torch, DTYPES[name]),
        "--max-shard-size": parse_size,
    }
    told = given_for_target(args).items()
    fields = {
        TARGET_FLAGS[flag][0]: parsed[flag](value) if flag in parsed else value
        for flag, value in told
    }
    options = WriteOptions(**fields, optimizer=not args.no_optim, note=note)
    read_options = ReadOptions(
        given,
        tuple(args.hf_ignore_fields),
        args.universal_qkv_layout,
        optimizer=not args.no_optim,
        verify=False if args.no_verify_source else None,
    )
    what = (
        args.load_dir,
        args.save_dir,
        args.saver,
        args.loader,
        args.ckpt_step,
        read_options,
        options,
    )
    with ProgressBar(f"-> {args.saver}") as progress:
        return conversion.convert(
            *what, args.overwrite, args.verify_target, progress.add, progress.restart
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
        sys.exit(f"error: {format_error(error)}")
    except MemoryError:
        sys.exit("error: out of memory; a damaged or hostile source can claim any size")
    except SystemExit as error:
        if error.code in [128 + number for number in STOPPING]:
            print_line("interrupted: nothing was written", file=sys.stderr)
        raise
    print_line(str(outcome.source))
    print_line(f"-> {outcome.target} ({args.saver}, {outcome.num_tensors} tensors)")
    for text in notes:
        print_line(f"   {text}")
    for name in without_effect(args):
        print_line(f"   no effect: {name}")
    for name in outcome.not_carried:
        print_line(f"   not carried: {name}")
    if outcome.verified is not None:
        print_line(f"   verified: {outcome.verified} tensors are bitwise those of the source")


if __name__ == "__main__":
    main()
