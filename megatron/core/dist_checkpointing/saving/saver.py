"""Saving in four verbs, of which only the first two touch the training thread.

* **plan** (`prepare`, or the first `save`): all ranks describe what they hold, rank 0 decides who writes what. A
  collective; kept as long as the structure stays the same.
* **stage**: live tensors are copied into host buffers, in the background. `wait_staged` returns when that is done: call
  it before anything changes the tensors, which is the optimizer step. Objects, `common` and `volatile` tensors are
  copied before `save` returns. No file is touched before, and none on the training thread.
* **write**: shard files, durable, with checksums, by background threads.
* **commit**: by rank 0 when all ranks are durable (`commit.py`). No collective.

A save that fails is reported (`poll`, `finish`), its files are removed, and training can go on.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing.format.checksums import checksum_records
from megatron.core.dist_checkpointing.format.metadata import Location
from megatron.core.dist_checkpointing.format.schema import CheckpointError
from megatron.core.dist_checkpointing.generation import Generation, SupersededError
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.dist_checkpointing.planning.file_layout import SLOT_SIZE
from megatron.core.dist_checkpointing.saving.commit import (
    Outcome,
    PendingCheckpoint,
    Rewrite,
    SaveBarrier,
    SaveReport,
    open_store,
)
from megatron.core.dist_checkpointing.saving.object_commit import pending_checkpoint
from megatron.core.dist_checkpointing.saving.objects import common_archive, object_file
from megatron.core.dist_checkpointing.saving.prepared_plan import Planner, PreparedPlan
from megatron.core.dist_checkpointing.saving.staging import DeviceSource, StageAndWrite, StagingBuffer, bind_sources
from megatron.core.dist_checkpointing.threads import Workers
from megatron.core.object_storage import path_of


class _Hooks(NamedTuple):
    """What the caller wants rank 0 to do around the commit; see `AsyncSaver.save`."""

    before_writing: Callable[[], None]
    rewrite: Rewrite | None
    beside: Mapping[str, bytes]
    on_commit: Callable[[], None]


class _Snapshot(NamedTuple):
    """Small things as bytes, and the transfer that copies and writes the tensors."""

    common: bytes  # content of common.pt, on rank 0
    objects: dict[str, Location]
    transfer: StageAndWrite


class SaveHandle:
    """One save under way; callers use `done` and `wait`, the rest is the saver's."""

    def __init__(self, plan: PreparedPlan, barrier: SaveBarrier, pending: PendingCheckpoint, started: float) -> None:
        self.plan, self.barrier, self.pending, self.started = plan, barrier, pending, started
        self.report = SaveReport(pending.directory, bytes=plan.files.nbytes, total_bytes=plan.total_bytes)
        self.snapshot: _Snapshot | Exception
        self.device_wait: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._finished = threading.Event()

    def done(self) -> bool:
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> SaveReport:
        """The report, when the checkpoint is committed or the save has failed. Raises TimeoutError."""
        if not self._finished.wait(timeout):
            raise TimeoutError(f"{self.report.directory}: still being saved after {timeout} s")
        return self.report

    @property
    def transfer(self) -> StageAndWrite | None:
        """None if the snapshot failed."""
        return None if isinstance(self.snapshot, Exception) else self.snapshot.transfer

    def elapsed(self) -> float:
        return time.perf_counter() - self.started

    def finish(self, outcome: Outcome) -> None:
        self.report.error, self.report.superseded = outcome
        self.report.total = self.elapsed()
        self.report.commit = self.report.total - self.report.writing
        self._finished.set()

    def has_ended(self) -> bool:
        """Also on the device, whose clock is not read before."""
        return self.done() and (self.device_wait is None or self.device_wait[1].query())

    def end(self) -> SaveReport:
        """On the training thread: the report, with the time that the device waited for the copies."""
        report = self.wait()
        if self.device_wait is not None:
            begin, end = self.device_wait
            end.synchronize()
            report.blocking += begin.elapsed_time(end) / 1e3
        return report


