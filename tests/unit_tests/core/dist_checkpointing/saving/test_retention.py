"""Retention rules, and crashes in the middle of a removal."""

import errno
import math
import os
import random
import shutil
import signal
import sys
import types
from pathlib import Path

import pytest
import torch

from megatron.core import durable_files
from megatron.core.dist_checkpointing import (
    AsyncSaver,
    CheckpointDirectory,
    Generation,
    Lineage,
    ShardedTensor,
    is_complete,
    read_lineage,
    read_tracker,
)
from megatron.core.dist_checkpointing.files import TRACKER
from megatron.core.dist_checkpointing.ownership.lineage import LINEAGE
from megatron.core.dist_checkpointing.saving.retention import (
    VALIDATION_LOSS,
    Retention,
    RetentionRules,
    select_superseded,
)
from megatron.core.dist_checkpointing.saving.run_saver import RunSaver, SaveOptions
from megatron.core.run_checkpoint.formats import find_checkpoint, find_problem
from megatron.training.checkpoint.save_options import is_native_checkpoint


def test_newest_is_kept_although_a_copy_has_a_higher_number(tmp_path):
    job = start(tmp_path)
    for iteration in (2, 4, 6, 8):
        lineage = make(job, iteration)
        if iteration == 4:
            shutil.copytree(tmp_path / "iter_0000004", tmp_path / "iter_0009999")

    assert apply(job, RetentionRules(keep_last=1), 8, lineage) == [
        "iter_0000002",
        "iter_0000004",
        "iter_0000006",
    ]
    assert CheckpointDirectory(tmp_path).list_iterations() == [8, 9999]

    actual = find_checkpoint(tmp_path)
    assert actual is not None
    assert actual.directory.name == "iter_0000008"

    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    actual = find_checkpoint(tmp_path)
    assert actual is not None
    assert actual.directory.name == "iter_0000008"


def test_higher_numbers_do_not_supersede_the_newest():
    rules = RetentionRules(keep_last=1)
    assert select_superseded([2, 9999], 8, rules, {}) == [2]


@pytest.mark.parametrize(
    "rules, saved, losses, deleted",
    [
        (RetentionRules(), [1, 2, 3], {}, []),
        (RetentionRules(keep_last=1), [1, 2, 3], {}, [1, 2]),
        (RetentionRules(keep_last=2), [1, 2, 3], {}, [1]),
        (RetentionRules(keep_last=9), [1, 2, 3], {}, []),
        (RetentionRules(keep_every=2), [1, 2, 3, 4, 5], {}, [1, 3]),
        (RetentionRules(keep_last=2, keep_every=4), [2, 4, 6, 8, 10], {}, [2, 6]),
        (RetentionRules(keep_best=1), [1, 2, 3, 4], {1: 3.0, 2: 1.0, 3: 2.0}, [1, 3]),
        (
            RetentionRules(keep_best=2),
            [1, 2, 3, 4],
            {1: 2.0, 2: 2.0, 3: 2.0},
            [1],
        ),  # the later of equal ones
        (RetentionRules(keep_best=1), [1, 2, 3], {1: float("nan"), 2: float("inf")}, [1, 2]),
        (RetentionRules(keep_best=1, keep_last=2), [1, 2, 3, 4], {1: 1.0, 4: 0.5}, [1, 2]),
    ],
)
def test_rules_select_superseded_checkpoints(rules, saved, losses, deleted):
    assert select_superseded(saved, saved[-1], rules, losses) == deleted


def test_rules_hold_for_random_runs():
    """Every rule holds after each save, and no other checkpoint is removed."""
    rng = random.Random(0)
    for _ in range(300):
        some = lambda top: rng.choice([None, rng.randint(1, top)])  # noqa: E731
        rules = RetentionRules(keep_last=some(4), keep_every=some(7), keep_best=some(3))
        saved = set()
        losses = {}
        iteration = 0
        for _ in range(25):
            iteration += rng.randint(1, 5)
            saved.add(iteration)
            if rng.random() < 0.5:
                losses[iteration] = rng.choice([rng.random(), 0.5, float("nan")])
            before = set(saved)
            saved -= set(select_superseded(saved, iteration, rules, losses))
            assert iteration in saved

            keep_last = rules.keep_last or 1
            newest_before = sorted(before)[-keep_last:]
            newest_saved = sorted(saved)[-keep_last:]
            assert newest_before == newest_saved

            known = {i: losses[i] for i in before if i in losses and losses[i] == losses[i]}
            best = sorted(known.values())[: rules.keep_best or 0]
            assert sorted(known[i] for i in saved if i in known)[: len(best)] == best
            if rules.keep_every:
                assert {i for i in before if i % rules.keep_every == 0} <= saved

            if not rules.removes_checkpoints:
                assert saved == before
                continue
            bound = (rules.keep_last or 1) + (rules.keep_best or 0)
            retained = sum(i % (rules.keep_every or iteration + 1) == 0 for i in saved)
            assert len(saved) <= bound + retained


