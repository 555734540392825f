"""Asynchronous saves: isolated from training, committed without collectives."""

import argparse
import errno
import functools
import os
import sys
import threading
import time
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing import (
    AsyncSaver,
    CheckpointError,
    ShardedObject,
    ShardedTensor,
    is_complete,
    load,
    load_common,
    read_tracker,
    save,
    write_tracker,
)
from megatron.core.dist_checkpointing.background import SLOT_SIZE
from megatron.core.dist_checkpointing.mapping import LazyTensor, narrow
from megatron.core.dist_checkpointing.saving import commit
from megatron.core.dist_checkpointing.saving import objects as objects_module
from megatron.core.dist_checkpointing.saving.objects import copy_plain_value
from megatron.core.dist_checkpointing.saving.save_barrier import Heartbeat, Outcome, SaveBarrier
from megatron.core.dist_checkpointing.saving.staging import StageAndWrite
from tests.unit_tests.core.dist_checkpointing.saved_state import (
    Training,
    assert_holds,
    assert_sharded,
    sharded,
    state_of,
)


@pytest.mark.parametrize("limit", [None, 2 * SLOT_SIZE], ids=["whole", "two slots"])
def test_a_snapshot_is_isolated(tmp_path, limit):
    with AsyncSaver(staging_mem_limit=limit) as saver:
        for seed in range(4):  # the buffers are used again from the second on
            training = Training(seed)
            saver.save(training.state(), tmp_path / f"{seed}", common=training.common)
            training.change_objects()
            saver.wait_staged()
            training.change_tensors()
            (report,) = saver.finish()
            assert report.error is None, report.error
            assert report.staging <= report.writing <= report.total
            assert report.bytes >= 2 * training.weight.nbytes
            assert_holds(tmp_path / f"{seed}", seed)


def test_change_before_staging_fails_the_save(tmp_path, monkeypatch):
    """Without `wait_staged` the checkpoint would contain later values."""
    written = threading.Event()
    real = os.pwrite

    def held_pwrite(*args):
        written.wait()
        return real(*args)

    training = Training(0)
    with AsyncSaver(staging_mem_limit=2 * SLOT_SIZE) as saver:
        monkeypatch.setattr(os, "pwrite", held_pwrite)
        saver.save(training.state(), tmp_path / "changed", common={})
        training.change_tensors()  # most of them wait for a slot
        written.set()
        (report,) = saver.finish()

        assert "changed before their values were staged: weight" in report.error
        assert "call wait_staged()" in report.error
        assert not (tmp_path / "changed").exists()

        saver.save(training.state(), tmp_path / "unchanged", common={})
        saver.wait_staged()
        training.change_tensors()
        (report,) = saver.finish()
        assert report.error is None


def test_waiting_for_a_save_counts_as_blocking_time(tmp_path, monkeypatch):
    """A synchronous save blocks for as long as it takes, an asynchronous one until it is waited
    for.
    """
    real = os.fsync

    def slow_fsync(handle):
        time.sleep(0.1)
        real(handle)

    monkeypatch.setattr(os, "fsync", slow_fsync)
    training = Training(0)
    report = save(training.state(), tmp_path / "sync", common={})

    assert report.blocking >= report.writing > report.staging
    assert report.end_wait > report.call_wait

    with AsyncSaver() as saver:
        handle = saver.save(training.state(), tmp_path / "async", common={})
        while not handle.done():
            time.sleep(0.01)
        (report,) = saver.finish()
        assert report.blocking < report.writing
        assert report.end_wait == 0.0
        saver.save(training.state(), tmp_path / "finished", common={})
        (report,) = saver.finish()
        assert report.blocking >= report.writing


def test_one_save_waits_for_the_other(tmp_path, monkeypatch):
    """The files of each save are held back until the test lets go of that one."""
    gates = {name: threading.Event() for name in ("first", "second", "third")}
    real = os.fsync

    def fsync(handle):
        path = os.readlink(f"/proc/self/fd/{handle}")
        for name, gate in gates.items():
            if name in path.removeprefix(str(tmp_path)):
                gate.wait()
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    handles = []
    with AsyncSaver() as saver:
        for seed, (name, gate) in enumerate(gates.items()):
            training = Training(seed)
            handles.append(saver.save(training.state(), tmp_path / name, common=training.common))
            assert [handle.done() for handle in handles] == [True] * seed + [False]
            assert saver.busy
            gate.set()
            saver.wait_staged()
            training.change_tensors()

        reports = saver.finish()
        assert [report.error for report in reports] == [None] * 3
        assert [report.directory.name for report in reports] == list(gates)
        assert saver.poll() == []
        assert not saver.busy

    for seed, name in enumerate(gates):
        assert_holds(tmp_path / name, seed)


