"""The record of a run survives crashes, full disks and numbers that JSON does not have."""

import itertools
import json
import logging
import math
import subprocess
import sys

from megatron.training.reporting.run_record import RECORDS, RunRecord, read_record


def record_of(directory, begin, first=0):
    times = itertools.count(begin)
    record = RunRecord(directory, clock=lambda: next(times))
    record.write("start", began=begin, iteration=first, layout="TP 1")
    return record


def test_starts_come_back_in_order(tmp_path):
    second = record_of(tmp_path, 2000, first=5)
    second.write("interval", iteration=6, lm_loss=math.nan)
    first = record_of(tmp_path, 1000)
    first.write("interval", iteration=5, lm_loss=2.5)
    first.write("point", iteration=5, values={"save-total-time": 1.0})
    first.write("end", iteration=5, reason="complete", failed=False)
    one, two = read_record(tmp_path)
    assert (one.first, one.last, two.first, two.last) == (0, 5, 5, 6)
    assert one.end["reason"] == "complete" and two.end is None and one.ended == 1004
    assert two.intervals[0]["lm_loss"] is None and one.points[0]["values"] == {
        "save-total-time": 1.0
    }


def test_a_torn_line_costs_that_line(tmp_path):
    record = record_of(tmp_path, 1000)
    record.write("interval", iteration=1, lm_loss=2.5)
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


def test_without_a_place_the_run_goes_on(tmp_path, caplog):
    (tmp_path / RECORDS).write_text("a file in the way")
    with caplog.at_level(logging.WARNING):
        record = record_of(tmp_path, 1000)
        record.write("interval", iteration=1)
    assert caplog.text.count("the record of this run has gaps") == 1


def test_reading_needs_no_torch(tmp_path):
    record_of(tmp_path, 1000)
    code = (
        "import sys; from megatron.training.reporting.run_record import read_record; "
        f"print(len(read_record({str(tmp_path)!r})), 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert output.split() == ["1", "False", "False"]