class AsyncSaver:
    """Saves checkpoints of one state again and again. All ranks of `group` make the same calls in the same order.

    `fully_parallel` shares out the writing of what several ranks hold; `workers` threads write as many files per rank;
    `staging_mem_limit` (bytes) caps the host buffers: below the size of a rank's share the snapshot takes as long as
    the writing. A save fails when no rank has written anything for `timeout` seconds.
    `progress` is called from the writing threads with the number of bytes just written. Leaving a `with` block by an
    exception cancels the save under way.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        fully_parallel: bool = True,
        workers: int = 2,
        staging_mem_limit: int | None = None,
        timeout: float = 600.0,
        assume_constant_structure: bool = False,
        progress: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers {workers} must be at least 1")
        self._coordination = Coordination.of(group)
        self._planner = Planner(self._coordination, fully_parallel, workers, assume_constant_structure)
        self._workers, self._timeout = workers, timeout
        self._progress = progress
        self._max_slots = None if staging_mem_limit is None else max(2, staging_mem_limit // SLOT_SIZE)
        self._buffer: StagingBuffer | None = None
        self._stream: torch.cuda.Stream | None = None
        self._store = open_store(timedelta(seconds=timeout))
        self._count = 0
        self._current: SaveHandle | None = None
        self._reports: list[SaveReport] = []
        self._past: deque[SaveBarrier] = deque()  # a slow rank may still ask how the last save ended
        self._leftover: PendingCheckpoint | None = None  # of a failed save, whose removal may have failed, too
        self._conductor = Workers(1, "checkpoint-conductor")
        self._pool = Workers(workers, "checkpoint-writer")

    @property
    def busy(self) -> bool:
        """Whether a save is under way on this rank; `save` would wait for it."""
        return self._current is not None and not self._current.done()

    def prepare(self, state: ShardedStateDict) -> None:
        """Plan and allocate ahead of the first save, so that it costs no more than the others. A collective."""
        plan = self._planner.plan_for(state)
        pinned = any(tensor.is_cuda for tensor in _tensors(state))
        self._conductor.submit(lambda: self._slots(plan, pinned, touch=True)).result()

    def save(
        self,
        state: ShardedStateDict,
        directory: str | os.PathLike[str],
        *,
        common: dict[str, Any],
        volatile: Collection[str] = (),
        generation: Generation | None = None,
        before_writing: Callable[[], None] = lambda: None,
        rewrite: Rewrite | None = None,
        beside: Mapping[str, bytes] | None = None,
        on_commit: Callable[[], None] = lambda: None,
    ) -> SaveHandle:
        """Begin to save `state` as the checkpoint `directory`; waits for the save before it, if that still runs.

        `common` is stored by rank 0. `volatile` names tensors that the next forward or backward pass changes: they are
        copied before this returns, all others until `wait_staged`. With a `generation` the checkpoint appears only as
        long as that owns the directory of checkpoints.

        On rank 0, in the background: `before_writing` runs before any rank writes; `rewrite` stores the checkpoint in
        another form before it has its name; `beside` are small files that are added to it then; `on_commit` runs right
        after the commit (it moves the tracker). Only planning errors are raised; all others are reported.
        """
        started = time.perf_counter()
        self._wait_for_current()
        plan = self._planner.plan_for(state)
        self._count += 1
        save_id = f"{plan.nonce}-{self._count}"
        barrier = SaveBarrier(self._store, save_id, self._coordination.rank, self._coordination.size, self._timeout)
        pending = pending_checkpoint(path_of(directory), save_id, generation)
        current = self._current = SaveHandle(plan, barrier, pending, started)
        try:
            current.snapshot = self._take_snapshot(plan, state, common, frozenset(volatile))
        except Exception as error:  # the other ranks must hear of it, so the save goes on and fails on all together
            current.snapshot = error
        hooks = _Hooks(before_writing, rewrite, beside or {}, on_commit)
        self._conductor.submit(lambda: self._conduct(current, hooks))
        current.report.blocking = current.elapsed()
        return current

    def wait_staged(self) -> None:
        """Return when the tensors of the last save may change. On CUDA the current stream waits, not the host."""
        current = self._current
        if current is None or current.transfer is None or current.done():
            return
        begin = time.perf_counter()
        current.transfer.staged.wait()
        current.report.blocking += time.perf_counter() - begin
        if current.transfer.on_device and current.device_wait is None:
            assert self._stream is not None
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
            torch.cuda.current_stream().wait_stream(self._stream)
            events[1].record()
            current.device_wait = events

    def poll(self) -> list[SaveReport]:
        """Reports of saves that have ended since the last call, in order; never blocks."""
        if self._current is not None and self._current.has_ended():
            self._wait_for_current()
        reports, self._reports = self._reports, []
        return reports

    def finish(self) -> list[SaveReport]:
        """Wait for the save under way, if any; then as `poll`."""
        self._wait_for_current()
        return self.poll()

    def close(self) -> None:
        """Finish, end the threads and give the buffers back."""
        self.finish()
        self._conductor.submit(self._remove_leftover).result()
        self._conductor.close()
        self._pool.close()
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None

    def __enter__(self) -> AsyncSaver:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None and self._current is not None and self._current.transfer is not None:
            self._current.transfer.cancel()
        self.close()

    def _wait_for_current(self) -> None:
        if self._current is not None:
            self._reports.append(self._current.end())
            self._current = None

    def _take_snapshot(
        self, plan: PreparedPlan, state: ShardedStateDict, common: dict[str, Any], volatile: frozenset[str]
    ) -> _Snapshot:
        """What must be done before `save` returns."""
        archive = common_archive(common) if self._coordination.is_coordinator else b""
        mine = set(plan.plan.objects)
        entries = [entry for entry in state.values() if isinstance(entry, ShardedObject) and entry.key in mine]
        objects = object_file(entries, self._coordination.rank, self._workers)
        sources = bind_sources(plan.files, state, volatile)
        stream = None
        if any(isinstance(source, DeviceSource) for source in sources):
            self._stream = stream = self._stream or torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())  # the copies must see the last update
        return _Snapshot(archive, objects.locations, StageAndWrite(plan.files, sources, objects, stream))

    def _slots(self, plan: PreparedPlan, pinned: bool, touch: bool = False) -> list:
        """The staging slots, allocated when the plan needs more than there are."""
        needed = max(1, min(len(plan.files.chunks), self._max_slots or len(plan.files.chunks)))
        if self._buffer is None or len(self._buffer.slots) < needed:
            if self._buffer is not None:
                self._buffer.close()
            self._buffer = StagingBuffer(needed, pinned)
            if touch:
                self._buffer.touch()
        return self._buffer.slots

    def _conduct(self, save: SaveHandle, hooks: _Hooks) -> None:
        """One save in the background: write, commit, agree on the outcome. On every rank."""
        failure: BaseException | None = None
        try:
            if isinstance(save.snapshot, Exception):
                raise save.snapshot
            self._write(save, save.snapshot, hooks)
            if self._coordination.is_coordinator:
                self._commit(save, save.snapshot, hooks)
        except BaseException as error:
            failure = error
            if save.transfer is not None:
                save.transfer.abort()
        try:
            outcome = self._agree(save, failure)
        except BaseException as error:  # contact with the others is lost, so this rank tells what it knows
            outcome = Outcome(_describe(failure or error))
        save.finish(outcome)

    def _write(self, save: SaveHandle, snapshot: _Snapshot, hooks: _Hooks) -> None:
        """Stage, wait until rank 0 has made the directory, write, and report that all of it is durable."""
        transfer = snapshot.transfer
        transfer.stage(self._pool, self._slots(save.plan, transfer.on_device))
        if self._coordination.is_coordinator:
            self._forget_past(save.barrier)
            self._remove_leftover()
            hooks.before_writing()
            save.pending.begin(save.plan.total_bytes)
            save.barrier.begin()
        else:
            save.barrier.await_begin()

        barrier = save.barrier

        # It must not know `save`, which knows the transfer that keeps it: the buffers would outlive the saver until the
        # next garbage collection, and in a forked child, which has other memory in their place, unmap that.
        def wrote(nbytes: int) -> None:
            barrier.show_progress()
            self._progress(nbytes)

        checksums = transfer.write(save.pending, wrote)
        save.report.staging = transfer.staged_at - save.started
        save.report.writing = save.elapsed()
        name_of = save.pending.name_of
        objects = {key: place._replace(file=name_of(place.file)) for key, place in snapshot.objects.items()}
        save.barrier.report(objects, checksum_records(checksums))

    def _commit(self, save: SaveHandle, snapshot: _Snapshot, hooks: _Hooks) -> None:
        """On rank 0, when all ranks have reported."""
        objects, checksums = save.barrier.collect()
        assert save.plan.metadata is not None
        metadata, alive = save.plan.metadata.encode(objects, save.pending.name_of), save.barrier.show_progress
        save.pending.commit(checksums, metadata, snapshot.common, hooks.beside, hooks.rewrite, alive)
        try:
            hooks.on_commit()
        except SupersededError:
            raise
        except Exception as error:
            raise _AfterCommitError(f"committed, but what follows the commit failed: {_describe(error)}") from error

    def _agree(self, save: SaveHandle, failure: BaseException | None) -> Outcome:
        """Rank 0 decides how the save ended and removes what has failed; the others tell it why they cannot go on."""
        if not self._coordination.is_coordinator:
            if failure is not None:
                save.barrier.fail(_describe(failure))
            return save.barrier.await_end()
        if failure is not None:
            failure = save.pending.explain(failure)
        outcome = Outcome() if failure is None else Outcome(_describe(failure), isinstance(failure, SupersededError))
        save.barrier.end(outcome)
        if failure is not None and not isinstance(failure, _AfterCommitError):
            self._leftover = save.pending
            save.pending.abandon()
        return outcome

    def _forget_past(self, barrier: SaveBarrier) -> None:
        """Delete the store's keys of saves before the last one, whose end a slow rank may still ask for."""
        while len(self._past) > 1:
            self._past.popleft().forget()
        self._past.append(barrier)

    def _remove_leftover(self) -> None:
        """Of the last failed save: a rank may have come too late for its removal, or the disk was read-only then."""
        if self._leftover is not None:
            self._leftover.abandon()
            self._leftover = None


