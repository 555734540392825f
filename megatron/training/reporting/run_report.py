"""The data and the HTML page of `tools/report.py`: one run, or several to compare.

The data come from the records of the launches (`run_record`) and from the checkpoints. The page
contains its style, script and data, so that it needs no network.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

from megatron.core.dist_checkpointing import CheckpointDirectory, read_tracker
from megatron.core.dist_checkpointing.ownership.lineage import read_parent
from megatron.core.dist_checkpointing.verification import compute_verify_size, verify
from megatron.core.progress import ProgressBar
from megatron.core.run_checkpoint.formats import find_problem
from megatron.core.terminal import escape_control_chars
from megatron.training.reporting.recorded_launches import (
    MAX_POINTS,
    RecordedLaunch,
    Row,
    average,
    compute_goodput,
    find_kept_iterations,
    make_curve,
    read_failed_launches,
    read_record,
)
from megatron.training.reporting.run_record import to_json_value
from megatron.training.reporting.verdict import make_verdict

PAGE = Path(__file__).with_name("report_page")
MAX_POINTS_OF_RUN = 6000  # of a curve over all launches
CURVES = (
    "lm_loss",
    "tokens_per_second",
    "grad_norm",
    "learning_rate",
    "loss_scale",
    "max_load_over_mean",
    "max_memory_bytes",
    "min_memory_bytes",
)
# Dense bf16 TFLOP/s of the data sheets, by name of the device.
PEAK_TFLOPS = {
    "A100": 312,
    "A800": 312,
    "B200": 2250,
    "B300": 2250,
    "GB200": 2500,
    "GB300": 2500,
    "GH200": 989,
    "H100 NVL": 835,
    "H100 PCIe": 756,
    "H100": 989,
    "H200": 989,
    "H20": 148,
    "H800": 989,
    "L40S": 362,
}
VALIDATION_LOSS = "lm loss validation"
EVALUATIONS = (f"{VALIDATION_LOSS} ", "eval ")  # prefixes of the metrics of domains and tasks
# Metrics of a save. Times are in seconds since it began, except for the time that training lost.
SAVE_TIMES = (
    "save-staging-time",
    "save-writing-time",
    "save-total-time",
    "save-blocking-time",
)
SAVE_SIZE = "save-gigabytes"


class NoRecordError(ValueError):
    """A directory has no record of a run, or none yet."""


def collect_facts(
    roots: Sequence[Path], verify_checkpoints: bool, clock: Callable[[], float] = time.time
) -> Row:
    """Return the data of the page as plain values.

    Raises NoRecordError if a directory has no record of a run.
    """
    now = clock()
    runs = [describe_run(root, verify_checkpoints, now) for root in roots]
    arguments = [run["arguments"] for run in runs]
    return {
        "generated": now,
        "train_iters": max(run["train_iters"] for run in runs),
        "runs": runs,
        "differences": find_differences(arguments),
    }


def describe_run(root: Path, verify_checkpoints: bool, now: float) -> Row:
    """Return all data of one run. Raises NoRecordError if there is no record of it."""
    launches = read_record(root)
    if not launches:
        raise NoRecordError(
            f"{escape_control_chars(str(root))}: no record of a run (runs/*.jsonl); "
            "give the --save directory of a run"
        )

    # Describe each launch. A page with many of them draws fewer points of each.
    max_points = max(20, MAX_POINTS_OF_RUN // len(launches))
    max_points = min(max_points, MAX_POINTS)
    kept_iterations = find_kept_iterations(launches)
    described = []
    for index, launch in enumerate(launches):
        row = describe_launch(launch, kept_iterations[index], max_points)
        row["changes"] = []
        if index > 0:
            before = launches[index - 1]
            row["changes"] = describe_changes(before, launch)
        described.append(row)

    # Summarize the whole run.
    newest = launches[-1]
    checkpoints = describe_checkpoints(root, launches, verify_checkpoints)
    goodput = compute_goodput(launches)
    train_iters = newest.start.get("train_iters", newest.last)
    return {
        "name": root.name or str(root),
        "path": str(root.resolve()),
        "summary": newest.start.get("summary", {}),
        "command": newest.start.get("command", []),
        "arguments": collect_arguments(newest),
        "train_iters": train_iters,
        "goodput": goodput,
        "launches": described,
        "failed": read_failed_launches(root),
        "checkpoints": checkpoints,
        "verdict": make_verdict(launches, train_iters, checkpoints, goodput, now),
    }


# Verdict


# Launches


def describe_launch(launch: RecordedLaunch, kept: int, max_points: int = MAX_POINTS) -> Row:
    """Return the row of a launch, with its curves; `kept` is its last iteration not repeated."""
    end = launch.end
    if end is None:
        end = {"reason": "no end recorded: killed, or still running", "failed": True}
    # Validation losses: (iteration, loss)
    validation = []
    evaluations: dict[str, list[tuple[int, float]]] = {}  # of domains and tasks, by metric
    for row in launch.points:
        loss = row["values"].get(VALIDATION_LOSS)
        if loss is not None:
            validation.append((row["iteration"], loss))
        for name, value in row["values"].items():
            if name.startswith(EVALUATIONS) and not name.endswith(" ppl"):
                evaluations.setdefault(name, []).append((row["iteration"], value))

    # Saves: (iteration, seconds by phase)
    saves = []
    for row in find_saves(launch):
        phases = split_save_time(row["values"])
        saves.append((row["iteration"], phases))
    return {
        "layout": launch.start.get("layout", ""),
        "host": launch.start.get("host", ""),
        "began": launch.began,
        "ended": launch.ended,
        "first": launch.first,
        "last": launch.last,
        "kept": min(kept, launch.last),
        "loaded": launch.start.get("loaded"),
        "reason": end["reason"],
        "failed": end["failed"],
        "speed": measure_speed(launch),
        "curves": {name: make_curve(launch, name, max_points) for name in CURVES},
        "validation": validation,
        "evaluations": evaluations,
        "saves": saves,
    }


def measure_speed(launch: RecordedLaunch) -> dict[str, float | None]:
    """Return tokens per second, TFLOP/s per device and model FLOPs utilization (MFU) of a launch.

    Values that cannot be computed are None: MFU requires a device of `PEAK_TFLOPS`.
    """
    # The first interval includes compilation and the start of the workers.
    rows = launch.intervals[1:] or launch.intervals
    tokens_per_second = average(rows, "tokens_per_second", "seconds")
    tflops = average(rows, "tflops_per_gpu", "seconds")
    device = launch.start.get("summary", {}).get("device", "")
    mfu = None
    # The longest name that fits: H200 is not an H20.
    names = [name for name in PEAK_TFLOPS if name in device]
    if names and tflops is not None:
        mfu = tflops / PEAK_TFLOPS[max(names, key=len)]
    return {"tokens_per_second": tokens_per_second, "tflops": tflops, "mfu": mfu}


def find_saves(launch: RecordedLaunch) -> list[Row]:
    """Return the points of committed saves that have all measurements."""
    required = {*SAVE_TIMES, SAVE_SIZE}
    saves = []
    for row in launch.points:
        values = row["values"]
        if all(values.get(name) is not None for name in required):
            saves.append(row)
    return saves


def split_save_time(values: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each phase of a save, and its bytes.

    `training lost` overlaps with the phases.
    """
    # Staging and writing overlap; the times are those at which they ended.
    staged, written, total, blocking = [values[name] for name in SAVE_TIMES]
    all_written = max(staged, written)
    return {
        "copy to host memory": staged,
        "write": max(0.0, written - staged),
        "commit": max(0.0, total - all_written),
        "training lost": blocking,
        "bytes": values[SAVE_SIZE] * 1e9,
    }


