"""Reader of the record of a run (see `run_record`), and the time that its launches have spent."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.core.safe_files.reading import find_outside_target, parse_json, read_regular
from megatron.core.safe_files.schema import (
    COUNT,
    boolean,
    integer,
    limit,
    mapping,
    number,
    optional,
    record,
    sequence,
    text,
)
from megatron.core.terminal import escape_control_chars
from megatron.training.reporting.run_record import RECORDS

MAX_RECORD_BYTES = limit("RECORD_BYTES", 1 << 30)
MAX_POINTS = 1500  # of a curve of one launch; more are averaged

Row = dict[str, Any]
Point = tuple[float, float]  # (iteration, value)

_TIME = number(0, 1e11)  # seconds since 1970; a browser can show a date up to about 8e12
_DURATION = number(0, 1e11)
_VALUE = optional(number(-1e100, 1e100))  # None: it was not finite. A sum of many stays finite.
_TEXT = text(1 << 20)
_MAX_FAILED_BYTES = 1 << 21
# Fields that readers of a record rely on, by kind of line.
ROW_CHECKS = {
    "start": record(
        {
            "time": _TIME,
            "began": _TIME,
            "iteration": COUNT,
            "loading?": _DURATION,
            "loaded?": optional(_TEXT),
            "layout?": _TEXT,
            "train_iters?": COUNT,
            "command?": sequence(_TEXT),
            "summary?": mapping(_TEXT),
            "host?": _TEXT,
            "world_size?": COUNT,
            "arguments?": mapping(_TEXT),
        }
    ),
    "interval": record(
        {
            "time": _TIME,
            "iteration": COUNT,
            "iterations": integer(1),
            "seconds": _DURATION,
            "lm_loss?": _VALUE,
            "tokens_per_second?": _VALUE,
            "grad_norm?": _VALUE,
            "learning_rate?": _VALUE,
            "loss_scale?": _VALUE,
            "tflops_per_gpu?": _VALUE,
            "max_memory_bytes?": _VALUE,
            "max_memory_rank?": optional(COUNT),
            "min_memory_bytes?": _VALUE,
            "input_seconds?": _VALUE,
            "input_rank?": optional(COUNT),
            "max_load_over_mean?": _VALUE,
            "skipped?": COUNT,
            "nan?": COUNT,
        }
    ),
    "point": record({"time": _TIME, "iteration": COUNT, "values": mapping(_VALUE)}),
    "end": record({"time": _TIME, "reason": _TEXT, "failed": boolean}),
    "failed": record({"time": _TIME, "reason": _TEXT, "command?": sequence(_TEXT)}),
}


@dataclass
class RecordedLaunch:
    """One launch of a run, as it was recorded."""

    start: Row
    intervals: list[Row] = field(default_factory=list)
    points: list[Row] = field(default_factory=list)
    end: Row | None = None

    @property
    def first(self) -> int:
        """Return the last iteration before this launch."""
        return int(self.start["iteration"])

    @property
    def last(self) -> int:
        """Return the last recorded iteration."""
        iterations = [row["iteration"] for row in self.intervals]
        return max([self.first, *iterations])

    @property
    def began(self) -> float:
        return float(self.start["began"])

    @property
    def ended(self) -> float:
        """Return the time of its last line."""
        rows = [self.start, *self.intervals, *self.points]
        if self.end is not None:
            rows.append(self.end)
        times = [row["time"] for row in rows]
        return float(max(times))


def read_record(save: str | Path) -> list[RecordedLaunch]:
    """Return all launches under `save` in order of time.

    Truncated lines and lines of unknown kinds are skipped. Raises ValueError that names file, line
    and field for a line with a value that no run writes.
    """
    launches = []
    for path in _list_records(save, "*.jsonl"):
        launch: RecordedLaunch | None = None
        for row in _read_rows(path):
            row_kind = row["kind"]
            if launch is None:
                if row_kind != "start":
                    break  # the first line is lost: the file cannot be interpreted
                launch = RecordedLaunch(row)
            elif row_kind == "interval":
                launch.intervals.append(row)
            elif row_kind == "point":
                launch.points.append(row)
            elif row_kind == "end":
                launch.end = row
        if launch is not None:
            launches.append(launch)
    return sorted(launches, key=lambda launch: launch.began)


def _list_records(save: str | Path, pattern: str) -> list[Path]:
    """Return the records of a run. Raises ValueError if their directory is a link out of the run.

    Such a link would be a way to read the records of others.
    """
    directory = Path(save) / RECORDS
    target = find_outside_target(directory)
    if target is not None:
        raise ValueError(
            f"{directory} is a link to {escape_control_chars(target)}, outside of the run: give "
            "the run that it belongs to"
        )
    return sorted(directory.glob(pattern))


def read_failed_launches(save: str | Path) -> list[Row]:
    """Return `time`, `reason` and `command` of the launches that failed before training.

    They are in order of time. Raises ValueError as `read_record` does.
    """
    failed = []
    for path in _list_records(save, "*.failed"):
        for row in _read_rows(path, _MAX_FAILED_BYTES):
            if row["kind"] == "failed":
                failed.append(row)
    return failed


def _read_rows(path: Path, max_bytes: int | None = None) -> list[Row]:
    """Return the checked lines of a file, without truncated ones and unknown kinds."""
    content = read_regular(path, MAX_RECORD_BYTES if max_bytes is None else max_bytes)
    rows = []
    for line_number, content_line in enumerate(content.split(b"\n"), start=1):
        location = f"{escape_control_chars(str(path))}:{line_number}"
        try:
            row = parse_json(content_line, location)
        except ValueError:
            continue
        if not isinstance(row, dict):
            continue
        row_kind = row.get("kind")
        if isinstance(row_kind, str) and row_kind in ROW_CHECKS:
            rows.append(ROW_CHECKS[row_kind](row, location))
    return rows


def find_kept_iterations(launches: Sequence[RecordedLaunch]) -> list[int]:
    """Return the last iteration of each launch that no later launch repeated."""
    kept_iterations = []
    # A launch that continued from iteration n has repeated everything after n.
    kept = sys.maxsize
    for launch in reversed(launches):
        kept_iterations.append(kept)
        kept = min(kept, launch.first)
    return kept_iterations[::-1]


def compute_goodput(launches: Sequence[RecordedLaunch]) -> dict[str, float]:
    """Return the seconds between the first and the last line by activity."""
    names = (
        "training",
        "done again later",
        "held up by saves",
        "loading",
        "starting",
        "between starts",
    )
    spent = dict.fromkeys(names, 0.0)
    began = launches[0].began
    ended = began  # the last line of the launches before
    for launch, kept in zip(launches, find_kept_iterations(launches), strict=True):
        # From the end of the previous launch to the first iteration
        loading = launch.start.get("loading", 0.0)
        before_training = launch.start["time"] - launch.began
        spent["between starts"] += max(0.0, launch.began - ended)
        spent["loading"] += loading
        spent["starting"] += max(0.0, before_training - loading)

        # Saves
        for row in launch.points:
            for name in ("save-blocking-time", "local-save-blocking-time"):
                seconds = row["values"].get(name) or 0.0
                spent["held up by saves"] += max(0.0, seconds)

        # Iterations, of which a later launch may have repeated some. The time of an interval is
        # divided among its iterations in equal parts.
        for row in launch.intervals:
            num_iterations = row["iterations"]
            num_repeated = max(0, row["iteration"] - kept)
            repeated = min(num_repeated, num_iterations) / num_iterations
            spent["done again later"] += repeated * row["seconds"]
            spent["training"] += (1 - repeated) * row["seconds"]
        ended = max(ended, launch.ended)

    accounted = sum(spent.values())
    spent["evaluation and other"] = max(0.0, ended - began - accounted)
    return spent


def measure_goodput(save: str | Path) -> dict[str, float]:
    """Return the seconds of all launches under `save` by activity."""
    return compute_goodput(read_record(save))


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
        mean = average(group, name, weight)
        assert mean is not None
        curve.append((group[-1]["iteration"], mean))
    return curve


def average(rows: Sequence[Row], name: str, weight: str) -> float | None:
    """Return the weighted mean of the recorded values, or None if there are none."""
    recorded = [row for row in rows if row.get(name) is not None]
    if not recorded:
        return None
    total = sum(row[weight] for row in recorded)
    if total <= 0:
        return statistics.fmean(row[name] for row in recorded)
    return sum(row[name] * row[weight] / total for row in recorded)
