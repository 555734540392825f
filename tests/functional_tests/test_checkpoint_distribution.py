"""The separately installable checkpoint engine does not need or use `megatron`."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

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


@pytest.fixture(scope="module")
def dependencies(site, tmp_path_factory):
    """Return a directory with links to the distributions that the engine declares, and to theirs.

    Optional packages are missing, as in a fresh environment.
    """
    directory = tmp_path_factory.mktemp("dependencies")
    (engine,) = importlib.metadata.distributions(path=[str(site)])
    pending = list(engine.requires)
    installed = set()
    while pending:
        requirement = Requirement(pending.pop())
        is_active = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if not is_active or requirement.name in installed:
            continue
        installed.add(requirement.name)
        distribution = importlib.metadata.distribution(requirement.name)
        pending += distribution.requires or []
        for entry in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            target = Path(distribution.locate_file(entry))
            if not (directory / entry).exists():
                (directory / entry).symlink_to(target)
    return directory


def test_installed_engine_needs_only_declared_packages(site, dependencies, tmp_path):
    """Saves and resumes without `megatron` and the other packages of this environment."""
    result = subprocess.run(
        [sys.executable, "-S", "-c", PROGRAM],  # -S: without the packages of this environment
        cwd=tmp_path,
        env={
            "PYTHONPATH": f"{site}:{dependencies}",
            "PATH": "/usr/bin:/bin",
            "OMP_NUM_THREADS": "1",
        },
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
