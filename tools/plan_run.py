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
import contextlib
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from statistics import median
from typing import Any

from megatron.core.terminal import format_error, print_json, print_line
from megatron.training.config.arguments import Given, parse_flags
from megatron.training.config.checkpoint_args import read_checkpoint_args
from megatron.training.config.parsing import flag_parser, make_config, use_stored_args
from megatron.training.config.run_config import Config
from megatron.training.planning.pictures import draw_plan
from megatron.training.planning.run_plan import RunPlan, StagePlan, plan_run
from megatron.training.planning.summary import format_plan, set_planned_vocab_size
from megatron.training.reporting.run_record import RecordedLaunch, compute_goodput, read_record
from pretrain_gpt import model_provider

ALTERNATIVES: list[tuple[str, dict[str, Any]]] = [
    ("--use-distributed-optimizer", {"use_distributed_optimizer": True}),
    ("--recompute-granularity selective", {"recompute_granularity": "selective"}),
    (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ),
    ("--micro-batch-size 1", {"micro_batch_size": 1}),
    ("--sequence-parallel", {"sequence_parallel": True}),
]


MTBF_HELP = (
    "propose save intervals for a failure every H hours, and one that loses a node with its "
    "replicas every H2 hours (default: 10 H), from the costs in --measured"
)


def find_best_interval(cost: float, mtbf: float) -> float:
    """Return the seconds of training between saves that lose the least time.

    A save costs `cost` seconds and the mean time between failures is `mtbf` seconds (J. T. Daly, A
    higher order estimate of the optimum checkpoint interval, 2006).
    """
    if cost >= 2 * mtbf:
        return mtbf
    ratio = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


def propose_save_intervals(
    launches: Sequence[RecordedLaunch], mtbf_hours: Sequence[float]
) -> list[str]:
    """Return a line for each tier that saved in these launches, with its best interval.

    The cost of a save is the time that it blocked training; the next one cannot start before it
    ends.
    """
    rows = [row for launch in launches for row in launch.intervals]
    num_iterations = sum(row["iterations"] for row in rows)
    if not num_iterations:
        raise ValueError("--measured: this run has recorded no iterations")
    iteration = sum(row["seconds"] for row in rows) / num_iterations
    spent = compute_goodput(launches)
    restart = (spent["loading"] + spent["starting"]) / len(launches)

    local = _find_save_times(launches, "local-")
    persistent = _find_save_times(launches, "")
    # Local checkpoints survive most failures; the persistent tier is for the others.
    any_failure = mtbf_hours[0]
    lost_nodes = mtbf_hours[1] if len(mtbf_hours) > 1 else 10 * any_failure
    tiers = [
        ("--non-persistent-save-interval", local, any_failure),
        ("--save-interval", persistent, lost_nodes if local else any_failure),
    ]
    lines = []
    for flag_name, saves, hours in tiers:
        if not saves:
            continue
        blocked = median(blocking for blocking, _ in saves)
        total = median(total for _, total in saves)
        seconds = max(find_best_interval(blocked, 3600 * hours), total)
        num_between = max(1, round(seconds / iteration)) if iteration else 1
        lines.append(
            f"{flag_name} {num_between}: every {seconds:.0f} s, for a failure every {hours:g} h; "
            f"a save blocks {blocked:.3f} s and takes {total:.1f} s, an iteration "
            f"{iteration:.3f} s, a restart {restart:.0f} s"
        )
    return lines


def _find_save_times(launches: Sequence[RecordedLaunch], tier: str) -> list[tuple[float, float]]:
    """Return the (blocking, total) seconds of each save of a tier, by the prefix of its metrics."""
    times = []
    for launch in launches:
        for row in launch.points:
            blocking = row["values"].get(f"{tier}save-blocking-time")
            total = row["values"].get(f"{tier}save-total-time")
            if blocking is not None and total is not None:
                times.append((max(0.0, blocking), max(0.0, total)))
    return times


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Given]:
    """Return the options of this tool, and the given flags of the run by field name."""
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
    options, rest = parser.parse_known_args(
        [word for word in argv if not word.endswith("pretrain_gpt.py")]
    )
    given, _ = parse_flags(flag_parser(), rest)
    stored_args = read_checkpoint_args(rest)
    if stored_args is not None:
        given, _ = use_stored_args(given, stored_args)
    given = {"lr": 1.0, "min_lr": 0.0} | given  # nothing here depends on these
    if "train_samples" not in given:
        given.setdefault("train_iters", 1)
    return options, given


