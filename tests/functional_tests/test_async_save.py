"""Asynchronous and synchronous saves write the same checkpoints, bit for bit."""

import os
import shlex
import shutil
import stat
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing import Reader, is_complete
from megatron.core.dist_checkpointing.saving import run_saver
from megatron.core.dist_checkpointing.saving.save_cost import IterationTimes
from megatron.training.config.parsing import parse_args
from megatron.training.training import pretrain
from tests.support.compare import assert_same
from tests.support.training_harness import (
    COMMON,
    LAYOUTS,
    LLAMA,
    Measurements,
    datasets_provider,
    forward_step,
    model_provider,
    train,
    whole,
)

SAVING = f"--mock-data {LLAMA} --global-batch-size 4 --train-iters 8 --save-interval 2 --bf16 "


def stored(directory: Path) -> dict[str, torch.Tensor]:
    reader = Reader(directory, verify=True)
    return {
        key: reader.read(key, (0,) * len(t.shape), t.shape)
        for key, t in reader.metadata.tensors.items()
    }


@pytest.mark.parametrize("layout", ["dp2_distributed_optimizer", "pp2_interleaved"])
def test_asynchronous_checkpoints_equal_synchronous_ones(pool, tmp_path, layout):
    world_size, flags = LAYOUTS[layout]
    pool.run(train, world_size, f"{SAVING} {flags} --save {tmp_path / 'sync'}")
    pool.run(
        train,
        world_size,
        f"{SAVING} {flags} --save {tmp_path / 'async'} --async-save --dist-ckpt-workers 1",
    )
    for iteration in (2, 4, 6, 8):
        name = f"iter_{iteration:07d}"
        assert_same(stored(tmp_path / "sync" / name), stored(tmp_path / "async" / name))
    assert (tmp_path / "async/latest_checkpointed_iteration.txt").read_text() == "8"


def test_resuming_from_an_asynchronous_checkpoint_is_bitwise(pool, tmp_path):
    world_size, flags = LAYOUTS["dp2_distributed_optimizer"]
    flags = f"{SAVING} {flags} --async-save --ckpt-assume-constant-structure "
    expected = whole(pool.run(train, world_size, flags))
    pool.run(train, world_size, f"{flags} --exit-interval 5 --save {tmp_path} --load {tmp_path}")
    assert is_complete(tmp_path / "iter_0000005")
    assert_same(
        whole(pool.run(train, world_size, f"{flags} --save {tmp_path} --load {tmp_path}")), expected
    )


def test_first_replica_writes_without_fully_parallel_save(pool, tmp_path):
    pool.run(
        train, 2, f"{SAVING} --save {tmp_path} --no-ckpt-fully-parallel-save --dist-ckpt-workers 1"
    )
    written = {
        rank: sorted(p.name for p in (tmp_path / "iter_0000008").glob(f"__{rank}_*"))
        for rank in (0, 1)
    }
    assert written == {0: ["__0_0.distcp", "__0_1.distcp"], 1: ["__1_1.distcp"]}, (
        "rank 1 has its generators to write"
    )


def train_during_held_save(rank, world_size, flags):
    """Train by a clock that counts seconds: 1 per micro-batch, and 3 in iterations 5 and 6, which
    run while the files of the save after iteration 4 are held back.
    """
    seconds = 0.0
    passes = 0
    released = threading.Event()
    real = os.fsync

    def hold_back(handle):
        if os.readlink(f"/proc/self/fd/{handle}").endswith(".distcp"):
            released.wait()
        real(handle)

    def step(chunk, batch, activation):
        nonlocal seconds, passes
        iteration = 1 + passes // 4  # of 4 micro-batches
        seconds += 3.0 if iteration in (5, 6) else 1.0
        if iteration == 7:
            released.set()
        passes += 1
        return forward_step(chunk, batch, activation)

    with pytest.MonkeyPatch.context() as monkeypatch:
        clock = partial(IterationTimes, lambda: seconds)
        monkeypatch.setattr(run_saver, "IterationTimes", clock)
        monkeypatch.setattr(os, "fsync", hold_back)
        return train(rank, world_size, flags, forward_step=step).measured.points


