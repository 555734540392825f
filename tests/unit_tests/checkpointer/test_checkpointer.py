"""`Checkpointer` in training loops of plain PyTorch: resume, policy, ownership, other programs."""

import os
import random
import re
import shutil
import signal
import time
from contextlib import suppress
from datetime import datetime, timezone
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from megatron.checkpointer import Checkpointer
from megatron.checkpointer.checkpointer import CheckpointerOptions
from megatron.core import object_storage
from megatron.core.dist_checkpointing import (
    CheckpointDirectory,
    CheckpointError,
    Reader,
)
from megatron.core.dist_checkpointing.background import default_workers
from megatron.core.dist_checkpointing.ownership import fencing
from megatron.core.dist_checkpointing.saving.run_saver import SaveFailedError
from tests.support.nfs_client import nfs_client
from tests.support.object_server import object_server


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 10)
        self.norm = nn.BatchNorm1d(10)
        self.out = nn.Linear(10, 6)

    def forward(self, x):
        return self.out(self.norm(self.linear(x)))


class Counter:
    """A data loader that counts its batches."""

    def __init__(self):
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def build(kind="plain"):
    """Return model and AdamW with two parameter groups."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    if kind == "ddp":
        model = DistributedDataParallel(model)
    if kind == "fsdp":
        for block in model:
            fully_shard(block)
        fully_shard(model)

    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed}, {"params": others[:-1], "weight_decay": 0.0}]
    groups.append({"params": others[-1:], "weight_decay": 0.1})
    return model, torch.optim.AdamW(groups, lr=0.01)


def train_step(model, optimizer, step):
    """Train on the same batch on every rank, so that all numbers of ranks compute the same."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 6, generator=generator)
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def snapshot(model, optimizer):
    """Return weights and optimizer state by name, in one piece."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    state = {name: whole(value).detach().clone() for name, value in inner.state_dict().items()}
    for name, parameter in inner.named_parameters():
        for kind, value in optimizer.state.get(parameter, {}).items():
            state[f"{name} {kind}"] = whole(value).clone()
    return state


def assert_equal(state, other):
    assert state.keys() == other.keys()
    for name, value in state.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=0, msg=name)


def train(rank, world_size, kind, directory, steps, options):
    """Train from the newest checkpoint to `steps`; returns first step, losses and final state."""
    model, optimizer = build(kind)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    losses = []
    with Checkpointer(directory, model, optimizer, scheduler=scheduler, **options) as ckpt:
        first = ckpt.load()
        for step in range(first, steps):
            losses.append(train_step(model, optimizer, step))
            scheduler.step()
            ckpt.step(step)
        ckpt.finish()

    rates = [group["lr"] for group in optimizer.param_groups]
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    return first, losses, snapshot(model, optimizer), rates, decays


@pytest.mark.parametrize(
    ("saved_by", "savers", "loaded_by", "loaders", "async_save"),
    [
        ("fsdp", 4, "fsdp", 2, False),
        ("fsdp", 2, "plain", 1, True),
        ("plain", 1, "fsdp", 4, False),
        ("ddp", 2, "fsdp", 4, True),
        pytest.param("fsdp", 4, "fsdp", 2, True, marks=pytest.mark.slow),
        pytest.param("fsdp", 2, "plain", 1, False, marks=pytest.mark.slow),
        pytest.param("plain", 1, "fsdp", 4, True, marks=pytest.mark.slow),
        pytest.param("ddp", 2, "fsdp", 4, False, marks=pytest.mark.slow),
    ],
)
def test_resume_at_another_layout(saved_by, savers, loaded_by, loaders, async_save, pool, tmp_path):
    options = {"save_interval": 3, "async_save": async_save}
    saved = pool.run(train, savers, saved_by, tmp_path / "run", 3, options)[0]
    loaded = pool.run(train, loaders, loaded_by, tmp_path / "run", 3, options)[0]

    assert (saved[0], loaded[0]) == (0, 3)
    assert_equal(loaded[2], saved[2])
    assert loaded[3:] == saved[3:] == ([0.005] * 3, [0.01, 0.0, 0.1])

    resumed = pool.run(train, loaders, loaded_by, tmp_path / "run", 6, options)[0]
    whole_run = pool.run(train, savers, saved_by, tmp_path / "other", 6, options)[0]
    assert resumed[1] == pytest.approx(whole_run[1][3:], rel=1e-5)


def test_resume_on_the_same_ranks_is_bitwise(pool, tmp_path):
    options = {"save_interval": 3}
    pool.run(train, 2, "fsdp", tmp_path / "a", 3, options)
    resumed = pool.run(train, 2, "fsdp", tmp_path / "a", 8, options)[0]
    at_once = pool.run(train, 2, "fsdp", tmp_path / "b", 8, options)[0]
    assert resumed[1] == at_once[1][3:]
    assert_equal(resumed[2], at_once[2])


def read_with_dcp(rank, world_size, kind, directory):
    model, optimizer = build(kind)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=directory)
    moments = {
        f"{name} {kind}": whole(value)
        for name, kinds in state["optimizer"]["state"].items()
        for kind, value in kinds.items()
    }
    weights = {name: whole(value) for name, value in state["model"].items()}
    return weights | moments, state["optimizer"]["param_groups"]


@pytest.mark.parametrize("kind", ["plain", "fsdp"])
def test_plain_dcp_reads_everything(kind, pool, tmp_path):
    saved = pool.run(train, 2, kind, tmp_path, 3, {"save_interval": 3})[0]
    read, groups = pool.run(read_with_dcp, 2, kind, tmp_path / "iter_0000003")[0]
    assert_equal(read, saved[2])
    assert [group["lr"] for group in groups] == saved[3]


def write_with_dcp(rank, world_size, kind, directory, style):
    model, optimizer = build(kind)
    for step in range(3):
        train_step(model, optimizer, step)

    if style == "state_dict":
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
    else:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        optimizer_state = get_optimizer_state_dict(model, optimizer, options=options)
        state = {**get_model_state_dict(model), "optimizer": optimizer_state}

    dcp.save(state, checkpoint_id=directory)
    return snapshot(model, optimizer)


def load_initial(rank, world_size, kind, directory, initial, weights_only):
    model, optimizer = build(kind)
    optimizer.param_groups[0]["lr"] = 7.0
    with Checkpointer(directory, model, optimizer) as ckpt:
        first = ckpt.load(initial, weights_only=weights_only)
    return first, snapshot(model, optimizer), optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("style", ["state_dict", "torchtitan"])
def test_checkpoints_of_plain_dcp_are_loaded(style, pool, tmp_path):
    saved = pool.run(write_with_dcp, 2, "fsdp", tmp_path / "dcp", style)[0]
    first, loaded, rate = pool.run(
        load_initial,
        4,
        "fsdp",
        tmp_path / "run",
        tmp_path / "dcp",
        False,
    )[0]
    assert_equal(loaded, saved)
    assert (first, rate) == (0, 0.01)


def test_objects_of_plain_dcp_are_loaded(tmp_path):
    """Plain DCP stores every entry of a dictionary under a key of its own."""
    model, optimizer = build()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for _ in range(3):
        scheduler.step()
    state = {"model": model.state_dict(), "scheduler": scheduler.state_dict()}
    state["dataloader"] = {"position": 5, "counts": {"seen": torch.arange(3)}}
    dcp.save(state, checkpoint_id=tmp_path / "dcp")

    resumed = torch.optim.lr_scheduler.StepLR(build()[1], 2, 0.5)
    loaded = {}
    counter = Counter()
    counter.load_state_dict = loaded.update
    with Checkpointer(tmp_path / "run", model, scheduler=resumed, dataloader=counter) as ckpt:
        ckpt.load(tmp_path / "dcp")

    assert resumed.state_dict() == scheduler.state_dict()
    assert loaded["position"] == 5
    assert loaded["counts"]["seen"].tolist() == [0, 1, 2]


def test_initial_weights_only(pool, tmp_path):
    saved = pool.run(write_with_dcp, 2, "fsdp", tmp_path / "dcp", "state_dict")[0]
    first, loaded, rate = pool.run(
        load_initial,
        1,
        "plain",
        tmp_path / "run",
        tmp_path / "dcp",
        True,
    )[0]
    assert_equal(loaded, {name: value for name, value in saved.items() if " " not in name})
    assert (first, rate) == (0, 7.0)


def test_another_model_is_refused_before_anything_changes(tmp_path):
    train(0, 1, "plain", tmp_path, 2, {"save_interval": 2})
    model, optimizer = build()
    model[1].out = nn.Linear(10, 7)
    model.append(nn.Linear(7, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    before = snapshot(model, optimizer)
    ckpt = Checkpointer(tmp_path, model, optimizer)

    with pytest.raises(
        CheckpointError,
        match=r"model\.1\.out\.weight: \(6, 10\) in the checkpoint",
    ):
        ckpt.load()

    assert_equal(snapshot(model, optimizer), before)

    del model[2]
    model[1].out = nn.Linear(10, 6)
    model[1].extra = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())

    with pytest.raises(CheckpointError, match=r"not in the checkpoint.*\n.*model\.1\.extra\.bias"):
        Checkpointer(tmp_path, model, optimizer).load()


def load_wider_model(rank, world_size, directory):
    """Return the error of loading into a sharded model whose last layer is wider."""
    model = nn.Sequential(Block(), Block())
    model[1].out = nn.Linear(10, 8)
    fully_shard(model)
    ckpt = Checkpointer(directory, model, torch.optim.AdamW(model.parameters()))

    with pytest.raises(CheckpointError) as caught:
        ckpt.load()
    return str(caught.value)


def test_another_sharded_model_is_refused_with_both_shapes(pool, tmp_path):
    """The message was about the state of the optimizer, which does not exist yet."""
    train(0, 1, "plain", tmp_path, 2, {"save_interval": 2})
    for message in pool.run(load_wider_model, 2, tmp_path):
        assert "model.1.out.weight: (6, 10) in the checkpoint, but (8, 10) in the mo" in message


def test_stored_weights_that_are_not_requested_are_an_error(tmp_path):
    train(0, 1, "plain", tmp_path, 2, {"save_interval": 2})
    model, _ = build()
    with pytest.raises(
        CheckpointError,
        match=r"not requested by any rank.*\n.*model\.1\.linear\.bias",
    ):
        Checkpointer(tmp_path, model[:1]).load()


def save_per_rank(rank, world_size, directory, position):
    model, optimizer = build()
    loader = Counter()
    loader.position = position and position + rank
    with Checkpointer(directory, model, optimizer, dataloader=loader) as ckpt:
        skip = () if position is None or position == 0 else ("dataloader",)
        ckpt.load(skip=skip)
        if position:
            ckpt.save(1)
    return loader.position


def test_data_loaders_resume_per_rank(pool, tmp_path):
    assert pool.run(save_per_rank, 2, tmp_path, 10) == [10, 11]
    assert pool.run(save_per_rank, 2, tmp_path, 0) == [10, 11]
    with pytest.raises(CheckpointError, match=r"saved by 2 ranks.*over 1.*skip=\[\"dataloader\"\]"):
        save_per_rank(0, 1, tmp_path, 0)


def train_stage(rank, world_size, directory):
    """Each rank has another part of the model, as with pipeline parallelism."""
    torch.manual_seed(rank)
    model = nn.ModuleDict({f"stage{rank}": nn.Linear(3, 3)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + rank)
    with Checkpointer(directory, model, optimizer) as ckpt:
        ckpt.load()
        ckpt.save(1)
    return snapshot(model, optimizer)


def test_pipeline_stages_are_loaded_in_one_process(pool, tmp_path):
    first, second = pool.run(train_stage, 2, tmp_path)
    model = nn.ModuleDict({"stage0": nn.Linear(3, 3), "stage1": nn.Linear(3, 3)})
    optimizer = torch.optim.SGD(
        [{"params": model[f"stage{stage}"].parameters()} for stage in (0, 1)],
        lr=7.0,
    )
    with Checkpointer(tmp_path, model, optimizer) as ckpt:
        assert ckpt.load() == 1

    assert_equal(snapshot(model, optimizer), first | second)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 1.1]


class Counted(nn.Linear):
    """A layer with extra state."""

    calls = 0

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


def resume_uneven_stages(rank, world_size, directory, calls):
    """Only the second stage has extra state and tied weights."""
    torch.manual_seed(rank)
    stage = nn.ModuleDict({"first": nn.Linear(2, 2)})
    if rank == 1:
        stage = nn.ModuleDict({"second": Counted(2, 2), "tied": nn.Linear(2, 2)})
        stage["tied"].weight = stage["second"].weight
        stage["second"].calls = calls

    with Checkpointer(directory, stage) as ckpt:
        first = ckpt.load()
        ckpt.save(first + 1)
    return first, stage["second"].calls if rank == 1 else None


def test_extra_state_and_tied_weights_of_one_stage(pool, tmp_path):
    assert pool.run(resume_uneven_stages, 2, tmp_path, 7) == [(0, None), (0, 7)]
    assert pool.run(resume_uneven_stages, 2, tmp_path, 0) == [(1, None), (1, 7)]


def test_two_optimizers_of_one_model(tmp_path):
    def build_two():
        model, _ = build()
        first = torch.optim.AdamW(model[0].parameters(), lr=0.01)
        second = torch.optim.SGD(model[1].parameters(), lr=0.02, momentum=0.9)
        return model, [first, second]

    model, optimizers = build_two()
    model(torch.ones(4, 6)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    with Checkpointer(tmp_path, model, optimizers) as ckpt:
        ckpt.save(1)
    other, loaded = build_two()
    for optimizer in loaded:
        optimizer.param_groups[0]["lr"] = 7.0
    with Checkpointer(tmp_path, other, loaded) as ckpt:
        assert ckpt.load() == 1

    for before, after in zip(optimizers, loaded, strict=True):
        assert_equal(snapshot(other, after), snapshot(model, before))
    assert [optimizer.param_groups[0]["lr"] for optimizer in loaded] == [0.01, 0.02]


class Loader:
    """A data loader with a state of any type."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return {"state": self.state}

    def load_state_dict(self, state):
        self.state = state["state"]


