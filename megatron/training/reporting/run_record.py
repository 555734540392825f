"""The record of a run: its launches, intervals, evaluations, saves and ends, for `tools/report.py`
and for programs.

    <save>/run.json                      the newest launch: command, arguments, summary, versions
    <save>/runs/20260131T101500.123456-4711.jsonl    one file per launch, one JSON object per line
    <save>/runs/20260131T101400.234567-4693.failed   a launch that failed before training

Every line has `kind` and `time` (seconds since 1970). The first one has the kind `start`: layout,
and where the run continues. `interval` contains the numbers of a log line, `point` those of an
evaluation or a committed save, `end` the reason. Lines are flushed when they are written: a process
that dies loses at most its last line, and leaves no `end`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

RUN_FILE = "run.json"
RECORDS = "runs"


def to_json_value(value: Any) -> Any:
    """Return `value` in a form that JSON can express: None for numbers that are not finite, text
    for other objects.
    """
    if isinstance(value, dict):
        return {key: to_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str | int | float | None):
        return value
    return str(value)


class RunRecord:
    """Writer of the record of one launch.

    An error of the file system costs lines and one warning, never the run. The file is open only
    while a line is written: the disk can become read-only or unavailable in between.
    """

    def __init__(self, save: str | Path, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        # The process id separates launches on a shared file system.
        began = _format_file_time(clock())
        self._path = Path(save) / RECORDS / f"{began}-{os.getpid()}.jsonl"
        self._started = False
        self._warned = False

    def write(self, row_kind: str, **fields: Any) -> None:
        """Append a line. Before the line of kind `start`, lines are dropped."""
        row = {"kind": row_kind, "time": round(self._clock(), 3), **fields}
        text = json.dumps(to_json_value(row))
        try:
            # A launch that fails before training leaves no file.
            if row_kind == "start":
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._started = True
            if self._started:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(text + "\n")
        except OSError as error:
            if not self._warned:
                logger.warning(f"the record of this run has gaps: {self._path}: {error}")
            self._warned = True


@contextmanager
def failed_launch_recorded(
    save: str | Path | None, command: Sequence[str], clock: Callable[[], float] = time.time
) -> Iterator[None]:
    """Record an exception in the block, e.g., for wrong flags, unless a `RunRecord` has begun.

    No file is written without a directory of records from an earlier launch under `save`.
    """
    began = _format_file_time(clock())
    try:
        yield
    except Exception as error:
        if save is not None:
            _record_failed_launch(Path(save) / RECORDS, began, clock(), command, error)
        raise


def _record_failed_launch(
    records: Path, began: str, now: float, command: Sequence[str], error: Exception
) -> None:
    """Write a `.failed` file, unless the process has begun a record, or there are none."""
    # A launch that has begun its record ends it with the reason.
    pid = os.getpid()
    own_records = [path for path in records.glob(f"*-{pid}.jsonl") if path.name >= began]
    if own_records or not records.is_dir():
        return
    row = {
        "kind": "failed",
        "time": round(now, 3),
        "reason": str(error),
        "command": list(command),
    }
    path = records / f"{began}-{pid}.failed"
    with contextlib.suppress(OSError):  # the original error matters more
        path.write_text(json.dumps(row), encoding="utf-8")


def _format_file_time(now: float) -> str:
    """Return seconds since 1970 as text that sorts by time."""
    day_and_time = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now))
    microseconds = int(now % 1 * 1e6)
    return f"{day_and_time}.{microseconds:06d}"
