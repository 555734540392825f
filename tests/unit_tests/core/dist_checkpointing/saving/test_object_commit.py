"""Checkpoints in object storage: commits, fencing, crashes and faults of the server."""

import json
import math
import os
import threading
from functools import partial
from unittest import mock

import pytest
import torch

from megatron.core import object_storage
from megatron.core.dist_checkpointing import (
    AsyncSaver,
    CheckpointError,
    Lineage,
    ShardedTensor,
    is_complete,
    load,
    read_tracker,
    save,
    take_generation,
)
from megatron.core.dist_checkpointing.checkpoint_directory import find_missing_or_truncated
from megatron.core.dist_checkpointing.format.checksums import BLOCK_SIZE
from megatron.core.dist_checkpointing.ownership import fencing
from megatron.core.dist_checkpointing.ownership.fencing import SupersededError
from megatron.core.dist_checkpointing.ownership.lineage import LINEAGE
from megatron.core.dist_checkpointing.saving import object_commit
from megatron.core.dist_checkpointing.saving.retention import Retention, RetentionRules
from megatron.core.dist_checkpointing.tiers.copier import CheckpointCopier
from megatron.core.dist_checkpointing.tiers.local_tier import LocalSaver, LocalTier
from megatron.core.dist_checkpointing.verification import verify
from megatron.core.object_path import path_of
from megatron.core.object_storage import ObjectStore
from tests.support.object_server import FaultyProxy, object_server
from tests.support.programs import run_program
from tests.unit_tests.core.dist_checkpointing.saved_state import (
    Training,
    assert_holds,
    assert_sharded,
    sharded,
)

ROWS = 40_000


@pytest.fixture(scope="module")
def server():
    with object_server() as url:
        yield url


@pytest.fixture
def root(server, request, monkeypatch):
    """An empty directory of checkpoints."""
    monkeypatch.setenv(
        "MEGATRON_STORAGE_DEADLINE", "60"
    )  # as by default: no healthy request comes near it
    object_storage.open_store.cache_clear()
    yield path_of(f"s3://bucket/{request.node.name}")
    object_storage.open_store.cache_clear()


def save_one(directory, seed, generation=None, **options):
    training = Training(seed, ROWS)
    with AsyncSaver() as saver:
        return saver.save(
            training.state(), directory, common=training.common, generation=generation, **options
        ).wait()


def test_async_save_is_loaded_at_another_layout(root, pool):
    generation = take_generation(root, {"host": "here"})
    with AsyncSaver() as saver:
        for seed in range(3):
            training = Training(seed, ROWS)
            directory = root / f"iter_{seed:07d}"
            saver.save(
                training.state(),
                directory,
                common=training.common,
                generation=generation,
                on_commit=lambda seed=seed: generation.move_tracker(seed),
            )
            training.change_objects()
            saver.wait_staged()
            training.change_tensors()
            (report,) = saver.finish()
            assert report.error is None
            assert_holds(directory, seed, ROWS)
            assert verify(directory).ok
            assert find_missing_or_truncated(directory) == []
            assert is_complete(directory)
    assert read_tracker(root) == 2
    pool.run(save_sharded, 2, str(root / "sharded"), dict(os.environ))
    assert_sharded(root / "sharded", 2, 7.0)


def test_local_checkpoint_is_copied_by_the_owner_only(root, tmp_path):
    """An owner that is superseded in the meantime does not commit."""
    generation = take_generation(root, {})
    training = Training(1, ROWS)
    nodes = LocalSaver(LocalTier.create(tmp_path), generation, None)
    copier = CheckpointCopier()
    reports = []
    takeovers = [lambda: None, lambda: take_generation(root, {})]
    with AsyncSaver() as saver:
        for iteration, take_over in enumerate(takeovers, 1):
            pending = partial(nodes.checkpoint, iteration)
            local = saver.save(training.state(), tmp_path, common=training.common, pending=pending)
            options = {"generation": generation, "before_writing": take_over}
            reports.append(copier.copy(local, root / f"iter_{iteration:07d}", **options).wait())
    copier.close()
    nodes.close()
    assert reports[0].error is None
    assert reports[1].superseded
    assert_holds(root / "iter_0000001", 1, ROWS)
    assert verify(root / "iter_0000001").ok
    assert not is_complete(root / "iter_0000002")


