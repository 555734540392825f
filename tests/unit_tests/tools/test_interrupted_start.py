"""Ctrl-C while a program imports its modules ends it with status 130, without a traceback."""

import os
import signal
import subprocess
import sys

import pytest

from tests import ROOT
from tests.support.processes import heed_interrupts

COMMANDS = {
    "pretrain_gpt.py": "--mock-data",
    "tools/plan_run.py": "--num-layers 1",
    "tools/report.py": "{run}",
    "tools/preprocess_data.py": "--input {run} --output-prefix {run}/data"
    " --tokenizer-type NullTokenizer --vocab-size 9",
    "tools/checkpoint/convert.py": "--load-dir {run} --save-dir {run}/new --saver hf",
    "tools/checkpoint/inspect_checkpoint.py": "show {run}",
    "tools/checkpoint/merge.py": "--input {run} {run} --output {run}/new",
}


def interrupt_import_of_torch(command):
    """Send SIGINT while torch is imported; return the exit status and the output."""
    # Python prints a line for every module that it has imported.
    with subprocess.Popen(
        [sys.executable, "-X", "importtime", *command],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=heed_interrupts,
    ) as process:
        output = []
        for line in process.stdout:
            if "torch.torch_version" in line:
                process.send_signal(signal.SIGINT)
            if not line.startswith("import time:"):
                output.append(line)
    return process.returncode, output


@pytest.mark.parametrize("program", COMMANDS)
def test_interrupt_during_imports_has_no_traceback(program, tmp_path):
    flags = COMMANDS[program].format(run=tmp_path).split()
    status, output = interrupt_import_of_torch([program, *flags])
    assert status == 130, output
    assert len(output) <= 1, output
    assert os.listdir(tmp_path) == []
