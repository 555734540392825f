"""Options and report of a conversion or merge, from and for the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.conversion.command_line import TARGET_FLAGS
from megatron.conversion.convert import ConversionReport
from megatron.conversion.options import DTYPES, EditOptions, ReadOptions, WriteOptions, parse_size
from megatron.core.terminal import print_line

_MOST_LINES = 30  # about foreign tensors


def make_edits(args: argparse.Namespace) -> EditOptions:
    """Return the edits on the command line."""
    if args.topk is not None and args.upcycle_experts is None:
        raise ValueError(f"--topk {args.topk} needs --upcycle-experts")
    return EditOptions(
        layers=args.layers,
        vocab_size=args.target_vocab_size,
        new_rows=args.new_rows,
        experts=args.upcycle_experts,
        topk=args.topk,
        adapters=tuple(args.lora),
    )


def get_target_values(args: argparse.Namespace) -> dict[str, Any]:
    """Return the target flags on the command line with their values."""
    values = {}
    for name in TARGET_FLAGS:
        field = name.removeprefix("--").replace("-", "_")
        value = getattr(args, field)
        if value:
            values[name] = value
    return values


def list_flags_without_effect(args: argparse.Namespace, saver: str) -> list[str]:
    """Return the target flags on the command line that do not apply to the target's format."""
    unused_flags = []
    for name in get_target_values(args):
        savers = TARGET_FLAGS[name].savers
        if saver not in savers:
            formats = ", ".join(savers)
            unused_flags.append(f"{name} (for {formats})")
    return unused_flags


def make_read_options(
    args: argparse.Namespace, model_args: dict[str, Any], optimizer: bool
) -> ReadOptions:
    """Return the read options; `model_args` contains the model's arguments on the command line."""
    if args.foreign_split and args.keep_foreign is not True:
        raise ValueError("--foreign-split needs --keep-foreign")
    # By default, checksums are compared if the source has any.
    verify = None
    if args.no_verify_source:
        verify = False
    return ReadOptions(
        args=model_args,
        ignored_fields=tuple(args.hf_ignore_fields),
        qkv_layout=args.universal_qkv_layout,
        optimizer=optimizer,
        verify=verify,
        renames=tuple(args.rename),
        keep_foreign=args.keep_foreign is True,
        foreign_splits=tuple(args.foreign_split),
    )


def make_write_options(
    args: argparse.Namespace, optimizer: bool, note: Callable[[str], None]
) -> WriteOptions:
    """Return the write options; `note` receives notes for the user."""
    fields = {}
    for name, value in get_target_values(args).items():
        if name == "--dtype":
            value = getattr(torch, DTYPES[value])
        elif name == "--max-shard-size":
            value = parse_size(value)  # bytes
        option = TARGET_FLAGS[name].option
        fields[option] = value
    foreign = None if args.keep_foreign is True else args.keep_foreign
    return WriteOptions(
        **fields, optimizer=optimizer, foreign=foreign, note=note, edits=make_edits(args)
    )


def print_report(outcome: ConversionReport, args: argparse.Namespace, notes: Sequence[str]) -> None:
    """Print the source, the target, notes, and the parts that were not carried over."""
    print_line(str(outcome.source))
    print_line(f"-> {outcome.target} ({outcome.saver}, {outcome.num_tensors} tensors)")
    for text in notes:
        print_line(f"   {text}")
    for name in list_flags_without_effect(args, outcome.saver):
        print_line(f"   no effect: {name}")
    for name in outcome.not_carried:
        print_line(f"   not carried: {name}")
    by_action: dict[str, list[str]] = {}
    for name, action in outcome.foreign.items():
        by_action.setdefault(action, []).append(name)
    for action, names in by_action.items():
        if len(names) > _MOST_LINES:
            names = [f"{len(names)} tensors, e.g. {names[0]}"]
        for name in names:
            print_line(f"   foreign, {action}: {name}")
    if outcome.verified is not None:
        exact = outcome.verified - outcome.rounded
        rounded = ""
        if outcome.rounded:
            rounded = f", {outcome.rounded} are rounded to a smaller dtype"
        print_line(f"   verified: {exact} tensors are bitwise those of the source{rounded}")
