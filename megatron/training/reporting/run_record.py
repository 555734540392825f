"""The record of a run: its starts, intervals, evaluations, saves and ends, for `tools/report.py`
and for programs.

    <save>/run.json                      the newest start: command, arguments, summary, versions
    <save>/runs/20260131T101500.123456-4711.jsonl    one file for each start, one JSON object per line

Every line has `kind` and `time` (seconds since 1970). `start` comes first: layout, where the run
continues. `interval` has the numbers of a log line, `point` those of an evaluation or a committed
save, `end` the reason. Lines are flushed as they are written: a process that dies loses at most the
line that it was writing, and leaves no `end`. Reading needs the standard library alone.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.training.reporting.logging import Interval

logger = logging.getLogger(__name__)

RUN_FILE = "run.json"
RECORDS = "runs"
Row = dict[str, Any]


def plain(value: Any) -> Any:
    """The same for JSON: None for what is no finite number, and text for what JSON has no form for."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | None) else str(value)


class RunRecord:
    """Appends the lines of one start. An error of the file system costs lines and one warning,
    never the run.

    The file is open only while a line is written: a disk can be made read-only or taken away in
    between.
    """

    def __init__(self, save: str | Path, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        now = clock()
        name = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(now))}.{int(now % 1 * 1e6):06d}-{os.getpid()}.jsonl"
        self._path = Path(save) / RECORDS / name
        self._started = self._warned = False

    def write(self, kind: str, **fields: Any) -> None:
        line = json.dumps(plain({"kind": kind, "time": round(self._clock(), 3), **fields}))
        try:
            if kind == "start":
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._started = True
            if self._started:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
        except OSError as error:
            if not self._warned:
                logger.warning(f"the record of this run has gaps: {self._path}: {error}")
            self._warned = True

    # As a writer of measurements (`logging.Writer`):

    def interval(self, interval: Interval) -> None:
        self.write("interval", **interval.as_fields())

    def scalars(self, values: dict[str, float], iteration: int, samples: int | None = None) -> None:
        self.write("point", iteration=iteration, values=values)

    def close(self) -> None:
        """Nothing to do: lines are written as they come."""


@dataclass
class RecordedStart:
    """One start of a run, as it was recorded."""

    start: Row
    intervals: list[Row] = field(default_factory=list)
    points: list[Row] = field(default_factory=list)
    end: Row | None = None

    @property
    def first(self) -> int:
        """The last iteration before this start."""
        return int(self.start["iteration"])

    @property
    def last(self) -> int:
        """The last recorded iteration."""
        return max([self.first, *(row["iteration"] for row in self.intervals)])

    @property
    def began(self) -> float:
        return float(self.start["began"])

    @property
    def ended(self) -> float:
        """The time of its last line."""
        return max(
            row["time"]
            for row in [
                self.start,
                *self.intervals,
                *self.points,
                *([self.end] if self.end else []),
            ]
        )


def read_record(save: str | Path) -> list[RecordedStart]:
    """All starts under `save` in order of time; torn and unknown lines are skipped."""
    starts = []
    for path in sorted((Path(save) / RECORDS).glob("*.jsonl")):
        rows = [
            row
            for row in map(_parse, path.read_text(encoding="utf-8").splitlines())
            if row is not None
        ]
        if not rows or rows[0]["kind"] != "start":
            continue
        start = RecordedStart(rows[0])
        for row in rows[1:]:
            if row["kind"] == "interval":
                start.intervals.append(row)
            elif row["kind"] == "point":
                start.points.append(row)
            elif row["kind"] == "end":
                start.end = row
        starts.append(start)
    return sorted(starts, key=lambda start: start.began)


def kept_until(starts: Sequence[RecordedStart]) -> list[int]:
    """For each start the last iteration that no later start did again."""
    limits = []
    limit = sys.maxsize
    for start in reversed(starts):
        limits.append(limit)
        limit = min(limit, start.first)
    return limits[::-1]


def goodput(starts: Sequence[RecordedStart]) -> dict[str, float]:
    """Where the time from the first line to the last went, in seconds."""
    names = (
        "training",
        "done again later",
        "held up by saves",
        "loading",
        "starting",
        "between starts",
    )
    spent = dict.fromkeys(names, 0.0)
    ended = starts[0].began
    for start, limit in zip(starts, kept_until(starts), strict=True):
        loading = start.start.get("loading", 0.0)
        spent["between starts"] += max(0.0, start.began - ended)
        spent["loading"] += loading
        spent["starting"] += start.start["time"] - start.began - loading
        for row in start.points:
            blocking = ("save-blocking-time", "local-save-blocking-time")
            spent["held up by saves"] += sum(row["values"].get(name, 0.0) for name in blocking)
        for row in start.intervals:
            again = min(max(0, row["iteration"] - limit), row["iterations"]) / row["iterations"]
            spent["done again later"] += again * row["seconds"]
            spent["training"] += (1 - again) * row["seconds"]
        ended = max(ended, start.ended)
    spent["evaluation and other"] = max(0.0, ended - starts[0].began - sum(spent.values()))
    return spent


def _parse(line: str) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "kind" in row and "time" in row else None
