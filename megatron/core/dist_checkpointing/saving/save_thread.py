"""The background half of a save: write, commit, and agree on the outcome across ranks.

`AsyncSaver` takes the data from the live state, `CheckpointCopier` from node-local storage. A save
that fails is reported and its files are removed; the next one may succeed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from megatron.core.dist_checkpointing.background import Workers, end_saver_at_exit
from megatron.core.dist_checkpointing.format.checksums import encode_checksum_records
from megatron.core.dist_checkpointing.ownership.fencing import SupersededError
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.dist_checkpointing.planning.rank_plan import RankPlan
from megatron.core.dist_checkpointing.saving.commit import (
    PendingCheckpoint,
    Progress,
    Rewrite,
)
from megatron.core.dist_checkpointing.saving.save_barrier import (
    Heartbeat,
    Outcome,
    SaveBarrier,
    open_store,
)
from megatron.core.safe_files.errors import CheckpointError

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.saving.pending_export import PendingExport
    from megatron.core.dist_checkpointing.saving.staging import StageAndWrite


_LONGEST_WAIT_ALONE = 60.0  # seconds for other ranks, which may be lost, at exit


@dataclass
class SaveReport:
    """Result and times of a save on this rank.

    Times are in seconds. `blocking` is the training time that the save cost: in the call, in
    `wait_staged` before an update, in waits for the end of the save, and as `slowdown` of the
    iterations during the save, if these are measured. The other times overlap with training.
    `bytes` counts this rank's bytes, `total_bytes` those of all ranks. `error` is None for a
    committed checkpoint, whose `warning` describes its missing parts. `superseded` is set if
    another launch has taken over the directory. `exported` is the export of this save on rank 0, if
    it was committed.
    """

    directory: Path
    error: str | None = None
    superseded: bool = False
    warning: str | None = None
    exported: Path | None = None
    bytes: int = 0
    total_bytes: int = 0
    call_wait: float = 0.0
    update_wait: float = 0.0
    end_wait: float = 0.0
    slowdown: float = 0.0
    staging: float = 0.0
    writing: float = 0.0
    commit: float = 0.0
    total: float = 0.0

    @property
    def blocking(self) -> float:
        return self.call_wait + self.update_wait + self.end_wait + self.slowdown

    @property
    def gb_per_second(self) -> float:
        """Throughput of all ranks together, from the call to the commit."""
        return self.total_bytes / self.total / 1e9 if self.total else 0.0


class Hooks(NamedTuple):
    """Additional steps of rank 0 around the commit; see `AsyncSaver.save`."""

    before_writing: Callable[[], None]
    rewrite: Rewrite | None
    extra_files: Mapping[str, bytes]
    on_commit: Callable[[], None]


class SaveHandle:
    """One save in progress. Callers use `done` and `wait`; the rest belongs to the saver."""

    def __init__(
        self,
        plan: RankPlan,
        barrier: SaveBarrier,
        pending: PendingCheckpoint,
        hooks: Hooks,
        started: float,
    ) -> None:
        self.plan = plan
        self.barrier = barrier
        self.pending = pending
        self.hooks = hooks
        self.started = started
        self.report = SaveReport(pending.directory, bytes=plan.nbytes, total_bytes=plan.total_bytes)
        self.make_common: Callable[[], bytes] = bytes  # the content of common.pt, on rank 0
        # Transfer of tensors and objects; None if the snapshot failed with `failure`.
        self.transfer: StageAndWrite | None = None
        self.failure: BaseException | None = None
        self.export: PendingExport | None = None
        self.device_wait: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._finished = threading.Event()

    def done(self) -> bool:
        """Return whether the checkpoint is committed or the save has failed."""
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> SaveReport:
        """Return the report once the checkpoint is committed or the save has failed.

        Raises TimeoutError after `timeout` seconds.
        """
        if not self._finished.wait(timeout):
            raise TimeoutError(f"{self.report.directory}: still being saved after {timeout} s")
        return self.report

    def elapsed(self) -> float:
        """Return the seconds since the save began."""
        return time.perf_counter() - self.started

    def finish(self, outcome: Outcome) -> None:
        """Record the outcome, and release the callers of `wait`."""
        self.report.error, self.report.superseded, self.report.warning = outcome
        self.report.total = self.elapsed()
        self.report.commit = self.report.total - self.report.writing
        self._finished.set()

    def has_ended(self) -> bool:
        """Return whether the save is done, on the device as well: its timer is read afterwards."""
        return self.done() and (self.device_wait is None or self.device_wait[1].query())

    def end(self) -> SaveReport:
        """Return the report including the time that the device waited for copies.

        Called by the training thread.
        """
        report = self.wait()
        if self.device_wait is not None:
            # CUDA events around the wait of the training stream for the copies
            begin, end = self.device_wait
            end.synchronize()
            report.update_wait += begin.elapsed_time(end) / 1e3
        return report


class SaveThread:
    """Background thread that drives saves, one at a time, from snapshot to commit.

    Every rank has one, and all of them drive the same saves in the same order. A save fails if the
    process of any rank is dead or suspended for `timeout` seconds. `progress` is called from other
    threads with the number of bytes just written.
    """

    def __init__(
        self, coordination: Coordination, timeout: float, progress: Progress, name: str
    ) -> None:
        self._coordination = coordination
        self._progress = progress
        self._store = open_store(timedelta(seconds=timeout))
        self._heartbeat = Heartbeat(
            self._store, name, coordination.rank, coordination.size, timeout
        )
        self._current: SaveHandle | None = None
        self._reports: list[SaveReport] = []
        # Kept for one more save: a slow rank may still wait for the outcome of the last one.
        self._past: deque[SaveBarrier] = deque()
        # The last failed save, whose files may not have been removed completely.
        self._leftover: PendingCheckpoint | None = None
        self._thread = Workers(1, name)
        self._is_closed = False
        end_saver_at_exit(self)

    @property
    def busy(self) -> bool:
        """Return whether a save is in progress on this rank; the next one would wait for it."""
        return self.in_progress is not None

    @property
    def in_progress(self) -> SaveReport | None:
        """The report of the save in progress on this rank, if there is one."""
        if self._current is None or self._current.done():
            return None
        return self._current.report

    def poll(self) -> list[SaveReport]:
        """Return reports of saves that ended since the last call, in order. Never blocks."""
        if self._current is not None and self._current.has_ended():
            self._wait_for_current()
        reports = self._reports
        self._reports = []
        return reports

    def finish(self) -> list[SaveReport]:
        """Wait for the save in progress, if any; then as `poll`."""
        self._wait_for_current()
        return self.poll()

    def close(self) -> None:
        """Finish, and end the threads; a second call has no effect."""
        self.finish()
        if self._is_closed:
            return
        self._is_closed = True
        self._thread.submit(self._remove_leftover).result()
        self._thread.close()

    def wait_alone(self) -> None:
        """Wait for the save in progress; if other ranks may be lost, at most for a minute.

        Raises TimeoutError after that.
        """
        if self._current is not None:
            self._current.wait(None if self._coordination.size == 1 else _LONGEST_WAIT_ALONE)

    def end_alone(self) -> None:
        """Finish the save in progress, if any, and end the threads, unless they are closed."""
        if not self._is_closed:
            self.wait_alone()
            self.close()

    def _wait_for_current(self) -> None:
        """Wait for the save in progress, if any; the wait is a cost of that save."""
        if self._current is not None:
            if not self._current.done():
                began = time.perf_counter()
                report = self._current.wait()
                report.end_wait += time.perf_counter() - began
            self._reports.append(self._current.end())
            self._current = None

    def _make_barrier(self, save_id: str) -> SaveBarrier:
        rank = self._coordination.rank
        return SaveBarrier(self._store, save_id, rank, self._coordination.size, self._heartbeat)

    def _start(self, save: SaveHandle) -> None:
        """Make `save` the current one; it is alive from now on."""
        self._current = save
        save.barrier.start_heartbeat()

    def _run_in_background(self, save: SaveHandle, *phases: Callable[[SaveHandle], None]) -> None:
        """Run the phases of a save one after another, and agree on the outcome, on every rank."""
        self._thread.submit(lambda: self._run_phases(save, phases))

    def _run_phases(self, save: SaveHandle, phases: Sequence[Callable[[SaveHandle], None]]) -> None:
        """Run the phases, and agree on the outcome.

        Calls `save.finish` in every case: the training thread waits for that without a deadline.
        """
        failure: BaseException | None = None
        # 1. Run the phases.
        try:
            for phase in phases:
                phase(save)
        except BaseException as error:
            failure = error
            if save.transfer is not None:
                with contextlib.suppress(Exception):  # only the first failure is reported
                    save.transfer.abort()
            if save.export is not None:
                save.export.close()

        # 2. Agree on the outcome.
        try:
            outcome = self._agree(save, failure)
        except BaseException as error:  # no contact with the other ranks
            outcome = Outcome(_describe(failure or error))
        # 3. Clean up, and wake up the training thread. The traceback of the failure refers to this
        # frame and to those of the transfer: a cycle that would keep the buffers.
        failure = None
        # From here on other ranks may find this one silent, which no longer matters.
        save.barrier.stop_heartbeat()
        try:
            save.pending.end(outcome)
        finally:
            save.finish(outcome)

    def _stage(self, save: SaveHandle) -> None:
        """Copy the live tensors to host memory, or begin to; raise the error of the snapshot.

        Staging begins before rank 0 has created the directory: training waits for it.
        """
        if save.failure is not None:
            raise save.failure
        assert save.transfer is not None
        save.transfer.export = save.export
        save.transfer.stage()
        save.transfer.make_objects().check()

    def _write(self, save: SaveHandle) -> None:
        """Wait until rank 0 has created the directory, write, and report that all is durable."""
        assert save.transfer is not None
        if self._coordination.is_coordinator:
            self._forget_past(save.barrier)
            self._remove_leftover()
            save.make_common()  # an invalid one fails the save before anything is written
            save.hooks.before_writing()
            save.pending.begin(save.plan.total_bytes)
            if save.export is not None:
                save.export.begin()
            save.barrier.begin()
        else:
            save.barrier.await_begin()

        barrier = save.barrier

        # This closure must not refer to `save`, which refers to the transfer that keeps the
        # closure: the buffers would outlive the saver until the next garbage collection. A forked
        # child, which has other memory at their addresses, would then unmap that.
        def on_written(nbytes: int) -> None:
            barrier.raise_if_failed()
            self._progress(nbytes)

        checksums = save.transfer.write(save.pending, on_written)
        save.report.staging = max(0.0, save.transfer.staged_at - save.started)
        save.report.writing = save.elapsed()
        name_of = save.pending.name_of
        objects = {
            key: location._replace(file=name_of(location.file))
            for key, location in save.transfer.make_objects().locations.items()
        }
        if not self._coordination.is_coordinator:  # rank 0 may add warnings after the commit
            save.barrier.warn(save.pending.warnings)
        if save.export is not None:
            save.barrier.count_exported(save.export.close())
            if not self._coordination.is_coordinator:
                save.barrier.warn(save.export.warnings)
        save.barrier.report(objects, encode_checksum_records(checksums))

    def _commit(self, save: SaveHandle) -> None:
        """Commit on rank 0, once all ranks have reported."""
        if not self._coordination.is_coordinator:
            return
        # The report of a rank means that its files are durable.
        objects, checksums = save.barrier.collect()
        assert save.plan.metadata is not None
        # Positions of objects are known only now, because their lengths vary.
        metadata = save.plan.metadata.encode(objects, save.pending.name_of)
        save.pending.commit(
            checksums,
            metadata,
            save.make_common(),
            save.hooks.extra_files,
            save.hooks.rewrite,
            lambda nbytes: save.barrier.check_before_commit(),
        )
        save.barrier.warn(save.pending.warnings)
        # From here on the checkpoint is committed: errors cannot take it back.
        try:
            save.hooks.on_commit()
        except SupersededError:
            raise
        except Exception as error:
            raise _AfterCommitError(
                f"committed, but a step after the commit failed: {_describe(error)}"
            ) from error
        # The export of the same iteration becomes visible after its checkpoint.
        if save.export is not None:
            nbytes = save.barrier.read_exported()
            if save.export.commit(nbytes, save.pending.directory):
                save.report.exported = save.export.directory
            save.barrier.warn(save.export.warnings)

    def _agree(self, save: SaveHandle, failure: BaseException | None) -> Outcome:
        """Return the outcome, the same on all ranks.

        Rank 0 decides how the save ended and removes the files of a failed one; the other ranks
        report to it why they failed.
        """
        # Rank 0 decides even if it has failed: the other ranks wait for its answer.
        if not self._coordination.is_coordinator:
            return self._learn_outcome(save, failure)
        if failure is not None and save.export is not None:
            save.export.abandon()
        if failure is None:
            # Missing replicas or an incomplete export do not fail the save.
            outcome = Outcome(warning=save.barrier.read_warnings())
        else:
            failure = save.pending.explain(failure)
            outcome = Outcome(_describe(failure), isinstance(failure, SupersededError))
        # Announced before the removal, which can take minutes.
        save.barrier.end(outcome)
        if failure is not None and not isinstance(failure, _AfterCommitError):
            self._leftover = save.pending
            save.pending.abandon()
        return outcome

    def _learn_outcome(self, save: SaveHandle, failure: BaseException | None) -> Outcome:
        """Return the outcome that rank 0 decided on."""
        # Rank 0 notices the failure while it waits for reports.
        if failure is not None:
            save.barrier.fail(_describe(failure))
        try:
            return save.barrier.await_end()
        except (CheckpointError, RuntimeError) as silence:
            # Rank 0 is lost. It may have committed before, which requires the report of this rank;
            # it does not commit any more (`check_before_commit`).
            if failure is None:
                with contextlib.suppress(RuntimeError):
                    save.barrier.fail(_describe(silence))
            # Rank 0 cannot be asked: look at the files themselves.
            if failure is not None or not save.pending.is_committed():
                raise
            return Outcome(warning=f"committed, but rank 0 did not confirm it: {silence}")

    def _forget_past(self, barrier: SaveBarrier) -> None:
        """Delete the store's keys of all saves but the last one, whose outcome a slow rank may
        need.
        """
        while len(self._past) > 1:
            self._past.popleft().forget()
        self._past.append(barrier)

    def _remove_leftover(self) -> None:
        """Remove the files of the last failed save that remain.

        A rank may have written after their removal, or the disk was read-only then.
        """
        if self._leftover is not None:
            self._leftover.abandon()
            self._leftover = None


class _AfterCommitError(CheckpointError):
    """The checkpoint is committed, but a step after the commit failed."""


def _describe(error: BaseException) -> str:
    if isinstance(error, (CheckpointError, OSError)):
        return str(error)
    return f"{type(error).__name__}: {error}"
