"""One owner of a directory of checkpoints: processes that were stopped, and come back after another
has taken over.
"""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing import (
    Generation,
    Lineage,
    SupersededError,
    is_complete,
    on_branch,
    read_lineage,
    read_tracker,
)

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
    """The process stops itself right before the call that is named."""
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


def test_a_process_that_was_stopped_changes_nothing_when_it_comes_back(tmp_path):
    """Stopped at a known place of its third save, continued when a successor has saved 25 and 60."""
    command = [sys.executable, "-c", STOPPED, str(tmp_path), json.dumps(list(MOMENTS.values()))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    for number, (old, new) in enumerate(json.loads(result.stdout)):
        root = tmp_path / str(number)
        moment = list(MOMENTS)[number]
        assert new == [[None, False]] * 2, moment
        (error, superseded) = next(report for report in old if report[0] is not None)
        assert (
            superseded and "another start has taken over" in error and "generation 2: " in error
        ), moment
        assert "host new" in error, moment
        assert read_tracker(root) == 60, moment
        present = {path.name for path in root.iterdir()}
        assert present >= {"iter_0000010", "iter_0000025", "iter_0000060", ".generation-0000002"}, (
            moment
        )
        assert present <= {f"iter_{i:07d}" for i in (10, 20, 25, 30, 60)} | {
            ".generation-0000002",
            "latest_checkpointed_iteration.txt",
        }, moment
        assert all(is_complete(path) for path in root.glob("iter_*")), moment
        assert [path.name for path in (root / ".generation-0000002").iterdir()] == ["owner.json"], (
            moment
        )


def test_many_starts_at_once_leave_one_owner(tmp_path):
    with ThreadPoolExecutor(8) as threads:
        taken = list(
            threads.map(lambda number: Generation.take(tmp_path, {"pid": number}), range(8))
        )
    taken.sort(key=lambda generation: generation.number)
    newest = taken[-1].number
    assert len({generation.number for generation in taken}) == 8 and newest >= 8, (
        "some may have been given up"
    )
    assert [generation.is_current() for generation in taken] == [False] * 7 + [True]
    for generation in taken[:-1]:
        with pytest.raises(SupersededError, match=rf"generation {newest}: since .*, pid \d"):
            generation.move_tracker(5)
    taken[-1].move_tracker(7)
    assert read_tracker(tmp_path) == 7
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f".generation-{newest:07d}",
        "latest_checkpointed_iteration.txt",
    ]


def test_what_a_removal_could_not_finish_goes_with_the_next(tmp_path):
    generation = Generation.take(tmp_path, {})
    directories = [tmp_path / "iter_0000001", tmp_path / "iter_0000002"]
    for directory in directories:
        directory.mkdir()
    (left,) = generation.put_aside(directories[:1])  # and the disk is read-only now
    (path,) = generation.put_aside(directories[1:])
    assert path.is_dir() and not left.exists() and not directories[0].exists()


def test_a_slow_start_takes_no_number_that_others_have_left_behind(tmp_path, monkeypatch):
    """It has read the numbers, and then two others start before it makes its claim."""
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


def test_generations_go_on_from_the_checkpoints_where_a_directory_was_copied(tmp_path):
    checkpoint = tmp_path / "iter_0000060"
    checkpoint.mkdir()
    (checkpoint / "lineage.json").write_bytes(Lineage(((3, 40), (7, 60))).encode(50))
    assert Generation.take(tmp_path, {}).number == 8


def test_the_checkpoint_that_was_being_replaced_is_put_back(tmp_path):
    old = Generation.take(tmp_path, {})
    (old.directory / ".replaced-iter_0000005").mkdir()
    (old.directory / ".replaced-iter_0000006").mkdir()
    (tmp_path / "iter_0000006").mkdir()
    Generation.take(tmp_path, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".generation-0000002",
        "iter_0000005",
        "iter_0000006",
    ]


def test_the_newest_is_the_newest_of_the_branch(tmp_path):
    """Generation 1 saved up to 10, 2 went back to 4 and saved 5 and 6, 3 went on from there."""
    first = {number: Lineage(((1, number),)) for number in (2, 4, 8, 10)}
    second = {number: first[4].descend(2, number) for number in (5, 6)}
    third = {7: second[6].descend(3, 7)}
    assert on_branch(first | second | third) == [7, 6, 5, 4, 2]
    assert on_branch(first | second) == [6, 5, 4, 2]
    assert on_branch(first) == [10, 8, 4, 2]
    assert on_branch(first | second, head=first[10]) == [10, 8, 4, 2]
    gone = second[6].descend(3, 9)  # the tracker names it, but it is damaged
    assert on_branch(first | second, head=gone) == [6, 5, 4, 2]
    assert on_branch({}) == []


def test_checkpoints_without_lineage_are_ordered_by_number(tmp_path):
    old = {number: read_lineage(tmp_path / f"iter_{number:07d}") for number in (1, 2, 3)}
    assert on_branch(old) == [3, 2, 1]
    assert on_branch(old | {5: old[2].descend(1, 5)}) == [5, 2, 1]
    (tmp_path / "iter_0000002").mkdir()
    (tmp_path / "iter_0000002/lineage.json").write_text("{}")
    assert read_lineage(tmp_path / "iter_0000002") == old[2]