def test_the_tracker_moves_after_the_commit(tmp_path):
    training = Training(3, rows=1000)
    seen = []

    def on_commit():
        seen.append(is_complete(tmp_path / "iter_0000003"))
        write_tracker(tmp_path, 3)

    with AsyncSaver() as saver:
        saver.save(training.state(), tmp_path / "iter_0000003", common={}, on_commit=on_commit)
    assert seen == [True]
    assert read_tracker(tmp_path) == 3


def test_a_failing_tracker_does_not_undo_the_commit(tmp_path):
    def on_commit():
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with AsyncSaver() as saver:
        report = saver.save(
            Training(0, 1000).state(),
            tmp_path / "c",
            common={},
            on_commit=on_commit,
        ).wait()

    assert "committed, but a step after the commit failed" in report.error
    assert "Read-only" in report.error
    assert is_complete(tmp_path / "c")
    assert os.listdir(tmp_path) == ["c"]


def test_prepare_makes_the_first_save_like_the_others(tmp_path):
    training = Training(1)
    with AsyncSaver() as saver:
        saver.prepare(training.state()).result()
        report = saver.save(training.state(), tmp_path / "c", common=training.common).wait()
        assert report.error is None
    assert_holds(tmp_path / "c", 1)


def test_the_structure_may_change_or_be_held_constant(tmp_path):
    def state(names):
        return {
            name: ShardedTensor.replicated(name, torch.full((50, 3), float(ord(name))))
            for name in names
        }

    with AsyncSaver() as saver:
        for names in ("a", "abc", "bc"):
            assert saver.save(state(names), tmp_path / names, common={}).wait().error is None
            loaded = {key: ShardedTensor.replicated(key, torch.zeros(50, 3)) for key in names}
            load(loaded, tmp_path / names)
            assert all(loaded[key].local[0, 0] == ord(key) for key in names)

    with AsyncSaver(assume_constant_structure=True) as saver:
        saver.save(state("ab"), tmp_path / "x", common={}).wait()
        assert saver.save(state("ab"), tmp_path / "y", common={}).wait().error is None
        with pytest.raises(
            CheckpointError,
            match="the structure has changed since the last save: c",
        ):
            saver.save(state("abc"), tmp_path / "z", common={})


