"""Which checkpoint is loaded: the one asked for, the tracker's, or the newest complete one."""

import pytest
import torch

from megatron.core.dist_checkpointing import ShardedTensor, save, write_tracker
from megatron.training.checkpoint.directory import (
    check_writable,
    complete_iterations,
    find_checkpoint,
    iteration_directory,
    saved_iterations,
)


def make(root, iteration, complete=True):
    directory = iteration_directory(root, iteration)
    directory.mkdir()
    for name in (".metadata", "metadata.json") if complete else (".metadata",):
        (directory / name).write_text("{}")
    return directory


def test_names():
    assert iteration_directory("run", 12).as_posix() == "run/iter_0000012"


def test_nothing_there(tmp_path):
    assert find_checkpoint(tmp_path, None) == (None, None)
    assert find_checkpoint(tmp_path / "absent", None) == (None, None)


def test_the_tracker_rules_even_over_newer_ones(tmp_path):
    old = make(tmp_path, 5)
    make(tmp_path, 10)
    (tmp_path / "iter_notes").mkdir()
    write_tracker(tmp_path, 5)
    assert find_checkpoint(tmp_path, None) == (old, None)
    assert saved_iterations(tmp_path) == [5, 10]


def test_a_step_rules_over_the_tracker(tmp_path):
    make(tmp_path, 5)
    new = make(tmp_path, 10)
    write_tracker(tmp_path, 5)
    assert find_checkpoint(tmp_path, 10) == (new, None)
    with pytest.raises(ValueError, match=r"--ckpt-step 7.*not complete.*complete are: 5, 10"):
        find_checkpoint(tmp_path, 7)


@pytest.mark.parametrize("tracker", [None, 10, 20])
def test_the_newest_complete_one_stands_in(tmp_path, tracker):
    old = make(tmp_path, 5)
    make(tmp_path, 10, complete=False)
    if tracker is not None:
        write_tracker(tmp_path, tracker)
    found, note = find_checkpoint(tmp_path, None)
    assert found == old and "newest complete" in note and (tracker is None or str(tracker) in note)
    assert complete_iterations(tmp_path) == [5]


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_damaged_one_is_reported_and_skipped(tmp_path, damage):
    for iteration in (5, 10):
        state = {"w": ShardedTensor.replicated("w", torch.arange(6.0))}
        save(state, iteration_directory(tmp_path, iteration), common={})
    write_tracker(tmp_path, 10)
    shard = next(iteration_directory(tmp_path, 10).glob("*.distcp"))
    if damage == "missing":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-1])
    found, note = find_checkpoint(tmp_path, None)
    assert found == iteration_directory(tmp_path, 5)
    assert shard.name in note and ("is missing" if damage == "missing" else "bytes instead of") in note
    with pytest.raises(ValueError, match=f"--ckpt-step 10.*damaged.*{shard.name}.*complete are: 5"):
        find_checkpoint(tmp_path, 10)


def test_a_release(tmp_path):
    release = tmp_path / "release"
    release.mkdir()
    write_tracker(tmp_path, "release")
    with pytest.raises(ValueError, match="release"):
        find_checkpoint(tmp_path, None)
    for name in (".metadata", "metadata.json"):
        (release / name).write_text("{}")
    assert find_checkpoint(tmp_path, None) == (release, None)


def test_a_directory_that_cannot_be_written_is_found_out_early(tmp_path):
    check_writable(tmp_path / "new" / "run")
    assert list((tmp_path / "new" / "run").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file/run"):
        check_writable(tmp_path / "file" / "run")
