"""`plan`: the share of a checkpoint that each rank of a layout reads."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.commands.inspection.view import READ_EVERYTHING
from megatron.conversion.model_space.layouts import Layout, RankLoad, plan_load
from megatron.conversion.opening import open_checkpoint
from megatron.core.terminal import format_size, print_json, print_line
from megatron.planning.pictures import draw_shares


def run_plan(args: argparse.Namespace) -> int:
    """Print the share of each rank at a layout; return the exit status."""
    source = open_checkpoint(args.path, step=args.ckpt_step, read_options=READ_EVERYTHING)
    tp = args.tensor_model_parallel_size
    pp = args.pipeline_model_parallel_size
    vpp = args.virtual_pipeline_model_parallel_size
    dp = args.data_parallel_size
    layout = {"tp": tp, "pp": pp, "vpp": vpp, "dp": dp}
    facts: dict[str, Any] = {"path": str(args.path), "layout": layout}

    # Planning fails if the layout does not fit the model.
    try:
        num_layers = source.args.get("num_layers") or 0
        target = Layout.of(num_layers, tp, pp, vpp, vars(args))
        ranks = plan_load(source, target)
    except ValueError as error:
        if args.json:
            print_json(facts | {"loadable": False, "reason": str(error)}, indent=1)
        else:
            print_line(f"{args.path} cannot be loaded at {layout}: {error}")
        return 1

    # Report.
    if args.plot is not None:
        draw_rank_shares(ranks, args.plot, args.path.name, layout)
    rows = [describe_rank(rank, dp) for rank in ranks]
    if args.json:
        print_json(facts | {"loadable": True, "ranks": rows}, indent=1)
        return 0
    print_line(str(source.description))
    print_line(f"loadable at {layout}; every rank reads (optimizer: sharded over data parallelism)")
    print_plan(rows)
    return 0


def draw_rank_shares(
    ranks: Sequence[RankLoad], path: Path, checkpoint: str, layout: Mapping[str, int]
) -> None:
    """Draw which parts of the model each model-parallel rank reads, into a file at `path`."""
    axes = []
    for axis, size in layout.items():
        name = axis.upper()
        axes.append(f"{name} {size}")
    title = f"{checkpoint}: bytes that each rank reads at {' x '.join(axes)}"

    shares = {}
    for rank in ranks:
        column = f"tp {rank.tp}, pp {rank.pp}"
        shares[column] = rank.modules
    draw_shares(shares, path, title, "rank")


def describe_rank(rank: RankLoad, dp_size: int) -> dict[str, Any]:
    """Return the entry of a rank in the JSON output.

    The optimizer state of a model-parallel rank is sharded over its data-parallel replicas.
    """
    layers = []
    for chunk in rank.layers:
        layers.append([chunk.start, chunk.stop])
    optimizer_bytes = -(-rank.nbytes("optimizer") // dp_size)  # rounded up
    return {
        "tp": rank.tp,
        "pp": rank.pp,
        "layers": layers,
        "parameters": rank.parameters,
        "weight_bytes": rank.nbytes("weights"),
        "optimizer_bytes": optimizer_bytes,
    }


def print_plan(rows: list[dict[str, Any]]) -> None:
    """Print a table with a line per model-parallel rank."""
    print_line(
        f"{'tp':>4}{'pp':>4}  {'layers':24}{'parameters':>16}{'weights':>12}{'optimizer':>12}"
    )
    for row in rows:
        # One range of layers per chunk of the model, e.g., 0..3 8..11
        chunks = []
        for start, stop in row["layers"]:
            last = stop - 1
            chunks.append(f"{start}..{last}")
        layers = " ".join(chunks)

        parameters = row["parameters"]
        weights = format_size(row["weight_bytes"])
        optimizer = format_size(row["optimizer_bytes"])
        cells = [
            f"{row['tp']:>4}",
            f"{row['pp']:>4}",
            f"  {layers:24}",
            f"{parameters:>16,}",
            f"{weights:>12}",
            f"{optimizer:>12}",
        ]
        print_line("".join(cells))
