"""Fencing: a directory of checkpoints has one owner, even if earlier owners are suspended."""

import errno
import json
import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing import (
    Generation,
    Lineage,
    Segment,
    SupersededError,
    clean_up,
    is_complete,
    read_lineage,
    read_tracker,
)
from megatron.core.dist_checkpointing.ownership.fencing import (
    find_interrupted_commit,
    find_newest,
    read_owner,
)
from megatron.core.dist_checkpointing.ownership.lineage import on_branch
from megatron.core.durable_files import put_in_place
from tests.support.programs import run_program

STOPPED = '''
import json, os, signal, sys, threading, torch
from pathlib import Path
from megatron.core.dist_checkpointing import AsyncSaver, Generation, ShardedTensor

torch.set_num_threads(1)
STATE = {"w": ShardedTensor.replicated("w", torch.ones(1000))}

def run(root, name, iterations, remove=None):
    generation = Generation.take(root, {"host": name})
    reports = []
    with AsyncSaver() as saver:
        for iteration in iterations:
            def on_commit():
                generation.move_tracker(iteration)
                if remove and iteration == iterations[-1]:
                    generation.put_aside([root / f"iter_{remove:07d}"])
            directory = root / f"iter_{iteration:07d}"
            report = saver.save(STATE, directory, common={}, generation=generation, on_commit=on_commit).wait()
            reports.append((report.error, report.superseded))
    return reports

def stop_at(event, source, target, nth):
    """Suspend this process right before the `nth` call of `event` with these paths."""
    count = 0
    def hook(name, args):
        nonlocal count
        if name == event and source in str(args[0]) and target in str(args[1]):
            count += 1
            if count == nth:
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # before this thread goes on
    sys.addaudithook(hook)

def child(action, answer):
    pid = os.fork()
    if pid == 0:
        try:
            answer.write_text(json.dumps(action()))
            os._exit(0)
        finally:
            os._exit(1)
    return pid

def old(root, moment):
    stop_at(*moment)
    return run(root, "old", [10, 20, 30], remove=10)

results = []
for number, moment in enumerate(json.loads(sys.argv[2])):
    root = Path(sys.argv[1]) / str(number)
    root.mkdir()
    answers = [root.with_suffix(suffix) for suffix in (".old", ".new")]
    stopped = child(lambda: old(root, moment), answers[0])
    assert os.WIFSTOPPED(os.waitpid(stopped, os.WUNTRACED)[1]), moment
    successor = child(lambda: run(root, "new", [25, 60]), answers[1])
    assert os.waitpid(successor, 0)[1] == 0
    os.kill(stopped, signal.SIGCONT)
    assert os.waitpid(stopped, 0)[1] == 0
    results.append([json.loads(answer.read_text()) for answer in answers])
print(json.dumps(results))
'''

PENDING = "saving-iter_0000030"
ROOT_30 = "/iter_0000030"
MOMENTS = {
    "before the directory is made": ("os.mkdir", PENDING, "", 1),
    "before a shard is created": ("open", PENDING, "", 1),
    "before the commit": ("os.rename", PENDING, ROOT_30, 1),
    "before the tracker moves": ("os.rename", ".generation", "latest_checkpointed", 3),
    "before a removal": ("os.rename", "/iter_0000010", "deleting-", 1),
}


def test_suspended_process_changes_nothing_after_a_takeover(tmp_path):
    """Suspend a process during its third save, and continue it after a successor has saved."""
    result = run_program(STOPPED, tmp_path, json.dumps(list(MOMENTS.values())))
    assert result.returncode == 0, result.stderr
    for index, (old, new) in enumerate(json.loads(result.stdout)):
        root = tmp_path / str(index)
        moment = list(MOMENTS)[index]
        assert new == [[None, False]] * 2, moment
        (error, superseded) = next(report for report in old if report[0] is not None)
        assert superseded, moment
        assert "another launch has taken over" in error, moment
        assert "generation 2: " in error, moment
        assert "host new" in error, moment
        assert read_tracker(root) == 60, moment
        present = {path.name for path in root.iterdir()}
        (owner,) = root.glob(".generation-0000002-*")
        assert present >= {"iter_0000010", "iter_0000025", "iter_0000060", owner.name}, moment
        assert present <= {f"iter_{i:07d}" for i in (10, 20, 25, 30, 60)} | {
            owner.name,
            "latest_checkpointed_iteration.txt",
        }, moment
        assert all(is_complete(path) for path in root.glob("iter_*")), moment
        assert [path.name for path in owner.iterdir()] == ["owner.json"], moment


