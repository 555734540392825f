"""Plan of a run, for tools/plan_run.py."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from megatron.core.progress import format_size
from megatron.core.terminal import print_json, print_line
from megatron.training.config.arguments import Given
from megatron.training.config.run_config import Config, ModelProvider
from megatron.training.planning.alternatives import (
    Alternative,
    find_alternatives,
    parse_planned_flags,
    plan_flags,
)
from megatron.training.planning.layout_search import Hardware, Layout, LayoutSearch
from megatron.training.planning.pictures import draw_plan
from megatron.training.planning.run_plan import RunPlan, StagePlan
from megatron.training.planning.save_intervals import propose_save_intervals
from megatron.training.planning.summary import format_plan
from megatron.training.reporting.run_record import read_record

NUM_LAYOUTS = 5  # that a run is shown whose single changes do not fit


def format_verdict(needed: int, available: float, reserve: float) -> str:
    """Return whether `needed` bytes fit into a device, with the numbers."""
    verdict = "fits" if needed + reserve <= available else "WILL NOT FIT"
    return (
        f"{verdict}: {format_size(needed)} and a reserve of {format_size(reserve)}, of "
        f"{format_size(available)}"
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


def find_layouts(
    options: argparse.Namespace, given: Given, model_provider: ModelProvider
) -> list[Layout]:
    """Return the layouts that fit, as --search requests."""
    hardware = Hardware(
        tflops=options.device_tflops,
        memory_bandwidth=1e9 * options.memory_gbps,
        node_bandwidth=1e9 * options.node_gbps,
        network_bandwidth=1e9 * options.network_gbps,
        devices_per_node=options.devices_per_node,
    )
    available = 1e9 * (options.device_memory_gb - options.reserve_gb)
    search = LayoutSearch(given, options.world_size, model_provider, available, hardware)
    return search.find(options.search or NUM_LAYOUTS)


def print_layouts(options: argparse.Namespace, layouts: Sequence[Layout]) -> None:
    """Print the result of --search."""
    if options.json:
        print_json({"layouts": [asdict(layout) for layout in layouts]}, indent=2)
        return
    for line in format_layouts(options, layouts):
        print_line(line)


def format_layouts(options: argparse.Namespace, layouts: Sequence[Layout]) -> list[str]:
    """Return the layouts as a table whose last column is the flags."""
    if not layouts:
        return [f"no layout of {options.world_size} ranks fits"]
    lines = [
        f"layouts that fit, with the time of a step estimated from {options.device_tflops:g} "
        "TFLOP/s per GPU, without overlap:",
        "  s/step     memory  bubble  sent/step  flags",
    ]
    for layout in layouts:
        cells = [
            f"{layout.seconds:8.3g}",
            f"{format_size(layout.memory):>10}",
            f"{100 * layout.bubble:4.1f} %",
            f"{format_size(layout.traffic):>10}",
            layout.flags,
        ]
        lines.append(" ".join(cells))
    return lines


def run(options: argparse.Namespace, flags: Sequence[str], model_provider: ModelProvider) -> int:
    """Plan the run and print the plan; return the exit status."""
    # Plan the run.
    world_size = options.world_size
    given = parse_planned_flags(flags)
    if options.search is not None:
        fitting = find_layouts(options, given, model_provider)
        print_layouts(options, fitting)
        return 0 if fitting else 1
    config, plan = plan_flags(given, world_size, model_provider)
    intervals: list[str] = []
    if options.mtbf_hours is not None:
        intervals = propose_save_intervals(read_record(options.measured), options.mtbf_hours)

    # Compare with the memory of a device.
    available = None
    reserve = 0.0
    fits = True
    alternatives: list[Alternative] = []
    layouts: list[Layout] = []
    if options.device_memory_gb is not None:
        available = options.device_memory_gb * 1e9
        reserve = options.reserve_gb * 1e9
        fits = plan.largest + reserve <= available
        if not fits:
            alternatives = find_alternatives(given, world_size, model_provider, plan.largest)
            if all(other.memory + reserve > available for other in alternatives):
                with contextlib.suppress(ValueError):  # the flags fix what a search selects
                    layouts = find_layouts(options, given, model_provider)

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
            values["layouts"] = [asdict(layout) for layout in layouts]
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
        if layouts:
            lines += format_layouts(options, layouts)
        for line in lines:
            print_line(line)
    return 0 if fits else 1
