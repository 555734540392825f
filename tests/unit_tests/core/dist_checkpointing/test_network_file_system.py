"""Saves, takeovers and resumes with the semantics of network file systems (`nfs_client`)."""

import errno
import os
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from megatron.conversion.output_directory import exclusive_output_dir
from megatron.conversion.run_exports import _replace_files
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.indexed_dataset_builder import IndexedDatasetBuilder
from megatron.core.dist_checkpointing import (
    AsyncSaver,
    Generation,
    Lineage,
    Segment,
    SupersededError,
    read_lineage,
    read_tracker,
)
from megatron.core.dist_checkpointing.files import read_run_name, run_name
from megatron.core.dist_checkpointing.verification import verify
from megatron.core.durable_files import fsync_directory, put_in_place, write_json
from megatron.core.safe_files.reading import CheckpointError, open_file
from tests.support.nfs_client import nfs_client
from tests.unit_tests.core.dist_checkpointing.saved_state import Training, assert_holds

STALE = ("latest_checkpointed_iteration.txt", "owner.json", "lineage.json", ".run")


def save_iteration(root, generation, iteration):
    training = Training(iteration, rows=100)
    lineage = Lineage((generation.segment(iteration),))
    directory = root / f"iter_{iteration:07d}"
    extra_files = {"lineage.json": lineage.encode(None)}
    with AsyncSaver() as saver:
        save = saver.save(
            training.state(),
            directory,
            common=training.common,
            generation=generation,
            extra_files=extra_files,
        )
        assert save.wait().error is None
    generation.move_tracker(iteration)


def write_lineage(root):
    """Write the lineage of a run that has trained up to iteration 3."""
    lineage = Lineage((Segment(2, 3),))
    (root / "lineage.json").write_bytes(lineage.encode(None))


def test_save_takeover_and_resume(tmp_path):
    with nfs_client(tmp_path, stale=STALE) as stale_files:
        first = Generation.take(tmp_path, {"host": "first"})
        save_iteration(tmp_path, first, 1)
        second = Generation.take(tmp_path, {"host": "second"})
        with pytest.raises(SupersededError, match="host second"):
            first.move_tracker(9)
        save_iteration(tmp_path, second, 2)
        assert read_tracker(tmp_path) == 2
        assert read_lineage(tmp_path / "iter_0000001").token == first.token
        # A save of the same name replaces the checkpoint, and retention removes the other one.
        save_iteration(tmp_path, second, 2)
        for path in second.put_aside([tmp_path / "iter_0000001"]):
            second.remove(path)
        assert len(stale_files) > 2
    assert_holds(tmp_path / "iter_0000002", 2, rows=100)
    names = sorted(os.listdir(tmp_path))
    assert names == [second.id.name, "iter_0000002", STALE[0]]
    assert os.listdir(second.directory) == ["owner.json"]


@pytest.mark.parametrize("attempt", range(4))  # the tokens, which order equal numbers, are random
def test_takeover_from_an_owner_that_is_not_listed_yet(tmp_path, attempt):
    first = Generation.take(tmp_path, {"host": "first"})
    with nfs_client(tmp_path, unlisted=[first.id.name]):
        second = Generation.take(tmp_path, {"host": "second"})
    assert second.is_current()
    assert second.id > first.id
    with pytest.raises(SupersededError, match="host second"):
        first.move_tracker(1)


def test_interrupted_replacements_are_all_restored(tmp_path):
    first = Generation.take(tmp_path, {})
    names = ["iter_0000001", "iter_0000002"]
    for name in names:
        (first.directory / f".replaced-{name}").mkdir()
    with nfs_client(tmp_path):
        second = Generation.take(tmp_path, {})
    assert sorted(os.listdir(tmp_path)) == [second.id.name, *names]


def test_files_that_another_client_replaces_are_read_again(tmp_path):
    generation = Generation.take(tmp_path, {})
    generation.move_tracker(3)
    name = run_name(tmp_path)
    write_lineage(tmp_path)
    with nfs_client(tmp_path, stale=STALE) as stale_files:
        assert generation.is_current()
        assert read_tracker(tmp_path) == 3
        assert read_lineage(tmp_path).generation == 2
        assert read_run_name(tmp_path) == name
    assert len(stale_files) == 4


def test_shards_whose_descriptor_is_stale_are_opened_again(tmp_path):
    generation = Generation.take(tmp_path, {})
    save_iteration(tmp_path, generation, 1)
    directory = tmp_path / "iter_0000001"
    names = [path.name for path in directory.iterdir()]
    with nfs_client(tmp_path, stale=names) as stale_files:
        assert verify(directory).ok
        assert_holds(directory, 1, rows=100)
    shards = set()
    for path in directory.glob("*.distcp"):
        status = path.stat()
        shards.add((status.st_dev, status.st_ino))
    assert shards
    assert shards <= set(stale_files)


def test_stale_shard_of_another_size_is_an_error(tmp_path):
    path = tmp_path / "shard"
    path.write_bytes(b"before")
    with open_file(path) as file, nfs_client(tmp_path, stale=["shard"]):
        assert file.read(0, 6) == b"before"
    with open_file(path) as file:
        other = tmp_path / "other"
        other.write_bytes(b"afterwards")
        other.rename(path)
        with (
            mock.patch.object(os, "preadv", side_effect=OSError(errno.ESTALE, "stale")),
            pytest.raises(CheckpointError, match="shard: cannot be read at 0: stale"),
        ):
            file.read(0, 6)
        assert file.read(0, 6) == b"before"  # of the descriptor that was not replaced


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_failing_reads_are_not_damaged_files(tmp_path, monkeypatch, code):
    """A lineage that cannot be read is not one of another program, and the owner is not lost."""
    generation = Generation.take(tmp_path, {})
    write_lineage(tmp_path)

    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "preadv", fail)
    readers = (partial(read_lineage, tmp_path), generation.is_current, generation.restore)
    for read in readers:
        with pytest.raises(OSError, match=os.strerror(code)) as error:
            read()
        assert error.value.filename.endswith(".json")


def test_files_are_replaced_and_directories_put_in_place(tmp_path):
    pending = tmp_path / "pending"
    pending.mkdir()
    (tmp_path / "checkpoint").mkdir()
    with nfs_client(tmp_path):
        write_json(tmp_path / "a.json", 1)
        put_in_place(pending, tmp_path / "checkpoint")
        fsync_directory(tmp_path)
    assert (tmp_path / "a.json").read_text() == "1\n"
    assert sorted(os.listdir(tmp_path)) == ["a.json", "checkpoint"]


def test_conversion_without_locks(tmp_path: Path):
    with nfs_client(tmp_path), exclusive_output_dir(tmp_path / "out"):
        (tmp_path / "out/file").touch()
    assert os.listdir(tmp_path / "out") == ["file"]


def test_data_is_written(tmp_path: Path):
    prefix = str(tmp_path / "a")
    with nfs_client(tmp_path), IndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.add(np.arange(3))
    assert len(IndexedDataset(prefix)) == 1


def test_files_of_a_checkpoint_are_replaced_by_an_export(tmp_path: Path):
    (tmp_path / "old").touch()

    def write(target: Path) -> None:
        target.mkdir()
        (target / "new").touch()

    with nfs_client(tmp_path):
        _replace_files(tmp_path, write)
    assert os.listdir(tmp_path) == ["new"]
