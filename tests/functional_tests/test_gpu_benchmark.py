"""The GPU benchmark program runs with a tiny model on a machine without a GPU."""

import os
import re
import select
import signal
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace

import pytest

from benchmarks.gpu import CALLS, PARTS, SMALL, Report, measure_checkpoint
from tests import ROOT
from tests.support.programs import run_program


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
with report.measuring("first", share=1.0):
    run(report, ["-c", sleep])
with report.measuring("second", share=1.0):
    run(report, ["-c", sleep])
report = Report(None, seconds=1)
with report.measuring("third", share=1.0):
    while True:
        time.sleep(0.01)
assert report.num_failures == 1
"""
    result = run_program(code, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "  first: stopped by the time limit of 1 s",
        "  second: not run: the time limit of 1 s was reached",
        "  third: stopped by the time limit of 1 s",
    ]


def test_a_slow_measurement_leaves_time_for_others():
    """Limits are nested: of the program, of a part, of a measurement."""
    code = """
import time
from benchmarks.gpu import Report
report = Report(None, seconds=60)
with report.limit(2), report.measuring("part", share=1.0):
    with report.measuring("slow", share=0.5):
        time.sleep(60)
    with report.measuring("fast"):
        report.add("  fast: done")
    time.sleep(60)
with report.measuring("next part"):
    report.add("  next part: done")
    time.sleep(3)  # longer than the limit of the part, which is over
"""
    result = run_program(code, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "  slow: stopped by the time limit of 1 s",
        "  fast: done",
        "  part: stopped by the time limit of 2 s",
        "  next part: done",
    ]


def test_termination_ends_measured_programs(tmp_path):
    """Their child processes are stopped, too, here one that keeps a named pipe open."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    code = f"""
from benchmarks.gpu import Report, exit_on_termination, run
exit_on_termination()
run(Report(None), ["-c", "import subprocess; subprocess.run('sleep 600 > {pipe}', shell=True)"])
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    with pipe.open() as reader:  # returns once the pipe is open for writing
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
        ready, _, _ = select.select([reader], [], [], 60)
        assert ready  # no process can write to it
        assert reader.read() == ""


def test_too_small_disk_is_reported(tmp_path, monkeypatch):
    """All files on it are removed."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    models = {"huge vocabulary": replace(SMALL["small"], vocab=10**14)}
    report = Report(tmp_path / "results.txt")
    measure_checkpoint(models, Namespace(disk=None, device="cpu"), report)
    (line,) = [line for line in report.output.read_text().splitlines() if "not run" in line]
    assert re.search(r"two checkpoints take \d+\.\d GB, .* has \d+\.\d GB free", line)
    assert os.listdir(tmp_path) == ["results.txt"]


def test_files_on_the_disk_are_not_removed(tmp_path):
    (tmp_path / "precious").touch()
    options = Namespace(disk=str(tmp_path), device="cpu")
    with pytest.raises(ValueError, match="not empty, and its files would be lost"):
        measure_checkpoint(SMALL, options, Report(None))
    assert os.listdir(tmp_path) == ["precious"]


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
    assert re.search(r"ours: 4 saves of 0\.\d+ GB", text)
    assert re.search(r"ours: cost per save: [-\d.]+ ms, [\d.]+ ms by the log", text)
    assert len(re.findall(r"blocking per save: [\d.]+ ms", text)) == 2
    assert re.search(r"\d+/\d+ tests collected", text)
    assert "local rank 1 that sees one device: cpu" in text
    assert text.count("waits for the device: none") == 2
    assert re.search(r"windowed attention: .*aten::", text)
    assert re.search(r"loss over 1000 words, .*\d kernels", text)
    assert re.search(r"grouped +[\d.]+ ms", text)
    assert "aten::mm" in text


@pytest.mark.slow
def test_adapter_benchmark_smoke_measures_speeds():
    result = subprocess.run(
        [sys.executable, "benchmarks/adapters.py", "--smoke"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert len(re.findall(r"^  LoRA, .*: [\d.]+ ms, [\d,]+ tokens/s$", result.stdout, re.M)) == 3


def test_bandwidth_of_every_kernel_is_measured():
    pytest.importorskip("triton", reason="Triton is not in the environment: pip install triton")
    program = [sys.executable, "benchmarks/triton_kernels.py", "--smoke"]
    result = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    rows = result.stdout.splitlines()
    assert len(rows) == 11
    assert all(" GB/s " in row for row in rows)
