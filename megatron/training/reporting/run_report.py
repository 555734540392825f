"""The data and the HTML page of `tools/report.py`: one run, or several to compare.

The data come from the records of the launches (`run_record`) and from the checkpoints. The page
contains its style, script and data, so that it needs no network.
"""

from __future__ import annotations

import contextlib
import json
import math
import shlex
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from megatron.core.dist_checkpointing import CheckpointDirectory, read_tracker
from megatron.core.dist_checkpointing.ownership.lineage import read_parent
from megatron.core.dist_checkpointing.verification import compute_verify_size, verify
from megatron.core.progress import ProgressBar
from megatron.core.run_checkpoint.formats import find_problem
from megatron.core.terminal import escape_control_chars
from megatron.training.reporting.recorded_launches import (
    RecordedLaunch,
    compute_goodput,
    find_kept_iterations,
    read_failed_launches,
    read_record,
)
from megatron.training.reporting.run_record import to_json_value

PAGE = Path(__file__).with_name("report_page")
MAX_POINTS = 1500  # of a curve of one launch; more are averaged
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
# Metrics of a save. Times are in seconds since it began, except for the time that training lost.
SAVE_TIMES = (
    "save-staging-time",
    "save-writing-time",
    "save-total-time",
    "save-blocking-time",
)
SAVE_SIZE = "save-gigabytes"
_PRODUCTIVE_SHARE = 0.9  # below, the verdict is a warning
_TREND_SHARE = 0.1  # of the losses, compared with as many before
_SPIKE_WINDOW = 20  # points of the curve with which a loss is compared
_SPIKE_DEVIATIONS = 8.0  # median absolute deviations above the median of the window
_SPIKE_SHARE = 0.1  # least increase
_SLOW_RATIO = 1.2  # of the slowest rank to the median of the others
_INPUT_SHARE = 0.05  # of the training time, above which waiting for data is a warning
_SILENCE_SECONDS = 600.0  # without an end or a new line for longer, a launch is not running

Row = dict[str, Any]
Point = tuple[float, float]  # (iteration, value)


class Sentence(NamedTuple):
    """A sentence of the verdict on a run."""

    mood: Literal["good", "warn", "bad"]
    text: str


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


def make_verdict(
    launches: Sequence[RecordedLaunch],
    train_iters: int,
    checkpoints: Sequence[Row],
    goodput: Mapping[str, float],
    now: float,
) -> list[Row]:
    """Return the state of the run in sentences, as plain values."""
    sentences = [
        _judge_progress(launches[-1], train_iters, now),
        _judge_numbers(launches),
        _judge_loss(launches),
        _judge_spikes(launches),
        _judge_ranks(launches[-1]),
        _judge_input(launches[-1]),
        _judge_checkpoints(checkpoints),
        _judge_time(goodput),
    ]
    return [sentence._asdict() for sentence in sentences if sentence is not None]


def _judge_progress(newest: RecordedLaunch, train_iters: int, now: float) -> Sentence:
    """Report whether the newest launch is running, or how it ended."""
    progress = f"iteration {newest.last} of {train_iters}"
    if newest.end is None:
        silence = max(0.0, now - newest.ended)
        if silence < _SILENCE_SECONDS:
            return Sentence("good", f"Running: {progress}.")
        age = _format_duration(silence)
        return Sentence(
            "bad",
            f"Killed or hanging: no end is recorded, and the last line, at {progress}, is {age} "
            "old.",
        )
    reason = newest.end["reason"]
    if newest.end["failed"]:
        return Sentence("bad", f"Failed at {progress}: {reason}")
    if newest.last >= train_iters:
        return Sentence("good", f"Finished: all {train_iters} iterations.")
    return Sentence("warn", f"Ended early at {progress}: {reason}")


def _judge_numbers(launches: Sequence[RecordedLaunch]) -> Sentence:
    """Report losses that are not finite, and skipped iterations."""
    num_nan = 0
    num_skipped = 0
    for launch in launches:
        for row in launch.intervals:
            num_nan += row.get("nan", 0)
            num_skipped += row.get("skipped", 0)
    skipped = f"skipped iterations: {num_skipped}."
    if num_nan:
        return Sentence("bad", f"Losses that are not finite: {num_nan}; {skipped}")
    if num_skipped:
        return Sentence("warn", f"All losses are finite; {skipped}")
    return Sentence("good", "All losses are finite; no iteration was skipped.")


