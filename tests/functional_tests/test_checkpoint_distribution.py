"""The separately installable checkpoint engine does not need or use `megatron`."""

import subprocess
import sys

import pytest

from tests import ROOT

PROGRAM = """
import sys
import torch
from megatron_checkpoint import Checkpointer, CheckpointDirectory, load_common

model = torch.nn.Linear(3, 2)
optimizer = torch.optim.AdamW(model.parameters())
with Checkpointer("run", model, optimizer, save_interval=2) as ckpt:
    for step in range(ckpt.load(), 4):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        ckpt.step(step)
other = torch.nn.Linear(3, 2)
with Checkpointer("run", other, torch.optim.AdamW(other.parameters())) as ckpt:
    assert ckpt.load() == 4
assert torch.equal(other.weight, model.weight)
foreign = sorted(name for name in sys.modules if name.partition(".")[0] == "megatron")
print(CheckpointDirectory("run").list_iterations(), load_common("run/iter_0000004"), foreign)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return a directory that contains only the installed distribution."""
    directory = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install"]
    options = ["--no-deps", "--no-build-isolation", "--target", str(directory / "site")]
    subprocess.run([*pip, *options, str(ROOT / "checkpointing")], check=True, timeout=300)
    return directory / "site"


def test_installed_engine_saves_and_resumes_without_megatron(site, tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env={"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.strip() == "[2, 4] {'iteration': 4} []"


def test_distribution_contains_the_engine_only(site):
    (package,) = site.glob("megatron_checkpoint")
    entries = {path.stem for path in package.iterdir()} - {"__init__", "__pycache__"}
    assert "dist_checkpointing" in entries
    assert list(package.rglob("hashed_copy_cpp*.so"))
    assert not entries & {"models", "transformer", "optimizer", "parallel_state", "flags"}
    for path in package.rglob("*.py"):
        assert "megatron.core" not in path.read_text(encoding="utf-8"), path
