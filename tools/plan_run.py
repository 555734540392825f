"""Plan a run before it is started: memory, checkpoint bytes, pipeline bubble and traffic of every
stage.

    python tools/plan_run.py --world-size 8 --device-memory-gb 80 FLAGS OF pretrain_gpt.py
    LAUNCH="python tools/plan_run.py --world-size 8 --device-memory-gb 80" \\
        bash examples/one_node_8_gpus.sh

--json prints the plan in bytes, for programs; --plot PNG draws the schedule and the memory. The
vocabulary size is --vocab-size, or that of the tokenizer, whose files are needed only then. The
exit status is 1 if the run does not fit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core.terminal import format_error, print_json, print_line

if TYPE_CHECKING:
    from megatron.training.config.run_config import Config
    from megatron.training.planning.run_plan import RunPlan, StagePlan

MTBF_HELP = (
    "propose save intervals for a failure every H hours, and one that loses a node with its "
    "replicas every H2 hours (default: 10 H), from the costs in --measured"
)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of this tool, and the other words, which are flags of the run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world-size", type=int, default=1, help="number of ranks, one per GPU")
    parser.add_argument(
        "--device-memory-gb", type=float, help="memory of a GPU in GB of 10^9 bytes, as it is sold"
    )
    parser.add_argument(
        "--reserve-gb",
        type=float,
        default=4.0,
        help="memory for CUDA, NCCL and gaps of the allocator (default: 4)",
    )
    parser.add_argument("--mtbf-hours", type=float, nargs="+", metavar=("H", "H2"), help=MTBF_HELP)
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="RUN",
        help="the --save directory of a run, for --mtbf-hours",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="PNG",
        help="draw the pipeline schedule and the memory of stages",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead; sizes in bytes"
    )
    # The scripts in examples/ pass the name of the program that they launch.
    words = [word for word in argv if not word.endswith("pretrain_gpt.py")]
    options, flags = parser.parse_known_args(words)
    hours = options.mtbf_hours
    if hours is not None and (options.measured is None or min(hours) <= 0 or len(hours) > 2):
        raise ValueError(
            "--mtbf-hours takes one or two positive numbers, and requires --measured, the "
            "--save directory of a run"
        )
    return options, flags


def format_verdict(needed: int, available: float, reserve: float) -> str:
    """Return whether `needed` bytes fit into a device, with the numbers."""
    verdict = "fits" if needed + reserve <= available else "WILL NOT FIT"
    return (
        f"{verdict}: {needed / 1e9:.2f} GB and a reserve of {reserve / 1e9:.2f} GB, of "
        f"{available / 1e9:.2f} GB"
    )


def make_json(config: Config, plan: RunPlan, world_size: int) -> dict[str, Any]:
    """Return the plan as plain values."""
    parallel = config.parallel
    return {
        "world_size": world_size,
        "tensor_parallel": parallel.tp_size,
        "context_parallel": parallel.cp_size,
        "pipeline_parallel": parallel.pp_size,
        "chunks_per_stage": parallel.vpp_size,
        "data_parallel": parallel.dp_size(world_size),
        "num_parameters": plan.num_parameters,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "num_microbatches": plan.num_microbatches,
        "bubble": plan.bubble,
        "notes": config.notes,
        "stages": [make_stage_json(stage) for stage in plan.stages],
    }


def make_stage_json(stage: StagePlan) -> dict[str, Any]:
    """Return the plan of a stage as plain values."""
    values: dict[str, Any] = {}
    for field in fields(stage):
        if field.name != "ps":
            values[field.name] = getattr(stage, field.name)
    values["stage"] = stage.ps.pp.rank
    values["memory"] = asdict(stage.memory) | {"total": stage.memory.total}
    values["traffic"] = {}
    for name, axis in stage.traffic.items():
        values["traffic"][name] = asdict(axis) | {"wire": axis.wire}
    return values


def main(argv: Sequence[str]) -> int:
    options, flags = parse(argv)

    # Imported after the options are parsed: these modules import torch, which takes seconds.
    from megatron.training.planning.alternatives import (
        Alternative,
        find_alternatives,
        parse_planned_flags,
        plan_flags,
    )
    from megatron.training.planning.pictures import draw_plan
    from megatron.training.planning.save_intervals import propose_save_intervals
    from megatron.training.planning.summary import format_plan
    from megatron.training.reporting.run_record import read_record
    from pretrain_gpt import model_provider

    # Plan the run.
    world_size = options.world_size
    given = parse_planned_flags(flags)
    config, plan = plan_flags(given, world_size, model_provider)
    intervals: list[str] = []
    if options.mtbf_hours is not None:
        intervals = propose_save_intervals(read_record(options.measured), options.mtbf_hours)

    # Compare with the memory of a device.
    available = None
    reserve = 0.0
    fits = True
    alternatives: list[Alternative] = []
    if options.device_memory_gb is not None:
        available = options.device_memory_gb * 1e9
        reserve = options.reserve_gb * 1e9
        fits = plan.largest + reserve <= available
    if not fits:
        alternatives = find_alternatives(given, world_size, model_provider, plan.largest)

    # Report.
    if options.plot is not None:
        draw_plan(plan, options.plot, available, reserve)
    if options.json:
        values = make_json(config, plan, world_size)
        if available is not None:
            values["fits"] = fits
            values["alternatives"] = []
            for other in alternatives:
                other_fits = other.memory + reserve <= available
                values["alternatives"].append(asdict(other) | {"fits": other_fits})
        if intervals:
            values["save_intervals"] = intervals
        print_json(values, indent=2)
    else:
        lines = format_plan(config, world_size, plan).split("\n")
        if intervals:
            lines += ["", *intervals]
        if available is not None:
            lines += ["", format_verdict(plan.largest, available, reserve)]
            for other in alternatives:
                verdict = format_verdict(other.memory, available, reserve)
                lines.append(f"  with {other.flags}: {verdict}")
        for line in lines:
            print_line(line)
    return 0 if fits else 1


def cli() -> None:
    """Run this process's command line; also the console entry point."""
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        sys.exit(f"error: {format_error(error)}")


if __name__ == "__main__":
    cli()
