"""`show`: contents of a checkpoint, as a summary or as JSON."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from megatron.commands.inspection.checkpoint_contents import collect_contents, compute_file_shares
from megatron.commands.inspection.view import format_shape
from megatron.conversion.model_space.foreign import describe_foreign_mixers
from megatron.conversion.opening import require_checkpoint
from megatron.core.run_checkpoint.keys import is_extra_state
from megatron.core.safe_files.schema import format_value
from megatron.core.terminal import format_size, print_json, print_line
from megatron.planning.pictures import draw_shares

NUM_LARGEST = 10  # tensors and files that are printed without --all


def run_show(args: argparse.Namespace) -> int:
    """Print the contents of a checkpoint; return the exit status."""
    checkpoint = require_checkpoint(args.path, args.ckpt_step)
    path = checkpoint.directory
    checkpoint_format = checkpoint.format
    if args.plot is not None and checkpoint_format != "torch_dist":
        raise ValueError(
            f"--plot: {path} is {checkpoint_format}, and only torch_dist records the contents of "
            "each file; use plan --plot"
        )

    # Metadata only: no tensor is read.
    result = collect_contents(path, checkpoint_format, args.keys)
    if args.plot is not None:
        title = f"{path.name}: bytes in each file"
        shares = compute_file_shares(path)
        draw_shares(shares, args.plot, title, "file: __{rank}_{writer}.distcp")

    # Report.
    if args.json:
        print_json(result, indent=1)
    else:
        print_checkpoint(result, args.all)
    return 0


def print_checkpoint(result: dict[str, Any], print_all: bool) -> None:
    """Print a summary, and the largest files and tensors, or all of them."""
    # Print the summary.
    iteration = "not stored"
    if result["iteration"] is not None:
        iteration = format_value(result["iteration"])
    sizes = summarize_sizes(result["bytes"], result["bytes_by_kind"])
    print_line(result["path"])
    print_line(f"  format     {result['format']}")
    print_line(f"  iteration  {iteration}")
    print_line(f"  written at {summarize_layout(result['layout'])}")
    print_line(f"  tensors    {result['num_tensors']}, {sizes}")
    mixers = describe_foreign_mixers(result["args"])
    if mixers:
        print_line(f"  foreign    {mixers}: can be converted, not trained")

    # Print the files, which are only known for torch_dist, and the tensors.
    if "files" in result:
        checksums = "no (written by another program)"
        if result["checksums"]:
            checksums = "yes"
        print_line(f"  objects    {summarize_objects(result['objects'])}")
        print_line(f"  checksums  {checksums}")
        print_files(result["files"], print_all)
    print_line()
    print_tensors(result["tensors"], print_all)


def summarize_layout(layout: Mapping[str, Any]) -> str:
    """Return the sizes of a layout, e.g. TP 2, PP 4."""
    axes = []
    for name, size in layout.items():
        axis = name.upper()
        axes.append(f"{axis} {format_value(size)}")
    return ", ".join(axes) or "not stored"


def summarize_sizes(total: int, by_kind: Mapping[str, int]) -> str:
    """Return the bytes of all tensors, in total and by kind."""
    sizes = []
    for tensor_kind, nbytes in by_kind.items():
        size = format_size(nbytes)
        sizes.append(f"{tensor_kind} {size}")
    listed = ", ".join(sizes)
    return f"{format_size(total)} ({listed})"


def print_files(files: dict[str, int | None], print_all: bool) -> None:
    """Print the number and balance of the files, and the largest ones or all of them."""
    missing: list[str] = []
    sizes: dict[str, int] = {}  # bytes of the files that exist
    for name, size in files.items():
        if size is None:
            missing.append(name)
        else:
            sizes[name] = size

    # Summarize the files that exist.
    if sizes:
        largest = max(sizes.values())
        mean = sum(sizes.values()) / len(sizes)
        imbalance = largest / mean
        balance = f"largest {format_size(largest)} = {imbalance:.2f} x the mean"
        print_line(f"  files      {len(sizes)}, {balance}")

    # List missing files first, then the largest.
    names = list(files)
    if not print_all:
        by_size = sorted(sizes, key=sizes.__getitem__, reverse=True)
        names = missing + by_size
        names = names[:NUM_LARGEST]
    for name in names:
        size = files[name]
        text = "missing"
        if size is not None:
            text = format_size(size)
        print_line(f"    {name:24} {text:>12}")
    num_omitted = len(files) - len(names)
    print_omitted(num_omitted, "files")


def print_tensors(tensors: dict[str, dict[str, Any]], print_all: bool) -> None:
    """Print a table of the largest tensors, or of all of them in stored order."""
    keys = list(tensors)
    if not print_all:
        keys.sort(key=lambda key: tensors[key]["bytes"], reverse=True)
        keys = keys[:NUM_LARGEST]

    # The column of keys is as wide as the longest one.
    width = max(map(len, keys), default=0)
    header = f"{'key':{width}}  {'shape':>20}  {'dtype':>9}"
    print_line(f"  {header}  {'size':>10}  chunks")
    for key in keys:
        tensor = tensors[key]
        shape = format_shape(tensor["shape"])
        dtype = tensor["dtype"]
        size = format_size(tensor["bytes"])
        chunks = tensor.get("chunks", "")  # of torch_dist only
        cells = [
            f"{key:{width}}",
            f"{shape:>20}",
            f"{dtype:>9}",
            f"{size:>10}",
            f"{chunks:>6}",
        ]
        row = "  ".join(cells)
        print_line(f"  {row}")
    num_omitted = len(tensors) - len(keys)
    print_omitted(num_omitted, "tensors")


def print_omitted(count: int, label: str) -> None:
    """Print how many rows of a table were left out, if any."""
    if count:
        print_line(f"  ... and {count} smaller {label} (--all prints them)")


def summarize_objects(keys: list[str]) -> str:
    """Return the number of objects, and the names of a few that are not extra states."""
    named = [key for key in keys if not is_extra_state(key)]
    num_extra = len(keys) - len(named)
    examples = ", ".join(named[:3])
    if len(named) > 3:
        examples += " ..."
    return f"{len(keys)}, of which {num_extra} extra states: {examples}"
