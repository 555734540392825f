"""Resumes from files that a network file system shows to one rank later than to rank 0."""

from unittest import mock

import pytest
import torch

from megatron.checkpointer.checkpointer import Checkpointer
from megatron.core.dist_checkpointing.planning import coordination
from tests.support.late_files import late_files
from tests.support.nfs_client import nfs_client
from tests.support.training_harness import COMMON, DISTRIBUTED_OPTIMIZER, LLAMA, get_losses, train

COMMON_FLAGS = COMMON.replace("--num-layers 4", "--num-layers 1")
FLAGS = f"{LLAMA} {DISTRIBUTED_OPTIMIZER} --mock-data --train-iters 4 "


def resume_late(rank, world_size, flags, names, looks=3):
    hidden = names if rank == 1 else []
    with late_files(hidden, looks) as seen:
        outcome = train(rank, world_size, flags, COMMON_FLAGS)
    assert all(seen[name] > looks for name in hidden), f"not hidden: {seen}"
    return outcome


@pytest.fixture(scope="module")
def run(pool, tmp_path_factory):
    """Return the flags that resume at iteration 2, and the losses of the uninterrupted run."""
    root = tmp_path_factory.mktemp("run")
    flags = f"{FLAGS} --save {root} --save-interval 2"
    losses = get_losses(pool.run(train, 2, flags, COMMON_FLAGS))
    return f"{FLAGS} --load {root} --ckpt-step 2", losses, root / "iter_0000002"


@pytest.mark.parametrize(
    "name",
    ["iter_0000002", ".metadata", "common.pt", "checksums.bin", "__1_0.distcp"],
)
def test_rank_waits_for_files_that_rank_0_sees(pool, run, name):
    flags, losses, _ = run
    outcomes = pool.run(resume_late, 2, flags, [name])
    assert get_losses(outcomes) == losses[2:]


def test_late_checksums_are_verified(pool, run, tmp_path):
    """Rank 1 reads the second half of the optimizer state."""
    flags, _, directory = run
    path = directory / "__1_0.distcp"
    intact_content = path.read_bytes()
    damaged_content = bytearray(intact_content)
    damaged_content[len(damaged_content) // 2] ^= 1
    path.write_bytes(damaged_content)

    try:
        with pytest.raises(Exception, match="wrong checksum"):
            pool.run(resume_late, 2, flags, ["checksums.bin"])
    finally:
        path.write_bytes(intact_content)


def resume_blind(rank, world_size, flags, names):
    impatient = mock.patch.object(coordination, "VISIBLE_WITHIN", 0.0)
    with impatient, pytest.raises(ValueError) as error:
        resume_late(rank, world_size, flags, names, looks=1_000_000)
    return str(error.value)


@pytest.mark.parametrize("name", ["common.pt", "__1_0.distcp"])
def test_file_that_stays_invisible_is_an_error_of_all_ranks(pool, run, name):
    flags, _, directory = run
    messages = pool.run(resume_blind, 2, flags, [name])
    for message in messages:
        assert message.startswith(f"rank 1: {directory / name}")


def load_late(rank, world_size, root, names):
    """Save a model and load it into another one, for which rank 1 sees the files late."""
    torch.manual_seed(0)  # the same on all ranks
    model = torch.nn.Linear(4, 4)
    saver = Checkpointer(root, model)
    saver.save(1)
    saver.close()
    other = torch.nn.Linear(4, 4)
    hidden = names if rank == 1 else []
    with late_files(hidden, looks=3):
        loader = Checkpointer(root, other)
        step = loader.load()
    loader.close()
    return step, torch.equal(other.weight, model.weight)


def test_checkpointer_waits_for_files_that_rank_0_sees(pool, tmp_path):
    names = [".metadata", "common.pt", "checksums.bin", "__0_0.distcp"]
    assert pool.run(load_late, 2, tmp_path, names) == [(1, True)] * 2


def train_on_nfs(rank, world_size, flags, root):
    """Train on clients that must read files again after another client has replaced them."""
    with nfs_client(root, stale=["owner.json", "lineage.json"]) as stale_files:
        outcome = train(rank, world_size, flags, COMMON_FLAGS)
    return outcome, len(stale_files)


@pytest.mark.parametrize("mode", ["", "--async-save"])
def test_save_takeover_and_resume_on_a_network_file_system(pool, run, tmp_path, mode):
    """Two launches of two ranks; the second one takes the directory over."""
    _, losses, _ = run
    flags = f"{FLAGS} --save {tmp_path} --load {tmp_path} --save-interval 1 --keep-last-n 2 {mode}"
    resumed_losses = []
    for launch_flags in (f"{flags} --exit-interval 2", flags):
        results = pool.run(train_on_nfs, 2, launch_flags, tmp_path)
        outcomes = [outcome for outcome, _ in results]
        stale_counts = [num_stale_files for _, num_stale_files in results]
        resumed_losses += get_losses(outcomes)
        assert max(stale_counts) > 0

    assert resumed_losses == losses

    checkpoints = sorted(path.name for path in tmp_path.glob("iter_*"))
    assert checkpoints == ["iter_0000003", "iter_0000004"]