def test_slower_iterations_are_a_cost_of_the_save(pool, tmp_path):
    flags = f"--mock-data {LLAMA} --train-iters 8 --save-interval 4 --save {tmp_path} --async-save"
    (points,) = pool.run(train_during_held_save, 1, flags)
    waited = points["save-update-wait-time", 4]
    slower = points["save-slowdown-time", 4]
    assert slower + waited == pytest.approx(2 * 4 * (3.0 - 1.0))
    assert points["save-blocking-time", 4] >= slower + waited


def train_during_held_removal(rank, world_size, flags):
    """Train by a clock that counts seconds: 1 per micro-batch, and 3 in iterations 10 and 11, which
    run while the checkpoint that the one of iteration 8 supersedes is being removed.
    """
    seconds = 0.0
    passes = 0
    removing = threading.Event()
    released = threading.Event()
    real = shutil.rmtree

    def hold_back(path, *args, **kwargs):
        if (Path(path) / ".metadata").exists():
            removing.set()
            released.wait()
        real(path, *args, **kwargs)

    def step(chunk, batch, activation):
        nonlocal seconds, passes
        iteration = 1 + passes // 4  # of 4 micro-batches
        if iteration == 9:
            removing.wait()
        seconds += 3.0 if iteration in (10, 11) else 1.0
        if iteration == 12:
            released.set()
        passes += 1
        return forward_step(chunk, batch, activation)

    with pytest.MonkeyPatch.context() as monkeypatch:
        clock = partial(IterationTimes, lambda: seconds)
        monkeypatch.setattr(run_saver, "IterationTimes", clock)
        monkeypatch.setattr(shutil, "rmtree", hold_back)
        return train(rank, world_size, flags, forward_step=step).measured.points


def test_iterations_during_removals_are_a_cost_of_the_save(pool, tmp_path):
    saving = f"--save-interval 4 --save {tmp_path} --async-save --keep-last-n 1"
    flags = f"--mock-data {LLAMA} --train-iters 13 {saving}"
    (points,) = pool.run(train_during_held_removal, 1, flags)
    assert points["save-slowdown-time", 8] == pytest.approx(2 * 4 * (3.0 - 1.0))


class DirectoryThief(Measurements):
    """After iteration 3 the directory of the checkpoints is gone, and a file has its name."""

    def interval(self, interval):
        super().interval(interval)
        if self.reached is not None:
            self.reached.write_text(str(interval.last.iteration))
        if interval.last.iteration == 3:
            while not (self.root / "latest_checkpointed_iteration.txt").exists():
                time.sleep(0.01)
            self.root.rename(self.root.with_name("stolen"))
            self.root.write_text("a file")


def train_robbed(rank, world_size, root, flags, reached=None):
    thief = DirectoryThief()
    thief.root = root
    thief.reached = reached
    config = parse_args(shlex.split(f"{COMMON} {SAVING} --save {root} {flags}"), world_size)
    return pretrain(
        config, model_provider, datasets_provider, forward_step, writers=[thief]
    ).state.iteration


@pytest.mark.parametrize("mode", ["", "--async-save"])
def test_failed_save_does_not_stop_training(pool, tmp_path, mode):
    reached = tmp_path / "reached"
    with pytest.raises(
        ValueError, match=r"iter_0000008 was not saved: .*It was the last save of the run"
    ):
        pool.run(train_robbed, 2, tmp_path / "checkpoints", mode, reached)
    assert reached.read_text() == "8", "training went on to the end"
    assert is_complete(tmp_path / "stolen/iter_0000002"), "the checkpoint before is as it was"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "reached", "stolen"]


def test_exit_on_save_failure_ends_the_run(pool, tmp_path):
    with pytest.raises(
        ValueError, match=r"iter_0000004 was not saved: .*(Not a directory|File exists)"
    ):
        pool.run(train_robbed, 2, tmp_path / "checkpoints", "--exit-on-save-failure")


def test_plain_dcp_reads_the_files(pool, tmp_path):
    pool.run(train, 1, f"{SAVING} --save {tmp_path}")
    for path in (tmp_path / "iter_0000008").iterdir():
        assert path.stat().st_mode & (stat.S_IRUSR | stat.S_IRGRP) == stat.S_IRUSR | stat.S_IRGRP
