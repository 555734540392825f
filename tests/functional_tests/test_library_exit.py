"""A program that uses `Checkpointer` and ends in any way keeps the checkpoint that it has begun."""

import random
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from megatron.checkpointer import Checkpointer
from tests.support.interpreters import Interpreter

# Every parameter has the number of finished steps as value. 16 MB per save, with momentum 32 MB.
PROGRAM = """
import signal, sys, time
import torch
from megatron.checkpointer import Checkpointer

ending, steps = sys.argv[1], int(sys.argv[2])
model = torch.nn.Linear(2048, 2048, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=1e-30)
torch.nn.init.zeros_(model.weight)

def report(*words):
    # One write: the threads of saves report, too.
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
    sys.stdout.flush()

def train(ckpt):
    for step in range(ckpt.load(), steps):
        model.weight.grad = -torch.ones_like(model.weight)
        optimizer.step()
        report("begins", step + 1)
        if ckpt.step(step):
            break
        report("began", step + 1)
    if ending == "exception" or ending == "with":
        raise RuntimeError("the training loop fails")
    if ending == "sys.exit":
        sys.exit(3)

ckpt = Checkpointer(
    "run", model, optimizer, save_interval=1, keep_last=2,
    exit_signals=[signal.SIGTERM] if ending == "SIGTERM" else [],
    on_saved=lambda saved: report("saved", saved.directory.name[5:]),
)
if ending == "with":
    with ckpt:
        train(ckpt)
else:
    train(ckpt)
"""


def start_program(directory: Path, ending: str, steps: int) -> Interpreter:
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    return Interpreter(PROGRAM, ending, str(steps), directory=directory, environment=environment)


def load_iteration(directory: Path) -> int:
    """Return the iteration of the newest checkpoint, whose weights must be those of it."""
    model = torch.nn.Linear(2048, 2048, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=1e-30)
    with Checkpointer(directory / "run", model, optimizer) as ckpt:
        iteration = ckpt.load()
    assert torch.all(model.weight == iteration)
    return iteration


@pytest.mark.parametrize(
    "ending, status", [("exception", 1), ("with", 1), ("sys.exit", 3), ("without close", 0)]
)
def test_a_save_in_progress_is_finished_at_exit(ending: str, status: int, tmp_path: Path) -> None:
    """Daemon threads lost it, and aborted the interpreter inside of C++ (status -6)."""
    program = start_program(tmp_path, ending, steps=3)
    _, errors = program.communicate(timeout=120)
    assert program.returncode == status, errors
    assert load_iteration(tmp_path) == 3


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 9))]
)
def test_a_signal_at_any_point_loses_no_checkpoint(
    number: signal.Signals, seed: int, tmp_path: Path
) -> None:
    """SIGINT and SIGTERM keep saves that have begun, SIGKILL those that were reported."""
    generator = random.Random(seed)
    program = start_program(tmp_path, number.name, steps=10_000)
    lines = []
    for line in program.stdout:
        lines.append(line.split())
        if len(lines) == 8:
            break
    try:
        program.wait(timeout=generator.uniform(0, 0.3))
    except subprocess.TimeoutExpired:
        program.send_signal(number)
    output, errors = program.communicate(timeout=120)
    expected_status = 0 if number == signal.SIGTERM else -number
    assert program.returncode == expected_status, errors
    lines += [line.split() for line in output.splitlines()]
    kept = "saved" if number == signal.SIGKILL else "began"
    newest = max(int(iteration) for event, iteration in lines if event == kept)
    begun = max(int(iteration) for event, iteration in lines if event == "begins")
    assert newest <= load_iteration(tmp_path) <= begun
