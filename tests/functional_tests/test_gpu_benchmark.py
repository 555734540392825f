"""The GPU benchmark program runs with a tiny model on a machine without a GPU."""

import os
import re
import subprocess
import sys

import pytest

from benchmarks.gpu import Report
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