class _AfterCommitError(CheckpointError):
    """The checkpoint is committed, what should follow it failed."""


def _tensors(state: ShardedStateDict) -> list[torch.Tensor]:
    return [box.tensor for entry in state.values() if not isinstance(entry, ShardedObject) for box in entry.boxes]


def _describe(error: BaseException) -> str:
    if isinstance(error, (CheckpointError, OSError)):
        return str(error)
    return f"{type(error).__name__}: {error}"


def staging_for_waiting(workers: int) -> int:
    """Bytes of host buffers that keep `workers` writers busy: room for all pieces pays only where nobody waits."""
    return max(8, 4 * workers) * SLOT_SIZE


def save(
    state: ShardedStateDict,
    directory: str | os.PathLike[str],
    *,
    common: dict[str, Any],
    group: dist.ProcessGroup | None = None,
    fully_parallel: bool = True,
    workers: int = 2,
    on_commit: Callable[[], None] = lambda: None,
    rewrite: Rewrite | None = None,
    timeout: float = 600.0,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> SaveReport:
    """The same verbs in a row: returns on every rank when the checkpoint is committed.

    Raises CheckpointError on every rank if it is not; nothing of it is left then, and a checkpoint that `directory`
    held before is as it was.
    """
    limit = staging_for_waiting(workers)
    with AsyncSaver(
        group,
        fully_parallel=fully_parallel,
        workers=workers,
        staging_mem_limit=limit,
        timeout=timeout,
        progress=progress,
    ) as saver:
        report = saver.save(state, directory, common=common, on_commit=on_commit, rewrite=rewrite).wait()
    if report.error is not None:
        raise CheckpointError(f"{report.directory}: not saved: {report.error}")
    return report
