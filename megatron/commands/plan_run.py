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
from megatron.training.planning.goodput import (
    DEVICE_HOURS_PER_FAILURE,
    SpentTime,
    Tier,
    choose_intervals,
    draw_failures,
    simulate_run,
)
from megatron.training.planning.layout_search import Hardware, Layout, LayoutSearch
from megatron.training.planning.pictures import draw_plan
from megatron.training.planning.run_plan import RunPlan, StagePlan
from megatron.training.planning.save_intervals import LOST_NODES_FACTOR, propose_save_intervals
from megatron.training.planning.summary import format_plan
from megatron.training.reporting.run_record import read_record

MONTH = 30 * 24 * 3600.0  # seconds
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


def list_tiers(options: argparse.Namespace, config: Config, plan: RunPlan) -> list[Tier]:
    """Return the tiers of a run, the persistent one first, with their estimated costs."""
    checkpoint = config.checkpoint
    # All ranks share the bandwidth of the storage, and read as much as they write.
    seconds = plan.checkpoint_bytes / (1e9 * options.storage_gbps)
    tiers = [
        Tier(
            "--save-interval",
            interval=checkpoint.save_interval or 1,
            blocking=options.blocking_seconds,
            total=seconds,
            loading=seconds,
        )
    ]
    if checkpoint.non_persistent_ckpt_type == "local":
        # The rank with the most bytes determines the time of a local save.
        largest = max(stage.checkpoint_bytes for stage in plan.stages)
        local_seconds = largest / (1e9 * options.local_gbps)
        copies = checkpoint.replication_factor if checkpoint.replication else 1
        tiers.append(
            Tier(
                "--non-persistent-save-interval",
                interval=checkpoint.non_persistent_save_interval or 1,
                blocking=options.blocking_seconds,
                total=copies * local_seconds,
                loading=local_seconds,
            )
        )
    return tiers


def simulate_month(options: argparse.Namespace, config: Config, plan: RunPlan) -> list[str]:
    """Return the lines of --goodput."""
    # Draw the failures once: all intervals are compared with the same ones.
    hours = options.mtbf_hours or [DEVICE_HOURS_PER_FAILURE / options.world_size]
    lost_node_hours = LOST_NODES_FACTOR * hours[0]
    if len(hours) > 1:
        lost_node_hours = hours[1]
    failures = list(draw_failures(MONTH, 3600 * hours[0], 3600 * lost_node_hours))
    num_lost = sum(failure.loses_node for failure in failures)
    lines = [
        f"30 days on {options.world_size} GPUs, a failure every {hours[0]:.3g} h: {len(failures)} "
        f"failures, {num_lost} of them with the loss of a node and its replicas"
    ]

    # Compare the intervals of the flags with the best ones.
    tiers = list_tiers(options, config, plan)
    step = options.step_seconds
    restart = options.restart_seconds
    if config.checkpoint.save_interval is not None:
        given = simulate_run(tiers, step, restart, failures, MONTH)
        lines.append(format_goodput("as given", given))
    best = choose_intervals(tiers, step, restart, failures, MONTH)
    spent = simulate_run(best, step, restart, failures, MONTH)
    intervals = [f"{tier.flag} {tier.interval}" for tier in best]
    lines.append(format_goodput(" ".join(intervals), spent))
    return lines


def format_goodput(label: str, spent: SpentTime) -> str:
    """Return a line with the shares of a simulated run."""
    total = spent.training + spent.repeated + spent.saving + spent.restarting
    shares = {"repeated": spent.repeated, "saves": spent.saving, "restarts": spent.restarting}
    parts = [f"{name} {100 * seconds / total:.2f} %" for name, seconds in shares.items()]
    return f"  {label}: {100 * spent.goodput:.2f} % progress ({', '.join(parts)})"


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
    if options.measured is not None and options.mtbf_hours is not None:
        intervals = propose_save_intervals(read_record(options.measured), options.mtbf_hours)
    goodput: list[str] = []
    if options.goodput:
        goodput = simulate_month(options, config, plan)

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
                with contextlib.suppress(ValueError):  # flags that fix the layout
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
        if goodput:
            values["goodput"] = goodput
        print_json(values, indent=2)
    else:
        lines = format_plan(config, world_size, plan).split("\n")
        if intervals:
            lines += ["", *intervals]
        if goodput:
            lines += ["", *goodput]
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