# Differences between launches


def collect_arguments(launch: RecordedLaunch) -> dict[str, str]:
    """Return flags, versions, host and number of ranks of a launch, as far as recorded."""
    start = launch.start
    arguments = {}
    for name, value in start.get("arguments", {}).items():
        flag = name.replace("_", "-")
        arguments[f"--{flag}"] = value

    # Versions are recorded as text: "torch 2.13.0, python 3.11".
    versions = start.get("summary", {}).get("versions", "")
    for package in versions.split(", "):
        name, _, version = package.partition(" ")
        if version:
            arguments[name] = version
    if "world_size" in start:
        arguments["ranks"] = str(start["world_size"])
    if "host" in start:
        arguments["host"] = start["host"]
    return arguments


def describe_changes(before: RecordedLaunch, after: RecordedLaunch) -> list[str]:
    """Return texts such as "--lr 0.003 -> 0.001" for the differences between two launches."""
    differences = find_differences([collect_arguments(before), collect_arguments(after)])
    changes = []
    for name, old, new in differences:
        if old and new:
            changes.append(f"{name} {old} -> {new}")
    return changes


def find_differences(columns: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """Return a row `[name, value, value, ...]` for each name whose values differ.

    A value that is not recorded is empty.
    """
    # All names, in the order of their first column
    names: dict[str, None] = {}
    for column in columns:
        names |= dict.fromkeys(column)

    rows = []
    for name in names:
        values = [column.get(name, "") for column in columns]
        if len(set(values)) > 1:
            rows.append([name, *values])
    return rows


# Checkpoints


def describe_checkpoints(
    root: Path, launches: Sequence[RecordedLaunch], verify_checkpoints: bool
) -> list[Row]:
    """Return a row for each checkpoint: state, size, writer, parent, branch, command to resume."""
    # The number (from 1) of the launch that saved each iteration last
    writers = {}
    for launch_number, launch in enumerate(launches, start=1):
        for row in find_saves(launch):
            writers[row["iteration"]] = launch_number

    # The branch on which the next launch continues
    checkpoints = CheckpointDirectory(root)
    lineages = checkpoints.read_lineages()
    head = None
    with contextlib.suppress(ValueError):  # a damaged tracker does not prevent a report
        head = lineages.get(cast(int, read_tracker(root)))
    current = checkpoints.list_branch(head)

    command = launches[-1].start.get("command", [])
    rows = []
    for iteration in checkpoints.list_iterations():
        directory = checkpoints.path(iteration)
        row = measure_files(directory)
        row["iteration"] = iteration

        # The launch that saved it, if it is known
        number_of_writer = writers.get(iteration)
        writer = None
        if number_of_writer is not None:
            writer = launches[number_of_writer - 1]
        row["launch"] = number_of_writer
        row["layout"] = None
        row["validation"] = None
        if writer is not None:
            row["layout"] = writer.start.get("layout")
            row["validation"] = find_validation_loss(writer, iteration)

        # Its state, and its place in the history
        is_usable, state = find_state(directory, verify_checkpoints)
        row["usable"] = is_usable
        row["state"] = state
        row["parent"] = find_parent(directory, writer)
        row["branch"] = "current" if iteration in current else "left"
        row["resume"] = make_resume_command(command, root, iteration)
        rows.append(row)
    return rows


def make_resume_command(command: Sequence[str], root: Path, iteration: int) -> str:
    """Return the recorded command with the flags that resume from a checkpoint.

    Returns an empty text if no command is recorded.
    """
    if not command:
        return ""

    # Remove these flags, with a value in the same word or in the next one.
    kept = []
    is_value = False
    for word in command:
        if is_value:
            is_value = False
        elif word in ("--load", "--ckpt-step"):
            is_value = True
        elif not word.startswith(("--load=", "--ckpt-step=")):
            kept.append(word)

    kept += ["--load", str(root.absolute()), "--ckpt-step", str(iteration)]
    return shlex.join(kept)


def find_validation_loss(launch: RecordedLaunch, iteration: int) -> float | None:
    """Return the validation loss that a launch has measured at an iteration, if any."""
    for row in launch.points:
        loss = row["values"].get(VALIDATION_LOSS)
        if row["iteration"] == iteration and loss is not None:
            return float(loss)
    return None


def measure_files(directory: Path) -> Row:
    """Return number, bytes and newest modification time of the files below a directory."""
    stats = [path.stat() for path in directory.rglob("*") if path.is_file()]
    return {
        "time": max((stat.st_mtime for stat in stats), default=None),
        "bytes": sum(stat.st_size for stat in stats),
        "files": len(stats),
    }


def find_parent(directory: Path, writer: RecordedLaunch | None) -> str | None:
    """Return the name of the previous checkpoint.

    For the first one of a directory, it is the checkpoint from which its launch started. Returns
    None if that is unknown.
    """
    before = read_parent(directory)
    if before is not None:
        return CheckpointDirectory(directory.parent).path(before).name
    if writer is None:
        return None
    loaded = writer.start.get("loaded")
    if not loaded:
        return "random weights"
    return Path(loaded).name


def find_state(directory: Path, verify_checkpoints: bool) -> tuple[bool, str]:
    """Return whether a checkpoint is usable, and its state, e.g. complete, verified or damaged."""
    if any(directory.glob("mp_rank_*")):
        return True, "legacy format"
    problem = find_problem(directory)
    if problem is not None:
        return False, problem
    if not verify_checkpoints:
        return True, "complete"
    with ProgressBar(f"verify {directory.name}", compute_verify_size(directory)) as progress:
        problems = verify(directory, progress=progress.add).problems
    if problems:
        return False, f"damaged: {problems[0]}"
    return True, "verified"


# Page


def render_page(facts: Row, refresh_seconds: int | None = None) -> str:
    """Return the page with its data; a browser reloads it every `refresh_seconds`."""
    # No text in the data can end the script, because `<` is escaped.
    data = json.dumps(to_json_value(facts)).replace("<", "\\u003c")
    refresh = ""
    if refresh_seconds is not None:
        refresh = f'<meta http-equiv="refresh" content="{refresh_seconds}">'
    contents = {
        "<!-- REFRESH -->": refresh,
        "/* STYLE */": _read_part("style.css"),
        "/* SCRIPT */": _read_part("script.js"),
        '"__FACTS__"': data,  # last: texts in the data must not be replaced
    }
    page = _read_part("page.html")
    for placeholder, content in contents.items():
        page = page.replace(placeholder, content, 1)
    return page


def _read_part(name: str) -> str:
    """Return the content of a file of the page."""
    return (PAGE / name).read_text(encoding="utf-8")