def start(root, after=None):
    """Start a job from the checkpoint of iteration `after`; returns its generation and lineage."""
    root.mkdir(exist_ok=True)
    base = None if after is None else read_lineage(CheckpointDirectory(root).path(after))
    return Generation.take(root, {"pid": os.getpid()}), base


def make(job, iteration, loss=None):
    """Save a checkpoint as a run does, and return its lineage."""
    generation, base = job
    segment = generation.segment(iteration)
    lineage = Lineage((segment,)) if base is None else base.descend(segment)
    weight = ShardedTensor.replicated("weight", torch.full((1000,), float(iteration)))
    common = {"iteration": iteration} | ({} if loss is None else {VALIDATION_LOSS: loss})
    with AsyncSaver() as saver:
        report = saver.save(
            {"weight": weight},
            CheckpointDirectory(generation.root).path(iteration),
            common=common,
            generation=generation,
            extra_files={LINEAGE: lineage.encode(None)},
            on_commit=lambda: generation.move_tracker(iteration),
        ).wait()

    assert report.error is None
    return lineage


def apply(job, rules, newest, lineage):
    retention = Retention(rules, job[0], is_native_checkpoint)
    removed = retention.apply(newest, lineage, math.nan)
    retention.close()
    return [path.name for path in removed]


def visible(root):
    return sorted(path.name for path in root.iterdir() if not path.name.startswith(".generation-"))


def test_losses_are_read_from_checkpoints(tmp_path):
    job = start(tmp_path)
    for iteration, loss in ((1, 3.0), (2, 1.0), (3, None), (4, 2.0)):
        lineage = make(job, iteration, loss)
    assert apply(job, RetentionRules(keep_best=1), 4, lineage) == [
        "iter_0000001",
        "iter_0000003",
    ]
    assert visible(tmp_path) == [
        "iter_0000002",
        "iter_0000004",
        "latest_checkpointed_iteration.txt",
    ]


def test_other_directories_are_left_alone(tmp_path):
    job = start(tmp_path)
    for iteration in (1, 2):
        lineage = make(job, iteration)
    (tmp_path / "iter_0000000").mkdir()
    (tmp_path / "iter_notes").mkdir()
    (tmp_path / "tensorboard").mkdir()

    assert apply(job, RetentionRules(keep_last=1), 2, lineage) == ["iter_0000001"]
    assert {"iter_0000000", "iter_notes", "tensorboard"} < {
        path.name for path in tmp_path.iterdir()
    }


def test_checkpoint_of_a_save_that_failed_after_its_commit_is_removed_later(tmp_path):
    """E.g., the directory could not be flushed: the save is reported as failed."""
    job = start(tmp_path)
    retention = Retention(RetentionRules(keep_last=1), job[0])
    for iteration in (2, 4):
        retention.apply(iteration, make(job, iteration), math.nan)
    make(job, 6)
    retention.forget()
    removed = retention.apply(8, make(job, 8), math.nan)
    retention.close()

    assert [path.name for path in removed] == ["iter_0000004", "iter_0000006"]
    assert CheckpointDirectory(tmp_path).list_iterations() == [8]


def test_abandoned_branch_is_neither_counted_nor_removed(tmp_path):
    """Save 2, 4, 6, 8, 10; return to 4 and save 5 and 6: 8 and 10 are of an abandoned branch."""
    first = start(tmp_path)
    for iteration in (2, 4, 6, 8, 10):
        make(first, iteration)
    second = start(tmp_path, after=4)
    make(second, 5)
    lineage = make(second, 6)

    assert apply(second, RetentionRules(keep_last=3), 6, lineage) == ["iter_0000002"]
    assert CheckpointDirectory(tmp_path).list_iterations() == [4, 5, 6, 8, 10]

    third = start(tmp_path, after=6)
    lineage = make(third, 9)
    assert apply(third, RetentionRules(keep_last=2), 9, lineage) == [
        "iter_0000004",
        "iter_0000005",
    ]
    assert CheckpointDirectory(tmp_path).list_iterations() == [6, 8, 9, 10]


def test_checkpoints_without_lineage_count_up_to_the_loaded_one(tmp_path):
    for iteration in (1, 2, 3):
        directory = CheckpointDirectory(tmp_path).path(iteration) / "mp_rank_00_000"
        directory.mkdir(parents=True)
        (directory / "model_optim_rng.pt").touch()
        assert is_native_checkpoint(directory.parent)

    job = start(tmp_path, after=2)
    lineage = make(job, 4)
    assert apply(job, RetentionRules(keep_last=1), 4, lineage) == [
        "iter_0000001",
        "iter_0000002",
    ]


def complete_iterations(root):
    checkpoints = CheckpointDirectory(root)
    iterations = checkpoints.list_iterations()
    return tuple(it for it in iterations if find_problem(checkpoints.path(it)) is None)


EVENTS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "open", "os.truncate")


