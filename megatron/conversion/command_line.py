"""The part of the command line that the tools which write checkpoints share.

This module does not import torch, so that errors in the command line are reported at once.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from megatron.conversion.options import (
    DTYPES,
    FORMAT_NAMES,
    NEW_ROWS,
    QKV_LAYOUTS,
    QUANTIZATIONS,
    UNIVERSAL_STYLES,
    parse_foreign_split,
    parse_layers,
    parse_rename,
)
from megatron.core.object_path import path_argument
from megatron.core.terminal import format_error, print_line

_T = TypeVar("_T")

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
    savers: tuple[str, ...] = FORMAT_NAMES  # formats that the flag has an effect on
    parse: Callable[[str], Any] | None = str  # how the value is parsed; None: the flag has no value
    choices: tuple[str, ...] | None = None
    default: Any = None

    @property
    def full_help(self) -> str:
        """Return the help text with the formats that the flag is for."""
        if len(self.savers) == len(FORMAT_NAMES):
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
    "--quantize": TargetFlag(
        "quantization",
        "store the matrices of linear layers in fp8 with a scale per block of 128 x 128, as "
        "DeepSeek-V3 does; other weights keep their dtype",
        ("hf",),
        choices=QUANTIZATIONS,
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
    "--hybrid-layers": TargetFlag(
        "hybrid_layers",
        "write a checkpoint of Megatron-core's HybridModel, with the layer pattern *- or *E",
        ("torch_dist",),
        None,
    ),
    "--workers": TargetFlag(
        "workers", "number of files written at once", parse=parse_positive, default=2
    ),
}


def parse_argument(parse: Callable[[str], _T]) -> Callable[[str], _T]:
    """Return `parse` for an argument parser, which prints only errors of its own type."""

    def parse_text(text: str) -> _T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse_text


def add_read_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that describe how sources are read."""
    add = parser.add_argument
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
    add(
        "--rename",
        nargs="+",
        type=parse_argument(parse_rename),
        default=[],
        metavar="OLD=NEW",
        help="new names for tensors in the files of an hf or torch_dist source; one * in OLD and "
        "in NEW matches any text, e.g. language_model.*=*",
    )
    add(
        "--weights",
        choices=["model", "ema"],
        default="model",
        help="weights to read: the model's, or their average (--ema-decay of training), without "
        "optimizer state",
    )
    add(
        "--keep-foreign",
        nargs="?",
        type=path_argument,
        const=True,  # the tensors of the source
        metavar="CHECKPOINT",
        help="keep tensors that the model does not have, under their names: convert.py copies them "
        "byte for byte, merge.py merges them like weights. With CHECKPOINT, those of the model "
        "that the source was trained from are copied. Default: list them as unused and leave "
        "them out",
    )
    add(
        "--foreign-split",
        nargs="+",
        type=parse_argument(parse_foreign_split),
        default=[],
        metavar="NAME=AXIS",
        help="for --keep-foreign of a legacy source: axis that tensor-parallel ranks split a "
        "tensor over; one * in NAME matches any text; default: all ranks have the same tensor",
    )
    add("--follow-links", action="store_true", help="follow links that leave a source's directory")
    add(
        "--no-verify-source",
        action="store_true",
        help="do not compare the blocks that are read with the source's checksums (checksums.bin)",
    )


def add_target_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that describe the target, except its directory and format."""
    add = parser.add_argument
    for name, flag in TARGET_FLAGS.items():
        if flag.parse is None:
            add(name, action="store_true", help=flag.full_help)
        else:
            add(
                name,
                type=flag.parse,
                choices=flag.choices,
                default=flag.default,
                help=flag.full_help,
            )
    add(
        "--verify-target",
        "--verify",
        action="store_true",
        help="read the result back and compare it with the source, tensor by tensor",
    )


def add_edit_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that change the model."""
    add = parser.add_argument
    add(
        "--lora",
        nargs="+",
        type=path_argument,
        default=[],
        metavar="DIR",
        help="merge these LoRA adapters of PEFT, one after the other, as merge_and_unload() does",
    )
    add(
        "--layers",
        type=parse_argument(parse_layers),
        metavar="LIST",
        help="layers of the source that the result consists of, in order, e.g. 0-11,6-17",
    )
    add(
        "--target-vocab-size",
        type=parse_positive,
        metavar="N",
        help="grow the vocabulary to N rows, or remove rows that no token uses",
    )
    add(
        "--new-rows",
        choices=NEW_ROWS,
        default="mean",
        help="new rows of the vocabulary: the mean of the existing rows (default), the initial "
        "values of training, or zero",
    )
    add(
        "--upcycle-experts",
        type=parse_positive,
        metavar="N",
        help="make N experts in each layer of a dense model, copies of its MLP",
    )
    add(
        "--topk",
        type=parse_positive,
        metavar="K",
        help="for --upcycle-experts: experts per token; default: --moe-router-topk, or 2",
    )


def stop(signal_number: int, frame: object) -> NoReturn:
    """Exit, which removes the partial result; a second Ctrl-C does not interrupt that."""
    for stop_signal in STOPPING:
        signal.signal(stop_signal, signal.SIG_IGN)
    raise SystemExit(128 + signal_number)


@contextmanager
def reported_errors() -> Iterator[None]:
    """End the process with one line for an expected error or a signal."""
    for signal_number in STOPPING:
        signal.signal(signal_number, stop)
    try:
        yield
    except (ValueError, OSError) as error:
        sys.exit(f"error: {format_error(error)}")
    except MemoryError:
        sys.exit("error: out of memory; a damaged or hostile source can claim any size")
    except SystemExit as error:
        if error.code in [128 + signal_number for signal_number in STOPPING]:
            print_line("interrupted: nothing was written", file=sys.stderr)
        raise