def save_sharded(rank, world_size, directory, environment):
    """Save from a worker, which was started before the server and needs its address."""
    with mock.patch.dict(
        os.environ, {name: value for name, value in environment.items() if name.startswith("AWS_")}
    ):
        object_storage.open_store.cache_clear()
        save(sharded(rank, world_size, 7.0), directory, common={})
        object_storage.open_store.cache_clear()


def test_commit_lists_size_and_hash_of_every_file(root):
    directory = root / "c"
    assert save_one(directory, 1).error is None
    listed = json.loads((directory / "metadata.json").read_text())["files"]
    names = {path.name for path in directory.iterdir()} - {".claim", "metadata.json"}
    assert set(listed) == names
    store = directory.store
    for name in sorted(names):
        path = directory / name
        content = path.read_bytes()
        store.put(path.key, content[:-1])
        assert find_missing_or_truncated(directory) == [
            f"{name} has {len(content) - 1} bytes instead of {len(content)}"
        ]
        path.unlink()
        assert find_missing_or_truncated(directory) == [f"{name} is missing"]
        store.put(path.key, content[:-1] + bytes([content[-1] ^ 1]))
        assert not verify(directory).ok
        store.put(path.key, content)
    assert verify(directory).ok


def test_claimed_directory_is_an_error_without_a_generation(root):
    assert save_one(root / "c", 1).error is None
    assert "holds a checkpoint already" in save_one(root / "c", 2).error
    assert_holds(root / "c", 1, ROWS)
    root.store.create((root / "d/.claim").key, b'{"host": "other"}')
    assert 'is being written by {"host": "other"}' in save_one(root / "d", 2).error
    with pytest.raises(CheckpointError, match="being written"):
        save({"w": ShardedTensor.replicated("w", torch.ones(3))}, root / "d", common={})


class Gate:
    """Delays a request of `ObjectStore`, right before it is sent, if `chosen(method, key)`."""

    def __init__(self, monkeypatch, chosen):
        self.reached = threading.Event()
        self.opened = threading.Event()
        for name in ("create", "replace", "put", "delete"):
            monkeypatch.setattr(
                ObjectStore, name, self._guarded(name, getattr(ObjectStore, name), chosen)
            )

    def _guarded(self, name, real, chosen):
        def request(store, key, *arguments):
            if not self.reached.is_set() and chosen(name, str(key)):
                self.reached.set()
                self.opened.wait()
            return real(store, key, *arguments)

        return request


@pytest.mark.parametrize("ending", [".claim", "delete", ".metadata", "metadata.json"])
@pytest.mark.parametrize("again", [False, True], ids=["first", "again"])
def test_suspended_owner_changes_nothing_at_any_request(root, monkeypatch, ending, again):
    """Delay a request until another launch has taken over and saved the same iteration."""
    directory = root / "iter_0000004"
    old = take_generation(root, {"host": "old"})
    if again:  # the name was taken before, e.g., by another branch
        assert save_one(directory, 0, old).error is None
    elif ending == "delete":
        pytest.skip("nothing is deleted")
    gate = Gate(monkeypatch, lambda name, key: name == ending or key.endswith(f"/{ending}"))
    reports = []
    thread = threading.Thread(target=lambda: reports.append(save_one(directory, 1, old)))
    thread.start()
    gate.reached.wait()
    new = take_generation(root, {"host": "new"})
    report = save_one(directory, 2, new)
    gate.opened.set()
    thread.join()
    assert report.error is None
    assert reports[0].superseded
    assert "another launch has taken over this directory (generation 2" in reports[0].error
    assert_holds(directory, 2, ROWS)
    assert verify(directory).ok
    assert find_missing_or_truncated(directory) == []


