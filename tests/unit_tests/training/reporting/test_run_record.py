"""The record of a run survives crashes, full disks and numbers that JSON does not have."""

import itertools
import json
import logging
import math
import os

import pytest

from megatron.training.reporting.recorded_launches import read_failed_launches, read_record
from megatron.training.reporting.run_record import RECORDS, RunRecord, failed_launch_recorded

LENGTH = {"iterations": 1, "seconds": 1.0}


def record_of(directory, begin, first=0):
    times = itertools.count(begin)
    record = RunRecord(directory, clock=lambda: next(times))
    record.write("start", began=begin, iteration=first, layout="TP 1")
    return record


def test_launches_are_ordered_by_time(tmp_path):
    second = record_of(tmp_path, 2000, first=5)
    second.write("interval", iteration=6, **LENGTH, lm_loss=math.nan)
    first = record_of(tmp_path, 1000)
    first.write("interval", iteration=5, **LENGTH, lm_loss=2.5)
    first.write("point", iteration=5, values={"save-total-time": 1.0})
    first.write("end", iteration=5, reason="complete", failed=False)
    one, two = read_record(tmp_path)

    assert (one.first, one.last, two.first, two.last) == (0, 5, 5, 6)
    assert one.end["reason"] == "complete"
    assert two.end is None
    assert one.ended == 1004
    assert two.intervals[0]["lm_loss"] is None
    assert one.points[0]["values"] == {"save-total-time": 1.0}


def test_truncated_lines_are_skipped(tmp_path):
    record = record_of(tmp_path, 1000)
    record.write("interval", iteration=1, **LENGTH, lm_loss=2.5)
    (path,) = (tmp_path / RECORDS).iterdir()
    whole = path.read_text()
    for length in range(len(whole)):
        path.write_text(whole[:length])
        starts = read_record(tmp_path)
        lines = whole[:length].splitlines()
        complete = [line for line in lines if line.endswith("}") and _is_json(line)]
        assert [1 + len(start.intervals) for start in starts] == [len(complete)] * bool(complete)


def _is_json(line):
    try:
        return bool(json.loads(line))
    except ValueError:
        return False


def test_unwritable_record_does_not_stop_the_run(tmp_path, caplog):
    (tmp_path / RECORDS).write_text("a file in the way")
    with caplog.at_level(logging.WARNING):
        record = record_of(tmp_path, 1000)
        record.write("interval", iteration=1)
    assert caplog.text.count("the record of this run has gaps") == 1


def fail(directory, clock, record=False):
    command = ["pretrain_gpt.py", "--lr", "x"]
    recorded = failed_launch_recorded(directory, command, lambda: clock)
    with pytest.raises(ValueError, match="wrong"), recorded:
        if record:
            record_of(directory, clock)
        raise ValueError("--lr x is wrong")


def test_failed_launches_are_recorded(tmp_path):
    fail(None, 500)
    fail(tmp_path, 500)
    assert not list(tmp_path.iterdir())  # the run has not started

    record_of(tmp_path, 1000)
    fail(tmp_path, 2000)
    fail(tmp_path, 3000, record=True)  # its own record ends with the reason
    assert [launch.began for launch in read_record(tmp_path)] == [1000, 3000]

    (failed,) = read_failed_launches(tmp_path)
    assert failed["time"] == 2000
    assert failed["reason"] == "--lr x is wrong"
    assert failed["command"] == ["pretrain_gpt.py", "--lr", "x"]


START = {"kind": "start", "time": 1.0, "began": 0.0, "iteration": 0, "layout": "TP 1"}
INTERVAL = {"kind": "interval", "time": 2.0, "iteration": 1, "iterations": 1, "seconds": 1.0}
POINT = {"kind": "point", "time": 2.0, "iteration": 1, "values": {"save-total-time": 1.0}}
END = {"kind": "end", "time": 3.0, "reason": "complete", "failed": False}
ROWS = [START, INTERVAL, POINT, END]
FORGED = {
    "began": (0, [None, "x", -1, 1e300, True]),
    "iteration": (0, [None, -1, 2.5, "1", 10**30]),
    "loading": (0, ["1", -1]),
    "layout": (0, [7, ["TP 1"]]),
    "summary": (0, ["x", {"model": 3}]),
    "command": (0, ["x", [1]]),
    "train_iters": (0, ["60", -1]),
    "iterations": (1, [0, -1, None, 1e300]),
    "seconds": (1, [None, "1", 1e300]),
    "lm_loss": (1, ["2", [1]]),
    "tokens_per_second": (1, [{}, 1e300]),
    "values": (2, [None, [], {"save-total-time": "1"}, {"save-total-time": 1e300}]),
    "reason": (3, [None, 3]),
    "failed": (3, [None, "no"]),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_values_are_errors_with_file_line_and_field(tmp_path, name):
    index, values = FORGED[name]
    path = tmp_path / RECORDS / "1.jsonl"
    path.parent.mkdir()

    for value in values:
        rows = [dict(row) for row in ROWS]
        rows[index][name] = value
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        with pytest.raises(ValueError, match=f"1.jsonl:{index + 1}: {name}"):
            read_record(tmp_path)


@pytest.mark.parametrize("index", range(4))
def test_missing_fields_are_errors(tmp_path, index):
    path = tmp_path / RECORDS / "1.jsonl"
    path.parent.mkdir()
    required = [name for name in ROWS[index] if name not in ("kind", "layout")]
    for name in required:
        rows = [dict(row) for row in ROWS]
        del rows[index][name]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        with pytest.raises(ValueError, match=f"1.jsonl:{index + 1} has no '{name}'"):
            read_record(tmp_path)


@pytest.mark.parametrize("line", ["[" * 100_000, "[1]", "7", '{"kind": ["start"]}', "{}", "\x00"])
def test_lines_of_other_kinds_are_skipped(tmp_path, line):
    path = tmp_path / RECORDS / "1.jsonl"
    path.parent.mkdir()
    path.write_text("\n".join([json.dumps(START), line, json.dumps(INTERVAL)]))
    (launch,) = read_record(tmp_path)
    assert len(launch.intervals) == 1


@pytest.mark.parametrize("kind", ["pipe", "/dev/zero"])
def test_records_must_be_regular_files(tmp_path, kind):
    path = tmp_path / RECORDS / "1.jsonl"
    path.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(kind)

    with pytest.raises(ValueError, match="1.jsonl is (not a regular file|a link to /dev/zero)"):
        read_record(tmp_path)