def test_failed_save_is_repeated(tmp_path):
    model, optimizer = build()
    loader = Loader(Loader("an object of a type that checkpoints cannot contain"))
    metadata = tmp_path / "iter_0000001" / ".metadata"
    with Checkpointer(tmp_path, model, optimizer, dataloader=loader) as ckpt:
        ckpt.load()
        ckpt.save(1)
        ckpt.finish()
        assert not metadata.exists()
        loader.state = 7
        ckpt.save(1)
        ckpt.finish()
        written = metadata.stat().st_mtime_ns
        ckpt.save(1)  # saved already
        assert metadata.stat().st_mtime_ns == written


def test_wrong_checksum_is_an_error(tmp_path):
    train(0, 1, "plain", tmp_path, 4, {"save_interval": 2})
    shard = max((tmp_path / "iter_0000004").glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    for position in range(0, len(content), 64):
        content[position] ^= 1
    shard.write_bytes(content)
    model, optimizer = build()

    with pytest.raises(CheckpointError, match=re.escape(shard.name)):
        Checkpointer(tmp_path, model, optimizer).load()

    shutil.rmtree(tmp_path / "iter_0000004")
    with Checkpointer(tmp_path, model, optimizer) as ckpt:
        assert ckpt.load() == 2


def test_object_storage():
    object_storage.open_store.cache_clear()
    with object_server():
        saved = train(0, 1, "plain", "s3://bucket/run", 4, {"save_interval": 2, "keep_last": 1})
        loaded = train(0, 1, "plain", "s3://bucket/run", 4, {})
        assert CheckpointDirectory("s3://bucket/run").list_iterations() == [4]

    object_storage.open_store.cache_clear()
    assert loaded[0] == 4
    assert_equal(loaded[2], saved[2])


def draw(rank, world_size, directory, steps):
    """Draw random numbers on every step; returns those after the first save."""
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    model = nn.Linear(2, 2)
    numbers = []
    with Checkpointer(directory, model, save_interval=2) as ckpt:
        for step in range(ckpt.load(), steps):
            numbers.append((torch.rand(1).item(), random.random(), np.random.rand()))
            ckpt.step(step)
    return numbers


def test_random_numbers_continue(pool, tmp_path):
    pool.run(draw, 2, tmp_path / "a", 2)
    resumed = pool.run(draw, 2, tmp_path / "a", 4)
    at_once = pool.run(draw, 2, tmp_path / "b", 4)
    assert resumed == [numbers[2:] for numbers in at_once]
    assert len(draw(0, 1, tmp_path / "a", 5)) == 1  # another number of ranks


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.calls = 0

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


def test_tied_weights_and_extra_state(tmp_path):
    model = Tied()
    model.calls = 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.head(model.embedding(torch.arange(5))).sum().backward()
    optimizer.step()
    with Checkpointer(tmp_path, torch.compile(model), optimizer) as ckpt:
        ckpt.save(1)
    other = Tied()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.5, momentum=0.9)
    with Checkpointer(tmp_path, other, optimizer) as ckpt:
        assert ckpt.load() == 1

    assert other.calls == 3
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert torch.equal(other.head.weight, model.embedding.weight)
    assert other.head.weight is other.embedding.weight


