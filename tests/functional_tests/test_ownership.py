"""Ownership of a checkpoint directory, with real processes that are suspended and restarted."""

import re
import shutil
from pathlib import Path

import pytest

from megatron.conversion.checkpoint_conversion import convert
from tests.support.crash_harness import stored_tensors
from tests.support.training_harness import COMMON, LLAMA

FLAGS = f"{COMMON} {LLAMA} --num-layers 1 --mock-data --lr-decay-iters 40 "
ENDLESS = "--train-iters 1000000"


def checkpoints(root):
    return sorted(int(path.name[5:]) for path in root.glob("iter_*"))


def tracker(root):
    return int((root / "latest_checkpointed_iteration.txt").read_text())


def tracker_or_zero(root):
    path = root / "latest_checkpointed_iteration.txt"
    return int(path.read_text()) if path.exists() else 0


def tensors(root):
    return {path.name: stored_tensors(path) for path in root.glob("iter_*")}


def assert_unchanged(root, before):
    after = tensors(root)
    assert after.keys() == before.keys()
    for name, stored in before.items():
        assert all((after[name][key] == value).all() for key, value in stored.items()), name


def torchelastic(logs: Path, restart: int, run_id: str = "none") -> dict[str, str]:
    """Return the environment in which torchrun starts its workers."""
    return {
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": str(restart),
        "TORCHELASTIC_ERROR_FILE": str(logs / f"attempt_{restart}" / "0" / "error.json"),
    }


@pytest.mark.parametrize(
    ("mode", "way"),
    [
        ("", "renamed"),
        ("", "restored"),
        ("--async-save", "renamed"),
        ("--async-save", "removed"),
        pytest.param("", "removed", marks=pytest.mark.slow),
        pytest.param("--async-save", "restored", marks=pytest.mark.slow),
    ],
)
def test_suspended_run_leaves_its_successor_alone(launcher, tmp_path, way, mode):
    """The directory is renamed, removed or restored, so that generation numbers begin again."""
    root = tmp_path / "run"
    flags = f"{FLAGS} {mode} --save {root} --load {root} --save-interval 2"
    suspended = launcher.start(1, f"{flags} {ENDLESS} --keep-last-n 1")
    suspended.until(lambda: len(suspended.saved()) > 2, "three saves")
    backup = tmp_path / "backup"
    backup.mkdir()
    suspended.suspend()
    if way == "renamed":
        root.rename(tmp_path / "run.old")
    else:
        shutil.rmtree(root)

    if way == "restored":
        launcher.run(1, f"{FLAGS} --save {backup} --train-iters 2 --save-interval 1")
        shutil.copytree(backup, root, dirs_exist_ok=True)
    launcher.run(1, f"{flags} --train-iters 12 --seed 99")
    before = tensors(root)
    run_json = (root / "run.json").read_text()
    suspended.resume()

    assert suspended.wait() == [1]
    assert "another launch has taken over this directory" in suspended.output()
    assert tracker(root) == 12
    assert (root / "run.json").read_text() == run_json
    assert_unchanged(root, before)


def test_start_that_fails_leaves_the_running_job_alone(launcher, tmp_path):
    flags = f"{FLAGS} --save {tmp_path} --load {tmp_path} --save-interval 2"
    running = launcher.start(1, f"{flags} {ENDLESS}")
    running.until(running.saved, "a save")
    failing = {
        "holds another model": "--hidden-size 64",
        "does not exist": "--data-path /does/not/exist",
        "--ckpt-step 77777": "--ckpt-step 77777",
    }
    for message, wrong in failing.items():
        given = flags.replace("--mock-data", "") if "data" in wrong else flags
        job = launcher.start(1, f"{given} --train-iters 50 {wrong}")
        assert job.wait() == [1], job.output()
        assert message in job.output()

    count = len(running.saved())
    running.until(lambda: len(running.saved()) > count + 1, "two more saves")
    assert not running.has_ended()
    assert "WARNING" not in running.output()


def test_removed_generation_is_created_again(launcher, tmp_path):
    flags = f"{FLAGS} --save {tmp_path} --load {tmp_path} --save-interval 1 --keep-last-n 2"
    running = launcher.start(1, f"{flags} {ENDLESS}")
    running.until(running.saved, "a save")
    running.suspend()
    for path in tmp_path.glob(".generation-*"):
        shutil.rmtree(path)
    count = len(running.saved())
    running.resume()
    running.until(lambda: len(running.saved()) > count + 2, "further saves")

    assert running.output().count("the directory was created again") == 1
    assert not running.has_ended()


