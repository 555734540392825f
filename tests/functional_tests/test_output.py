"""Programs whose output cannot be written: a run continues, a tool ends without a traceback."""

import shlex
import subprocess
import sys

import pytest

from megatron.core.dist_checkpointing import is_complete
from tests import ROOT
from tests.support.training_harness import COMMON, LLAMA

ITERATIONS = 5


@pytest.fixture
def training(tmp_path):
    flags = f"{COMMON} {LLAMA} --mock-data --train-iters {ITERATIONS} --save {tmp_path}"
    return [sys.executable, str(ROOT / "pretrain_gpt.py"), *shlex.split(flags)]


@pytest.fixture
def last_checkpoint(tmp_path):
    return tmp_path / f"iter_{ITERATIONS:07d}"


def test_run_continues_without_reader_of_its_log(training, last_checkpoint):
    process = subprocess.Popen(training, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 0
    assert is_complete(last_checkpoint)


def test_run_continues_if_its_log_is_on_a_full_disk(training, last_checkpoint):
    with open("/dev/full", "w") as full:
        result = subprocess.run(training, stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 0, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("WARNING: messages are lost")
    assert "No space left" in line
    assert is_complete(last_checkpoint)


def test_tool_ends_quietly_without_reader():
    command = [sys.executable, str(ROOT / "tools/preprocess_data.py"), "--help"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 0