class Fused(nn.Module):
    """A layer whose fused weight is stored as two."""

    def __init__(self):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(6, 4))
        self.register_state_dict_post_hook(self.split)
        self.register_load_state_dict_pre_hook(self.fuse)

    @staticmethod
    def split(module, state, prefix, metadata):
        gate, up = state.pop(prefix + "gate_up").chunk(2)
        state[prefix + "gate"] = gate.clone()
        state[prefix + "up"] = up.clone()

    @staticmethod
    def fuse(module, state, prefix, *others):
        if prefix + "gate" in state:
            parts = [state.pop(prefix + name) for name in ("gate", "up")]
            state[prefix + "gate_up"] = torch.cat(parts)


def test_weights_that_hooks_split_are_loaded(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), Fused())
    with Checkpointer(tmp_path, model) as ckpt:
        ckpt.save(1)
    assert "model.1.gate" in Reader(tmp_path / "iter_0000001").metadata.tensors

    other = nn.Sequential(nn.Linear(4, 4), Fused())
    with Checkpointer(tmp_path, other) as ckpt:
        assert ckpt.load() == 1
    assert torch.equal(other[1].gate_up, model[1].gate_up)


def test_optimizer_step_waits_for_staging(tmp_path):
    """The saved values are those at the call of `save`, although steps follow at once."""
    model, optimizer = build()
    with Checkpointer(tmp_path, model, optimizer) as ckpt:
        for step in range(8):
            train_step(model, optimizer, step)
            saved = snapshot(model, optimizer)
            ckpt.save(step + 1)
            train_step(model, optimizer, 100 + step)
            ckpt.finish()
            read, _ = read_with_dcp(0, 1, "plain", tmp_path / f"iter_{step + 1:07d}")
            assert_equal(read, saved)


