"""Asynchronous saves: isolated from what training does, committed without collectives, harmless when they fail."""

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing import (
    AsyncSaver,
    CheckpointError,
    ShardedObject,
    ShardedTensor,
    clean_up,
    is_complete,
    load,
    load_common,
    read_tracker,
    save,
    save_plan,
    write_tracker,
    writing,
)
from megatron.core.dist_checkpointing.staging import SLOT_SIZE


class Training:
    """State that changes as in training: the step changes tensors, the forward pass a buffer, all the time the rest."""

    def __init__(self, seed=0, rows=600_000):
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.randn(rows, 20, generator=generator)
        self.moment = torch.randn(rows * 20, generator=generator)
        self.transposed = torch.randn(300, 500, generator=generator)
        self.buffer = torch.randn(1000, generator=generator)
        self.step = torch.tensor(seed)
        self.rng = {"python": [seed, seed], "torch": torch.randn(8, generator=generator)}
        self.common = {"iteration": seed, "args": {"lr": [0.1 * seed]}}

    def state(self):
        weight = ShardedTensor.replicated("weight", self.weight)
        return {
            "weight": weight,
            "moment": weight.flat_range("moment", 0, self.moment),
            "transposed": ShardedTensor.replicated("transposed", self.transposed.t()),
            "buffer": ShardedTensor.replicated("buffer", self.buffer),
            "step": ShardedTensor.replicated("step", self.step),
            "rng": ShardedObject("rng", self.rng),
        }

    def change_objects(self):
        self.rng["python"].append(-1)
        self.rng["torch"].zero_()
        self.common["args"]["lr"][0] = -1
        self.common["iteration"] = -1
        self.buffer.zero_()

    def change_tensors(self):
        for tensor in (self.weight, self.moment, self.transposed, self.step):
            tensor.zero_()


def assert_holds(directory, seed, rows=600_000):
    expected, loaded = Training(seed, rows), Training(seed + 1, rows)
    report = load(loaded.state(), directory, verify=True)
    for name in ("weight", "moment", "transposed", "buffer", "step"):
        assert torch.equal(getattr(loaded, name), getattr(expected, name)), name
    assert report.objects["rng"]["python"] == expected.rng["python"]
    assert torch.equal(report.objects["rng"]["torch"], expected.rng["torch"])
    assert load_common(directory) == expected.common


@pytest.mark.parametrize("limit", [None, 2 * SLOT_SIZE], ids=["whole", "two slots"])
def test_a_snapshot_is_isolated(tmp_path, limit):
    with AsyncSaver(staging_mem_limit=limit) as saver:
        for seed in range(4):  # the buffers are used again from the second on
            training = Training(seed)
            saver.save(training.state(), tmp_path / f"{seed}", common=training.common, volatile={"buffer"})
            training.change_objects()
            saver.wait_staged()
            training.change_tensors()
            (report,) = saver.finish()
            assert report.error is None, report.error
            assert report.staging <= report.writing <= report.total and report.bytes >= 2 * training.weight.nbytes
            assert_holds(tmp_path / f"{seed}", seed)


def test_one_save_waits_for_the_other(tmp_path):
    with AsyncSaver() as saver:
        for seed in range(3):
            training = Training(seed)
            handle = saver.save(training.state(), tmp_path / f"{seed}", common=training.common)
            assert saver.busy or handle.done()
            saver.wait_staged()
            training.change_tensors()
        reports = saver.finish()
        assert [report.error for report in reports] == [None] * 3
        assert [report.directory.name for report in reports] == ["0", "1", "2"]
        assert saver.poll() == [] and not saver.busy
    for seed in range(3):
        assert_holds(tmp_path / f"{seed}", seed)


def test_the_tracker_moves_after_the_commit(tmp_path):
    training = Training(3, rows=1000)
    seen = []

    def on_commit():
        seen.append(is_complete(tmp_path / "iter_0000003"))
        write_tracker(tmp_path, 3)

    with AsyncSaver() as saver:
        saver.save(training.state(), tmp_path / "iter_0000003", common={}, on_commit=on_commit)
    assert seen == [True] and read_tracker(tmp_path) == 3


def test_a_failing_tracker_does_not_undo_the_commit(tmp_path):
    def on_commit():
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with AsyncSaver() as saver:
        report = saver.save(Training(0, 1000).state(), tmp_path / "c", common={}, on_commit=on_commit).wait()
    assert "committed, but what follows" in report.error and "Read-only" in report.error
    assert is_complete(tmp_path / "c") and os.listdir(tmp_path) == ["c"]


