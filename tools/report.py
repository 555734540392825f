"""Write one self-contained HTML page about a run: curves over all launches, saves, goodput,
checkpoints.

    python tools/report.py RUN [--output RUN/report.html] [--verify]

RUN is a --save directory. The data come from the record of the run (`runs/` in it) and from the
checkpoints themselves. --verify reads all checkpoints and compares their checksums. The page does
not need a network.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from megatron.conversion.formats import find_problem
from megatron.core.dist_checkpointing import CheckpointDirectory, read_tracker, verify
from megatron.core.dist_checkpointing.lineage import read_parent
from megatron.core.dist_checkpointing.verification import compute_verify_size
from megatron.core.durable_files import write_durably
from megatron.core.progress import ProgressBar
from megatron.core.terminal import escape_control_chars, format_error, print_line
from megatron.training.reporting.run_record import (
    RecordedLaunch,
    compute_goodput,
    find_kept_iterations,
    read_record,
    to_json_value,
)

PAGE = Path(__file__).with_name("report_page.html")
MAX_POINTS = 1500  # of a curve; more are averaged
# Metrics of a save. Times are in seconds since it began, except for the time training waited.
SAVE_TIMES = (
    "save-staging-time",
    "save-writing-time",
    "save-total-time",
    "save-blocking-time",
)
SAVE_SIZE = "save-gigabytes"

Row = dict[str, Any]
Point = tuple[float, float]


def collect_facts(root: Path, verify_checkpoints: bool) -> Row:
    """Return the data of the page as plain values. Raises ValueError if there is no record."""
    launches = read_record(root)
    if not launches:
        raise ValueError(
            f"{escape_control_chars(str(root))}: no record of a run (runs/*.jsonl); "
            "give the --save directory of a run"
        )
    newest = launches[-1]
    described = []
    for launch, kept in zip(launches, find_kept_iterations(launches), strict=True):
        described.append(describe_launch(launch, kept))
    return {
        "name": str(root),
        "summary": newest.start.get("summary", {}),
        "command": newest.start.get("command", []),
        "train_iters": newest.start.get("train_iters", newest.last),
        "goodput": compute_goodput(launches),
        "launches": described,
        "checkpoints": describe_checkpoints(root, launches, verify_checkpoints),
    }


# Launches.


def describe_launch(launch: RecordedLaunch, kept: int) -> Row:
    """Return the row of a launch, with its curves; `kept` is its last iteration not repeated."""
    end = launch.end
    if end is None:
        end = {"reason": "no end recorded: killed, or still running", "failed": True}
    validation = []
    for row in launch.points:
        loss = row["values"].get("lm loss validation")
        if loss is not None:
            validation.append((row["iteration"], loss))
    saves = []
    for row in find_saves(launch):
        saves.append((row["iteration"], split_save_time(row["values"])))
    return {
        "layout": launch.start.get("layout", ""),
        "began": launch.began,
        "ended": launch.ended,
        "first": launch.first,
        "last": launch.last,
        "kept": min(kept, launch.last),
        "loaded": launch.start.get("loaded"),
        "reason": end["reason"],
        "failed": end["failed"],
        "loss": make_curve(launch, "lm_loss"),
        "throughput": make_curve(launch, "tokens_per_second"),
        "validation": validation,
        "saves": saves,
    }


def make_curve(launch: RecordedLaunch, name: str) -> list[Point]:
    """Return (iteration, value) of the intervals, averaged if there are more than `MAX_POINTS`."""
    points = []
    for row in launch.intervals:
        if row.get(name) is not None:
            points.append((row["iteration"], row[name]))

    # A point of the curve is the mean of a group of intervals, at the last of their iterations.
    group_size = max(1, math.ceil(len(points) / MAX_POINTS))
    curve = []
    for start in range(0, len(points), group_size):
        group = points[start : start + group_size]
        mean = sum(value for _, value in group) / len(group)
        curve.append((group[-1][0], mean))
    return curve


def find_saves(launch: RecordedLaunch) -> list[Row]:
    """Return the points of committed saves that have all measurements."""
    saves = []
    for row in launch.points:
        measurements = [row["values"].get(name) for name in (*SAVE_TIMES, SAVE_SIZE)]
        if None not in measurements:
            saves.append(row)
    return saves


def split_save_time(values: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each phase of a save; `training waited` overlaps with them."""
    staged, written, total, blocking = [values[name] for name in SAVE_TIMES]
    return {
        "copy to host memory": staged,
        "write": max(0.0, written - staged),
        "commit": max(0.0, total - max(staged, written)),
        "training waited": blocking,
        "bytes": values[SAVE_SIZE] * 1e9,
    }


