"""What a run will need, before it is started: memory, checkpoint bytes, pipeline bubble and traffic
of every stage.

    python tools/plan_run.py --world-size 8 --device-memory-gb 80 FLAGS      FLAGS: those of pretrain_gpt.py
    LAUNCH="python tools/plan_run.py --world-size 8 --device-memory-gb 80" bash examples/one_node_8_gpus.sh

With --json the same, in bytes, for programs; with --plot PNG as a picture (schedule and memory).
The vocabulary is that of --vocab-size, else of the tokenizer, which then must be there. Exit status
1: it does not fit.
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
from megatron.training.planning.run_plan import RunPlan, plan_run
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
    "propose save intervals for a failure every H hours, and one that loses a node with its replicas every H2 (10 H), "
    "from the costs in --measured"
)


def save_interval(cost: float, mtbf: float) -> float:
    """Seconds of training between saves that lose least, if a save costs `cost` seconds and the
    mean time between failures is `mtbf` seconds (J. T. Daly, A higher order estimate of the optimum
    checkpoint interval, 2006).
    """
    if cost >= 2 * mtbf:
        return mtbf
    ratio = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


def save_intervals(starts: Sequence[RecordedLaunch], mtbf_hours: Sequence[float]) -> list[str]:
    """A line for each tier that saved in these starts: the interval that loses least, in Daly's
    approximation.

    A save costs what it blocked training; it cannot be due again before it has ended.
    """
    rows = [row for start in starts for row in start.intervals]
    iterations = sum(row["iterations"] for row in rows)
    if not iterations:
        raise ValueError("--measured: this run has recorded no iterations")
    iteration = sum(row["seconds"] for row in rows) / iterations
    spent = compute_goodput(starts)
    lines = []
    restart = (spent["loading"] + spent["starting"]) / len(starts)
    local = [
        row["values"]
        for start in starts
        for row in start.points
        if "local-save-total-time" in row["values"]
    ]
    persistent = [
        row["values"]
        for start in starts
        for row in start.points
        if "save-total-time" in row["values"]
    ]
    hours = [*mtbf_hours, 10 * mtbf_hours[0]][
        :2
    ]  # of (any failure, one that the local tier does not survive)
    for flag_name, saves, prefix, every in (
        ("--non-persistent-save-interval", local, "local-", hours[0]),
        ("--save-interval", persistent, "", hours[1] if local else hours[0]),
    ):
        if saves:
            blocked, total = (
                median(row[f"{prefix}save-{name}-time"] for row in saves)
                for name in ("blocking", "total")
            )
            seconds = max(save_interval(blocked, 3600 * every), total)
            lines.append(
                f"{flag_name} {max(1, round(seconds / iteration))}: every {seconds:.0f} s, for a failure every "
                f"{every:g} h; a save blocks {blocked:.3f} s and takes {total:.1f} s, an iteration {iteration:.3f} s, "
                f"a restart {restart:.0f} s"
            )
    return lines


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Given]:
    """Our own options, and those of the run by field name."""
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
        help="what CUDA, NCCL and gaps of the allocator take of it (default: 4)",
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
    """The configuration of `given` flags and its plan; ValueError if there can be no such run."""
    config = make_config(given, world_size)
    set_planned_vocab_size(config)
    return config, plan_run(config, world_size, model_provider)


def alternatives(given: Given, world_size: int, needed: int) -> list[tuple[str, int]]:
    """Flags that change one thing and make the run need less than `needed` bytes on its fullest
    rank, and how much.
    """
    axes = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
    sizes = {name: given.get(name, 1) * 2 for name in axes}
    changes = ALTERNATIVES + [
        (f"--{name.replace('_', '-')} {size}", {name: size}) for name, size in sizes.items()
    ]
    plans = []
    for flags, change in changes:
        if not change.items() <= given.items():
            with contextlib.suppress(ValueError):  # not possible with this model or number of ranks
                plans.append((flags, make_plan(given | change, world_size)[1].largest))
    return [(flags, size) for flags, size in plans if size < needed]


def gb(count: float) -> str:
    return f"{count / 1e9:.2f}"


def as_json(config: Config, plan: RunPlan, world_size: int) -> dict[str, Any]:
    """The plan as plain values."""
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
        "stages": [
            {
                field.name: getattr(stage, field.name)
                for field in fields(stage)
                if field.name != "ps"
            }
            | {
                "stage": stage.ps.pp.rank,
                "memory": asdict(stage.memory) | {"total": stage.memory.total},
            }
            | {
                "traffic": {
                    name: asdict(axis) | {"wire": axis.wire} for name, axis in stage.traffic.items()
                }
            }
            for stage in plan.stages
        ],
    }


def verdict(needed: int, available: float, reserve: float) -> str:
    word = "fits" if needed + reserve <= available else "WILL NOT FIT"
    return f"{word}: {gb(needed)} GB and a reserve of {gb(reserve)} GB, of {gb(available)} GB"


def main(argv: Sequence[str]) -> int:
    options, given = parse(argv)
    world_size = options.world_size
    limited = options.device_memory_gb is not None
    config, plan = make_plan(given, world_size)
    needed = plan.largest
    available = (options.device_memory_gb or 0) * 1e9
    reserve = options.reserve_gb * 1e9
    fits = not limited or needed + reserve <= available
    intervals = []
    if options.mtbf_hours is not None:
        if options.measured is None or min(options.mtbf_hours) <= 0 or len(options.mtbf_hours) > 2:
            raise ValueError(
                "--mtbf-hours takes one or two positive numbers, and --measured, the --save of a run"
            )
        intervals = save_intervals(read_record(options.measured), options.mtbf_hours)
    better = [] if fits else alternatives(given, world_size, needed)
    if options.plot is not None:
        draw_plan(plan, options.plot, available if limited else None, reserve if limited else 0.0)
    if options.json:
        ways = [
            {"flags": flags, "memory": size, "fits": size + reserve <= available}
            for flags, size in better
        ]
        answer: dict[str, Any] = {"fits": fits, "alternatives": ways} if limited else {}
        answer |= {"save_intervals": intervals} if intervals else {}
        print_json(as_json(config, plan, world_size) | answer, indent=2)
        return 0 if fits else 1
    for line in format_plan(config, world_size, plan).split("\n"):
        print_line(line)
    if intervals:
        print_line()
    for line in intervals:
        print_line(line)
    if limited:
        print_line()
        print_line(verdict(needed, available, reserve))
    for flags, size in better:
        print_line(f"  with {flags}: {verdict(size, available, reserve)}")
    return 0 if fits else 1


def cli() -> None:
    """Run this process's command line; also the console entry point."""
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        sys.exit(f"error: {format_error(error)}")


if __name__ == "__main__":
    cli()
