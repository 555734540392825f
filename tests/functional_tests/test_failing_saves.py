"""A failed save leaves a clear message, no partial files, and the previous checkpoint as the newest
one.
"""

import re
import signal
import time

import pytest

from megatron.core.dist_checkpointing import clean_up
from megatron.core.dist_checkpointing.verification import verify
from tests.support.crash_harness import assert_same_checkpoint
from tests.support.training_harness import COMMON, LLAMA

FLAGS = f"{COMMON} {LLAMA} --num-layers 2 --mock-data --train-iters 6 --save-interval 2 "
MODES = ["", "--async-save"]
TRACKER = "latest_checkpointed_iteration.txt"
LAST_FAILED = "It was the last save of the run"


def list_names(directory):
    """Return the names of the checkpoints and the tracker; assert that the generation of the owner
    contains no unfinished files.
    """
    names = {path.name for path in directory.iterdir()}
    for generation in directory.glob(".generation-*"):
        assert [path.name for path in generation.iterdir()] == ["owner.json"]
        names.remove(generation.name)
    names -= {"run.json", "runs"}  # the record of the run
    return sorted(names)


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
    assert_same_checkpoint(directory, straight, iteration)
    for name in list_names(directory):
        assert re.fullmatch(rf"iter_\d+|{TRACKER}", name), name


def measure_checkpoint(disk, launcher):
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
    needed = measure_checkpoint(disk, launcher)
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
    needed = measure_checkpoint(disk, launcher)
    num_pages = [0, 8, 16]
    for missing in (24, 16, 10, 8, 6, 5, 4, 3, 2, 1, 0):
        num_pages.append(needed // 4096 - missing)
    outcomes = []
    for pages in num_pages:
        disk.mount(f"size={max(1, pages) * 4096}")
        job = launcher.start(1, flags(disk.path, stop=2))
        succeeded = job.wait() == [0]
        outcomes.append(succeeded)

        assert succeeded == (job.saved() == [2])

        if succeeded:
            assert_whole(disk.path, straight, 2)
        else:
            assert "was not saved: " in job.output()
            assert "No space left" in job.output()
            for path in disk.path.iterdir():
                assert verify(path).ok, path
            for name in list_names(disk.path):
                assert name.startswith("iter_"), f"{name} is left"

        disk.unmount()

    assert outcomes == sorted(outcomes), "more space never makes a save fail"
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
        used = len(list(disk.path.rglob("*"))) + 1
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
    run_flags = flags(tmp_path, more=mode)
    job = run_without_its_last_save(launcher, ranks, run_flags, file_size_limits=limits)
    assert job.iterations() == [1, 2, 3, 4, 5, 6]

    failures = re.findall(r"WARNING: \S*iter_000000(\d) was not saved: (.*)", job.output())
    assert [iteration for iteration, _ in failures] == ["2", "4", "6"]
    for _, reason in failures:
        assert "File too large" in reason
        assert ("rank 1" in reason) == (ranks == 2)
        assert reason.endswith("there is no checkpoint yet")

    assert list_names(tmp_path) == []


@pytest.mark.parametrize("mode", MODES)
def test_read_only_disk_fails_the_save_only(launcher, disk, mode):
    disk.mount("size=64m")
    more = f"{mode} --exit-signal-handler --keep-last-n 2 --train-iters 1000000"
    job = launcher.start(1, flags(disk.path, more, stop=1_000_000))
    job.until(lambda: len(job.saved()) >= 2)
    job.until(lambda: disk.remount("ro"))
    job.until(lambda: "WARNING" in job.output())
    newest = int((disk.path / TRACKER).read_text())
    assert verify(disk.path / f"iter_{newest:07d}").ok

    # The disk can be written again.
    num_saved = len(job.saved())
    assert disk.remount("rw")

    job.until(lambda: len(job.saved()) > num_saved + 1)
    job.signal(0, signal.SIGTERM)
    job.succeed()

    assert "Read-only file system" in job.output()
    assert (disk.path / TRACKER).read_text() == str(job.iterations()[-1])
    assert len(list_names(disk.path)) == 3, "two checkpoints and the tracker"


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
        stale = tmp_path / name
        stale.mkdir()
        (stale / "__0_0.distcp").write_bytes(b"half")

    (tmp_path / ".saving-iter_0000004-abc-1.failed").touch()
    (tmp_path / f"{TRACKER}.tmp").write_text("4")
    job = launcher.run(1, flags(tmp_path, stop=4))

    assert job.resumed_at() == 2 or "at iteration 2" in job.output()
    assert list_names(tmp_path) == ["iter_0000002", "iter_0000004", TRACKER]


@pytest.mark.parametrize("mode", [*MODES, "--ckpt-format torch"])
def test_exit_on_save_failure_ends_the_run(launcher, tmp_path, mode):
    """All ranks stop, also the one whose own writing went well."""
    more = f"{mode} --exit-on-save-failure --train-iters 1000000"
    job = launcher.start(2, flags(tmp_path, more, stop=1_000_000), file_size_limits=[20_000, None])
    job.until(job.has_ended)
    time.sleep(0.5)
    # Rank 1 lets rank 0 report the error first, for some seconds; launchers do not wait for it.
    job.signal(1, signal.SIGTERM)

    assert job.wait() == [1, -signal.SIGTERM]
    assert re.search(r"error: \S*/iter_0000002 was not saved: .*File too large", job.output())
    assert "Traceback" not in job.output(1), "it has not waited for a rank that is gone"

    # If rank 1 was so late that rank 0 was gone, the next launch removes its directory.
    clean_up(tmp_path)
    assert list_names(tmp_path) == []


def test_failed_legacy_save_is_reported(launcher, disk):
    """The disk has room only for torch_dist, the first of two steps; the files of both are removed."""
    needed = measure_checkpoint(disk, launcher)
    disk.mount(f"size={needed * 5 // 4}")
    job = run_without_its_last_save(launcher, 1, flags(disk.path, more="--ckpt-format torch"))
    warning = r"WARNING: \S*iter_000000(\d) was not saved: .*No space left"

    assert re.findall(warning, job.output()) == ["2", "4", "6"]
    assert job.iterations()[-1] == 6
    assert list_names(disk.path) == []
