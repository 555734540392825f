"""What every save does in the background, wherever its bytes come from: write, commit, agree on the outcome.

`AsyncSaver` takes them from the live state, `Drainer` from the nodes' own disks. A save that fails is reported, its
files are removed, and the next one may succeed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch

from megatron.core.dist_checkpointing.background import Workers
from megatron.core.dist_checkpointing.format.checksums import FileChecksums, checksum_records
from megatron.core.dist_checkpointing.format.metadata import Location
from megatron.core.dist_checkpointing.format.schema import CheckpointError
from megatron.core.dist_checkpointing.generation import SupersededError
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.dist_checkpointing.planning.save_plan import PreparedPlan
from megatron.core.dist_checkpointing.saving.commit import (
    Outcome,
    PendingCheckpoint,
    Rewrite,
    SaveBarrier,
    SaveReport,
    open_store,
)
from megatron.core.dist_checkpointing.saving.shard_file import Progress, ShardTarget


class Transfer(Protocol):
    """Brings the data files of this rank into a checkpoint; `abort` if `write` is not called or has failed."""

    staged_at: float  # time.perf_counter when the live tensors were not needed any more; 0: they never were

    def begin(self) -> None:
        """What can be done before there is a directory."""
        ...

    def write(self, target: ShardTarget, progress: Progress) -> dict[str, FileChecksums]:
        """Returns when all files are durable in `target`. Raises the first error."""
        ...

    def abort(self) -> None:
        """Returns when nothing is written any more."""
        ...


class Snapshot(NamedTuple):
    """Small things as bytes, and the transfer that brings the tensors."""

    common: bytes  # content of common.pt, on rank 0
    objects: dict[str, Location]
    transfer: Transfer


class Hooks(NamedTuple):
    """What the caller wants rank 0 to do around the commit; see `AsyncSaver.save`."""

    before_writing: Callable[[], None]
    rewrite: Rewrite | None
    beside: Mapping[str, bytes]
    on_commit: Callable[[], None]


class SaveHandle:
    """One save under way; callers use `done` and `wait`, the rest is the saver's."""

    def __init__(self, plan: PreparedPlan, barrier: SaveBarrier, pending: PendingCheckpoint, started: float) -> None:
        self.plan, self.barrier, self.pending, self.started = plan, barrier, pending, started
        self.report = SaveReport(pending.directory, bytes=plan.files.nbytes, total_bytes=plan.total_bytes)
        self.snapshot: Snapshot | Exception
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
    def transfer(self) -> Transfer | None:
        """None if the snapshot failed."""
        return None if isinstance(self.snapshot, Exception) else self.snapshot.transfer

    def elapsed(self) -> float:
        return time.perf_counter() - self.started

    def finish(self, outcome: Outcome) -> None:
        self.report.error, self.report.superseded, self.report.warning = outcome
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


class Conductor:
    """A thread that takes one save after the other from its snapshot to the commit.

    Every rank has one, and all conduct the same saves in the same order. A save fails when no rank has written anything
    for `timeout` seconds. `progress` is called from other threads with the number of bytes just written.
    """

    def __init__(self, coordination: Coordination, timeout: float, progress: Progress, name: str) -> None:
        self._coordination, self._timeout, self._progress = coordination, timeout, progress
        self._store = open_store(timedelta(seconds=timeout))
        self._current: SaveHandle | None = None
        self._reports: list[SaveReport] = []
        self._past: deque[SaveBarrier] = deque()  # a slow rank may still ask how the last save ended
        self._leftover: PendingCheckpoint | None = None  # of a failed save, whose removal may have failed, too
        self._thread = Workers(1, name)

    @property
    def busy(self) -> bool:
        """Whether a save is under way on this rank; the next one would wait for it."""
        return self._current is not None and not self._current.done()

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
        """Finish, and end the threads."""
        self.finish()
        self._thread.submit(self._remove_leftover).result()
        self._thread.close()

    def _wait_for_current(self) -> None:
        if self._current is not None:
            self._reports.append(self._current.end())
            self._current = None

    def _barrier(self, save_id: str) -> SaveBarrier:
        return SaveBarrier(self._store, save_id, self._coordination.rank, self._coordination.size, self._timeout)

    def _conduct(self, save: SaveHandle, hooks: Hooks) -> None:
        """One save in the background: write, commit, agree on the outcome. On every rank.

        However it goes, `save.finish` is called: the training thread waits for that without a deadline.
        """
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
                with contextlib.suppress(Exception):  # the first failure is the one that is told
                    save.transfer.abort()
        try:
            outcome = self._agree(save, failure)
        except BaseException as error:  # contact with the others is lost, so this rank tells what it knows
            outcome = Outcome(_describe(failure or error))
        try:
            save.pending.end(outcome)
        finally:
            save.finish(outcome)

    def _write(self, save: SaveHandle, snapshot: Snapshot, hooks: Hooks) -> None:
        """Begin, wait until rank 0 has made the directory, write, and report that all of it is durable."""
        snapshot.transfer.begin()
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

        checksums = snapshot.transfer.write(save.pending, wrote)
        save.report.staging = max(0.0, snapshot.transfer.staged_at - save.started)
        save.report.writing = save.elapsed()
        name_of = save.pending.name_of
        objects = {key: place._replace(file=name_of(place.file)) for key, place in snapshot.objects.items()}
        if not self._coordination.is_coordinator:  # which may have some more to tell after the commit
            save.barrier.warn(save.pending.warnings)
        save.barrier.report(objects, checksum_records(checksums))

    def _commit(self, save: SaveHandle, snapshot: Snapshot, hooks: Hooks) -> None:
        """On rank 0, when all ranks have reported."""
        objects, checksums = save.barrier.collect()
        assert save.plan.metadata is not None
        metadata, alive = save.plan.metadata.encode(objects, save.pending.name_of), save.barrier.show_progress
        save.pending.commit(checksums, metadata, snapshot.common, hooks.beside, hooks.rewrite, alive)
        save.barrier.warn(save.pending.warnings)
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
        if failure is None:
            outcome = Outcome(warning=save.barrier.warnings())
        else:
            failure = save.pending.explain(failure)
            outcome = Outcome(_describe(failure), isinstance(failure, SupersededError))
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


def _describe(error: BaseException) -> str:
    if isinstance(error, (CheckpointError, OSError)):
        return str(error)
    return f"{type(error).__name__}: {error}"
