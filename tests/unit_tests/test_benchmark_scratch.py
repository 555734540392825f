"""Files of benchmarks are removed however a benchmark ends, and no other files."""

import os
import signal
import subprocess
import sys

import pytest

from benchmarks.scratch import create_scratch_directory
from tests import ROOT
from tests.support.processes import children_of, is_running, wait_until

# A benchmark that has started a program, which writes until it gets a signal.
PROGRAM = """
import subprocess, sys
from pathlib import Path
from benchmarks.scratch import create_scratch_directory

with create_scratch_directory("example", Path(sys.argv[1])) as directory:
    (directory / "large").write_bytes(bytes(1000))
    print(directory, flush=True)
    subprocess.run(["sleep", "300"])
"""


def start_benchmark(parent):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(parent)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    directory = process.stdout.readline().strip()
    wait_until(lambda: children_of(process.pid))
    return process, directory


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_removes_directory_and_stops_programs(tmp_path, number):
    process, directory = start_benchmark(tmp_path)
    (child,) = children_of(process.pid)
    assert os.listdir(tmp_path) == [os.path.basename(directory)]

    process.send_signal(number)

    assert process.wait(60) == 128 + number
    assert not is_running(child)
    assert os.listdir(tmp_path) == []


def test_next_start_removes_only_directories_of_killed_benchmarks(tmp_path):
    foreign = tmp_path / "benchmark-example-mine"
    foreign.mkdir()
    other_benchmark, other = start_benchmark(tmp_path)
    killed_benchmark, killed = start_benchmark(tmp_path)
    (child,) = children_of(killed_benchmark.pid)
    killed_benchmark.kill()
    killed_benchmark.wait()
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: not is_running(child))
    try:
        with create_scratch_directory("example", tmp_path) as directory:
            names = {str(path) for path in tmp_path.iterdir()}
            assert names == {str(foreign), other, str(directory)}
        assert killed not in names
    finally:
        other_benchmark.terminate()
        other_benchmark.wait(60)
    assert os.listdir(tmp_path) == [foreign.name]


def test_exception_removes_directory(tmp_path):
    with pytest.raises(ZeroDivisionError), create_scratch_directory("example", tmp_path):
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []
