"""Saving in four verbs, of which only the first two touch the training thread.

* **plan** (`prepare`, or the first `save`): all ranks describe what they hold, rank 0 decides who writes what. A
  collective; kept as long as the structure stays the same.
* **stage**: live tensors are copied into host buffers, in the background. `wait_staged` returns when that is done: call
  it before anything changes the tensors, which is the optimizer step. Objects, `common` and `volatile` tensors are
  copied before `save` returns.
* **write**: shard files, durable, with checksums, by background threads.
* **finalize** (`commit.py`): rank 0 commits when all ranks are durable. No collective.

A save that fails is reported (`poll`, `finish`), its files are removed, and training can go on.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.dist_checkpointing.saving.commit import PendingSave, RankResult, Rewrite
from megatron.core.dist_checkpointing.saving.prepared_plan import PreparedPlan, prepare_plan
from megatron.core.dist_checkpointing.saving.snapshot import ObjectFile, common_archive, object_file
from megatron.core.dist_checkpointing.saving.stage_and_write import Transfer
from megatron.core.dist_checkpointing.saving.staging import SLOT_SIZE, DeviceSource, StagingBuffer, bind_sources
from megatron.core.dist_checkpointing.threads import Workers
from megatron.core.durable_files import check_free_space


@dataclass
class SaveReport:
    """How a save went on this rank. Seconds: `blocking` is what the training thread was held up, the others overlap
    with training; `bytes` are this rank's, `total_bytes` all ranks'. `error` is None for a committed checkpoint."""

    directory: Path
    error: str | None = None
    bytes: int = 0
    total_bytes: int = 0
    blocking: float = 0.0
    staging: float = 0.0
    writing: float = 0.0
    commit: float = 0.0
    total: float = 0.0

    @property
    def gb_per_second(self) -> float:
        """Of all ranks together, from the call to the commit."""
        return self.total_bytes / self.total / 1e9 if self.total else 0.0


@dataclass
class _Job:
    report: SaveReport
    started: float
    plan: PreparedPlan
    save_id: str
    transfer: Transfer | None  # None: the snapshot failed
    objects: ObjectFile | None
    common: bytes
    on_commit: Callable[[], None] | None
    rewrite: Rewrite | None
    snapshot_error: Exception | None


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


class AsyncSaver:
    """Saves checkpoints of one state again and again. All ranks of `group` make the same calls in the same order.

    `fully_parallel` shares out the writing of what several ranks hold; `workers` threads write as many files per rank;
    `staging_mem_limit` (bytes) caps the host buffers: below the size of a rank's share the snapshot takes as long as
    the writing. A rank that is silent for `timeout` seconds after rank 0 has finished its own part fails the save.
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
        self._fully_parallel, self._workers, self._timeout = fully_parallel, workers, timeout
        self._assume_constant_structure, self._progress = assume_constant_structure, progress
        self._max_slots = None if staging_mem_limit is None else max(2, staging_mem_limit // SLOT_SIZE)
        self._plan: PreparedPlan | None = None
        self._buffer: StagingBuffer | None = None
        self._stream: torch.cuda.Stream | None = None
        self._count = 0
        self._current: tuple[_Job, SaveHandle] | None = None
        self._reports: list[SaveReport] = []
        self._failed_save: PendingSave | None = None
        self._conductor = Workers(1, "checkpoint-conductor")
        self._pool = Workers(workers, "checkpoint-writer")

    @property
    def busy(self) -> bool:
        """Whether a save is under way on this rank; `save` would wait for it."""
        return self._current is not None and not self._current[1].done()

    def prepare(self, state: ShardedStateDict) -> None:
        """Plan and allocate ahead of the first save, so that it costs no more than the others. A collective."""
        self._plan = self._make_plan(state)
        pinned = any(tensor.is_cuda for tensor in _tensors(state))
        self._conductor.submit(lambda: self._slots(pinned, touch=True)).result()

    def save(
        self,
        state: ShardedStateDict,
        directory: str | os.PathLike[str],
        *,
        common: dict[str, Any],
        on_commit: Callable[[], None] | None = None,
        volatile: Collection[str] = (),
        rewrite: Rewrite | None = None,
    ) -> SaveHandle:
        """Begin to save `state` as the checkpoint `directory`; waits for the save before it, if that still runs.

        `common` is stored by rank 0. `volatile` names tensors that the next forward or backward pass changes: they are
        copied before this returns, all others until `wait_staged`. `on_commit` runs on rank 0, in the background, right
        after the commit (it moves the tracker), `rewrite` there right before it, to store the checkpoint in another
        form. Only planning errors are raised; all others are reported.
        """
        started = time.perf_counter()
        self._wait_for_current()
        self._plan = plan = self._make_plan(state)
        report = SaveReport(Path(directory), bytes=plan.nbytes, total_bytes=plan.total_bytes)
        self._count += 1
        job = _Job(report, started, plan, f"{plan.nonce}-{self._count}", None, None, b"", on_commit, rewrite, None)
        try:
            self._take_snapshot(job, state, common, frozenset(volatile))
        except Exception as error:
            job.snapshot_error = error
        handle = SaveHandle(report)
        self._current = (job, handle)
        self._conductor.submit(lambda: self._conduct(job, handle))
        report.blocking = time.perf_counter() - started
        return handle

    def wait_staged(self) -> None:
        """Return when the tensors of the last save may change. On CUDA the current stream waits, not the host."""
        if self._current is None or self._current[0].transfer is None:
            return
        job = self._current[0]
        begin = time.perf_counter()
        assert job.transfer is not None
        job.transfer.staged.wait()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        if not self._current[1].done():
            job.report.blocking += time.perf_counter() - begin

    def poll(self) -> list[SaveReport]:
        """Reports of saves that have ended since the last call, in order; never blocks."""
        if self._current is not None and self._current[1].done():
            self._reports.append(self._current[0].report)
            self._current = None
        reports, self._reports = self._reports, []
        return reports

    def finish(self) -> list[SaveReport]:
        """Wait for the save under way, if any; then as `poll`."""
        self._wait_for_current()
        return self.poll()

    def close(self) -> None:
        """Finish, end the threads and give the buffers back."""
        self.finish()
        self._conductor.close()
        self._pool.close()
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None
        if self._failed_save is not None and self._coordination.is_coordinator:
            self._failed_save.forget()

    def __enter__(self) -> AsyncSaver:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None and self._current is not None and self._current[0].transfer is not None:
            self._current[0].transfer.cancel()
        self.close()

    def _wait_for_current(self) -> None:
        if self._current is not None:
            self._current[1].wait()
            self._reports.append(self._current[0].report)
            self._current = None

    def _make_plan(self, state: ShardedStateDict) -> PreparedPlan:
        return prepare_plan(
            state, self._coordination, self._fully_parallel, self._workers, self._plan, self._assume_constant_structure
        )

    def _take_snapshot(
        self, job: _Job, state: ShardedStateDict, common: dict[str, Any], volatile: frozenset[str]
    ) -> None:
        """What must be done before `save` returns."""
        if self._coordination.is_coordinator:
            job.common = common_archive(common)
        mine = set(job.plan.plan.objects)
        objects = [entry for entry in state.values() if isinstance(entry, ShardedObject) and entry.key in mine]
        job.objects = object_file(objects, self._coordination.rank, self._workers)
        sources = bind_sources(job.plan.files, job.plan.constants, state, volatile)
        on_device = any(isinstance(source, DeviceSource) for source in sources)
        if on_device:
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
        stream = self._stream if on_device else None
        job.transfer = Transfer(job.plan.files, job.plan.chunks, sources, job.objects, stream, self._progress)

    def _slots(self, pinned: bool, touch: bool = False) -> list:
        """The staging slots, allocated when the plan needs more than there are."""
        assert self._plan is not None
        needed = max(1, min(len(self._plan.chunks), self._max_slots or len(self._plan.chunks)))
        if self._buffer is None or len(self._buffer.slots) < needed:
            if self._buffer is not None:
                self._buffer.close()
            self._buffer = StagingBuffer(needed, pinned)
            if touch:
                self._buffer.touch()
        return self._buffer.slots

    def _conduct(self, job: _Job, handle: SaveHandle) -> None:
        """The background of one save, from staging to commit."""
        save = None
        try:
            if self._failed_save is not None and self._coordination.is_coordinator:
                self._failed_save.forget()
                self._failed_save = None
            directory, rank, size = job.report.directory, self._coordination.rank, self._coordination.size
            save = PendingSave.begin(directory, job.save_id, rank, size)
            self._write_and_commit(job, save)
        except BaseException as error:
            removed = isinstance(error, FileNotFoundError) and save is not None and save.given_up()
            reason = save.failure_reason() if save is not None and removed else _describe(error)
            job.report.error = reason
            if save is not None and not isinstance(error, _AfterCommitError):
                self._failed_save = save
                if self._coordination.is_coordinator:
                    save.abandon(reason)
                else:
                    names = [file.name for file in job.plan.files]
                    save.publish_failure(reason, names if job.objects is None else [*names, job.objects.name])
        finally:
            if job.transfer is not None:
                job.transfer.staged.set()
            job.report.total = time.perf_counter() - job.started
            handle._finished.set()

    def _write_and_commit(self, job: _Job, save: PendingSave) -> None:
        if job.snapshot_error is not None:
            raise job.snapshot_error
        assert job.transfer is not None and job.objects is not None
        check_free_space(save.pending, job.plan.total_bytes)
        slots = self._slots(pinned=job.transfer.on_device)
        checksums = job.transfer.run(save, self._pool, slots)
        written = time.perf_counter()
        job.report.staging = job.transfer.staged_at - job.started
        job.report.writing = written - job.started
        save.publish(RankResult(checksums, job.objects.locations))
        if self._coordination.is_coordinator:
            result = save.collect(self._timeout)
            assert job.plan.metadata is not None
            save.commit(result, job.plan.metadata.encode(result.objects), job.common, job.rewrite)
            if job.on_commit is not None:
                _after_commit(job.on_commit)
        else:
            save.await_outcome(self._timeout)
        job.report.commit = time.perf_counter() - written


class _AfterCommitError(CheckpointError):
    """The checkpoint is committed, what should follow it failed."""


def _after_commit(action: Callable[[], None]) -> None:
    try:
        action()
    except Exception as error:
        raise _AfterCommitError(f"committed, but what follows the commit failed: {_describe(error)}") from error


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
