"""A failed save leaves a clear message, no partial files, and the previous checkpoint as the newest
one.
"""

import re
import signal
import time

import pytest

from megatron.core.dist_checkpointing import clean_up
from megatron.core.dist_checkpointing.verification import verify
from tests.support.compare import assert_same
from tests.support.crash_harness import stored_tensors
from tests.support.training_harness import COMMON, LLAMA

FLAGS = f"{COMMON} {LLAMA} --num-layers 2 --mock-data --train-iters 6 --save-interval 2 "
MODES = ["", "--async-save"]
TRACKER = "latest_checkpointed_iteration.txt"


LAST_FAILED = "It was the last save of the run"


def names(directory):
    """Return the names of the checkpoints and the tracker; assert that the generation of the owner
    contains no unfinished files.
    """
    for generation in directory.glob(".generation-*"):
        assert [path.name for path in generation.iterdir()] == ["owner.json"]
    others = ("run.json", "runs")  # the record of the run
    return sorted(
        p.name
        for p in directory.iterdir()
        if not p.name.startswith(".generation-") and p.name not in others
    )


def run_without_its_last_save(launcher, ranks, flags, **limits):
    """Return a run that ends with exit code 1 on all ranks because its last save failed."""
    job = launcher.start(ranks, flags, **limits)
    job.until(job.has_ended)
    job.kill(*range(1, ranks))  # as launchers do
    assert job.wait()[0] == 1
    assert LAST_FAILED in job.output()
    return job


def flags(directory, more="", stop=6):
    return f"{FLAGS} --exit-interval {stop} --save {directory} --load {directory} {more}"


@pytest.fixture(scope="module")
def straight(launcher, tmp_path_factory):
    """Return the checkpoints of an undisturbed run."""
    directory = tmp_path_factory.mktemp("straight")
    launcher.run(1, flags(directory))
    return directory


def assert_whole(directory, straight, iteration):
    """Assert that the newest checkpoint is that of `iteration`, intact, and that the directory
    contains only checkpoints.
    """
    name = f"iter_{iteration:07d}"
    assert (directory / TRACKER).read_text() == str(iteration)
    assert verify(directory / name).ok
    assert_same(stored_tensors(directory / name), stored_tensors(straight / name))
    assert all(re.fullmatch(rf"iter_\d+|{TRACKER}", name) for name in names(directory))


def bytes_on(disk, straight, launcher):
    """Return the size of a checkpoint on the disk."""
    disk.mount("size=64m")
    launcher.run(1, flags(disk.path, stop=2))
    used = disk.used
    disk.unmount()
    return used


@pytest.mark.parametrize("mode", MODES)
def test_full_disk_fails_the_save_only(launcher, disk, straight, mode):
    """The first checkpoint fits, and the second one fails before its first byte. After the disk has
    been enlarged, the run continues.
    """
    needed = bytes_on(disk, straight, launcher)
    disk.mount(f"size={needed * 3 // 2}")
    job = run_without_its_last_save(launcher, 1, flags(disk.path, more=mode))
    assert job.iterations()[-1] == 6, "training goes on"
    failure = (
        r"WARNING: \S*iter_000000[46] was not saved: .*the checkpoint needs [\d.]+ [kMG]?B, "
        r"[\d.]+ [kMG]?B are free.*newest"
    )
    assert len(re.findall(failure, job.output())) == 2
    assert job.saved() == [2]
    assert_whole(disk.path, straight, 2)
    assert disk.remount("size=64m")
    again = launcher.run(1, flags(disk.path, more=mode))
    assert again.resumed_at() == 2
    assert again.saved() == [4, 6]
    assert_whole(disk.path, straight, 6)