def test_prepare_makes_the_first_save_like_the_others(tmp_path):
    training = Training(1)
    with AsyncSaver() as saver:
        saver.prepare(training.state())
        report = saver.save(training.state(), tmp_path / "c", common=training.common).wait()
        assert report.error is None
    assert_holds(tmp_path / "c", 1)


def test_the_structure_may_change_or_be_held_constant(tmp_path):
    def state(names):
        return {name: ShardedTensor.replicated(name, torch.full((50, 3), float(ord(name)))) for name in names}

    with AsyncSaver() as saver:
        for names in ("a", "abc", "bc"):
            assert saver.save(state(names), tmp_path / names, common={}).wait().error is None
            loaded = {key: ShardedTensor.replicated(key, torch.zeros(50, 3)) for key in names}
            load(loaded, tmp_path / names)
            assert all(loaded[key].local[0, 0] == ord(key) for key in names)
    with AsyncSaver(assume_constant_structure=True) as saver:
        saver.save(state("ab"), tmp_path / "x", common={}).wait()
        assert saver.save(state("ab"), tmp_path / "y", common={}).wait().error is None
        with pytest.raises(CheckpointError, match="said to be constant.*: c"):
            saver.save(state("abc"), tmp_path / "z", common={})


# Failures


class Fault:
    """Makes a system call of the writers fail from its n-th use on."""

    def __init__(self, monkeypatch, name, code, after):
        self.real, self.calls, self.lock = getattr(os, name), 0, threading.Lock()

        def call(*args, **kwargs):
            if name == "open" and not str(args[0]).endswith(".distcp"):
                return self.real(*args, **kwargs)
            with self.lock:
                self.calls += 1
                failing = self.calls > after
            if failing:
                raise OSError(code, os.strerror(code))
            return self.real(*args, **kwargs)

        monkeypatch.setattr(writing.os, name, call)


