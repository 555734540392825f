"""Plan of a run, for tools/plan_run.py."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any, NamedTuple

from megatron.core.terminal import format_size, print_json, print_line
from megatron.planning.alternatives import (
    Alternative,
    find_alternatives,
    parse_planned_flags,
    plan_flags,
)
from megatron.planning.goodput import (
    DEVICE_HOURS_PER_FAILURE,
    SaveTier,
    SpentTime,
    choose_intervals,
    draw_failures,
    simulate_run,
)
from megatron.planning.layout_search import Hardware, LayoutSearch, RatedLayout
from megatron.planning.pictures import draw_plan
from megatron.planning.run_plan import RunPlan, StagePlan
from megatron.planning.save_intervals import LOST_NODES_FACTOR, propose_save_intervals
from megatron.planning.summary import format_plan
from megatron.training.config.arguments import FlagValues
from megatron.training.config.run_config import Config, ModelProvider
from megatron.training.reporting.recorded_launches import read_record

HOUR = 3600.0  # seconds
MONTH = 30 * 24 * HOUR
NUM_LAYOUTS = 5  # proposed if no single change of the flags lets the run fit
GB = 1e9


class DeviceMemory(NamedTuple):
    """Memory of a device, and the part of it that a plan must leave unused, in bytes."""

    available: float
    reserve: float

    def fits(self, needed: int) -> bool:
        """Return whether `needed` bytes fit next to the reserve."""
        return needed + self.reserve <= self.available

    def format_verdict(self, needed: int) -> str:
        """Return whether `needed` bytes fit, with the numbers."""
        verdict = "WILL NOT FIT"
        if self.fits(needed):
            verdict = "fits"
        size = format_size(needed)
        reserve = format_size(self.reserve)
        available = format_size(self.available)
        return f"{verdict}: {size} and a reserve of {reserve}, of {available}"


class Comparison(NamedTuple):
    """A plan compared with the memory of a device, and changes that need less memory."""

    memory: DeviceMemory
    fits: bool
    alternatives: list[Alternative]  # single changes of the flags
    layouts: list[RatedLayout]  # if none of the alternatives fits


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
        if field.name != "ps":  # the topology: only the number of the stage is of interest
            values[field.name] = getattr(stage, field.name)
    values["stage"] = stage.ps.pp.rank

    # Add the properties of nested dataclasses.
    values["memory"] = asdict(stage.memory) | {"total": stage.memory.total}
    traffic = {}
    for name, axis in stage.traffic.items():
        traffic[name] = asdict(axis) | {"wire": axis.wire}
    values["traffic"] = traffic
    return values


def find_layouts(
    options: argparse.Namespace, flag_values: FlagValues, model_provider: ModelProvider
) -> list[RatedLayout]:
    """Return the layouts that fit, as --search requests."""
    hardware = Hardware(
        tflops=options.device_tflops,
        memory_bandwidth=GB * options.memory_gbps,
        node_bandwidth=GB * options.node_gbps,
        network_bandwidth=GB * options.network_gbps,
        devices_per_node=options.devices_per_node,
    )
    available = GB * (options.device_memory_gb - options.reserve_gb)
    search = LayoutSearch(flag_values, options.world_size, model_provider, available, hardware)
    return search.find(options.search or NUM_LAYOUTS)


def print_layouts(options: argparse.Namespace, layouts: Sequence[RatedLayout]) -> None:
    """Print the result of --search."""
    if options.json:
        print_json({"layouts": [asdict(layout) for layout in layouts]}, indent=2)
        return
    for row in format_layouts(options, layouts):
        print_line(row)


def format_layouts(options: argparse.Namespace, layouts: Sequence[RatedLayout]) -> list[str]:
    """Return the layouts as a table whose last column is the flags."""
    if not layouts:
        return [f"no layout of {options.world_size} ranks fits"]
    rows = [
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
        rows.append(" ".join(cells))
    return rows


def list_tiers(options: argparse.Namespace, config: Config, plan: RunPlan) -> list[SaveTier]:
    """Return the tiers of a run, the persistent one first, with their estimated costs."""
    checkpoint = config.checkpoint
    # All ranks share the bandwidth of the storage, and read as much as they write.
    seconds = plan.checkpoint_bytes / (GB * options.storage_gbps)
    persistent = SaveTier(
        "--save-interval",
        interval=checkpoint.save_interval or 1,
        blocking=options.blocking_seconds,
        total=seconds,
        loading=seconds,
    )
    if checkpoint.non_persistent_ckpt_type != "local":
        return [persistent]

    # The rank with the most bytes determines the time of a local save.
    largest = max(stage.checkpoint_bytes for stage in plan.stages)
    local_seconds = largest / (GB * options.local_gbps)
    copies = 1
    if checkpoint.replication:
        copies = checkpoint.replication_factor
    local = SaveTier(
        "--non-persistent-save-interval",
        interval=checkpoint.non_persistent_save_interval or 1,
        blocking=options.blocking_seconds,
        total=copies * local_seconds,
        loading=local_seconds,
    )
    return [persistent, local]


def choose_failure_intervals(options: argparse.Namespace) -> tuple[float, float]:
    """Return the hours between failures, and between those that lose a node.

    Both default to published rates.
    """
    mtbf_hours = options.mtbf_hours
    if not mtbf_hours:
        mtbf_hours = [DEVICE_HOURS_PER_FAILURE / options.world_size]
    hours = mtbf_hours[0]
    if len(mtbf_hours) > 1:
        return hours, mtbf_hours[1]
    return hours, LOST_NODES_FACTOR * hours


def simulate_month(options: argparse.Namespace, config: Config, plan: RunPlan) -> list[str]:
    """Return the lines of --goodput."""
    # Draw the failures once: all intervals are compared with the same ones.
    hours, lost_node_hours = choose_failure_intervals(options)
    failures = list(draw_failures(MONTH, HOUR * hours, HOUR * lost_node_hours))
    num_lost = sum(failure.loses_node for failure in failures)
    report = [
        f"30 days on {options.world_size} GPUs, a failure every {hours:.3g} h: {len(failures)} "
        f"failures, {num_lost} of them with the loss of a node and its replicas"
    ]

    # Compare the intervals of the flags with the best ones.
    tiers = list_tiers(options, config, plan)
    step = options.step_seconds
    restart = options.restart_seconds
    if config.checkpoint.save_interval is not None:
        configured = simulate_run(tiers, step, restart, failures, MONTH)
        report.append(format_goodput("as given", configured))
    best = choose_intervals(tiers, step, restart, failures, MONTH)
    spent = simulate_run(best, step, restart, failures, MONTH)
    label = " ".join(f"{tier.flag} {tier.interval}" for tier in best)
    report.append(format_goodput(label, spent))
    return report


def format_goodput(label: str, spent: SpentTime) -> str:
    """Return a line with the shares of a simulated run."""
    total = spent.training + spent.repeated + spent.saving + spent.restarting
    lost_seconds = {
        "repeated": spent.repeated,
        "saves": spent.saving,
        "restarts": spent.restarting,
    }
    shares = []
    for name, seconds in lost_seconds.items():
        percent = 100 * seconds / total
        shares.append(f"{name} {percent:.2f} %")
    progress = 100 * spent.goodput
    losses = ", ".join(shares)
    return f"  {label}: {progress:.2f} % progress ({losses})"


def compare_with_device(
    options: argparse.Namespace,
    flag_values: FlagValues,
    model_provider: ModelProvider,
    plan: RunPlan,
) -> Comparison | None:
    """Compare the plan with --device-memory-gb; return None without that option."""
    if options.device_memory_gb is None:
        return None
    memory = DeviceMemory(GB * options.device_memory_gb, GB * options.reserve_gb)
    if memory.fits(plan.largest):
        return Comparison(memory, True, [], [])

    # Find changes that need less memory. Search for layouts only if none of them is enough.
    alternatives = find_alternatives(flag_values, options.world_size, model_provider, plan.largest)
    layouts: list[RatedLayout] = []
    if not any(memory.fits(alternative.memory) for alternative in alternatives):
        with contextlib.suppress(ValueError):  # flags that fix the layout
            layouts = find_layouts(options, flag_values, model_provider)
    return Comparison(memory, False, alternatives, layouts)


def add_comparison(values: dict[str, Any], comparison: Comparison) -> None:
    """Add a comparison to the plan as plain values."""
    alternatives = []
    for alternative in comparison.alternatives:
        fits = comparison.memory.fits(alternative.memory)
        alternatives.append(asdict(alternative) | {"fits": fits})
    values["fits"] = comparison.fits
    values["alternatives"] = alternatives
    values["layouts"] = [asdict(layout) for layout in comparison.layouts]


def format_comparison(
    options: argparse.Namespace, plan: RunPlan, comparison: Comparison
) -> list[str]:
    """Return the lines about the memory of a device."""
    memory = comparison.memory
    report = [memory.format_verdict(plan.largest)]
    for alternative in comparison.alternatives:
        report.append(f"  with {alternative.flags}: {memory.format_verdict(alternative.memory)}")
    if comparison.layouts:
        report += format_layouts(options, comparison.layouts)
    return report


def run(options: argparse.Namespace, flags: Sequence[str], model_provider: ModelProvider) -> int:
    """Plan the run and print the plan; return the exit status."""
    world_size = options.world_size
    flag_values = parse_planned_flags(flags)
    if options.search is not None:
        fitting = find_layouts(options, flag_values, model_provider)
        print_layouts(options, fitting)
        return 0 if fitting else 1

    # Plan the run.
    config, plan = plan_flags(flag_values, world_size, model_provider)

    # Evaluate it as the options request.
    intervals: list[str] = []
    if options.measured is not None and options.mtbf_hours is not None:
        record = read_record(options.measured)
        intervals = propose_save_intervals(record, options.mtbf_hours)
    goodput: list[str] = []
    if options.goodput:
        goodput = simulate_month(options, config, plan)
    comparison = compare_with_device(options, flag_values, model_provider, plan)

    # Report.
    if options.plot is not None:
        if comparison is None:
            draw_plan(plan, options.plot)
        else:
            draw_plan(plan, options.plot, *comparison.memory)
    if options.json:
        values = make_json(config, plan, world_size)
        if comparison is not None:
            add_comparison(values, comparison)
        if intervals:
            values["save_intervals"] = intervals
        if goodput:
            values["goodput"] = goodput
        print_json(values, indent=2)
    else:
        verdict: list[str] = []
        if comparison is not None:
            verdict = format_comparison(options, plan, comparison)
        report = format_plan(config, world_size, plan).split("\n")
        for section in (intervals, goodput, verdict):
            if section:
                report += ["", *section]
        for row in report:
            print_line(row)
    fits = comparison is None or comparison.fits
    return 0 if fits else 1
