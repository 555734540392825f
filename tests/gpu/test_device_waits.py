"""The host launches work ahead of the device and does not wait for it in the middle of a run."""

import json
import subprocess
import sys

import pytest

from tests import ROOT
from tests.support.training_harness import COMMON, LLAMA

VOTES = (
    "--exit-signal-handler --exit-duration-in-mins 60 --save-interval-secs 3600 "
    "--exit-on-save-failure --async-save "
)


@pytest.mark.gpu
def test_votes_do_not_wait(tmp_path):
    """Ranks vote after each iteration on whether to save or to exit."""
    flags = (
        f"{COMMON}{LLAMA}--mock-data --bf16 --device cuda --train-iters 5 --log-interval 100 "
        f"--save {tmp_path} {VOTES}"
    )
    command = [sys.executable, "-m", "tests.support.find_waits", *flags.split()]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == {}


@pytest.mark.gpu
def test_single_process_names_its_device(tmp_path):
    """Otherwise torch warns at the first barrier that it uses the current device."""
    flags = f"{COMMON}{LLAMA}--mock-data --bf16 --device cuda --train-iters 3 --save {tmp_path}"
    command = [sys.executable, "pretrain_gpt.py", *flags.split()]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "barrier()" not in result.stderr