def test_values_changed_before_staging_fail_the_save(tmp_path, caplog):
    """A tensor that is changed while it is saved is named; the save is not committed."""
    model = nn.Linear(2000, 2000)
    failed = 0
    with Checkpointer(tmp_path, model, staging_mem_limit=1) as ckpt:
        ckpt.load()
        ckpt.save(1)
        with torch.no_grad():
            model.weight.add_(1)
        ckpt._saver.finish()
        failed = "model.weight" in caplog.text and "before their values were staged" in caplog.text
        committed = CheckpointDirectory(tmp_path).list_iterations()
        # Staging may be complete before the change, on a machine with enough cores.
        assert failed == (committed == [])

        ckpt.save(2)
        ckpt.wait_staged()
        with torch.no_grad():
            model.weight.add_(1)

    assert 2 in CheckpointDirectory(tmp_path).list_iterations()


def test_interval_and_retention(tmp_path):
    reports = []
    train(0, 1, "plain", tmp_path / "all", 5, {"save_interval": 2, "on_saved": reports.append})
    assert [report.directory.name for report in reports] == ["iter_0000002", "iter_0000004"]
    assert all(report.total_bytes > 0 and report.error is None for report in reports)
    train(0, 1, "plain", tmp_path, 11, {"save_interval": 2, "keep_last": 2, "keep_every": 4})
    assert CheckpointDirectory(tmp_path).list_iterations() == [4, 8, 10]