def test_claim_after_a_takeover_does_not_commit(root, monkeypatch):
    old = take_generation(root, {"host": "old"})
    gate = Gate(monkeypatch, lambda name, key: key.endswith("/.claim"))
    reports = []
    thread = threading.Thread(
        target=lambda: reports.append(save_one(root / "iter_0000004", 1, old))
    )
    thread.start()
    gate.reached.wait()
    take_generation(root, {"host": "new"})
    gate.opened.set()
    thread.join()
    assert reports[0].superseded
    assert not is_complete(root / "iter_0000004")


def test_simultaneous_starts_get_different_generations(root):
    taken = []
    threads = [
        threading.Thread(target=lambda: taken.append(take_generation(root, {}))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({generation.id for generation in taken}) == 6
    newest = max(taken, key=lambda generation: generation.id)
    assert [generation for generation in taken if generation.is_current()] == [newest]


def test_slow_start_does_not_reuse_a_removed_number(root, monkeypatch):
    """After its listing, others take generations 1 and 2, and the second removes the first."""
    look = fencing.find_newest

    def look_before_the_others(root):
        monkeypatch.setattr(fencing, "find_newest", look)
        seen = look(root)
        assert [take_generation(root, {}).number for _ in range(2)] == [1, 2]
        return seen

    monkeypatch.setattr(fencing, "find_newest", look_before_the_others)
    generation = take_generation(root, {})
    assert generation.number == 3
    assert generation.is_current()


def test_old_owner_cannot_touch_a_prefix_whose_numbers_start_again(root):
    """All objects were deleted while the old owner was suspended."""
    old = take_generation(root, {"host": "old"})
    assert save_one(root / "iter_0000005", 1, old).error is None
    root.store.delete(list(root.store.sizes(root.key)))
    new = take_generation(root, {"host": "new"})
    assert (old.number, new.number) == (1, 1)
    assert save_one(root / "iter_0000005", 2, new).error is None
    new.move_tracker(5)
    for iteration in (5, 9):
        assert save_one(root / f"iter_{iteration:07d}", 3, old).superseded
    with pytest.raises(SupersededError, match="host new"):
        old.move_tracker(65)
    with pytest.raises(SupersededError):
        old.put_aside([root / "iter_0000005"])
    assert_holds(root / "iter_0000005", 2, ROWS)
    assert read_tracker(root) == 5
    assert not is_complete(root / "iter_0000009")


def test_removal_revokes_the_checkpoint_first(root, monkeypatch):
    generation = take_generation(root, {})
    assert save_one(root / "iter_0000001", 1, generation).error is None
    (aside,) = generation.put_aside([root / "iter_0000001"])
    assert not is_complete(root / "iter_0000001")
    generation.remove(aside)
    assert not aside.exists()


def test_retention_follows_its_rules(root):
    """Checkpoints of another branch are neither counted nor removed."""
    assert save_one(root / "iter_0000009", 9).error is None  # by no launch of this run
    generation = take_generation(root, {"host": "here"})
    retention = Retention(RetentionRules(keep_last=2, keep_every=4), generation)
    for seed in range(1, 8):
        lineage = Lineage((generation.segment(seed),))
        report = save_one(
            root / f"iter_{seed:07d}",
            seed,
            generation,
            extra_files={LINEAGE: lineage.encode(None)},
            before_writing=retention.wait,
            on_commit=partial(retention.apply, seed, lineage, math.nan),
        )
        assert report.error is None
    retention.close()
    assert [int(path.name[5:]) for path in sorted(root.glob("iter_*")) if is_complete(path)] == [
        4,
        6,
        7,
        9,
    ]
    for seed in (4, 6, 7):
        assert_holds(root / f"iter_{seed:07d}", seed, ROWS)
    assert not [
        key
        for seed in (1, 2, 3, 5)
        for key in root.store.sizes(f"{root.key}/iter_{seed:07d}")
        if "distcp" in key
    ]


def test_failed_upload_fails_the_save_and_is_cleaned_up(root, server, monkeypatch):
    """The store rejects all data for longer than requests are repeated."""
    generation = take_generation(root, {})
    monkeypatch.setenv("MEGATRON_STORAGE_DEADLINE", "0.3")
    with FaultyProxy(
        server,
        lambda method, path, headers: (
            "refuse" if ".distcp" in path and method != "DELETE" else None
        ),
    ):
        object_storage.open_store.cache_clear()
        report = save_one(root / "iter_0000001", 1, generation)
        assert report.error is not None
        assert not report.superseded
    monkeypatch.setenv("MEGATRON_STORAGE_DEADLINE", "60")
    object_storage.open_store.cache_clear()
    assert not any((root / "iter_0000001").glob("*.distcp"))
    assert not is_complete(root / "iter_0000001")
    assert save_one(root / "iter_0000001", 2, generation).error is None
    assert_holds(root / "iter_0000001", 2, ROWS)


def save_in_an_outage(rank, world_size, root, generation, environment):
    """Save on one rank while the store rejects requests."""
    with mock.patch.dict(os.environ, environment):
        object_storage.open_store.cache_clear()
        ours = object_commit.ObjectGeneration(path_of(root), *generation)
        with AsyncSaver(timeout=30) as saver:
            state = sharded(rank, world_size, 7.0)
            report = saver.save(state, f"{root}/iter_0000001", common={}, generation=ours).wait()
            if rank == 0:
                assert not (path_of(root) / "end-of-outage").is_file()
        object_storage.open_store.cache_clear()
    return report.error


def test_outage_is_reported_on_every_rank_and_cleaned_up(root, server, pool):
    """The store rejects everything from the first small file on, also reads of the owner."""
    outage = threading.Event()

    def fault(method, path, headers):
        if path.endswith("/common.pt"):
            outage.set()
        if path.endswith("/end-of-outage"):
            outage.clear()
        return "refuse" if outage.is_set() else None

    generation = take_generation(root, {})
    with FaultyProxy(server, fault):
        environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        environment["MEGATRON_STORAGE_DEADLINE"] = "0.3"
        told, other = pool.run(save_in_an_outage, 2, str(root), generation.id, environment)
    assert "common.pt" in told
    assert other == told
    assert [path.name for path in (root / "iter_0000001").iterdir()] == [".claim"]


@pytest.mark.parametrize("repeatedly", [False, True])
def test_lost_answer_after_the_commit(root, server, monkeypatch, repeatedly):
    """A lost answer is read back. Without the server the save may fail, but not be damaged."""
    lost = []
    broken = threading.Event()

    def fault(method, path, headers):
        if method == "PUT" and path.endswith("/metadata.json") and not lost:
            lost.append(path)
            if repeatedly:
                broken.set()
            return "drop"
        return "refuse" if broken.is_set() else None

    generation = take_generation(root, {})
    # On a busy machine a request before the commit may exceed a short deadline: then a longer one.
    deadlines = ("0.3", "3", "20") if repeatedly else ("60",)
    with FaultyProxy(server, fault):
        for deadline in deadlines:
            monkeypatch.setenv("MEGATRON_STORAGE_DEADLINE", deadline)
            object_storage.open_store.cache_clear()
            report = save_one(root / "iter_0000001", 1, generation)
            if lost:
                break
        broken.clear()
    monkeypatch.setenv("MEGATRON_STORAGE_DEADLINE", "60")
    object_storage.open_store.cache_clear()
    assert lost
    if not repeatedly:
        assert report.error is None
    if is_complete(root / "iter_0000001"):  # after any error
        assert_holds(root / "iter_0000001", 1, ROWS)
    assert save_one(root / "iter_0000001", 2, generation).error is None
    assert_holds(root / "iter_0000001", 2, ROWS)


WRITERS = """
import os, random, signal, sys, threading, torch, traceback
from megatron.core.dist_checkpointing import *
from megatron.core.dist_checkpointing.ownership.lineage import LINEAGE
from megatron.core.object_path import path_of
from megatron.core.dist_checkpointing.saving.retention import Retention, RetentionRules

torch.set_num_threads(1)
root, starts, rng = path_of(sys.argv[1]), int(sys.argv[2]), random.Random(1)

def train(answers):
    tensors = {"w": torch.zeros(300, 1000), "b": torch.zeros(7)}
    state = {key: ShardedTensor.replicated(key, tensor) for key, tensor in tensors.items()}
    generation = take_generation(root, {"pid": os.getpid()})
    retention = Retention(RetentionRules(keep_last=2), generation)
    step = max((int(path.name[5:]) for path in root.glob("iter_*") if is_complete(path)), default=0)
    lineage = Lineage(())
    if step:
        load(state, root / f"iter_{step:07d}", verify=True)
        assert (tensors["w"] == step).all() and (tensors["b"] == -step).all(), step
        lineage = read_lineage(root / f"iter_{step:07d}")
    os.write(answers, f"{step}\\n".encode())
    with AsyncSaver() as saver:
        while True:
            step += 1
            saver.wait_staged()
            tensors["w"].add_(1)
            tensors["b"].sub_(1)
            ours = lineage.descend(generation.segment(step))

            def done(step=step, ours=ours):
                os.write(answers, f"{step}\\n".encode())
                retention.apply(step, ours, 0.0)

            saver.save(state, root / f"iter_{step:07d}", common={"step": step}, generation=generation,
                       before_writing=retention.wait, extra_files={LINEAGE: ours.encode(None)}, on_commit=done)
            for report in saver.poll():
                if report.superseded:
                    return
                assert report.error is None, report.error

def start():
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, os.fdopen(reading)
    try:
        train(writing)
        os._exit(3)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)

last, running = 0, []
for number in range(starts):
    child, answers = start()
    running.append((child, answers))
    step = int(answers.readline())
    assert step >= last, (step, last)
    for _ in range(rng.randrange(1, 3)):
        last = int(answers.readline())
    if number % 2:  # the older of the two: it still runs, and has lost the directory
        assert os.waitstatus_to_exitcode(os.waitpid(running.pop(0)[0], 0)[1]) == 3
    threading.Event().wait(rng.random() * 0.3)  # any moment of the next save, or of the removals after it
    if number % 2:
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, "the child ended by itself"
        running.clear()
print(last)
"""


def run_kills(root, starts):
    """Kill every second start after it has superseded another one that is still running."""
    result = run_program(WRITERS, root, starts, timeout=3600)
    assert result.returncode == 0, result.stderr
    whole = [path for path in root.glob("iter_*") if is_complete(path)]
    assert whole
    assert all(verify(path).ok for path in whole), "0 torn"
    assert max(int(path.name[5:]) for path in whole) >= int(result.stdout), "0 lost"
    assert len(whole) <= 4, "what is superfluous is removed"


def test_random_kills_and_takeovers(root):
    run_kills(root, 4)


@pytest.mark.slow
def test_many_random_kills_and_takeovers(root):
    run_kills(root, 120)


def test_load_reports_the_bytes_read(root):
    assert save_one(root / "c", 3).error is None
    rows = torch.zeros(10, 20)
    whole = Training(3, ROWS).weight
    state = {"w": ShardedTensor("weight", tuple(whole.shape), torch.float32, ())}
    box = ShardedTensor.replicated("weight", rows).boxes[0]
    state = {
        "w": ShardedTensor(
            "weight", tuple(whole.shape), torch.float32, (type(box)((100, 0), rows),)
        )
    }
    report = load(state, root / "c", strictness="log_unexpected", verify=False)
    assert torch.equal(rows, whole[100:110])
    assert report.bytes_read < 10_000
    rows.zero_()
    report = load(state, root / "c", strictness="log_unexpected")
    assert torch.equal(rows, whole[100:110])
    assert report.bytes_read < 10_000 + 2 * BLOCK_SIZE
