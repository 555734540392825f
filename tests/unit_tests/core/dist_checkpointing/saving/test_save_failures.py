"""A failed save reports the reason and leaves no files, on every rank; the next one succeeds."""

import contextlib
import errno
import fcntl
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing import (
    AsyncSaver,
    CheckpointError,
    Generation,
    ShardedObject,
    ShardedTensor,
    save,
)
from megatron.core.dist_checkpointing.background import SLOT_SIZE
from megatron.core.dist_checkpointing.format import metadata_codec
from megatron.core.dist_checkpointing.saving import save_thread
from megatron.core.dist_checkpointing.saving import shard as shard_module
from tests.support.processes import list_open_files, wait_until
from tests.unit_tests.core.dist_checkpointing.saved_state import (
    Training,
    assert_holds,
    assert_sharded,
    sharded,
)


class Fault:
    """Makes a system call of the writers fail from its n-th use on."""

    def __init__(self, monkeypatch, name, code, after):
        self.real = getattr(os, name)
        self.calls = 0
        self.lock = threading.Lock()

        def call(*args, **kwargs):
            if name == "open" and not str(args[0]).endswith(".distcp"):
                return self.real(*args, **kwargs)
            with self.lock:
                self.calls += 1
                failing = self.calls > after
            if failing:
                raise OSError(code, os.strerror(code))
            return self.real(*args, **kwargs)

        monkeypatch.setattr(shard_module.os, name, call)


