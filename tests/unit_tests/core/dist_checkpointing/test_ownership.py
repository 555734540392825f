"""Ownership of a directory of checkpoints: restarts, other jobs, directories not shared."""

import errno
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest

from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.dist_checkpointing.ownership.fencing import GenerationId
from megatron.core.dist_checkpointing.ownership.takeover import (
    Job,
    identify_job,
    prepare_directory,
    read_previous_owner,
    take_directory,
)
from megatron.core.dist_checkpointing.tiers.local_tier import LocalTier

FIRST = Job("torchrun none", ("host:/tmp/a",))
RESTARTED = FIRST._replace(is_restart=True)
OTHER = Job("torchrun none", ("host:/tmp/b",))


def test_directory_that_cannot_be_written_is_an_error(tmp_path):
    prepare_directory(tmp_path / "new" / "run")
    assert list((tmp_path / "new" / "run").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"checkpoints cannot be saved to .*file/run"):
        prepare_directory(tmp_path / "file" / "run")


def test_link_that_leads_nowhere_is_an_error(tmp_path):
    (tmp_path / "run").symlink_to(tmp_path / "unmounted")
    with pytest.raises(
        ValueError, match=r"run: it is a link to .*/unmounted, which does not exist"
    ):
        prepare_directory(tmp_path / "run")


def prepare_with_an_error_on_rank_1(rank, world_size, root):
    exists = Path.exists

    def fail(path):
        if rank == 1 and path.name.startswith(".probe-"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return exists(path)

    with mock.patch.object(Path, "exists", fail), pytest.raises(CheckpointError) as failed:
        prepare_directory(root)
    return str(failed.value)


def test_error_of_the_file_system_on_one_rank_is_reported_by_all(pool, tmp_path):
    for message in pool.run(prepare_with_an_error_on_rank_1, 2, tmp_path):
        assert message.startswith("rank 1: ")
        assert os.strerror(errno.EIO) in message
    assert list(tmp_path.iterdir()) == []


def prepare_with_a_late_rank_1(rank, world_size, root):
    exists = Path.exists
    looks = 0

    def exist_at_the_third_look(path):
        nonlocal looks
        if rank == 1 and path.name.startswith(".probe-"):
            looks += 1
            return looks >= 3 and exists(path)
        return exists(path)

    with mock.patch.object(Path, "exists", exist_at_the_third_look):
        prepare_directory(root)
    return looks


def test_directory_may_become_visible_late(pool, tmp_path):
    """A network file system may remember that a name did not exist."""
    assert pool.run(prepare_with_a_late_rank_1, 2, tmp_path) == [0, 3]


def test_restart_keeps_the_id_of_its_job(tmp_path):
    first = take_directory(tmp_path, FIRST)
    previous = read_previous_owner(tmp_path, RESTARTED)
    assert (previous.job_id, previous.first_generation) == (first.owner["job_id"], 1)
    second = take_directory(tmp_path, RESTARTED)
    third = take_directory(tmp_path, RESTARTED)
    assert second.owner["job_id"] == third.owner["job_id"] == first.owner["job_id"]
    assert third.owner["first_generation"] == 1
    assert third.number == 3


def test_restart_does_not_take_over_from_another_job(tmp_path):
    take_directory(tmp_path, FIRST)
    taken = take_directory(tmp_path, OTHER)
    for _ in range(2):
        with pytest.raises(ValueError, match="another job has taken over .*does not take over"):
            take_directory(tmp_path, RESTARTED)
    assert taken.is_current()
    assert take_directory(tmp_path, FIRST).number == 3  # an explicit launch may
    with pytest.raises(ValueError, match="another job has taken over"):
        take_directory(tmp_path, OTHER._replace(is_restart=True))


def test_restart_takes_over_from_the_owner_that_its_first_start_found(tmp_path):
    take_directory(tmp_path, OTHER)
    generation = take_directory(tmp_path, RESTARTED)  # the first launch failed before this
    assert generation.number == 2
    assert generation.owner["job_id"] != ""


def test_generation_exceeds_those_of_checkpoints_on_the_nodes(tmp_path):
    """A backup of --save was restored, and the nodes have checkpoints of later launches."""
    tier = LocalTier.create(tmp_path / "node")
    (tier.root / "iter_0000050-0000007.save-1").mkdir()
    (tmp_path / "run").mkdir()
    assert take_directory(tmp_path / "run", Job(), tier).number == 8


def test_job_is_identified_by_torchrun_or_slurm(monkeypatch):
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE")
    for name in (*names, "SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    assert identify_job() == Job()
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert identify_job() == Job("slurm 17")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert identify_job() == Job("slurm 17", (), True)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/tmp/torch/none_x/attempt_2/0/error.json")
    host = os.uname().nodename
    assert identify_job() == Job("torchrun none", (f"{host}:/tmp/torch/none_x",), True)


def test_numbers_are_not_reused_on_the_nodes(tmp_path):
    """A backup of --save is restored while a launch is suspended that has not saved anything yet.

    With the number of its successor, its next local checkpoint would count as one of the successor.
    """
    tier = LocalTier.create(tmp_path / "node")
    root = tmp_path / "run"
    root.mkdir()
    suspended = take_directory(root, Job(), tier)
    shutil.rmtree(root)
    root.mkdir()
    successor = take_directory(root, Job(), tier)
    assert (suspended.number, successor.number) == (1, 2)
    assert take_directory(root, Job(), tier).number == 3
    assert len(list(tier.root.glob(".generation-*"))) == 1


def test_number_that_another_start_records_meanwhile_is_not_used(tmp_path, monkeypatch):
    tier = LocalTier.create(tmp_path / "node")
    root = tmp_path / "run"
    root.mkdir()
    record = LocalTier.record_generation

    def record_after_another_start(self, generation):
        monkeypatch.setattr(LocalTier, "record_generation", record)
        record(self, GenerationId(generation.number, "other"))
        record(self, generation)

    monkeypatch.setattr(LocalTier, "record_generation", record_after_another_start)
    assert take_directory(root, Job(), tier).number == 2
