"""The code of docs/library.md and examples/library runs and resumes at another number of ranks."""

import os
import re

import pytest
import torch

from megatron.api import merge, open_checkpoint
from megatron.conversion.megatron_lm.torch_dist_writer import write_torch_dist
from megatron.core.dist_checkpointing import CheckpointDirectory, write_tracker
from tests import ROOT
from tests.support.crash_harness import free_port
from tests.support.memory_source import LLAMA_ARGS, random_source


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
    (block,) = [code for code in code_blocks() if f"def {name}(" in code]
    exec(block, namespace)
    return namespace[name](*args)


@pytest.mark.parametrize(("savers", "loaders"), [(2, 1), (1, 4), (4, 2)])
def test_example_resumes_at_another_number_of_ranks(savers, loaders, pool, tmp_path):
    saved = torch.cat(pool.run(run_example, savers, "train", 3, str(tmp_path)))
    resumed = pool.run(run_example, loaders, "resume", str(tmp_path / "step_3"))
    shards = [weight for weight, _, _ in resumed]
    assert torch.equal(torch.cat(shards), saved)
    assert [step for _, _, step in resumed] == [3] * loaders


def test_example_serves_the_weights_of_the_last_step(pool):
    *trainers, server = pool.run(run_example, 3, "train_and_serve", 2)
    bytes_moved, served = server
    trained = torch.cat([rows for _, rows in trainers])
    assert torch.equal(served, trained)
    assert served[:, 0].tolist() == [2.0] * 4 + [4.0] * 4
    assert bytes_moved == served.nbytes


def train_fsdp2(launcher, processes, run, steps):
    """Run the FSDP2 example; returns its losses by step."""
    flags = f"--checkpoints {run} --steps {steps} --save-interval 2"
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    example = "examples/library/train_fsdp2.py"
    job = launcher.run(processes, flags, variables=rendezvous, program=example)
    lines = re.findall(r"step (\d+) of \d+  loss (\S+)", job.output())
    return {int(step): float(loss) for step, loss in lines}


def test_fsdp2_example_resumes_on_half_of_the_ranks(launcher, tmp_path):
    first = train_fsdp2(launcher, 2, tmp_path / "run", 4)
    second = train_fsdp2(launcher, 1, tmp_path / "run", 6)
    at_once = train_fsdp2(launcher, 1, tmp_path / "other", 6)
    assert list(first) == [1, 2, 3, 4]
    assert list(second) == [5, 6]
    assert first | second == pytest.approx(at_once, rel=1e-4)


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory):
    """Return a directory with the checkpoints of iterations 7 and 8 of a run."""
    root = tmp_path_factory.mktemp("api")
    for iteration in (7, 8):
        source = random_source(LLAMA_ARGS, seed=iteration)
        source.training.iteration = iteration
        write_torch_dist(source, root / f"run/iter_{iteration:07d}")

    write_tracker(root / "run", 8)
    return root


def run_block(function, directory, monkeypatch):
    """Run the block of the page that imports a function of the API; returns its variables."""
    monkeypatch.chdir(directory)
    (block,) = [code for code in code_blocks() if re.search(rf"megatron\.api .*{function}\n", code)]
    names: dict = {}
    exec(block, names)
    return names


def test_documented_open_checkpoint(run_directory, monkeypatch, capsys):
    names = run_block("open_checkpoint", run_directory, monkeypatch)
    assert capsys.readouterr().out == f"8 {LLAMA_ARGS['num_layers']}\n"
    tensor = random_source(LLAMA_ARGS, seed=8).tensors[names["key"]]
    rows = names["rows"]
    assert torch.equal(rows, tensor.read((0, 0), rows.shape))


def test_documented_convert(run_directory, monkeypatch):
    report = run_block("convert", run_directory, monkeypatch)["report"]
    model = open_checkpoint(run_directory / "model")
    assert report.verified == len(model.tensors)
    assert {info.dtype for info in model.tensors.values()} == {torch.bfloat16}


def test_documented_merge(run_directory, monkeypatch):
    run_block("merge", run_directory, monkeypatch)
    key = "decoder.final_layernorm.weight"

    def read(name):
        tensor = open_checkpoint(run_directory / name).tensors[key]
        return tensor.read((0,), (4,))

    first = read("run/iter_0000007")
    second = read("run/iter_0000008")
    assert torch.allclose(read("merged"), 0.25 * first + 0.75 * second)


def test_documented_plan(run_directory, monkeypatch, capsys):
    run_block("plan", run_directory, monkeypatch)
    memory, checkpoint = map(int, capsys.readouterr().out.split())
    assert memory > checkpoint > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inputs": []}, "at least one input"),
        ({"inputs": ["a"], "base": 1}, "base=1 is not the index of one of 1 inputs"),
        ({"inputs": ["a", "b"], "weights": [1.0]}, "1 weights for 2 inputs"),
    ],
)
def test_merge_rejects_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        merge(target="merged", **arguments)