@pytest.mark.parametrize("name", ["pwrite", "fsync", "open", "ftruncate"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_a_failed_save_leaves_nothing_and_training_goes_on(tmp_path, name, code):
    training = Training(0)
    with AsyncSaver(workers=2) as saver:  # the second file fails
        save = saver.save(training.state(), tmp_path / "good", common=training.common)
        assert save.wait().error is None
        with pytest.MonkeyPatch.context() as monkeypatch:
            Fault(monkeypatch, name, code, after=1)
            saver.save(training.state(), tmp_path / "bad", common=training.common)
            saver.wait_staged()
            reports = saver.finish()
        assert os.strerror(code) in reports[-1].error
        assert not (tmp_path / "bad").exists()
        assert os.listdir(tmp_path) == ["good"]
        assert list_open_files(tmp_path) == []
        report = saver.save(training.state(), tmp_path / "next", common=training.common).wait()
        assert report.error is None
    assert sorted(os.listdir(tmp_path)) == ["good", "next"]
    assert_holds(tmp_path / "good", 0)
    assert_holds(tmp_path / "next", 0)


def test_a_file_system_that_fails_again_when_files_are_closed(tmp_path):
    """Closing fails again, as on a full network file system: it must not end the thread that the
    training thread waits for.
    """
    training = Training(0)
    really_close = os.close

    def close(descriptor):
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        really_close(descriptor)
        if name.endswith(".distcp"):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    saver = AsyncSaver()
    with pytest.MonkeyPatch.context() as monkeypatch:
        Fault(monkeypatch, "pwrite", errno.ENOSPC, after=1)
        monkeypatch.setattr(shard_module.os, "close", close)
        report = saver.save(training.state(), tmp_path / "bad", common=training.common).wait(
            timeout=60
        )
    assert os.strerror(errno.ENOSPC) in report.error
    assert os.listdir(tmp_path) == []
    saver.wait_staged()
    assert (
        saver.save(training.state(), tmp_path / "next", common=training.common).wait().error is None
    )
    saver.close()


class Interrupts:
    def __reduce__(self):
        raise KeyboardInterrupt


def test_files_of_a_failed_save_that_cannot_be_removed_are_removed_by_the_next(
    tmp_path, monkeypatch
):
    training = Training(0)
    generation = Generation.take(tmp_path, {})

    name_of_data = "__0_0.distcp"
    flush = os.fsync
    unlink = os.unlink

    def cannot_flush(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(name_of_data):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        flush(descriptor)

    def cannot_unlink(path, **kwargs):
        if Path(path).name == name_of_data:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        unlink(path, **kwargs)

    def save_as(name):
        path = tmp_path / name
        return saver.save(
            training.state(), path, common=training.common, generation=generation
        ).wait()

    with AsyncSaver() as saver:
        with monkeypatch.context() as failing:
            failing.setattr(os, "fsync", cannot_flush)
            failing.setattr(os, "unlink", cannot_unlink)
            assert os.strerror(errno.ESTALE) in save_as("bad").error
        assert list(generation.directory.glob(".discarded-*"))
        assert save_as("next").error is None
    assert os.listdir(generation.directory) == ["owner.json"]


def test_unreadable_owner_is_not_a_removed_generation(tmp_path, monkeypatch):
    """Opening fails as on a network file system, or in a process without free file descriptors."""
    generation = Generation.take(tmp_path, {})
    real = os.open

    def fail(path, *args, **kwargs):
        if str(path).endswith("owner.json"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return real(path, *args, **kwargs)

    with monkeypatch.context() as failing:
        failing.setattr(os, "open", fail)
        with pytest.raises(OSError, match="Stale file handle"):
            generation.restore()
    assert os.listdir(tmp_path) == [generation.id.name]
    assert generation.is_current()


def test_an_interrupt_while_objects_are_copied_ends_the_save(tmp_path):
    training = Training(0)
    saver = AsyncSaver()
    with pytest.raises(KeyboardInterrupt):
        saver.save(
            training.state() | {"x": ShardedObject("x", Interrupts())},
            tmp_path / "bad",
            common=training.common,
        )
    wait_until(lambda: not saver.busy)
    (report,) = saver.finish()
    assert report.error == "interrupted"
    assert os.listdir(tmp_path) == []
    saver.close()


def test_direct_writes_fall_back_to_buffered_ones(tmp_path, monkeypatch):
    """A file system that accepts O_DIRECT at open and refuses the write."""
    real = os.pwrite
    refused = []

    def pwrite(descriptor, data, offset):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(offset)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(descriptor, data, offset)

    monkeypatch.setattr(shard_module.os, "pwrite", pwrite)
    training = Training(2)
    save(training.state(), tmp_path / "c", common=training.common)
    assert refused
    assert_holds(tmp_path / "c", 2)


def test_short_writes_are_continued(tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(
        shard_module.os,
        "pwrite",
        lambda fd, data, offset: real(fd, data[: max(1, len(data) // 3)], offset),
    )
    training = Training(2, rows=10_000)
    save(training.state(), tmp_path / "c", common=training.common)
    assert_holds(tmp_path / "c", 2, rows=10_000)


def test_free_space_is_checked_before_the_first_byte(tmp_path, monkeypatch):
    real = os.statvfs(tmp_path)
    fields = list(real)
    fields[4] = 10  # f_bavail
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    with pytest.raises(CheckpointError, match=r"needs 48\.6\d MB, 40\.96 kB are free"):
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
        [sys.executable, "-c", FILE_SIZE_LIMIT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    first, second = result.stdout.strip().splitlines()
    assert "File too large" in first
    assert second == "None"
    assert os.listdir(tmp_path) == ["small"]


@contextlib.contextmanager
def small_tmpfs(path):
    path.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", path], capture_output=True
    ).returncode:
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
                monkeypatch.setattr(
                    "megatron.core.dist_checkpointing.saving.commit.check_free_space",
                    lambda *_: None,
                )
                assert "No space left" in saver.save(big, disk / "2", common={}).wait().error
            (disk / "other").unlink()
            assert saver.save(small, disk / "3", common={}).wait().error is None
        assert sorted(os.listdir(disk)) == ["1", "3"]


PAGE = 4096


@pytest.mark.parametrize("missing_pages", [1, 2, 3, 5, 12])
def test_full_disk_names_the_bytes_to_free(disk, missing_pages):
    """Every save fails until so much is freed; one page less is not enough.

    The missing pages are those of the tracker, of another small file, or of tensors.
    """
    disk.mount("size=1m")
    state = {"w": ShardedTensor.replicated("w", torch.ones(10_000))}
    generation = Generation.take(disk.path, {})
    filler = disk.path / "filler"

    def count_free_pages():
        return os.statvfs(disk.path).f_bavail

    with AsyncSaver() as saver:

        def save_iteration(iteration):
            directory = disk.path / f"iter_{iteration:07d}"
            handle = saver.save(
                state,
                directory,
                common={},
                generation=generation,
                on_commit=lambda: generation.move_tracker(iteration),
            )
            return handle.wait().error

        pages_before = count_free_pages()
        assert save_iteration(1) is None
        checkpoint_pages = pages_before - count_free_pages()  # including the tracker
        filler_pages = count_free_pages() - checkpoint_pages + missing_pages
        filler.write_bytes(bytes(filler_pages * PAGE))
        error = save_iteration(2)
        assert "No space left on device" in error
        assert f"as iter_0000001, free at least {missing_pages * PAGE:,} bytes" in error
        os.truncate(filler, (filler_pages - missing_pages + 1) * PAGE)
        assert "No space left on device" in save_iteration(3)
        os.truncate(filler, (filler_pages - missing_pages) * PAGE)
        assert save_iteration(4) is None


def failing_rank(rank, size, root, broken):
    with AsyncSaver() as saver:
        results = []
        for value in range(3):
            with pytest.MonkeyPatch.context() as monkeypatch:
                if value == 1 and rank == broken:
                    Fault(monkeypatch, "pwrite", errno.EIO, after=0)
                handle = saver.save(sharded(rank, size, value), f"{root}/{value}", common={})
                results.append(handle.wait(300).error)
            dist.barrier()
    return results


@pytest.mark.parametrize("broken", [0, 2])
def test_one_failing_rank_fails_the_save_everywhere(pool, tmp_path, broken):
    results = pool.run(failing_rank, 3, str(tmp_path), broken)
    for rank, (first, second, third) in enumerate(results):
        assert first is None
        assert third is None
        assert "Input/output error" in second, (rank, second)
        assert rank == broken or broken == 0 or "rank 2" in second
    assert sorted(os.listdir(tmp_path)) == ["0", "2"]
    assert_sharded(tmp_path / "0", 3, 0)
    assert_sharded(tmp_path / "2", 3, 2)


def test_a_saver_can_be_closed_twice(tmp_path):
    with AsyncSaver() as saver:
        handle = saver.save(Training(0).state(), tmp_path / "c", common={})
        saver.close()
    saver.close()
    assert handle.wait().error is None


def end_alone_while_rank_1_writes(rank, size, root, wait):
    """Rank 0 ends its program; rank 1 writes until rank 0 has stopped waiting, or until it waits."""
    released = threading.Event()
    with AsyncSaver() as saver, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(save_thread, "_LONGEST_WAIT_ALONE", wait)
        if rank == 1:
            write = os.pwrite

            def wait_and_write(*args):
                released.wait()
                return write(*args)

            monkeypatch.setattr(shard_module.os, "pwrite", wait_and_write)
        handle = saver.save(sharded(rank, size, 0), f"{root}/checkpoint", common={})
        outcome = "saved"
        if rank == 0 and wait < 1:
            try:
                saver.end_alone()
            except TimeoutError as error:
                outcome = str(error)
        dist.barrier()
        released.set()
        if rank == 0 and wait > 1:
            saver.end_alone()
        assert handle.wait(300).error is None
        dist.barrier()
        return outcome


@pytest.mark.parametrize("wait", [0.05, 300.0])
def test_wait_at_exit_for_other_ranks_is_bounded(pool, tmp_path, wait):
    """A rank that ends without `close` waits for slow ranks, but not for ever for lost ones."""
    outcome, _ = pool.run(end_alone_while_rank_1_writes, 2, str(tmp_path), wait)
    path = tmp_path / "checkpoint"
    expected = f"{path}: still being saved after {wait} s" if wait < 1 else "saved"
    assert outcome == expected
    assert_sharded(path, 2, 0)


def silent_rank(rank, size, root, victim):
    """Return the error of the other rank for a save that `victim` does not join."""
    answered = Path(root, "answered")
    with AsyncSaver() as saver:
        assert saver.save(sharded(rank, size, 0), f"{root}/0", common={}).wait().error is None
    saver = AsyncSaver(timeout=1, assume_constant_structure=True)  # no collective with the silent
    saver.prepare(sharded(rank, size, 1)).result()
    error = None
    if rank == victim:
        while not answered.exists():
            time.sleep(0.02)
    else:
        error = saver.save(sharded(rank, size, 1), f"{root}/1", common={}).wait().error
        answered.touch()
    saver.close()
    return error


@pytest.mark.parametrize("victim", [0, 1])
def test_a_silent_rank_fails_the_save(pool, tmp_path, victim):
    errors = pool.run(silent_rank, 2, str(tmp_path), victim)
    error = errors[1 - victim]
    assert f"nothing was heard from rank {victim} for 1 s" in error
    assert not (tmp_path / "1").exists()
    assert_sharded(tmp_path / "0", 2, 0)


@contextlib.contextmanager
def delayed_calls(seconds, *delays):
    """Delay system calls by (name in `os`, part of the path), once each."""
    remaining = list(delays)
    originals = {name: getattr(os, name) for name, _ in delays}

    def patch(name):
        def call(target, *args, **kwargs):
            path = target
            if isinstance(target, int):
                path = os.readlink(f"/proc/self/fd/{target}")
            for delay in list(remaining):
                if delay[0] == name and delay[1] in str(path):
                    remaining.remove(delay)
                    time.sleep(seconds)
            return originals[name](target, *args, **kwargs)

        return call

    for name in originals:
        setattr(os, name, patch(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(os, name, original)
    assert not remaining, f"never called: {remaining}"


SLOW = 1.5  # seconds; a silent rank is given up after at most 5/4 of a timeout of 1 s


def save_with_slow_calls(rank, size, root):
    """Each call takes longer than the timeout, in every phase of the save."""
    slow = [("fsync", "__1_0.distcp")]
    if rank == 0:
        slow = [("fsync", ".metadata"), ("rename", "tracker.tmp")]
        # pathlib of Python 3.10 keeps the function that it has found when it was imported.
        if sys.version_info >= (3, 11):
            slow.append(("mkdir", "saving-"))
    removed = []

    def move_tracker():
        Path(root, "tracker.tmp").write_text("0")
        os.rename(Path(root, "tracker.tmp"), Path(root, "tracker"))

    def remove_superseded():
        time.sleep(SLOW)
        removed.append("the previous checkpoint")

    with AsyncSaver(timeout=1) as saver, delayed_calls(SLOW, *slow):
        report = saver.save(
            sharded(rank, size, 0),
            f"{root}/0",
            common={},
            before_writing=remove_superseded,
            on_commit=move_tracker,
        ).wait()
    assert len(removed) == (rank == 0)
    return report.error, report.warning


def test_system_calls_may_outlast_the_timeout(pool, tmp_path):
    """A save is alive while the process is: both ranks report success."""
    assert pool.run(save_with_slow_calls, 2, str(tmp_path)) == [(None, None)] * 2
    assert_sharded(tmp_path / "0", 2, 0)
    assert (tmp_path / "tracker").read_text() == "0"


def save_while_rank_0_is_suspended(rank, size, root, phase):
    """Rank 0 stops in `phase`; rank 1 continues it once its own save has ended."""
    pid = Path(root, "pid")
    state = sharded(rank, size, 0)

    def suspend(*_):
        Path(root, "pid.tmp").write_text(str(os.getpid()))
        os.rename(Path(root, "pid.tmp"), pid)
        # To this thread: another thread of a busy machine would stop the process too late.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    hooks = {phase: suspend} if rank == 0 else {}
    with AsyncSaver(timeout=1) as saver:
        report = saver.save(state, f"{root}/0", common={}, **hooks).wait()
        if rank == 1:
            os.kill(int(pid.read_text()), signal.SIGCONT)
    return report.error, report.warning


@pytest.mark.parametrize("phase", ["before_writing", "rewrite", "on_commit"])
def test_ranks_agree_when_rank_0_was_suspended(pool, tmp_path, phase):
    """Rank 1 gives up after the timeout; rank 0 does not commit any more when it continues."""
    (error, _), (other_error, warning) = pool.run(
        save_while_rank_0_is_suspended, 2, str(tmp_path), phase
    )
    silence = "nothing was heard from rank 0 for 1 s: the process is dead or suspended"
    if phase == "on_commit":  # the checkpoint has its name: rank 1 finds it
        assert error is None
        assert other_error is None
        assert silence in warning
        assert_sharded(tmp_path / "0", 2, 0)
    else:
        assert silence in other_error
        assert "rank 0 was suspended" in error or silence in error
        assert not (tmp_path / "0").exists()


def test_metadata_that_cannot_be_made_fail_every_save(tmp_path, monkeypatch):
    training = Training(0, rows=10)
    with AsyncSaver() as saver:
        with monkeypatch.context() as patch:
            patch.setattr(metadata_codec, "choose_widths", lambda columns: [0][len(columns)])
            for name in ("first", "second"):
                error = (
                    saver.save(training.state(), tmp_path / name, common=training.common)
                    .wait()
                    .error
                )
                assert error == "IndexError: list index out of range"
        assert (
            saver.save(training.state(), tmp_path / "third", common=training.common).wait().error
            is None
        )
    assert os.listdir(tmp_path) == ["third"]
    assert_holds(tmp_path / "third", 0, rows=10)


@pytest.mark.parametrize("limit", [None, 2 * SLOT_SIZE], ids=["whole", "two slots"])
def test_failed_save_frees_its_buffers_without_the_garbage_collector(tmp_path, monkeypatch, limit):
    """A forked child has other memory at the addresses of buffers that a cycle keeps alive."""
    state = {"a": ShardedTensor.replicated("a", torch.zeros(3 * SLOT_SIZE // 4))}
    Fault(monkeypatch, "pwrite", errno.EIO, after=0)
    gc.disable()
    try:
        with AsyncSaver(staging_mem_limit=limit) as saver:
            handle = saver.save(state, tmp_path / "0", common={})
            assert "Input/output error" in handle.wait().error
            transfer = weakref.ref(handle.transfer)
        del saver, handle
        assert transfer() is None
    finally:
        gc.enable()