def saves_counting_collectives(rank, size, root, constant):
    calls = []
    names = (
        "all_reduce",
        "gather",
        "scatter",
        "all_gather_object",
        "barrier",
        "broadcast",
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in names:
            real = getattr(dist, name)
            monkeypatch.setattr(
                dist,
                name,
                lambda *a, _real=real, _n=name, **k: (calls.append(_n), _real(*a, **k))[1],
            )

        with AsyncSaver(assume_constant_structure=constant) as saver:
            counts = []
            for value in range(3):
                state = sharded(rank, size, value)
                handle = saver.save(state, f"{root}/{value}", common={"value": value})
                saver.wait_staged()
                state["split"].local.zero_()
                assert handle.wait(60).error is None, handle.wait().error
                counts.append(list(calls))
                calls.clear()
    return counts


@pytest.mark.parametrize("constant", [False, True])
def test_later_saves_need_no_collectives(pool, tmp_path, constant):
    for counts in pool.run(saves_counting_collectives, 3, str(tmp_path), constant):
        assert "gather" in counts[0]
        assert "scatter" in counts[0]
        assert counts[1:] == [[] if constant else ["all_reduce"]] * 2

    for value in range(3):
        assert_sharded(tmp_path / str(value), 3, value)
        assert load_common(tmp_path / str(value)) == {"value": value}
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2"]


def save_with_workers_of_ranks(rank, size, root):
    with AsyncSaver(workers=3 - rank) as saver:
        return saver.save(sharded(rank, size, 5), f"{root}/5", common={"value": 5}).wait().error


def test_ranks_may_differ_in_workers(pool, tmp_path):
    """E.g. on nodes with other numbers of cores: the plan determines the names of all files."""
    assert pool.run(save_with_workers_of_ranks, 3, str(tmp_path)) == [None] * 3
    assert_sharded(tmp_path / "5", 3, 5)
    for rank in range(3):
        assert (tmp_path / "5" / f"__{rank}_3.distcp").exists()  # its objects


def test_files_are_created_in_parallel(tmp_path, monkeypatch):
    """Reserving the space of a file takes seconds on a tmpfs: each file waits for the other one."""
    both_open = threading.Barrier(2, timeout=30)
    real = os.open

    def open_file(path, *args, **kwargs):
        descriptor = real(path, *args, **kwargs)
        if Path(path).name in ("__0_0.distcp", "__0_1.distcp"):
            both_open.wait()
        return descriptor

    training = Training(0)
    with AsyncSaver(workers=2) as saver:
        monkeypatch.setattr(os, "open", open_file)
        report = saver.save(training.state(), tmp_path / "c", common=training.common).wait()
        monkeypatch.undo()

    assert report.error is None
    assert_holds(tmp_path / "c", 0)


class ScriptedStore(dist.Store):
    """A store in which every wait but the last times out and heartbeats follow a script."""

    def __init__(self, heartbeats):
        super().__init__()
        self.heartbeats = heartbeats
        self.waits = 0

    def wait(self, keys, timeout=None):
        self.waits += 1
        if self.waits < len(self.heartbeats):
            raise RuntimeError("wait timeout")

    def add(self, key, value):
        return self.heartbeats[min(self.waits, len(self.heartbeats) - 1)]

    def get(self, key):
        return b"[null, false]"

    def check(self, keys):
        return False


def await_end(store):
    return SaveBarrier(store, "save", 1, 2, Heartbeat(store, "test", 1, 2, 600)).await_end()


def test_heartbeats_of_rank_0_keep_a_save_alive():
    # Variables keep the Python side of the stores alive, which the barrier does not.
    lively = ScriptedStore([n // 3 for n in range(50)])
    silent = ScriptedStore([1, 2, 3, *[4] * 50])
    assert await_end(lively) == Outcome()
    with pytest.raises(CheckpointError, match="nothing was heard from rank 0 for 600 s"):
        await_end(silent)


def rewrite_slowly(directory, progress):
    for _ in range(30):
        progress(1)
    time.sleep(1.5)  # a silent rank is given up after at most 5/4 of the timeout
    (directory / "added").write_text("a file of another form")


def save_with_rewrite(rank, size, root):
    with AsyncSaver(timeout=1) as saver:
        state = sharded(rank, size, 0)
        return saver.save(state, f"{root}/0", common={}, rewrite=rewrite_slowly).wait().error


def test_rewrite_before_commit_may_outlast_the_timeout(pool, tmp_path):
    assert pool.run(save_with_rewrite, 2, str(tmp_path)) == [None, None]
    assert (tmp_path / "0/added").read_text() == "a file of another form"
    assert_sharded(tmp_path / "0", 2, 0)


class Held:
    """Holds the background of a save at its first use of a function of `os`, until the test lets
    go.
    """

    def __init__(self, monkeypatch, name):
        self.reached = threading.Event()
        self.go = threading.Event()
        owner = (
            Path if name == "mkdir" else os
        )  # pathlib of Python 3.10 has its own reference to os.mkdir
        real = getattr(owner, name)

        def call(*args, **kwargs):
            if threading.current_thread() is not threading.main_thread() and not self.go.is_set():
                self.reached.set()
                self.go.wait()
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize("name", ["mkdir", "statvfs", "open"])
def test_slow_file_systems_do_not_hold_training_up(tmp_path, monkeypatch, name):
    """The state is staged, and may change, while the file system has not answered yet."""
    training = Training(5)
    with AsyncSaver() as saver:
        held = Held(monkeypatch, name)
        handle = saver.save(training.state(), tmp_path / "c", common=training.common)
        training.change_objects()
        held.reached.wait()
        saver.wait_staged()
        training.change_tensors()
        assert saver.busy
        assert saver.poll() == []
        held.go.set()
        assert handle.wait().error is None

    assert_holds(tmp_path / "c", 5)


def test_the_removal_of_a_failed_save_does_not_hold_training_up(tmp_path, monkeypatch):
    training = Training(0, rows=1000)
    with AsyncSaver() as saver:
        held = Held(monkeypatch, "rmdir")
        with monkeypatch.context() as patch:
            patch.setattr(commit, "check_free_space", lambda *_: 1 / 0)
            saver.save(training.state(), tmp_path / "bad", common={})
            saver.wait_staged()
            held.reached.wait()
        assert saver.busy
        held.go.set()
        (report,) = saver.finish()
        assert "ZeroDivisionError" in report.error

    assert os.listdir(tmp_path) == []


class CallCounter:
    """The uses of files under `root` by this process: those that Python reports to audit hooks, and
    the rest.
    """

    EVENTS = (
        "open",
        "os.mkdir",
        "os.rename",
        "os.remove",
        "os.rmdir",
        "os.listdir",
        "os.scandir",
        "os.utime",
    )

    def __init__(self, monkeypatch, root):
        self.root = root
        self.calls = []
        self.active = True
        sys.addaudithook(lambda event, args: event in self.EVENTS and self.note(event, *args))
        for name in ("stat", "lstat", "statvfs"):
            monkeypatch.setattr(os, name, self._noted(name, getattr(os, name)))

    def _noted(self, name, real):
        def call(*args, **kwargs):
            self.note(name, *args)
            return real(*args, **kwargs)

        return call

    def note(self, name, path, *_):
        if self.active and str(path).startswith(self.root):
            self.calls.append(name)


def counting_calls(rank, size, root, slow):
    """Uses of files in the second save of this rank; with `slow`, rank 1 is done long after
    rank 0.
    """
    with pytest.MonkeyPatch.context() as monkeypatch, AsyncSaver(timeout=60) as saver:
        counter = CallCounter(monkeypatch, root)
        for value in range(2):
            counter.calls = []
            held = Held(monkeypatch, "fsync") if slow and rank == 1 else None
            saver.save(sharded(rank, size, value), f"{root}/{value}", common={})
            if held is not None:
                held.reached.wait()
                time.sleep(0.3)  # polling would show
                held.go.set()
            assert saver.finish()[0].error is None
            dist.barrier()

        counter.active = False
        return sorted(counter.calls)


def test_ranks_wait_without_asking_the_file_system(pool, tmp_path):
    """At most 3 calls for each file written and 5 more, however long the others take."""
    quick = pool.run(counting_calls, 2, str(tmp_path / "quick"), False)
    slow = pool.run(counting_calls, 2, str(tmp_path / "slow"), True)

    assert quick == slow
    assert [calls.count("statvfs") for calls in quick] == [1, 0], (
        "the free space is checked once, before anyone writes"
    )

    files = [path.name for path in (tmp_path / "quick/1").iterdir()]
    written = [sum(name.startswith(f"__{rank}_") for name in files) for rank in range(2)]
    written[0] += len([name for name in files if not name.startswith("__")])

    for calls, count in zip(quick, written, strict=True):
        assert len(calls) <= 3 * count + 5, (calls, count)


LAZY = {  # over several pieces of 8 MB, one of them with rows larger than a piece
    "matrix": torch.arange(3_000_000, dtype=torch.float32).view(3000, 1000),
    "wide": torch.arange(5_000_000, dtype=torch.int32).view(2, -1),
    "vector": torch.arange(7, dtype=torch.bfloat16),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 3),
}


def lazy_state():
    return {
        key: ShardedTensor.lazy(
            key,
            LazyTensor(tuple(value.shape), value.dtype, functools.partial(narrow, value)),
        )
        for key, value in LAZY.items()
    }


def test_tensors_read_during_staging_are_saved_as_from_memory(tmp_path):
    written = []
    save(state_of(**LAZY), tmp_path / "live", common={}, workers=2)
    save(lazy_state(), tmp_path / "lazy", common={}, workers=2, progress=written.append)
    files = sorted(path.name for path in (tmp_path / "live").glob("*.distcp"))

    assert files == ["__0_0.distcp", "__0_1.distcp"]
    assert all(
        (tmp_path / "lazy" / name).read_bytes() == (tmp_path / "live" / name).read_bytes()
        for name in files
    )
    assert sum(written) == sum((tmp_path / "lazy" / name).stat().st_size for name in files)


def test_an_interrupted_save_is_cancelled(tmp_path):
    """The exception of the caller is raised, and all files are removed."""
    begun = threading.Event()
    go_on = threading.Event()

    def stuck(offset, shape):
        begun.set()
        go_on.wait()
        return torch.zeros(shape)

    class Saver(AsyncSaver):
        def close(self):  # the last that leaving the block does: the save is cancelled by now
            go_on.set()
            super().close()

    matrix = LazyTensor((9_000_000,), torch.float32, stuck)
    state = {"matrix": ShardedTensor.lazy("matrix", matrix)}
    with pytest.raises(KeyboardInterrupt), Saver(workers=1) as saver:
        handle = saver.save(state, tmp_path / "interrupted", common={})
        begun.wait()
        raise KeyboardInterrupt

    assert "cancelled" in handle.wait().error
    assert os.listdir(tmp_path) == []


def nested_value():
    shared = [1, 2]
    return {
        "list": [1, [2.5, "three"], (4, [5]), None, True],
        "shared": (shared, shared),
        "ordered": OrderedDict(a=[1], b=torch.arange(6).view(2, 3)),
        "array": np.arange(4.0),
        "namespace": argparse.Namespace(betas=[0.9, 0.95]),
        "bytes": bytearray(b"bytes"),
        3: torch.tensor(7.0),
    }


def change_nested(value):
    value["list"][1].append("late")
    value["list"][2][1][0] = -1
    value["shared"][0][0] = -1
    value["ordered"]["a"].clear()
    value["ordered"]["b"].zero_()
    value["array"][0] = -1
    value["namespace"].betas[0] = -1
    value["bytes"][0] = 0
    value[3].fill_(-1)
    value["new"] = "late"


def equal(first, second):
    """Return whether two nested values are equal, including the types of their parts."""
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return list(first) == list(second) and all(equal(first[k], second[k]) for k in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(equal, first, second))
    if isinstance(first, argparse.Namespace):
        return equal(vars(first), vars(second))
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    return np.array_equal(first, second)


def view_of_tensor():
    return {"view": torch.arange(10.0)[2:5], "leaf": torch.ones(2, requires_grad=True)}


def change_view(value):
    value["view"].zero_()
    with torch.no_grad():
        value["leaf"].zero_()


def dictionary_of_sets():
    return {"a": {1, 2}, "b": [{"one"}]}


def change_sets(value):
    value["a"].clear()
    value["b"][0].add("late")


@pytest.mark.parametrize(
    ("make", "change", "in_background"),
    [
        (nested_value, change_nested, True),
        (view_of_tensor, change_view, False),
        (dictionary_of_sets, change_sets, False),
    ],
    ids=["plain types", "views", "other types"],
)
def test_changed_objects_do_not_reach_the_file(tmp_path, monkeypatch, make, change, in_background):
    """Objects of plain types are copied and encoded in the background, others are encoded."""
    changed = threading.Event()
    stage = StageAndWrite.stage

    def stage_after_change(self):
        changed.wait()
        stage(self)

    monkeypatch.setattr(StageAndWrite, "stage", stage_after_change)
    threads = set()
    encode = objects_module.encode_object

    def recording(*args):
        threads.add(threading.current_thread())
        return encode(*args)

    monkeypatch.setattr(objects_module, "encode_object", recording)
    value = make()
    common = {"value": make()}
    # Two keys of one object are stored once.
    state = {key: ShardedObject(key, value) for key in ("o", "p")}
    with AsyncSaver() as saver:
        handle = saver.save(state, tmp_path / "saved", common=common)
        change(value)
        change(common["value"])
        changed.set()
        report = handle.wait()

    assert report.error is None, report.error
    assert (threading.main_thread() not in threads) == in_background

    loaded = load({key: ShardedObject(key, None) for key in state}, tmp_path / "saved").objects
    assert equal(loaded["o"], make())
    assert equal(loaded["p"], make())
    assert equal(load_common(tmp_path / "saved")["value"], make())


def test_copies_of_plain_values_keep_shared_parts():
    shared = torch.zeros(2)
    inner = [shared, shared]
    value = {"a": inner, "b": inner, "c": (1, "two", None)}
    inner.append(value)  # a cycle
    copied = copy_plain_value(value)

    assert copied["a"] is copied["b"]
    assert copied["a"][0] is copied["a"][1] is not shared
    assert copied["a"][2] is copied
    assert copied["c"] is value["c"]  # immutable


def test_tensors_with_more_than_values_are_not_copied():
    named = torch.zeros(2)
    named.label = "attribute"
    base = torch.zeros(2)
    values = [
        torch.eye(2).to_sparse(),
        torch.eye(2).to_sparse_csr(),
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.zeros(2, 3).t(),
        torch.zeros(2, device="meta"),
        torch.nn.Parameter(torch.zeros(2)),
        named,
        [base, base.view(2, 1)],
    ]

    for value in values:
        with pytest.raises(objects_module._NotCopyableError):
            copy_plain_value(value)