def test_simultaneous_starts_leave_one_owner(tmp_path):
    with ThreadPoolExecutor(8) as threads:
        taken = list(
            threads.map(lambda number: Generation.take(tmp_path, {"pid": number}), range(8))
        )
    taken.sort(key=lambda generation: generation.id)
    newest = taken[-1].number
    assert len({generation.id for generation in taken}) == 8
    assert [generation.is_current() for generation in taken] == [False] * 7 + [True]
    for generation in taken[:-1]:
        with pytest.raises(SupersededError, match=rf"generation {newest}: since .*, pid \d"):
            generation.move_tracker(5)
    taken[-1].move_tracker(7)
    assert read_tracker(tmp_path) == 7
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        taken[-1].id.name,
        "latest_checkpointed_iteration.txt",
    ]


def test_unfinished_removal_is_completed_by_the_next(tmp_path):
    generation = Generation.take(tmp_path, {})
    directories = [tmp_path / "iter_0000001", tmp_path / "iter_0000002"]
    for directory in directories:
        directory.mkdir()
    (left,) = generation.put_aside(directories[:1])  # and the disk is read-only now
    (path,) = generation.put_aside(directories[1:])
    assert path.is_dir()
    assert not left.exists()
    assert not directories[0].exists()


def test_slow_start_does_not_reuse_a_number(tmp_path, monkeypatch):
    """Two other launches take generations between its listing and its claim."""
    faster = []
    make = Path.mkdir

    def slowly(path, *args, **options):
        monkeypatch.setattr(Path, "mkdir", make)
        faster.extend(Generation.take(tmp_path, {}) for _ in range(2))
        make(path, *args, **options)

    monkeypatch.setattr(Path, "mkdir", slowly)
    slow = Generation.take(tmp_path, {})
    assert [generation.number for generation in (*faster, slow)] == [1, 2, 3]
    assert [generation.is_current() for generation in (*faster, slow)] == [False, False, True]


def test_numbers_continue_from_copied_checkpoints(tmp_path):
    checkpoint = tmp_path / "iter_0000060"
    checkpoint.mkdir()
    (checkpoint / "lineage.json").write_bytes(Lineage((Segment(3, 40), Segment(7, 60))).encode(50))
    assert Generation.take(tmp_path, {}).number == 8


def test_checkpoint_that_was_being_replaced_is_restored(tmp_path):
    old = Generation.take(tmp_path, {})
    (old.directory / ".replaced-iter_0000005").mkdir()
    (old.directory / ".replaced-iter_0000006").mkdir()
    (tmp_path / "iter_0000006").mkdir()
    new = Generation.take(tmp_path, {})
    assert new.number == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        new.id.name,
        "iter_0000005",
        "iter_0000006",
    ]


def test_branch_determines_the_newest_checkpoint(tmp_path):
    """Generation 1 saved up to 10, 2 went back to 4 and saved 5 and 6, 3 went on from there."""
    first = {}
    for iteration in (2, 4, 8, 10):
        first[iteration] = Lineage((Segment(1, iteration),))
    second = {}
    for iteration in (5, 6):
        second[iteration] = first[4].descend(Segment(2, iteration))
    third = {7: second[6].descend(Segment(3, 7))}
    both = first | second
    assert on_branch(both | third) == [7, 6, 5, 4, 2]
    assert on_branch(both) == [6, 5, 4, 2]
    assert on_branch(first) == [10, 8, 4, 2]
    assert on_branch(both, head=first[10]) == [10, 8, 4, 2]
    gone = second[6].descend(Segment(3, 9))  # the tracker names it, but it is damaged
    assert on_branch(both, head=gone) == [6, 5, 4, 2]
    assert on_branch({}) == []


def test_checkpoints_without_lineage_are_ordered_by_number(tmp_path):
    old = {}
    for iteration in (1, 2, 3):
        old[iteration] = read_lineage(tmp_path / f"iter_{iteration:07d}")
    assert on_branch(old) == [3, 2, 1]
    child = old[2].descend(Segment(1, 5))
    assert on_branch(old | {5: child}) == [5, 2, 1]
    directory = tmp_path / "iter_0000002"
    directory.mkdir()
    (directory / "lineage.json").write_text("{}")
    assert read_lineage(directory) == old[2]


def test_checkpoint_whose_link_leads_nowhere_is_replaced(tmp_path):
    generation = Generation.take(tmp_path, {})
    (tmp_path / "iter_0000005").symlink_to(tmp_path / "unmounted")
    publish(tmp_path, generation, 5)
    assert (tmp_path / "iter_0000005/data").read_text() == generation.token
    # The link has its name again after a crash between the two renames, and keeps it.
    (generation.directory / ".replaced-iter_0000006").mkdir()
    (tmp_path / "iter_0000006").symlink_to(tmp_path / "unmounted")
    Generation.take(tmp_path, {})
    assert (tmp_path / "iter_0000006").is_symlink()


