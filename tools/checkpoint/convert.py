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
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

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
else:  # errors in the command line are reported before torch is imported
    torch, conversion = map(lazy_module, ("torch", "megatron.conversion.convert"))

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
STOPPING = (signal.SIGINT, signal.SIGTERM)


def parse_positive(text: str) -> int:
    """Return a size or a number of the command line."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


class TargetFlag(NamedTuple):
    """A flag that describes the target."""

    option: str  # field of WriteOptions
    help: str
    savers: tuple[str, ...] = tuple(FORMATS)  # formats that the flag has an effect on
    kind: Callable[[str], Any] | None = str  # how the value is parsed; None: the flag has no value
    choices: tuple[str, ...] | None = None
    default: Any = None

    @property
    def full_help(self) -> str:
        """Return the help text with the formats that the flag is for."""
        if len(self.savers) == len(FORMATS):
            return self.help
        return f"for {', '.join(self.savers)}: {self.help}"


TARGET_FLAGS = {
    "--target-tensor-parallel-size": TargetFlag(
        "tensor_parallel",
        "tensor-parallel size of the target; default: as the source",
        ("legacy", "universal"),
        parse_positive,
    ),
    "--target-pipeline-parallel-size": TargetFlag(
        "pipeline_parallel",
        "pipeline-parallel size of the target; default: as the source",
        ("legacy",),
        parse_positive,
    ),
    "--target-virtual-pipeline-parallel-size": TargetFlag(
        "virtual_pipeline_parallel", "model chunks per stage", ("legacy",), parse_positive
    ),
    "--target-expert-model-parallel-size": TargetFlag(
        "expert_parallel",
        "expert-parallel size of the target; default: as the source",
        ("legacy",),
        parse_positive,
    ),
    "--target-expert-tensor-parallel-size": TargetFlag(
        "expert_tensor_parallel",
        "expert-tensor-parallel size of the target; default: as the source",
        ("legacy",),
        parse_positive,
    ),
    "--dtype": TargetFlag(
        "dtype", "dtype of the weights; default: as the source", choices=tuple(DTYPES)
    ),
    "--save-optim-sidecar": TargetFlag(
        "optim_sidecar", "store the optimizer next to the model", ("hf",), None
    ),
    "--max-shard-size": TargetFlag(
        "max_shard_size", "maximum size of a weight file; default: 5GB", ("hf",)
    ),
    "--true-vocab-size": TargetFlag(
        "vocab_size", "number of tokens to keep", ("hf", "universal"), parse_positive
    ),
    "--tokenizer": TargetFlag("tokenizer", "tokenizer to store next to the model", ("hf",), Path),
    "--universal-style": TargetFlag(
        "universal_style",
        "style of parameter names; default: depends on the model",
        ("universal",),
        choices=UNIVERSAL_STYLES,
    ),
    "--target-qkv-blocks": TargetFlag(
        "qkv_blocks",
        "order q, k and v as Megatron-DeepSpeed since December 2024 does at the target's TP size",
        ("universal",),
        None,
    ),
    "--target-transformer-impl": TargetFlag(
        "transformer_impl",
        "implementation of Megatron-LM's modules that the files are for; default: as the source, "
        "else transformer_engine",
        ("legacy", "torch_dist"),
        choices=("local", "transformer_engine"),
    ),
    "--stacked-layers": TargetFlag(
        "stacked_layers",
        "write one tensor for all layers instead of one per layer",
        ("torch_dist",),
        None,
    ),
    "--workers": TargetFlag(
        "workers", "number of files written at once", kind=parse_positive, default=2
    ),
}


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
    add(
        "--hf-ignore-fields",
        nargs="+",
        default=[],
        metavar="NAME",
        help="fields of config.json to ignore because they do not change the model",
    )
    add(
        "--universal-qkv-layout",
        choices=QKV_LAYOUTS,
        help="QKV layout of a universal source; default: as its arguments imply",
    )
    add("--follow-links", action="store_true", help="follow links that leave --load-dir")
    add(
        "--no-verify-source",
        action="store_true",
        help="do not compare the blocks that are read with the source's checksums (checksums.bin)",
    )

    # Target.
    add("--save-dir", type=path_of, required=True, help="directory of the result; must not exist")
    add("--saver", choices=[*FORMATS], required=True, help="format of the result")
    for name, flag in TARGET_FLAGS.items():
        if flag.kind is None:
            add(name, action="store_true", help=flag.full_help)
        else:
            add(
                name,
                type=flag.kind,
                choices=flag.choices,
                default=flag.default,
                help=flag.full_help,
            )
    add("--overwrite", action="store_true", help="replace an existing --save-dir")
    add(
        "--verify-target",
        "--verify",
        action="store_true",
        help="read the result back and compare it with the source, tensor by tensor",
    )
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


def get_target_values(args: argparse.Namespace) -> dict[str, Any]:
    """Return the target flags on the command line with their values."""
    values = {name: vars(args)[name[2:].replace("-", "_")] for name in TARGET_FLAGS}
    return {name: value for name, value in values.items() if value}


def list_flags_without_effect(args: argparse.Namespace) -> list[str]:
    """Return the target flags on the command line that do not apply to the target's format."""
    lines = []
    for name in get_target_values(args):
        savers = TARGET_FLAGS[name].savers
        if args.saver not in savers:
            lines.append(f"{name} (for {', '.join(savers)})")
    return lines


def run(
    args: argparse.Namespace, given: dict[str, Any], note: Callable[[str], None] = lambda text: None
) -> conversion.ConversionReport:
    """Convert as the command line specifies."""
    fields = {}
    for name, value in get_target_values(args).items():
        if name == "--dtype":
            value = getattr(torch, DTYPES[value])
        elif name == "--max-shard-size":
            value = parse_size(value)
        fields[TARGET_FLAGS[name].option] = value
    read_options = ReadOptions(
        args=given,
        ignored_fields=tuple(args.hf_ignore_fields),
        qkv_layout=args.universal_qkv_layout,
        optimizer=not args.no_optim,
        verify=False if args.no_verify_source else None,
    )
    with ProgressBar(f"-> {args.saver}") as progress:
        return conversion.convert(
            args.load_dir,
            args.save_dir,
            args.saver,
            loader=args.loader,
            step=args.ckpt_step,
            read_options=read_options,
            options=WriteOptions(**fields, optimizer=not args.no_optim, note=note),
            overwrite=args.overwrite,
            verify=args.verify_target,
            progress=progress.add,
            starting=progress.restart,
        )


def stop(number: int, frame: object) -> NoReturn:
    """Exit, which removes the partial result; a second Ctrl-C does not interrupt that."""
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
    for name in list_flags_without_effect(args):
        print_line(f"   no effect: {name}")
    for name in outcome.not_carried:
        print_line(f"   not carried: {name}")
    if outcome.verified is not None:
        print_line(f"   verified: {outcome.verified} tensors are bitwise those of the source")


if __name__ == "__main__":
    main()