def _judge_loss(launches: Sequence[RecordedLaunch]) -> Sentence | None:
    """Compare the mean of the last losses with the mean of as many before them."""
    # Losses of iterations that were not repeated
    losses = []
    for launch, kept in zip(launches, find_kept_iterations(launches), strict=True):
        for row in launch.intervals:
            if row["iteration"] <= kept and row.get("lm_loss") is not None:
                losses.append(row["lm_loss"])
    if not losses:
        return None
    newest = losses[-1]

    # Means over a share of the run are less noisy than single losses.
    size = max(1, int(_TREND_SHARE * len(losses)))
    if len(losses) < 2 * size:
        return Sentence("good", f"Training loss {newest:.3f}.")
    recent = sum(losses[-size:]) / size
    before = sum(losses[-2 * size : -size]) / size
    change = 0.0
    if before != 0:
        change = (recent - before) / abs(before)

    trend = f"{change:+.2%}"
    if trend in ("+0.00%", "-0.00%"):
        trend = "unchanged"
    text = f"Training loss {newest:.3f}, {trend} over the last {_TREND_SHARE:.0%} of it."
    is_falling = change < 0.01
    return Sentence("good" if is_falling else "warn", text)


def _judge_spikes(launches: Sequence[RecordedLaunch]) -> Sentence | None:
    """Report losses far above those before them."""
    curve = []
    for launch, kept in zip(launches, find_kept_iterations(launches), strict=True):
        curve += [point for point in make_curve(launch, "lm_loss") if point[0] <= kept]

    # A spike begins at a loss that is too high, and ends at the next one that is not.
    spikes: list[tuple[float, float, float, float]] = []  # iteration, loss before, loss, end
    window: list[float] = []
    is_high = False
    for iteration, loss in curve:
        if len(window) < _SPIKE_WINDOW // 2:
            window.append(loss)
            continue
        before = statistics.median(window)
        deviation = statistics.median(abs(value - before) for value in window)
        limit = before + max(_SPIKE_DEVIATIONS * deviation, _SPIKE_SHARE * abs(before))
        if loss <= limit:
            window = [*window, loss][-_SPIKE_WINDOW:]
            is_high = False
            continue
        if not is_high:
            spikes.append((iteration, before, loss, iteration))
        is_high = True
        first, before, highest, _ = spikes[-1]
        spikes[-1] = (first, before, max(highest, loss), iteration)
    if not spikes:
        return None

    first, before, highest, last = max(spikes, key=lambda spike: spike[2] - spike[1])
    text = f"Loss spikes: {len(spikes)}; the largest from {before:.3f} to {highest:.3f}, at "
    text += f"iteration {first}" if first == last else f"iterations {first} to {last}"
    if is_high:
        return Sentence("bad", f"{text}. The loss has not come down since iteration {first}.")
    return Sentence("warn", f"{text}.")


def _judge_ranks(newest: RecordedLaunch) -> Sentence | None:
    """Report a rank that is slower than the others, if --log-straggler measured it."""
    ratios: dict[float, list[float]] = {}
    num_points = 0
    for row in newest.points:
        values = row["values"]
        rank = values.get("slowest-rank")
        ratio = values.get("slowest-rank-ratio")
        if rank is not None and ratio is not None:
            num_points += 1
            ratios.setdefault(rank, []).append(ratio)
    if num_points == 0:
        return None
    # Noise makes another rank the slowest each time.
    rank, of_rank = max(ratios.items(), key=lambda item: len(item[1]))
    ratio = statistics.median(of_rank)
    if ratio < _SLOW_RATIO or len(of_rank) <= num_points / 2:
        return Sentence("good", "No rank is permanently slower than the others.")
    return Sentence(
        "warn",
        f"Rank {rank:.0f} is slow: it works {ratio:.2f} times as long as the median of the others.",
    )


def _judge_input(newest: RecordedLaunch) -> Sentence | None:
    """Report time that ranks have waited for data."""
    # The first interval includes the start of the workers.
    rows = [row for row in newest.intervals[1:] if row.get("input_seconds") is not None]
    seconds = sum(row["seconds"] for row in rows)
    waited = sum(row["input_seconds"] for row in rows)
    if waited <= _INPUT_SHARE * seconds:
        return None
    slowest = max(rows, key=lambda row: row["input_seconds"])
    return Sentence(
        "warn",
        f"{waited / seconds:.0%} of the training time was spent waiting for data, longest on rank "
        f"{slowest.get('input_rank')}: raise --num-workers, or use faster storage.",
    )


def _judge_checkpoints(checkpoints: Sequence[Row]) -> Sentence:
    """Report the newest usable checkpoint, and the number of damaged ones."""
    total = len(checkpoints)
    if total == 0:
        return Sentence("warn", "There is no checkpoint.")
    usable = [row["iteration"] for row in checkpoints if row["usable"]]
    if not usable:
        return Sentence("bad", f"None of {total} checkpoints is usable.")
    text = f"Newest usable checkpoint: iteration {max(usable)}"
    num_damaged = total - len(usable)
    if num_damaged:
        return Sentence("warn", f"{text}; {num_damaged} of {total} are not usable.")
    return Sentence("good", f"{text}; all {total} are usable.")


