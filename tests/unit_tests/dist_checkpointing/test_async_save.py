"""Asynchronous saves: isolated from what training does, committed without collectives."""

import errno
import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from saved_state import Training, assert_holds, assert_sharded, sharded, state_of

from megatron.core.dist_checkpointing import (
    AsyncSaver,
    CheckpointError,
    ShardedTensor,
    is_complete,
    load,
    load_common,
    read_tracker,
    save,
    write_tracker,
)
from megatron.core.dist_checkpointing.saving.staging import SLOT_SIZE


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


LAZY = {  # over several pieces of 8 MB, one of them with rows larger than a piece
    "matrix": torch.arange(3_000_000, dtype=torch.float32).view(3000, 1000),
    "wide": torch.arange(5_000_000, dtype=torch.int32).view(2, -1),
    "vector": torch.arange(7, dtype=torch.bfloat16),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 3),
}


def lazy_state():
    def reader(value):
        return lambda offset, shape: value[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]

    return {key: ShardedTensor.lazy(key, tuple(value.shape), value.dtype, reader(value)) for key, value in LAZY.items()}


def test_what_is_read_while_it_is_staged_is_saved_as_from_memory(tmp_path):
    written = []
    save(state_of(**LAZY), tmp_path / "live", common={}, workers=2)
    save(lazy_state(), tmp_path / "lazy", common={}, workers=2, progress=written.append)
    files = sorted(path.name for path in (tmp_path / "live").glob("*.distcp"))
    assert files == ["__0_0.distcp", "__0_1.distcp"]
    assert all((tmp_path / "lazy" / name).read_bytes() == (tmp_path / "live" / name).read_bytes() for name in files)
    assert sum(written) == sum((tmp_path / "lazy" / name).stat().st_size for name in files)


def test_an_interrupted_save_is_cancelled(tmp_path):
    """The exception of the caller comes through, and nothing is left behind."""
    begun, go_on = threading.Event(), threading.Event()

    def stuck(offset, shape):
        begun.set()
        go_on.wait()
        return torch.zeros(shape)

    class Saver(AsyncSaver):
        def close(self):  # the last that leaving the block does: the save is cancelled by now
            go_on.set()
            super().close()

    state = {"matrix": ShardedTensor.lazy("matrix", (9_000_000,), torch.float32, stuck)}
    with pytest.raises(KeyboardInterrupt), Saver(workers=1) as saver:
        handle = saver.save(state, tmp_path / "interrupted", common={})
        begun.wait()
        raise KeyboardInterrupt
    assert "cancelled" in handle.wait().error and os.listdir(tmp_path) == []