@pytest.mark.parametrize("begin", ["--load {run} --ckpt-step 2", "--load {base} --finetune", ""])
def test_restart_continues_from_the_saves_of_its_job(launcher, tmp_path, begin):
    """A job is killed and restarted as by torchrun --max-restarts, with flags that name an older
    checkpoint.
    """
    base = tmp_path / "base"
    run = tmp_path / "run"
    logs = tmp_path / "logs"
    launcher.run(1, f"{FLAGS} --save {base} --train-iters 4 --save-interval 2")
    if "ckpt-step" in begin:
        shutil.copytree(base, run)
    flags = f"{FLAGS} {begin.format(run=run, base=base)} --save {run} --save-interval 2"
    first = launcher.start(1, f"{flags} {ENDLESS}", variables=torchelastic(logs, 0))
    first.until(lambda: len(first.saved()) >= 3, "three saves")
    first.kill()
    assert first.wait() == [-9]

    newest = tracker(run)
    iterations = f"--train-iters {newest + 2} --override-opt_param-scheduler"
    second = launcher.start(1, f"{flags} {iterations}", variables=torchelastic(logs, 1))
    second.succeed()

    assert second.resumed_at() == newest
    assert second.iterations()[0] == newest + 1
    assert f"continuing from {run}/iter_{newest:07d}" in second.output()


def test_second_start_continues_the_branch_that_its_flags_began(launcher, tmp_path):
    base = tmp_path / "base"
    run = tmp_path / "run"
    launcher.run(1, f"{FLAGS} --save {base} --train-iters 4 --save-interval 2")
    flags = f"{FLAGS} --load {base} --save {run} --save-interval 2"
    launcher.run(1, f"{flags} --train-iters 8")
    second = launcher.run(1, f"{flags} --train-iters 10")

    assert second.resumed_at() == 8
    assert "this run began with" in second.output()

    third = launcher.run(1, f"{flags} --train-iters 6 --override-existing-run")
    assert third.resumed_at() == 4
    assert "--override-existing-run starts again" in third.output()
    assert tracker(run) == 6
    assert checkpoints(run) == [6, 8, 10]

    # A rollback in one directory: the first launch rolls back, the second one continues.
    back = f"{FLAGS} --load {run} --save {run} --ckpt-step 6 --save-interval 1"
    fourth = launcher.run(1, f"{back} --train-iters 7")
    assert fourth.resumed_at() == 6
    assert "iter_0000008, iter_0000010" in fourth.output()

    fifth = launcher.run(1, f"{back} --train-iters 9")
    assert fifth.resumed_at() == 7
    assert tracker(run) == 9


@pytest.mark.parametrize("form", ["hf", "universal"])
def test_run_in_the_directory_of_its_first_checkpoint_is_continued(launcher, tmp_path, form):
    """The model that --load names on the first launch is not loaded again by later ones."""
    base = tmp_path / "base"
    run = tmp_path / "run"
    launcher.run(1, f"{FLAGS} --save {base} --train-iters 4 --save-interval 4")
    convert(base, run, form)
    flags = f"{FLAGS} --load {run} --save {run} --save-interval 2 --lr-decay-iters 40"
    flags += " --override-opt_param-scheduler"
    begin = {"hf": 0, "universal": 4}[form]
    assert launcher.run(1, f"{flags} --train-iters 6").resumed_at() == begin

    second = launcher.run(1, f"{flags} --train-iters 8")
    assert second.resumed_at() == 6
    assert "To use the other one, move it" in second.output()
    assert launcher.run(1, f"{flags} --train-iters 10").resumed_at() == 8
    assert checkpoints(run) == list(range(begin + 2, 11, 2))


