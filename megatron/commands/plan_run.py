"""Plan of a run, for tools/plan_run.py."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from megatron.core.terminal import print_json, print_line
from megatron.training.config.run_config import Config, ModelProvider
from megatron.training.planning.alternatives import (
    Alternative,
    find_alternatives,
    parse_planned_flags,
    plan_flags,
)
from megatron.training.planning.pictures import draw_plan
from megatron.training.planning.run_plan import RunPlan, StagePlan
from megatron.training.planning.save_intervals import propose_save_intervals
from megatron.training.planning.summary import format_plan
from megatron.training.reporting.run_record import read_record


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
        "export_bytes": plan.export_bytes,
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


def run(options: argparse.Namespace, flags: Sequence[str], model_provider: ModelProvider) -> int:
    """Plan the run and print the plan; return the exit status."""
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