def save_by_clock(rank, world_size, directory):
    seconds = [0.0]
    model, optimizer = build()
    saved = []
    with Checkpointer(
        directory,
        model,
        optimizer,
        save_seconds=10 if rank == 0 else 1000,
        clock=lambda: seconds[0],
    ) as ckpt:
        ckpt.load()
        for step in range(12):
            ckpt.step(step)
            seconds[0] += 3
            ckpt.finish()
            saved = CheckpointDirectory(directory).list_iterations()
    return saved


def test_clock_of_one_rank_saves_on_all(pool, tmp_path):
    """Due on rank 0 after 12 seconds, i.e. at the fifth step, and seen by all one step later."""
    assert pool.run(save_by_clock, 2, tmp_path) == [[6, 11]] * 2


def stop_by_signal(rank, world_size, directory):
    model, optimizer = build()
    before = signal.getsignal(signal.SIGUSR1)
    with Checkpointer(directory, model, optimizer, exit_signals=[signal.SIGUSR1]) as ckpt:
        for step in range(ckpt.load(), 10):
            if rank == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGUSR1)
            if ckpt.step(step):
                break

    assert signal.getsignal(signal.SIGUSR1) is before
    return step


def test_signal_on_one_rank_saves_and_ends_all(pool, tmp_path):
    assert pool.run(stop_by_signal, 2, tmp_path) == [4, 4]
    assert CheckpointDirectory(tmp_path).list_iterations() == [5]


