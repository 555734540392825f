"""The code of docs/library.md and examples/library runs and resumes at another number of ranks."""

import os
import re

import pytest
import torch

from megatron.core.dist_checkpointing import CheckpointDirectory
from tests import ROOT
from tests.support.crash_harness import free_port


def code_blocks():
    page = (ROOT / "docs/library.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


class Loader:
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        assert state == {}


def run_loop(directory, steps):
    """Run the loop at the top of the page; returns the numbers of the steps it has trained."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained = []

    def train_step():
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        trained.append(len(trained))

    os.chdir(directory)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    names = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": Loader()}
    exec(code_blocks()[0], {**names, "train_step": train_step, "steps": steps})
    return len(trained)


def test_loop_of_the_page_resumes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_loop(tmp_path, 1003) == 1003
    assert CheckpointDirectory(tmp_path / "run").list_iterations() == [1000]
    assert run_loop(tmp_path, 1004) == 4


def run_example(rank, world_size, name, *args):
    namespace: dict = {}
    exec(code_blocks()[1], namespace)
    return namespace[name](*args)


@pytest.mark.parametrize(("savers", "loaders"), [(2, 1), (1, 4), (4, 2)])
def test_example_resumes_at_another_number_of_ranks(savers, loaders, pool, tmp_path):
    saved = torch.cat(pool.run(run_example, savers, "train", 3, str(tmp_path)))
    parts = pool.run(run_example, loaders, "resume", str(tmp_path / "step_3"))
    assert torch.equal(torch.cat([weight for weight, _, _ in parts]), saved)
    assert [step for _, _, step in parts] == [3] * loaders


def train_fsdp2(launcher, processes, run, steps):
    """Run the FSDP2 example; returns its losses by step."""
    flags = f"--checkpoints {run} --steps {steps} --save-interval 2"
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    example = "examples/library/train_fsdp2.py"
    job = launcher.run(processes, flags, variables=rendezvous, program=example)
    found = re.findall(r"step (\d+) of \d+  loss (\S+)", job.output())
    return {int(step): float(loss) for step, loss in found}


def test_fsdp2_example_resumes_on_half_of_the_ranks(launcher, tmp_path):
    first = train_fsdp2(launcher, 2, tmp_path / "run", 4)
    second = train_fsdp2(launcher, 1, tmp_path / "run", 6)
    at_once = train_fsdp2(launcher, 1, tmp_path / "other", 6)
    assert (list(first), list(second)) == ([1, 2, 3, 4], [5, 6])
    assert first | second == pytest.approx(at_once, rel=1e-4)