@pytest.mark.slow
def test_disk_that_fills_at_any_point_loses_nothing(launcher, disk, straight):
    """The sizes range from too small for a shard to too small for the tracker."""
    needed = bytes_on(disk, straight, launcher)
    outcomes = []
    for pages in (
        0,
        8,
        16,
        *(needed // 4096 - back for back in (24, 16, 10, 8, 6, 5, 4, 3, 2, 1, 0)),
    ):
        disk.mount(f"size={max(1, pages) * 4096}")
        job = launcher.start(1, flags(disk.path, stop=2))
        outcomes.append(job.wait() == [0])
        assert outcomes[-1] == (job.saved() == [2])
        if outcomes[-1]:
            assert_whole(disk.path, straight, 2)
        else:
            assert "was not saved: " in job.output()
            assert "No space left" in job.output()
            assert not [name for name in names(disk.path) if not name.startswith("iter_")], (
                "nothing is left"
            )
            assert all(verify(path).ok for path in disk.path.iterdir()), "what is there is whole"
        disk.unmount()
    assert outcomes == sorted(outcomes)
    assert not outcomes[0]
    assert outcomes[-1]


@pytest.mark.parametrize("mode", MODES)
def test_missing_inodes_fail_the_save_only(launcher, disk, straight, mode):
    """ENOSPC in the middle of a save although there are bytes: the file system has no
    inodes left.
    """
    disk.mount("size=64m")
    launcher.run(1, flags(disk.path, stop=2))
    for spare in range(1, 40, 3):
        used = sum(1 for _ in disk.path.rglob("*")) + 1
        assert disk.remount(f"nr_inodes={used + spare}")
        job = launcher.start(1, flags(disk.path, mode, stop=4))
        if job.wait() == [0]:
            break
        if "checkpoints cannot be saved to" in job.output():  # too full to become the owner
            continue
        assert "iter_0000004 was not saved: " in job.output()
        assert "No space left" in job.output()
        assert_whole(disk.path, straight, 2)
    assert spare > 3
    assert_whole(disk.path, straight, 4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_write_error_fails_the_save_only(launcher, tmp_path, mode, ranks):
    """Every file is cut off in the middle, on all ranks or on the last one alone, while the others
    write well.
    """
    limits = [None] * (ranks - 1) + [20_000]
    job = run_without_its_last_save(
        launcher, ranks, flags(tmp_path, more=mode), file_size_limits=limits
    )
    assert job.iterations() == [1, 2, 3, 4, 5, 6]
    failed = re.findall(r"WARNING: \S*iter_000000(\d) was not saved: (.*)", job.output())
    assert [number for number, _ in failed] == ["2", "4", "6"]
    assert all(
        "File too large" in reason and ("rank 1" in reason) == (ranks == 2) for _, reason in failed
    )
    assert all(reason.endswith("there is no checkpoint yet") for _, reason in failed)
    assert names(tmp_path) == []


@pytest.mark.parametrize("mode", MODES)
def test_read_only_disk_fails_the_save_only(launcher, disk, mode):
    disk.mount("size=64m")
    more = f"{mode} --exit-signal-handler --keep-last-n 2 --train-iters 1000000"
    job = launcher.start(1, flags(disk.path, more, stop=1_000_000))
    job.until(lambda: len(job.saved()) >= 2)
    job.until(lambda: disk.remount("ro"))
    job.until(lambda: "WARNING" in job.output())
    before = (disk.path / TRACKER).read_text()
    assert verify(disk.path / f"iter_{int(before):07d}").ok
    lost = len(job.saved())
    assert disk.remount("rw")
    job.until(lambda: len(job.saved()) > lost + 1)
    job.signal(0, signal.SIGTERM)
    job.succeed()
    assert "Read-only file system" in job.output()
    assert (disk.path / TRACKER).read_text() == str(job.iterations()[-1])
    assert len(names(disk.path)) == 3, "two checkpoints and the tracker"


def test_unwritable_save_is_an_error_before_training(launcher, disk, tmp_path):
    disk.mount("size=1m,ro")
    (tmp_path / "file").write_text("")
    for path in (disk.path, disk.path / "deeper", tmp_path / "file"):
        job = launcher.start(1, flags(path))
        assert job.wait() == [1]
        assert f"error: checkpoints cannot be saved to {path}: " in job.output()
        assert not job.iterations()


@pytest.mark.parametrize("form", ["torch_dist", "torch"])
def test_stale_files_of_earlier_crashes_are_removed(launcher, tmp_path, straight, form):
    launcher.run(1, flags(tmp_path, stop=2, more=f"--ckpt-format {form}"))
    for name in (
        ".saving-iter_0000004-abc-1",
        ".deleting-iter_0000001",
        ".saving-iter_0000004-torch_dist",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / ".saving-iter_0000004-abc-1.failed").touch()
    (tmp_path / f"{TRACKER}.tmp").write_text("4")
    job = launcher.run(1, flags(tmp_path, stop=4))
    assert job.resumed_at() == 2 or "at iteration 2" in job.output()
    assert names(tmp_path) == ["iter_0000002", "iter_0000004", TRACKER]


@pytest.mark.parametrize("mode", [*MODES, "--ckpt-format torch"])
def test_exit_on_save_failure_ends_the_run(launcher, tmp_path, mode):
    """All ranks stop, also the one whose own writing went well."""
    more = f"{mode} --exit-on-save-failure --train-iters 1000000"
    job = launcher.start(2, flags(tmp_path, more, stop=1_000_000), file_size_limits=[20_000, None])
    job.until(job.has_ended)
    time.sleep(0.5)
    job.signal(
        1, signal.SIGTERM
    )  # rank 1 leaves the word to rank 0 for some seconds; launchers do not wait for it
    assert job.wait() == [1, -signal.SIGTERM]
    assert re.search(r"error: \S*/iter_0000002 was not saved: .*File too large", job.output())
    assert "Traceback" not in job.output(1), "it has not waited for a rank that is gone"
    clean_up(
        tmp_path
    )  # rank 1 may have come so late that rank 0 was gone: the next launch removes its directory
    assert names(tmp_path) == []


def test_failed_legacy_save_is_reported(launcher, disk, straight):
    """The disk has room only for torch_dist, the first of two steps; the files of both are removed."""
    disk.mount(f"size={bytes_on(disk, straight, launcher) * 5 // 4}")
    job = run_without_its_last_save(launcher, 1, flags(disk.path, more="--ckpt-format torch"))
    failed = re.findall(r"WARNING: \S*iter_000000(\d) was not saved: .*No space left", job.output())
    assert failed == ["2", "4", "6"]
    assert job.iterations()[-1] == 6
    assert names(disk.path) == []
