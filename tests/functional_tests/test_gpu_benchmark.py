"""The GPU benchmark program runs with a tiny model on a machine without a GPU."""

import os
import re
import subprocess
import sys

import pytest

from benchmarks.gpu import CALLS, PARTS, Report
from tests import ROOT


def test_gpu_benchmark_continues_after_a_failure(tmp_path, capsys):
    """Every result is stored at once; an error is a result."""
    report = Report(tmp_path / "results.txt")
    report.add("first")
    with report.measuring("second"):
        report.add("half of it")
        raise RuntimeError("command failed:\nout of memory")
    report.add("third")
    lines = ["first", "half of it", "  second: FAILED: out of memory", "third"]
    assert (tmp_path / "results.txt").read_text().splitlines() == lines
    assert capsys.readouterr().out.splitlines() == lines
    assert report.num_failures == 1


def test_measurements_end_at_the_time_limit():
    """Processes that a measured program has started would keep its output open."""
    code = """
import time
from benchmarks.gpu import Report, run
report = Report(None, seconds=1)
sleep = "import subprocess; subprocess.run(['sleep', '600'])"
with report.measuring("first"):
    run(report, ["-c", sleep])
with report.measuring("second"):
    run(report, ["-c", sleep])
report = Report(None, seconds=1)
with report.measuring("third"):
    while True:
        time.sleep(0.01)
assert report.num_failures == 1
"""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "  first: stopped by the time limit of 1 s",
        "  second: not run: the time limit of 1 s was reached",
        "  third: stopped by the time limit of 1 s",
    ]


def test_calls_fit_into_half_an_hour():
    assert all(call.seconds < 600 for call in CALLS.values())
    assert sum(call.seconds for call in CALLS.values()) <= 26 * 60
    measured = {part for call in CALLS.values() for part in call.parts}
    assert measured == set(PARTS)


@pytest.mark.slow
def test_gpu_benchmark_smoke_runs_all_parts():
    environment = {
        k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    result = subprocess.run(
        [sys.executable, "benchmarks/gpu.py", "--smoke"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    text = result.stdout
    assert re.search(r"small ours +eager +[\d.]+ ms/step .* MFU +[\d.]+ %", text)
    assert re.search(r"small transformers +eager +[\d.]+ ms/step .* MFU +[\d.]+ %", text)
    assert re.search(r"peak memory [\d.]+ GB, of tensors as planned 0\.0\d+ GB", text)
    assert (
        re.search(r"ours: 4 saves of 0\.\d+ GB", text)
        and len(re.findall(r"blocking per save: \d+ ms", text)) == 3
    )
    assert re.search(r"\d+/\d+ tests collected", text)
    assert (
        "local rank 1 that sees one device: cpu" in text
        and text.count("waits for the device: none") == 2
    )
    assert re.search(r"windowed attention: .*aten::", text) and re.search(
        r"loss over 1000 words, .*\d kernels", text
    )
    assert re.search(r"grouped +[\d.]+ ms", text) and "aten::mm" in text