def killed_at(event_number, action):
    """Run `action` in a child that is killed at its n-th change of the file system.

    Returns whether there were that many changes.
    """
    child = os.fork()
    if child == 0:
        count = 0

        def hook(event, args):
            nonlocal count
            if event in EVENTS:
                count += 1
                if count == event_number:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(hook)
            action()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_kill_at_every_step_leaves_a_complete_newest_checkpoint(tmp_path):
    """Kill a launch at every change of the file system: takeover, save, commit, removal."""
    rules = RetentionRules(keep_last=1)

    def next_one():
        job = start(root, after=2)
        apply(job, rules, 3, make(job, 3))

    base = tmp_path / "base"
    job = start(base)
    make(job, 1)
    make(job, 2)
    step = 0
    outcomes = set()
    while True:
        step += 1
        root = tmp_path / str(step)
        shutil.copytree(base, root)
        died = killed_at(step, next_one)
        newest = find_checkpoint(root)

        assert newest is not None
        assert newest.directory.name in ("iter_0000002", "iter_0000003")
        assert read_tracker(root) in (2, 3)
        for directory in root.glob("iter_*"):
            assert is_complete(directory), directory

        present = complete_iterations(root)
        outcomes.add(present)
        if not died:
            break
        # The next launch cleans up, and the next save removes the remaining checkpoints.
        job = start(root, after=read_tracker(root))
        lineage = make(job, 4)
        apply(job, rules, 4, lineage)
        remaining = set(complete_iterations(root))
        assert remaining <= {3, 4}, "a 3 that the tracker did not name is of another branch"

        generation, *_ = job
        assert list(root.glob(".*")) == [generation.directory]
        assert list(generation.directory.iterdir()) == [generation.directory / "owner.json"]

    assert step > 20
    assert present == (3,)
    assert outcomes >= {(1, 2), (1, 2, 3), (2, 3), (3,)}


class FullDisk:
    """A file system without free blocks as long as the checkpoint of iteration 1 exists.

    While it has a `quota`, the rename of the tracker fails instead.
    """

    def __init__(self, root, monkeypatch, quota=False):
        self._root = root
        self.quota = quota
        self._replace = os.replace
        monkeypatch.setattr(os, "statvfs", self._statvfs)
        monkeypatch.setattr(os, "replace", self._rename)

    def _statvfs(self, path):
        is_full = not self.quota and (self._root / "iter_0000001").exists()
        return types.SimpleNamespace(f_bavail=0 if is_full else 1 << 30, f_frsize=1, f_blocks=1)

    def _rename(self, source, target):
        if Path(target).name == TRACKER and self.quota:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(target))
        self._replace(source, target)


def save_with(saver, root, iteration):
    weight = ShardedTensor.replicated("weight", torch.full((1000,), float(iteration)))
    saver.save({"weight": weight}, root, iteration, {"iteration": iteration})
    return not saver.last_save_failed


def make_saver(root, base=None):
    saver = RunSaver(SaveOptions(retention=RetentionRules(keep_last=1)))
    saver.own(Generation.take(root, {}), lineage=base)
    return saver


def test_removal_after_a_failed_step_precedes_the_next_save(tmp_path, monkeypatch):
    """Otherwise a disk that the commit has filled stays full for ever."""
    saver = make_saver(tmp_path)
    assert save_with(saver, tmp_path, 1)

    disk = FullDisk(tmp_path, monkeypatch, quota=True)
    assert not save_with(saver, tmp_path, 2)
    assert read_tracker(tmp_path) == 1
    assert is_complete(tmp_path / "iter_0000002")

    disk.quota = False
    assert save_with(saver, tmp_path, 3)

    saver.close()
    assert visible(tmp_path) == ["iter_0000003", TRACKER]


def test_next_start_repeats_the_removal_that_a_crash_prevented(tmp_path, monkeypatch):
    job = start(tmp_path)
    make(job, 1)
    lineage = make(job, 2)
    FullDisk(tmp_path, monkeypatch)
    saver = make_saver(tmp_path, lineage)
    assert save_with(saver, tmp_path, 3)

    saver.close()
    assert visible(tmp_path) == ["iter_0000003", TRACKER]


def test_start_that_returned_to_an_earlier_checkpoint_removes_nothing(tmp_path):
    job = start(tmp_path)
    lineages = [make(job, iteration) for iteration in (1, 2, 3)]
    saver = make_saver(tmp_path, lineages[1])
    assert save_with(saver, tmp_path, 4)
    saver.close()
    assert visible(tmp_path) == ["iter_0000003", "iter_0000004", TRACKER]


def test_tracker_needs_no_room_after_the_commit(tmp_path, monkeypatch):
    saver = make_saver(tmp_path)
    written = []
    write = durable_files.create_file

    def create_file(path):
        written.append((Path(path).name, is_complete(tmp_path / "iter_0000001")))
        return write(path)

    monkeypatch.setattr(durable_files, "create_file", create_file)
    assert save_with(saver, tmp_path, 1)

    saver.close()
    assert (TRACKER, False) in written
    assert [name for name, is_committed in written if is_committed] == []
