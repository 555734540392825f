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
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing.format.checksums import checksum_records
from megatron.core.dist_checkpointing.format.schema import CheckpointError
from megatron.core.dist_checkpointing.generation import Generation, SupersededError
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.dist_checkpointing.saving.commit import (
    Outcome,
    PendingCheckpoint,
    Rewrite,
    SaveBarrier,
    SaveReport,
    open_store,
)
from megatron.core.dist_checkpointing.saving.prepared_plan import Planner, PreparedPlan
from megatron.core.dist_checkpointing.saving.shard_file import ObjectFile, common_archive, object_file
from megatron.core.dist_checkpointing.saving.staging import (
    SLOT_SIZE,
    DeviceSource,
    StageAndWrite,
    StagingBuffer,
    bind_sources,
)
from megatron.core.dist_checkpointing.threads import Workers


class _AroundCommit(NamedTuple):
    """What the caller wants rank 0 to do; see `AsyncSaver.save`."""

    before_writing: Callable[[], None] | None
    rewrite: Rewrite | None
    beside: Mapping[str, bytes]
    on_commit: Callable[[], None] | None


class _Snapshot(NamedTuple):
    """What a save needs of the live state: copies of small things, and a transfer that is to copy the tensors."""

    plan: PreparedPlan
    common: bytes
    objects: ObjectFile
    transfer: StageAndWrite


class SaveHandle:
    """One save under way."""

    def __init__(self, report: SaveReport) -> None:
        self._report = report
        self._finished = threading.Event()

    def done(self) -> bool:
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> SaveReport:
        """The report, when the checkpoint is committed or the save has failed. Raises TimeoutError."""
        if not self._finished.wait(timeout):
            raise TimeoutError(f"{self._report.directory}: still being saved after {timeout} s")
        return self._report