def test_start_that_cannot_revoke_the_owner_leaves_it_the_directory(tmp_path, monkeypatch):
    """In a directory with the sticky bit, only the user who created an entry can rename it."""
    owner = Generation.take(tmp_path, {"host": "owner"})
    rename = os.rename

    def rename_own(source, target):
        if Path(source) == owner.directory:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(source))
        rename(source, target)

    monkeypatch.setattr(os, "rename", rename_own)
    with pytest.raises(PermissionError):
        Generation.take(tmp_path, {"host": "other user"})
    assert [path.name for path in tmp_path.iterdir()] == [owner.id.name]
    assert read_owner(tmp_path, find_newest(tmp_path))["host"] == "owner"


def publish(root, generation, iteration):
    """Put a checkpoint into `root` as its owner does."""
    pending = generation.directory / "saving"
    pending.mkdir()
    lineage = Lineage((generation.segment(iteration),))
    (pending / "lineage.json").write_bytes(lineage.encode(None))
    (pending / "data").write_text(generation.token)
    put_in_place(pending, root / f"iter_{iteration:07d}")


@pytest.mark.parametrize("way", ["removed", "renamed"])
def test_old_owner_cannot_touch_a_directory_whose_numbers_start_again(tmp_path, way):
    root = tmp_path / "run"
    root.mkdir()
    old = Generation.take(root, {"host": "old"})
    publish(root, old, 5)
    if way == "removed":
        shutil.rmtree(root)
    else:
        root.rename(tmp_path / "run.old")
    root.mkdir()
    new = Generation.take(root, {"host": "new"})
    publish(root, new, 5)
    new.move_tracker(5)
    assert (old.number, new.number) == (1, 1)
    with pytest.raises(SupersededError, match="another launch has taken over .*host new"):
        old.restore()
    with pytest.raises(SupersededError):
        old.move_tracker(65)
    with pytest.raises(SupersededError):
        old.publish("run.json", b"{}")
    with pytest.raises(FileNotFoundError):
        publish(root, old, 5)
    with pytest.raises(SupersededError):
        old.put_aside([root / "iter_0000005"])
    assert (root / "iter_0000005/data").read_text() == new.token
    assert read_tracker(root) == 5
    assert new.is_current()


def test_removed_generation_is_created_again(tmp_path, caplog):
    generation = Generation.take(tmp_path, {"host": "here"})
    publish(tmp_path, generation, 5)
    shutil.rmtree(generation.directory)
    generation.restore()
    generation.restore()
    assert len(caplog.records) == 1
    assert "was removed" in caplog.text
    generation.move_tracker(5)
    assert generation.is_current()
    assert read_tracker(tmp_path) == 5
    assert read_owner(tmp_path, find_newest(tmp_path))["host"] == "here"