def test_later_start_takes_the_directory_over(tmp_path):
    model, optimizer = build()
    first = Checkpointer(tmp_path, model, optimizer, async_save=False)
    assert first.load() == 0

    first.save(1)
    with Checkpointer(tmp_path, *build()) as second:
        assert second.load() == 1
    with pytest.raises(SaveFailedError, match="another launch has taken over"):
        first.save(2)
    assert CheckpointDirectory(tmp_path).list_iterations() == [1]


def test_clocks_that_jump_do_not_order_checkpoints(tmp_path, monkeypatch):
    """Later launches run on nodes whose clocks are decades behind, and jump back during the run."""
    clock = mock.Mock()
    monkeypatch.setattr(fencing, "datetime", clock)
    newest = 0
    for year in (2040, 2001, 2020):
        date = datetime(year, 1, 1, tzinfo=timezone.utc)
        clock.now.return_value = date
        with Checkpointer(tmp_path, *build(), async_save=False, keep_last=2) as ckpt:
            assert ckpt.load() == newest
            for _ in range(3):
                newest += 1
                ckpt.save(newest)
                seconds = date.timestamp() - 1000 * newest
                # Retention may be removing files: `os.walk` ignores directories that disappear.
                for directory, folders, files in os.walk(tmp_path):
                    for name in folders + files:
                        with suppress(FileNotFoundError):
                            os.utime(os.path.join(directory, name), (seconds, seconds))

        owner = fencing.read_owner(tmp_path, fencing.find_newest(tmp_path))
        assert owner["since"].startswith(str(year))
        assert CheckpointDirectory(tmp_path).list_iterations() == [newest - 1, newest]


def test_run_that_is_not_continued_is_not_replaced(tmp_path):
    train(0, 1, "plain", tmp_path, 2, {"save_interval": 2})
    with pytest.raises(CheckpointError, match=r"iter_0000002.*override_existing_run"):
        Checkpointer(tmp_path, *build()).save(1)
    with Checkpointer(tmp_path, *build(), override_existing_run=True) as ckpt:
        ckpt.save(1)
    with Checkpointer(tmp_path, *build()) as ckpt:
        assert ckpt.load() == 1  # the newest start, not the highest number


def test_damaged_newest_checkpoint_is_not_used(tmp_path):
    train(0, 1, "plain", tmp_path, 4, {"save_interval": 2})
    next((tmp_path / "iter_0000004").glob("*.distcp")).unlink()
    with Checkpointer(tmp_path, *build()) as ckpt:
        assert ckpt.load() == 2