def test_edited_tracker_is_followed_with_a_warning(launcher, tmp_path):
    flags = (
        f"{FLAGS} --save {tmp_path} --load {tmp_path} --save-interval 2 --lr-decay-iters 10 "
        "--lr-warmup-iters 0"
    )
    launcher.run(1, f"{flags} --train-iters 8")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    second = launcher.run(1, f"{flags} --train-iters 6")
    assert second.resumed_at() == 4

    newer = f"{tmp_path}/iter_0000006, {tmp_path}/iter_0000008"
    reason = f"the tracker has been edited to return to {tmp_path}/iter_0000004"
    assert f"{newer} are not used: {reason}" in second.output()

    # The last one is of an abandoned branch now, and not newer than the run.
    third = launcher.run(1, f"{flags} --train-iters 7")
    assert third.resumed_at() == 6
    assert "not used" not in third.output()
    assert checkpoints(tmp_path) == [2, 4, 6, 7, 8]


def test_damaged_checkpoints_do_not_look_like_an_edited_tracker(launcher, tmp_path):
    flags = f"{FLAGS} --save {tmp_path} --load {tmp_path} --save-interval 2"
    launcher.run(1, f"{flags} --train-iters 6 --lr-decay-style constant")
    for iteration in (4, 6):
        (tmp_path / f"iter_{iteration:07d}/.metadata").unlink()
    second = launcher.run(1, f"{flags} --train-iters 4 --lr-decay-style constant")

    assert second.resumed_at() == 2
    assert "it is not complete: taking" in second.output()
    assert "the tracker has been edited" not in second.output()


def test_edited_tracker_is_followed_although_nodes_have_newer_checkpoints(launcher, tmp_path):
    run = tmp_path / "run"
    flags = (
        f"{FLAGS} --save {run} --load {run} --save-interval 2 --async-save --lr-decay-style constant "
        "--non-persistent-ckpt-type local --non-persistent-save-interval 1 "
        f"--non-persistent-local-ckpt-dir {tmp_path / 'disk'}"
    )
    first = launcher.start(1, f"{flags} {ENDLESS}")
    first.until(lambda: tracker_or_zero(run) >= 6, "three saves")
    first.kill()
    first.wait()
    newest = tracker(run)
    # Unedited, the run continues from its newest checkpoint, wherever that is.
    assert launcher.run(1, f"{flags} --train-iters 1").resumed_at() >= newest

    (run / "latest_checkpointed_iteration.txt").write_text("2")
    second = launcher.run(1, f"{flags} --train-iters 4")
    assert second.resumed_at() == 2
    assert "on the disks of the nodes are not used: the tracker has been edited" in second.output()


@pytest.mark.parametrize("load", ["", "--load {other} --finetune"])
def test_another_run_is_replaced_only_on_request(launcher, tmp_path, load):
    run = tmp_path / "run"
    other = tmp_path / "other"
    for root in (run, other):
        launcher.run(1, f"{FLAGS} --save {root} --train-iters 6 --save-interval 3")
    before = tensors(run)
    flags = f"{FLAGS} {load.format(other=other)} --save {run} --train-iters 4 --save-interval 3"
    refused = launcher.start(1, f"{flags} --seed 99")

    assert refused.wait() == [1]
    assert re.search(
        r"contains iter_0000006 of a run that this one.*iter_0000003, iter_0000006.*"
        r"--override-existing-run",
        refused.output(),
        re.DOTALL,
    )
    assert tracker(run) == 6
    assert_unchanged(run, before)

    launcher.run(1, f"{flags} --seed 99 --override-existing-run")
    assert tracker(run) == 4


def test_restart_does_not_take_over_from_another_job(launcher, tmp_path):
    root = tmp_path / "run"
    flags = f"{FLAGS} --save {root} --load {root} --save-interval 2 {ENDLESS}"
    first = launcher.start(1, flags, variables=torchelastic(tmp_path / "first", 0))
    first.until(first.saved, "a save")
    first.suspend()
    second = launcher.start(1, flags, variables=torchelastic(tmp_path / "second", 0))
    second.until(second.saved, "a save")
    first.resume()
    assert first.wait() == [1]

    again = launcher.start(1, flags, variables=torchelastic(tmp_path / "first", 1))
    assert again.wait() == [1]
    assert "another job has taken over this directory" in again.output()

    count = len(second.saved())
    second.until(lambda: len(second.saved()) > count + 1, "two more saves")
    assert not second.has_ended()

    second.kill()
    second.wait()
    last = launcher.start(1, flags, variables=torchelastic(tmp_path / "second", 1))
    last.until(last.saved, "a save")
    assert last.resumed_at() > 0