def test_generation_is_not_created_in_the_directory_of_another_run(tmp_path):
    """The directory was replaced by a mirror without hidden files."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    old = Generation.take(tmp_path / "a", {})
    other = Generation.take(tmp_path / "b", {})
    publish(tmp_path / "b", other, 7)
    shutil.rmtree(tmp_path / "a")
    shutil.copytree(tmp_path / "b", tmp_path / "a", ignore=shutil.ignore_patterns(".*"))
    with pytest.raises(SupersededError, match="replaced by that of another run"):
        old.restore()
    assert not list((tmp_path / "a").glob(".*"))


def test_links_are_removed_but_never_followed(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / ".replaced-iter_0000005").mkdir(parents=True)
    (elsewhere / "file").touch()
    root = tmp_path / "run"
    root.mkdir()
    for name in (".generation-0000003", ".generation-0000004-ab", ".revoked-x", ".claim-x"):
        (root / name).symlink_to(elsewhere)
    (root / ".revoked-y").mkdir()
    (root / ".revoked-y/.replaced-iter_0000006").symlink_to(elsewhere)
    (root / ".replaced-iter_0000007").symlink_to(elsewhere)
    (root / ".saving-iter_0000008-x").symlink_to(elsewhere)
    generation = Generation.take(root, {})
    clean_up(root)
    assert [path.name for path in root.iterdir()] == [generation.id.name]
    assert sorted(path.name for path in elsewhere.iterdir()) == [".replaced-iter_0000005", "file"]


@pytest.mark.parametrize("committed", ["by this launch", "by an earlier launch", "not"])
def test_successor_moves_the_tracker_of_an_interrupted_commit(tmp_path, committed):
    """The owner was killed around the commit of iteration 7, before it moved the tracker."""
    earlier = Generation.take(tmp_path, {})
    if committed == "by an earlier launch":
        publish(tmp_path, earlier, 7)
    owner = Generation.take(tmp_path, {})
    publish(tmp_path, owner, 5)
    owner.move_tracker(5)
    owner.stage_tracker(7)
    if committed == "by this launch":
        publish(tmp_path, owner, 7)
    expected = 7 if committed == "by this launch" else None
    assert find_interrupted_commit(tmp_path) == expected
    Generation.take(tmp_path, {})
    assert find_interrupted_commit(tmp_path) is None
    assert read_tracker(tmp_path) == (expected or 5)


def test_rename_that_the_server_has_repeated_succeeds(tmp_path, monkeypatch):
    """The answer to the first request of NFS was lost, and the second one finds no source."""
    replace = os.replace

    def repeated(source, target):
        replace(source, target)
        replace(source, target)

    for name in ("pending", "iter_0000001"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").write_text(name)
    monkeypatch.setattr(os, "replace", repeated)
    put_in_place(tmp_path / "pending", tmp_path / "iter_0000001")
    assert (tmp_path / "iter_0000001/content").read_text() == "pending"
    assert os.listdir(tmp_path) == ["iter_0000001"]
    # A source that never existed is an error, although the target exists.
    with pytest.raises(FileNotFoundError):
        put_in_place(tmp_path / "pending", tmp_path / "iter_0000001")
    assert (tmp_path / "iter_0000001/content").read_text() == "pending"


def test_directory_of_an_older_version_is_taken_over(tmp_path):
    old = tmp_path / ".generation-0000007"
    old.mkdir()
    (old / "owner.json").write_text('{"token": "ab"}')
    generation = Generation.take(tmp_path, {})
    assert generation.number == 8
    assert not old.exists()


def test_pipe_as_owner_file_is_not_read(tmp_path):
    directory = tmp_path / ".generation-0000007-ab"
    directory.mkdir()
    os.mkfifo(directory / "owner.json")
    assert read_owner(tmp_path, find_newest(tmp_path)) == {}


class Start:
    """A launch of a run in the random histories below: it saves as long as it is not suspended."""

    def __init__(self, root):
        self.generation = Generation.take(root, {})
        self.ended = False

    def save(self, root, iteration, keep):
        """Save, move the tracker and remove all but the last `keep` checkpoints of this launch."""
        try:
            self.generation.restore()
            publish(root, self.generation, iteration)
            self.generation.move_tracker(iteration)
            own = sorted(
                number
                for number in map(int, (path.name[5:] for path in root.glob("iter_*")))
                if Lineage((self.generation.segment(iteration),)).includes(
                    read_lineage(root / f"iter_{number:07d}")
                )
            )
            directories = [root / f"iter_{number:07d}" for number in own[:-keep]]
            for aside in self.generation.put_aside(directories):
                self.generation.remove(aside)
        except SupersededError:
            self.ended = True
        except OSError:
            pass  # the directory is missing at the moment


@pytest.mark.parametrize("seed", range(20))
def test_older_starts_never_change_checkpoints_of_the_newest(tmp_path, seed):
    """Starts are suspended, and the directory is renamed, removed, restored or cleaned
    meanwhile.
    """
    rng = random.Random(seed)
    root = tmp_path / "run"
    root.mkdir()
    starts = [Start(root)]
    owner = starts[0]
    backup = tmp_path / "backup"
    for step in range(60):
        action = rng.choice(["start", "rename", "remove", "restore", "clean", "old", "new", "new"])
        if action == "start":
            owner = Start(root)
            starts.append(owner)
        elif action in ("rename", "remove", "restore"):
            if action == "rename":
                root.rename(tmp_path / f"run.{step}")
            else:
                shutil.rmtree(root)
            if action == "restore" and backup.is_dir():
                shutil.copytree(backup, root)
            else:
                root.mkdir()
            owner = Start(root)
            starts.append(owner)
        elif action == "clean":
            for path in root.glob(".generation-*"):
                shutil.rmtree(path)
        elif action == "new" and not owner.ended:
            owner.save(root, rng.randint(1, 9), keep=3)
            assert not owner.ended, "the newest start was superseded by an older one"
            if rng.random() < 0.3:
                shutil.rmtree(backup, ignore_errors=True)
                shutil.copytree(root, backup)
        elif action == "old":
            if not owner.generation.is_current():
                owner.generation.restore()
            before = contents(root)
            tracker = read_tracker(root)
            older = rng.choice(starts)
            if older is not owner and not older.ended:
                older.save(root, rng.randint(1, 9), keep=1)
                assert contents(root) == before
                assert read_tracker(root) == tracker
    assert len(starts) > 5


def contents(root):
    texts = {}
    for path in root.glob("iter_*"):
        texts[path.name] = (path / "data").read_text()
    return texts