@pytest.mark.parametrize("name", ["pwrite", "fsync", "open", "ftruncate"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_a_failed_save_leaves_nothing_and_training_goes_on(tmp_path, name, code):
    training = Training(0)
    with AsyncSaver() as saver:
        assert saver.save(training.state(), tmp_path / "good", common=training.common).wait().error is None
        open_files = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
        with pytest.MonkeyPatch.context() as monkeypatch:
            Fault(monkeypatch, name, code, after=1)
            saver.save(training.state(), tmp_path / "bad", common=training.common)
            saver.wait_staged()
            reports = saver.finish()
        assert [os.strerror(code) in report.error for report in reports[-1:]] == [True]
        assert not (tmp_path / "bad").exists()
        assert [path for path in tmp_path.iterdir() if path.is_dir()] == [tmp_path / "good"]
        if open_files:
            assert len(os.listdir("/proc/self/fd")) == open_files
        report = saver.save(training.state(), tmp_path / "next", common=training.common).wait()
        assert report.error is None
    assert sorted(os.listdir(tmp_path)) == ["good", "next"]
    assert_holds(tmp_path / "good", 0)
    assert_holds(tmp_path / "next", 0)


def test_direct_writes_fall_back_to_buffered_ones(tmp_path, monkeypatch):
    """A file system that accepts O_DIRECT at open and refuses the write."""
    real, refused = os.pwrite, []

    def pwrite(descriptor, data, offset):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(offset)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(descriptor, data, offset)

    monkeypatch.setattr(writing.os, "pwrite", pwrite)
    training = Training(2)
    save(training.state(), tmp_path / "c", common=training.common)
    assert refused
    assert_holds(tmp_path / "c", 2)


def test_short_writes_are_continued(tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(writing.os, "pwrite", lambda fd, data, offset: real(fd, data[: max(1, len(data) // 3)], offset))
    training = Training(2, rows=10_000)
    save(training.state(), tmp_path / "c", common=training.common)
    assert_holds(tmp_path / "c", 2, rows=10_000)


def test_free_space_is_checked_before_the_first_byte(tmp_path, monkeypatch):
    real = os.statvfs(tmp_path)
    fields = list(real)
    fields[4] = 10  # f_bavail
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    with pytest.raises(CheckpointError, match=r"needs 0\.10 GB, 0\.00 GB are free"):
        save(Training(0).state(), tmp_path / "c", common={})
    assert not any(path.is_dir() for path in tmp_path.iterdir())


FILE_SIZE_LIMIT = """
import resource, sys, torch
from megatron.core.dist_checkpointing import AsyncSaver, ShardedTensor
resource.setrlimit(resource.RLIMIT_FSIZE, (20 << 20, 20 << 20))
state = {"w": ShardedTensor.replicated("w", torch.zeros(16 << 20))}
small = {"w": ShardedTensor.replicated("w", torch.ones(1 << 20))}
with AsyncSaver() as saver:
    print(saver.save(state, sys.argv[1] + "/big", common={}).wait().error)
    print(saver.save(small, sys.argv[1] + "/small", common={}).wait().error)
"""


def test_the_kernel_refuses_the_file(tmp_path):
    """A real error of a real write: the limit on file sizes."""
    result = subprocess.run(
        [sys.executable, "-c", FILE_SIZE_LIMIT, str(tmp_path)], capture_output=True, text=True, timeout=120, check=True
    )
    first, second = result.stdout.strip().splitlines()
    assert "File too large" in first and second == "None"
    assert os.listdir(tmp_path) == ["small"]


@contextlib.contextmanager
def small_tmpfs(path):
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", path], capture_output=True).returncode:
        pytest.skip("cannot mount a tmpfs")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


def test_a_full_disk(tmp_path):
    """A file system that fills up after the check of its free space."""
    with small_tmpfs(tmp_path / "disk") as disk:
        small = {"w": ShardedTensor.replicated("w", torch.ones(1 << 20))}
        big = {"w": ShardedTensor.replicated("w", torch.ones(8 << 20))}
        with AsyncSaver() as saver:
            assert saver.save(small, disk / "1", common={}).wait().error is None
            (disk / "other").write_bytes(bytes(20 << 20))
            assert "are free" in saver.save(big, disk / "2", common={}).wait().error
            with pytest.MonkeyPatch.context() as monkeypatch:
                monkeypatch.setattr("megatron.core.dist_checkpointing.async_save.check_free_space", lambda *_: None)
                assert "No space left" in saver.save(big, disk / "2", common={}).wait().error
            (disk / "other").unlink()
            assert saver.save(small, disk / "3", common={}).wait().error is None
        assert sorted(os.listdir(disk)) == ["1", "3"]


# Several processes


def sharded(rank, size, value):
    local = torch.full((1000, 64), float(value + rank))
    whole = torch.full((300, 10), float(value))
    return {
        "split": ShardedTensor.split("split", local, 0, rank, size),
        "whole": ShardedTensor.replicated("whole", whole),
        "rng": ShardedObject(f"rng/{rank}", [rank, value]),
    }


def assert_sharded(directory, size, value):
    split, whole = torch.zeros(1000 * size, 64), torch.zeros(300, 10)
    state = {"split": ShardedTensor.replicated("split", split), "whole": ShardedTensor.replicated("whole", whole)}
    state |= {f"rng/{rank}": ShardedObject(f"rng/{rank}", None) for rank in range(size)}
    report = load(state, directory, verify=True)
    assert (whole == value).all()
    for rank in range(size):
        assert (split[1000 * rank : 1000 * (rank + 1)] == value + rank).all()
        assert report.objects[f"rng/{rank}"] == [rank, value]


def saves_counting_collectives(rank, size, root, constant):
    calls = []
    names = ("all_reduce", "gather_object", "scatter_object_list", "all_gather_object", "barrier", "broadcast")
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in names:
            real = getattr(dist, name)
            monkeypatch.setattr(dist, name, lambda *a, _real=real, _n=name, **k: (calls.append(_n), _real(*a, **k))[1])
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
        assert "gather_object" in counts[0] and "scatter_object_list" in counts[0]
        assert counts[1:] == [[] if constant else ["all_reduce"]] * 2
    for value in range(3):
        assert_sharded(tmp_path / str(value), 3, value)
        assert load_common(tmp_path / str(value)) == {"value": value}
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2"]


def failing_rank(rank, size, root, broken):
    with AsyncSaver() as saver:
        results = []
        for value in range(3):
            with pytest.MonkeyPatch.context() as monkeypatch:
                if value == 1 and rank == broken:
                    Fault(monkeypatch, "pwrite", errno.EIO, after=0)
                handle = saver.save(sharded(rank, size, value), f"{root}/{value}", common={})
                results.append(handle.wait(60).error)
            dist.barrier()
    return results


@pytest.mark.parametrize("broken", [0, 2])
def test_one_failing_rank_fails_the_save_everywhere(pool, tmp_path, broken):
    results = pool.run(failing_rank, 3, str(tmp_path), broken)
    for rank, (first, second, third) in enumerate(results):
        assert first is None and third is None
        assert "Input/output error" in second, (rank, second)
        assert rank == broken or broken == 0 or "rank 2" in second
    assert sorted(os.listdir(tmp_path)) == ["0", "2"]
    assert_sharded(tmp_path / "0", 3, 0)
    assert_sharded(tmp_path / "2", 3, 2)


def dying_rank(rank, size, root, victim):
    saver = AsyncSaver(timeout=3, assume_constant_structure=True)  # no collective with the dead
    saver.save(sharded(rank, size, 0), f"{root}/0", common={}).wait()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    error = saver.save(sharded(rank, size, 1), f"{root}/1", common={}).wait().error
    Path(f"{root}/answer_{rank}").write_text(f"{time.monotonic() - began:.1f} {error}")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_dead_rank_fails_the_save_in_time(pool, tmp_path, victim):
    with pytest.raises(RuntimeError, match="died"):
        pool.run(dying_rank, 2, str(tmp_path), victim)
    answer = tmp_path / f"answer_{1 - victim}"
    deadline = time.monotonic() + 20
    while not answer.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    seconds, _, error = answer.read_text().partition(" ")
    assert float(seconds) < 10
    expected = "nothing was heard from rank 1 for 3 s" if victim else "rank 0 did not commit"
    assert expected in error
    assert not (tmp_path / "1").exists()
    assert_sharded(tmp_path / "0", 2, 0)


def test_metadata_that_cannot_be_made_fail_every_save(tmp_path, monkeypatch):
    training = Training(0, rows=10)
    with AsyncSaver() as saver:
        with monkeypatch.context() as patch:
            patch.setattr(save_plan, "encode_metadata", lambda metadata: [0][len(metadata.tensors)])
            for name in ("first", "second"):
                error = saver.save(training.state(), tmp_path / name, common=training.common).wait().error
                assert error == "IndexError: list index out of range"
        assert saver.save(training.state(), tmp_path / "third", common=training.common).wait().error is None
    assert os.listdir(tmp_path) == ["third"]
    assert_holds(tmp_path / "third", 0, rows=10)


def rewriting_slowly(rank, size, root, lively):
    def rewrite(directory, progress):
        for _ in range(8):
            time.sleep(0.25)
            if lively:
                progress(1)
        (directory / "added").write_text("a file of another form")

    with AsyncSaver(timeout=1) as saver:
        error = saver.save(sharded(rank, size, 0), f"{root}/0", common={}, rewrite=rewrite).wait().error
        dist.barrier()
        return error


@pytest.mark.parametrize("lively", [True, False])
def test_a_checkpoint_may_be_rewritten_before_it_has_its_name(pool, tmp_path, lively):
    """However long it takes, as long as rank 0 shows that it lives."""
    errors = pool.run(rewriting_slowly, 2, str(tmp_path), lively)
    assert errors[0] is None
    assert errors[1] is None if lively else "silent for 1 s" in errors[1]
    if lively:
        assert (tmp_path / "0/added").read_text() == "a file of another form"
        assert_sharded(tmp_path / "0", 2, 0)


# Crashes and leaks

CRASHING = """
import os, random, signal, sys, time, torch, traceback
from megatron.core.dist_checkpointing import AsyncSaver, ShardedTensor, clean_up, load, read_tracker, write_tracker

torch.set_num_threads(1)
root, kills = sys.argv[1], int(sys.argv[2])
random.seed(int(sys.argv[3]))

def train(ready):
    tensors = {"w": torch.zeros(300, 1000), "b": torch.zeros(7)}
    state = {key: ShardedTensor.replicated(key, tensor) for key, tensor in tensors.items()}
    step = 0
    if read_tracker(root) is not None:
        step = read_tracker(root)
        load(state, f"{root}/iter_{step:07d}", verify=True)
        assert (state["w"].local == step).all() and (state["b"].local == -step).all(), step
    clean_up(root)
    os.write(ready, step.to_bytes(4, "little"))
    with AsyncSaver() as saver:
        while True:
            step += 1
            saver.wait_staged()
            state["w"].local.add_(1)
            state["b"].local.sub_(1)
            def done(step=step):
                write_tracker(root, step)
                os.write(ready, b"x")
            saver.save(state, f"{root}/iter_{step:07d}", common={"step": step}, on_commit=done)
            for report in saver.poll():
                assert report.error is None, report.error

last = 0
for _ in range(kills):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            train(writing)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writing)
    resumed = os.read(reading, 4)
    assert len(resumed) == 4, "a restart failed"
    step = int.from_bytes(resumed, "little")
    assert step >= last, (step, last)
    last = step
    for _ in range(random.randrange(4)):  # some commits, then any moment of the next save
        os.read(reading, 1)
    time.sleep(random.random() * 0.04)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, "the child ended by itself"
    os.close(reading)
print("resumed up to", last)
"""


def run_crashes(root, kills):
    result = subprocess.run(
        [sys.executable, "-c", CRASHING, str(root), str(kills), "1"], capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split()[-1]) > 0


def test_killed_at_any_moment(tmp_path):
    run_crashes(tmp_path, 25)
    names = {path.name for path in tmp_path.iterdir() if path.name.startswith("iter")}
    clean_up(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == names | {"latest_checkpointed_iteration.txt"}
    assert all(is_complete(tmp_path / name) for name in names), "no incomplete checkpoint ever has its final name"


@pytest.mark.slow
def test_killed_at_any_moment_often(tmp_path):
    run_crashes(tmp_path, 400)


def test_clean_up_after_crashes(tmp_path):
    training = Training(0, rows=10)
    save(training.state(), tmp_path / "c", common=training.common)
    os.rename(tmp_path / "c", tmp_path / ".replaced-c")  # where a crash between the two renames leaves it
    (tmp_path / ".saving-c-1234-1").mkdir()
    (tmp_path / ".saving-c-1234-1.failed").touch()
    write_tracker(tmp_path, 1)
    unfinished = tmp_path / "latest_checkpointed_iteration.txt.tmp"
    unfinished.touch()
    assert clean_up(tmp_path) == [".saving-c-1234-1", ".saving-c-1234-1.failed", unfinished.name]
    assert read_tracker(tmp_path) == 1
    assert_holds(tmp_path / "c", 0, rows=10)


LEAKS = """
import ctypes, gc, os, sys, threading, torch
from megatron.core.dist_checkpointing import AsyncSaver, ShardedObject, ShardedTensor

def usage():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that the allocator keeps for later is no leak
    resident = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    mapped = sorted(line.split()[5] for line in open("/proc/self/maps") if "/dev/shm/" in line)
    named = [name for name in os.listdir("/dev/shm") if str(os.getpid()) in name]  # those of other programs come and go
    return resident, len(os.listdir("/proc/self/fd")), threading.active_count(), mapped, named

root, saves = sys.argv[1], int(sys.argv[2])
state = {key: ShardedTensor.replicated(key, torch.randn(500_000)) for key in "abcdef"}
state["t"] = ShardedTensor.replicated("t", torch.randn(300, 400).t())
state["rng"] = ShardedObject("rng", torch.get_rng_state())
with AsyncSaver() as saver:
    for count in range(-30, saves):  # the first ones fill the allocator's pools
        if count == 0:
            before = usage()
        handle = saver.save(state, f"{root}/{count % 2}", common={"args": {str(i): i for i in range(500)}})
        saver.wait_staged()
        assert handle.wait().error is None
        saver.poll()
    after = usage()
assert after[1:] == before[1:], (before, after)
assert after[0] - before[0] < 4 << 20, f"{(after[0] - before[0]) / saves:.0f} bytes per save"
"""


def run_leaks(root, saves):
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc")
    command = [sys.executable, "-c", LEAKS, str(root), str(saves)]
    environment = os.environ | {"MALLOC_ARENA_MAX": "2"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr


def test_nothing_leaks(tmp_path):
    run_leaks(tmp_path, 30)


@pytest.mark.slow
def test_nothing_leaks_over_200_saves(tmp_path):
    run_leaks(tmp_path, 200)


def test_closing_ends_the_threads(tmp_path):
    before = threading.active_count()
    for _ in range(3):
        with AsyncSaver(workers=3) as saver:
            saver.save(Training(0, 10).state(), tmp_path / "c", common={})
    assert threading.active_count() == before