# Checkpoints.


def describe_checkpoints(
    root: Path, launches: Sequence[RecordedLaunch], verify_checkpoints: bool
) -> list[Row]:
    """Return a row for each checkpoint: size, writer, parent, branch and state."""
    writers = {}  # iteration -> number of the launch that saved it last, from 1
    for number_of_launch, launch in enumerate(launches, start=1):
        for row in find_saves(launch):
            writers[row["iteration"]] = number_of_launch

    # The branch on which the next launch continues.
    checkpoints = CheckpointDirectory(root)
    lineages = checkpoints.read_lineages()
    head = None
    with contextlib.suppress(ValueError):  # a damaged tracker does not prevent a report
        head = lineages.get(cast(int, read_tracker(root)))
    current = checkpoints.list_branch(head)

    rows = []
    for iteration in checkpoints.list_iterations():
        directory = checkpoints.path(iteration)
        row = measure_files(directory)
        row["iteration"] = iteration
        row["launch"] = writers.get(iteration)
        row["layout"] = None
        writer = None
        if iteration in writers:
            writer = launches[writers[iteration] - 1]
            row["layout"] = writer.start.get("layout")
        row["parent"] = find_parent(directory, writer)
        row["branch"] = "current" if iteration in current else "left"
        row["state"] = find_state(directory, verify_checkpoints)
        rows.append(row)
    return rows


def measure_files(directory: Path) -> Row:
    """Return number, bytes and newest modification time of the files below a directory."""
    stats = [path.stat() for path in directory.rglob("*") if path.is_file()]
    return {
        "time": max((stat.st_mtime for stat in stats), default=None),
        "bytes": sum(stat.st_size for stat in stats),
        "files": len(stats),
    }


def find_parent(directory: Path, writer: RecordedLaunch | None) -> str | None:
    """Return the name of the previous checkpoint; for the first one of a directory, the checkpoint
    from which its launch started.
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


def find_state(directory: Path, verify_checkpoints: bool) -> str:
    """Return whether a checkpoint is complete, verified or damaged, and why."""
    if any(directory.glob("mp_rank_*")):
        return "legacy format"
    problem = find_problem(directory)
    if problem is not None:
        return problem
    if not verify_checkpoints:
        return "complete"
    with ProgressBar(f"verify {directory.name}", compute_verify_size(directory)) as progress:
        problems = verify(directory, progress=progress.add).problems
    if problems:
        return f"DAMAGED: {problems[0]}"
    return "verified"


# Page.


def render_page(facts: Row) -> str:
    """Return the page with its data; `<` is escaped, so that no text can end the script."""
    data = json.dumps(to_json_value(facts)).replace("<", "\\u003c")
    return PAGE.read_text(encoding="utf-8").replace('"__DATA__"', data)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the --save directory of a run")
    parser.add_argument("--output", type=Path, help="HTML file to write (default: RUN/report.html)")
    parser.add_argument(
        "--verify", action="store_true", help="read every checkpoint and compare its checksums"
    )
    args = parser.parse_args(argv)
    output = args.output or args.run / "report.html"
    write_durably(output, render_page(collect_facts(args.run, args.verify)).encode())
    print_line(f"report: {output}")
    return 0


def cli() -> None:
    """Run this process's command line; also the console entry point."""
    try:
        sys.exit(main(sys.argv[1:]))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {format_error(error)}")


if __name__ == "__main__":
    cli()