def test_node_local_checkpoint_is_used_if_it_is_newer(pool, tmp_path):
    options = {"save_interval": 4, "local_directory": tmp_path / "disk", "local_interval": 1}
    saved = pool.run(train, 2, "fsdp", tmp_path / "run", 6, options)[0]
    assert CheckpointDirectory(tmp_path / "run").list_iterations() == [4]
    loaded = pool.run(train, 2, "fsdp", tmp_path / "run", 6, options)[0]
    assert loaded[0] == 6
    assert_equal(loaded[2], saved[2])


def test_older_checkpoint_replaces_a_damaged_one_on_the_nodes(pool, tmp_path):
    options = {"save_interval": 4, "local_directory": tmp_path / "disk", "local_interval": 1}
    saved = pool.run(train, 2, "fsdp", tmp_path / "run", 6, options)[0]
    shards = list((tmp_path / "disk").rglob("*0000006*/**/*.distcp"))
    assert shards

    for shard in shards:
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)

    loaded = pool.run(train, 2, "fsdp", tmp_path / "run", 6, options)[0]
    assert loaded[0] < 6
    assert_equal(loaded[2], saved[2])


def export(rank, world_size, directory, target):
    model, optimizer = build("fsdp")
    with Checkpointer(directory, model, optimizer) as ckpt:
        ckpt.load()
        train_step(model, optimizer, 0)
        ckpt.save(1)
        with nfs_client(target.parent):
            ckpt.to_safetensors(target, max_file_size=600)
    return snapshot(model, torch.optim.SGD(model.parameters()))


def test_weights_are_exported_as_safetensors(pool, tmp_path):
    saved = pool.run(export, 2, tmp_path / "run", tmp_path / "model")[0]
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 2
    exported = {}
    for file in files:
        exported |= load_file(file)
    assert_equal(exported, saved)


def test_stored_object_is_read_without_loading(tmp_path):
    loader = Counter()
    model = nn.Linear(2, 2)
    with Checkpointer(tmp_path, model, objects={"loader": loader}) as ckpt:
        assert ckpt.read_object("loader") is None
        loader.position = 5
        ckpt.save(1)

    with Checkpointer(tmp_path, nn.Module()) as ckpt:
        assert ckpt.read_object("loader") == {"position": 5}
        with pytest.raises(CheckpointError, match="iter_0000001: contains no object other"):
            ckpt.read_object("other")


def test_every_option_has_an_effect_and_others_are_refused(tmp_path):
    defaults: CheckpointerOptions = {
        "async_save": True,
        "save_interval": None,
        "save_seconds": None,
        "exit_signals": (),
        "keep_last": None,
        "keep_every": None,
        "local_directory": None,
        "local_interval": None,
        "local_replicas": 1,
        "local_replication_interval": 1,
        "workers": default_workers(),
        "staging_mem_limit": None,
        "timeout": 600.0,
        "must_succeed": False,
        "override_existing_run": False,
        "on_saved": lambda report: None,
        "clock": time.monotonic,
    }
    assert defaults.keys() == CheckpointerOptions.__annotations__.keys()

    model = nn.Linear(2, 2)
    with Checkpointer(tmp_path, model) as plain, Checkpointer(tmp_path, model, **defaults) as ckpt:
        assert plain._options == ckpt._options
    with pytest.raises(TypeError, match="unexpected keyword argument 'keep_first'"):
        Checkpointer(tmp_path, model, keep_first=1)


def test_unsupported_programs_are_refused(tmp_path):
    model, _ = build()
    other = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(ValueError, match=r"group 0 .* shape \(3,\) that is not a parameter"):
        Checkpointer(tmp_path, model, other)
    with pytest.raises(ValueError, match="save_interval 0 must be positive"):
        Checkpointer(tmp_path, model, save_interval=0)
    with pytest.raises(ValueError, match="require each other"):
        Checkpointer(tmp_path, model, local_interval=3)
    with pytest.raises(ValueError, match="called model"):
        Checkpointer(tmp_path, model, objects={"model": Counter()})