def _judge_time(goodput: Mapping[str, float]) -> Sentence | None:
    """Report the share of productive time, and the two activities that lost the most."""
    total = sum(goodput.values())
    if total <= 0:
        return None
    share = goodput["training"] / total
    text = f"{share:.0%} of the time was productive training"

    # Name the two largest losses, if they matter.
    lost = {name: seconds for name, seconds in goodput.items() if name != "training"}
    by_seconds = sorted(lost.items(), key=lambda item: -item[1])
    losses = []
    for name, seconds in by_seconds[:2]:
        if seconds > 0.01 * total:
            label = _LOSSES.get(name, name)
            losses.append(f"{label} {_format_duration(seconds)}")
    if losses:
        text += f"; most was lost by: {', '.join(losses)}"
    is_productive = share >= _PRODUCTIVE_SHARE
    return Sentence("good" if is_productive else "warn", f"{text}.")


# Activities of `compute_goodput`, as the page calls them.
_LOSSES = {
    "done again later": "iterations repeated later",
    "held up by saves": "saves that blocked training",
    "between starts": "time between launches",
}


def _format_duration(seconds: float) -> str:
    """Return a time in the unit that suits its size."""
    if seconds < 90:
        return f"{seconds:.1f} s"
    if seconds < 5400:
        return f"{seconds / 60:.1f} min"
    if seconds < 172_800:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86_400:.1f} days"


# Launches


def describe_launch(launch: RecordedLaunch, kept: int, max_points: int = MAX_POINTS) -> Row:
    """Return the row of a launch, with its curves; `kept` is its last iteration not repeated."""
    end = launch.end
    if end is None:
        end = {"reason": "no end recorded: killed, or still running", "failed": True}
    # Validation losses: (iteration, loss)
    validation = []
    for row in launch.points:
        loss = row["values"].get(VALIDATION_LOSS)
        if loss is not None:
            validation.append((row["iteration"], loss))

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
        "saves": saves,
    }


def measure_speed(launch: RecordedLaunch) -> dict[str, float | None]:
    """Return tokens per second, TFLOP/s per device and model FLOPs utilization (MFU) of a launch.

    Values that cannot be computed are None: MFU requires a device of `PEAK_TFLOPS`.
    """
    # The first interval includes compilation and the start of the workers.
    rows = launch.intervals[1:] or launch.intervals
    tokens_per_second = _average(rows, "tokens_per_second", "seconds")
    tflops = _average(rows, "tflops_per_gpu", "seconds")
    device = launch.start.get("summary", {}).get("device", "")
    mfu = None
    # The longest name that fits: H200 is not an H20.
    names = [name for name in PEAK_TFLOPS if name in device]
    if names and tflops is not None:
        mfu = tflops / PEAK_TFLOPS[max(names, key=len)]
    return {"tokens_per_second": tokens_per_second, "tflops": tflops, "mfu": mfu}


def make_curve(launch: RecordedLaunch, name: str, max_points: int = MAX_POINTS) -> list[Point]:
    """Return (iteration, value) of the intervals, averaged if there are more than `max_points`.

    A launch logs its first iteration alone, and its last ones if it ends between two lines. Such
    intervals are averaged with their neighbors: one iteration is noisier than the mean of many.
    """
    rows = [row for row in launch.intervals if row.get(name) is not None]
    if not rows:
        return []
    usual = statistics.median_high(row["iterations"] for row in rows)
    group_size = max(1, math.ceil(len(rows) / max_points))

    # A point of the curve is the mean of a group of intervals, at the last of their iterations.
    groups: list[list[Row]] = []
    missing = 0  # iterations of the last group
    for row in rows:
        if missing <= 0:
            groups.append([])
            missing = group_size * usual
        groups[-1].append(row)
        missing -= row["iterations"]
    num_last = sum(row["iterations"] for row in groups[-1])
    if num_last < usual and len(groups) > 1:
        last_group = groups.pop()
        groups[-1] += last_group

    weight = "seconds" if name == "tokens_per_second" else "iterations"
    curve = []
    for group in groups:
        mean = _average(group, name, weight)
        assert mean is not None
        curve.append((group[-1]["iteration"], mean))
    return curve


def _average(rows: Sequence[Row], name: str, weight: str) -> float | None:
    """Return the weighted mean of the recorded values, or None if there are none."""
    recorded = [row for row in rows if row.get(name) is not None]
    if not recorded:
        return None
    total = sum(row[weight] for row in recorded)
    if total <= 0:
        return statistics.fmean(row[name] for row in recorded)
    return sum(row[name] * row[weight] / total for row in recorded)


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