def make_plan(given: Given, world_size: int) -> tuple[Config, RunPlan]:
    """Return the configuration for the given flags and its plan. Raises ValueError if such a run is
    impossible.
    """
    config = make_config(given, world_size)
    set_planned_vocab_size(config)
    return config, plan_run(config, world_size, model_provider)


def find_alternatives(given: Given, world_size: int, needed: int) -> list[tuple[str, int]]:
    """Return single changes of flags that reduce the bytes on the fullest rank below `needed`, and
    the bytes.
    """
    changes = list(ALTERNATIVES)
    for axis in ("tensor_model_parallel", "context_parallel", "pipeline_model_parallel"):
        size = 2 * given.get(f"{axis}_size", 1)
        changes.append((f"--{axis.replace('_', '-')}-size {size}", {f"{axis}_size": size}))
    found = []
    for flags, change in changes:
        if change.items() <= given.items():
            continue
        with contextlib.suppress(ValueError):  # impossible with this model or number of ranks
            _, plan = make_plan(given | change, world_size)
            if plan.largest < needed:
                found.append((flags, plan.largest))
    return found


def format_gb(count: float) -> str:
    return f"{count / 1e9:.2f}"


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
    values = {
        field.name: getattr(stage, field.name) for field in fields(stage) if field.name != "ps"
    }
    values["stage"] = stage.ps.pp.rank
    values["memory"] = asdict(stage.memory) | {"total": stage.memory.total}
    values["traffic"] = {
        name: asdict(axis) | {"wire": axis.wire} for name, axis in stage.traffic.items()
    }
    return values


def format_verdict(needed: int, available: float, reserve: float) -> str:
    word = "fits" if needed + reserve <= available else "WILL NOT FIT"
    return (
        f"{word}: {format_gb(needed)} GB and a reserve of {format_gb(reserve)} GB, of "
        f"{format_gb(available)} GB"
    )


def main(argv: Sequence[str]) -> int:
    options, given = parse(argv)
    world_size = options.world_size
    reserve = options.reserve_gb * 1e9
    config, plan = make_plan(given, world_size)
    intervals = []
    if options.mtbf_hours is not None:
        hours = options.mtbf_hours
        if options.measured is None or min(hours) <= 0 or len(hours) > 2:
            raise ValueError(
                "--mtbf-hours takes one or two positive numbers, and requires --measured, the "
                "--save directory of a run"
            )
        intervals = propose_save_intervals(read_record(options.measured), hours)

    # Compare with the memory of a device.
    available = None if options.device_memory_gb is None else options.device_memory_gb * 1e9
    fits = available is None or plan.largest + reserve <= available
    better = [] if fits else find_alternatives(given, world_size, plan.largest)
    if options.plot is not None:
        draw_plan(plan, options.plot, available, 0.0 if available is None else reserve)

    if options.json:
        values = make_json(config, plan, world_size)
        if available is not None:
            values["fits"] = fits
            values["alternatives"] = [
                {"flags": flags, "memory": size, "fits": size + reserve <= available}
                for flags, size in better
            ]
        if intervals:
            values["save_intervals"] = intervals
        print_json(values, indent=2)
        return 0 if fits else 1

    lines = format_plan(config, world_size, plan).split("\n")
    if intervals:
        lines += ["", *intervals]
    if available is not None:
        lines += ["", format_verdict(plan.largest, available, reserve)]
        for flags, size in better:
            lines.append(f"  with {flags}: {format_verdict(size, available, reserve)}")
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