@dataclass
class _Save:
    """A save under way, as the training thread sees it."""

    report: SaveReport
    handle: SaveHandle
    started: float
    transfer: StageAndWrite | None = None  # None: the snapshot failed
    device_wait: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def has_ended(self) -> bool:
        return self.handle.done() and (self.device_wait is None or self.device_wait[1].query())

    def end(self) -> SaveReport:
        """The report, after the end, with the time that the device waited for the copies."""
        report = self.handle.wait()
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
        self._current: _Save | None = None
        self._reports: list[SaveReport] = []
        self._past: deque[SaveBarrier] = deque()  # a slow rank may still ask how the last save ended
        self._leftover: PendingCheckpoint | None = None  # of a failed save, whose removal may have failed, too
        self._conductor = Workers(1, "checkpoint-conductor")
        self._pool = Workers(workers, "checkpoint-writer")

    @property
    def busy(self) -> bool:
        """Whether a save is under way on this rank; `save` would wait for it."""
        return self._current is not None and not self._current.handle.done()

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
        before_writing: Callable[[], None] | None = None,
        rewrite: Rewrite | None = None,
        beside: Mapping[str, bytes] | None = None,
        on_commit: Callable[[], None] | None = None,
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
        report = SaveReport(Path(directory), bytes=plan.nbytes, total_bytes=plan.total_bytes)
        self._count += 1
        save_id = f"{plan.nonce}-{self._count}"
        barrier = SaveBarrier(self._store, save_id, self._coordination.rank, self._coordination.size, self._timeout)
        pending = PendingCheckpoint.of(report.directory, save_id, generation)
        current = _Save(report, SaveHandle(report), started)
        snapshot: _Snapshot | Exception
        try:
            snapshot = self._take_snapshot(plan, state, common, frozenset(volatile))
            current.transfer = snapshot.transfer
        except Exception as error:
            snapshot = error
        self._current = current
        around = _AroundCommit(before_writing, rewrite, beside or {}, on_commit)
        self._conductor.submit(lambda: self._conduct(current, snapshot, barrier, pending, around))
        report.blocking = time.perf_counter() - started
        return current.handle

    def wait_staged(self) -> None:
        """Return when the tensors of the last save may change. On CUDA the current stream waits, not the host."""
        current = self._current
        if current is None or current.transfer is None or current.handle.done():
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
        sources = bind_sources(plan.files, plan.constants, state, volatile)
        stream = None
        if any(isinstance(source, DeviceSource) for source in sources):
            self._stream = stream = self._stream or torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
        return _Snapshot(plan, archive, objects, StageAndWrite(plan.files, plan.chunks, sources, objects, stream))

    def _slots(self, plan: PreparedPlan, pinned: bool, touch: bool = False) -> list:
        """The staging slots, allocated when the plan needs more than there are."""
        needed = max(1, min(len(plan.chunks), self._max_slots or len(plan.chunks)))
        if self._buffer is None or len(self._buffer.slots) < needed:
            if self._buffer is not None:
                self._buffer.close()
            self._buffer = StagingBuffer(needed, pinned)
            if touch:
                self._buffer.touch()
        return self._buffer.slots

    def _conduct(
        self,
        current: _Save,
        snapshot: _Snapshot | Exception,
        barrier: SaveBarrier,
        pending: PendingCheckpoint,
        around: _AroundCommit,
    ) -> None:
        """The background of one save. All ranks end with the same outcome."""
        report, failure = current.report, None
        is_coordinator = self._coordination.is_coordinator
        try:
            if isinstance(snapshot, Exception):
                raise snapshot
            self._write(current, snapshot, barrier, pending, around.before_writing)
            if is_coordinator:
                self._commit(snapshot, barrier, pending, around)
        except BaseException as error:
            failure = error
            if not isinstance(snapshot, Exception):
                snapshot.transfer.abort()
        try:
            if is_coordinator:
                outcome = self._end(failure, barrier, pending)
            else:
                if failure is not None:
                    barrier.fail(_describe(failure))
                outcome = barrier.await_end()
        except BaseException as error:  # contact is lost, so this rank alone knows why
            outcome = Outcome(_describe(failure or error))
        report.error, report.superseded = outcome
        report.total = time.perf_counter() - current.started
        report.commit = report.total - report.writing
        current.handle._finished.set()

    def _write(
        self,
        current: _Save,
        snapshot: _Snapshot,
        barrier: SaveBarrier,
        pending: PendingCheckpoint,
        before_writing: Callable[[], None] | None,
    ) -> None:
        """Copy, have the directory made, write, and tell rank 0 that all of it is durable."""
        transfer, plan = snapshot.transfer, snapshot.plan
        transfer.stage(self._pool, self._slots(plan, transfer.on_device))
        if self._coordination.is_coordinator:
            while len(self._past) > 1:
                self._past.popleft().forget()
            self._past.append(barrier)
            self._remove_leftover()
            if before_writing is not None:
                before_writing()
            pending.begin(plan.total_bytes)
            barrier.begin()
        else:
            barrier.await_begin()

        def wrote(nbytes: int) -> None:
            barrier.show_progress()
            self._progress(nbytes)

        checksums = transfer.write(pending.pending, wrote)
        current.report.staging = transfer.staged_at - current.started
        current.report.writing = time.perf_counter() - current.started
        barrier.report(snapshot.objects.locations, checksum_records(checksums))

    def _commit(
        self, snapshot: _Snapshot, barrier: SaveBarrier, pending: PendingCheckpoint, around: _AroundCommit
    ) -> None:
        objects, checksums = barrier.collect()
        assert snapshot.plan.metadata is not None
        metadata = snapshot.plan.metadata.encode(objects)
        pending.commit(checksums, metadata, snapshot.common, around.beside, around.rewrite, barrier.show_progress)
        try:
            if around.on_commit is not None:
                around.on_commit()
        except SupersededError:
            raise
        except Exception as error:
            raise _AfterCommitError(f"committed, but what follows the commit failed: {_describe(error)}") from error

    def _end(self, failure: BaseException | None, barrier: SaveBarrier, pending: PendingCheckpoint) -> Outcome:
        """On rank 0: tell the others, and remove what has failed."""
        if failure is None:
            barrier.end(outcome := Outcome())
            return outcome
        try:
            if pending.generation is not None:
                pending.generation.check(failure)
        except SupersededError as superseded:
            failure = superseded
        outcome = Outcome(_describe(failure), isinstance(failure, SupersededError))
        barrier.end(outcome)
        if not isinstance(failure, _AfterCommitError):
            self._leftover = pending
            pending.abandon()
        return outcome

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
    on_commit: Callable[[], None] | None = None,
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
