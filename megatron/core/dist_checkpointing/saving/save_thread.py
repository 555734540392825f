"""The background half of a save: write, commit, and agree on the outcome across ranks.

`AsyncSaver` takes the data from the live state, `CheckpointCopier` from node-local storage. A save
that fails is reported and its files are removed; the next one may succeed.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron.core.dist_checkpointing.background import Workers
from megatron.core.dist_checkpointing.format.checksums import checksum_records
from megatron.core.dist_checkpointing.format.metadata import Location
from megatron.core.dist_checkpointing.format.schema import CheckpointError
from megatron.core.dist_checkpointing.generation import SupersededError
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.dist_checkpointing.planning.save_plan import PreparedPlan
from megatron.core.dist_checkpointing.saving.commit import (
    Outcome,
    PendingCheckpoint,
    Progress,
    Rewrite,
)

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.saving.staging import StageAndWrite

_SLICES = 4  # of the timeout: silence is noticed after 4 to 5 quarters of it
_BUCKETS = 64
_NEWS_EVERY = 5.0  # seconds, at most, between two signs of life of a rank that writes


def open_store(timeout: timedelta) -> dist.Store:
    """A client of the job's store for the background threads alone: a client that waits is locked
    for others.
    """
    if not dist.is_initialized():
        return dist.HashStore()
    store = distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        return dist.TCPStore(store.host, store.port, is_master=False, timeout=timeout)
    if not isinstance(store, dist.HashStore):
        raise ValueError(
            f"checkpoints cannot be saved over a {type(store).__name__}: start the process group with env:// or tcp://"
        )
    return store


class SaveBarrier:
    """One save, as one rank sees it. Every rank calls

        rank 0:  begin        report  collect  end
        others:  await_begin  report           await_end

    and `show_progress` while it writes. A rank that cannot go on calls `fail` in place of `report`,
    rank 0 `end` with the reason. Waiting ends with CheckpointError when no rank has shown progress
    for `timeout` seconds.
    """

    def __init__(
        self, store: dist.Store, save_id: str, rank: int, size: int, timeout: float
    ) -> None:
        self._store = dist.PrefixStore(f"checkpoint/{save_id}", store)
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._next_news = 0.0

    def begin(self) -> None:
        """The directory is there and has room."""
        self._store.set("begun", "")

    def await_begin(self) -> None:
        self._wait("begun")
        self._raise_failure()

    def report(self, objects: Mapping[str, Location], checksums: bytes) -> None:
        """This rank's files are durable. The last report wakes rank 0."""
        line = json.dumps([self._rank, objects]).encode() + b"\n"
        self._store.append("objects", line)  # type: ignore[attr-defined]
        self._store.append(self._bucket(self._rank), checksums)  # type: ignore[attr-defined]
        # Counted after the appends: whoever is last knows that all of them are there.
        if self._store.add("reports", 1) == self._size:
            self._store.set("ready", "")

    def warn(self, warnings: Sequence[str]) -> None:
        """Before `report`: what the checkpoint lacks on this rank."""
        for text in warnings:
            self._store.append("warnings", f"rank {self._rank}: {text}\n")  # type: ignore[attr-defined]

    def warnings(self) -> str | None:
        """On rank 0 after `collect`: those of all ranks."""
        return (
            self._store.get("warnings").decode().strip()
            if self._store.check(["warnings"])
            else None
        )

    def fail(self, reason: str) -> None:
        """This rank cannot go on. The first failure is the one that is told."""
        self._store.compare_set("failure", "", f"rank {self._rank}: {reason}")
        self._store.set("ready", "")

    def show_progress(self, nbytes: int = 0) -> None:
        """Called whenever something was written; raises CheckpointError if the save has failed
        elsewhere meanwhile.
        """
        # Rarely: every rank calls this for every piece, and the store serves all of them alone.
        now = time.monotonic()
        if now < self._next_news or self._size == 1:
            return
        self._next_news = now + min(_NEWS_EVERY, self._timeout / (2 * _SLICES))
        self._store.add("progress", 1)
        self._raise_failure()

    def collect(self) -> tuple[list[bytes], list[bytes]]:
        """The reports of all ranks: a line for the objects of each, always in the same order; all
        checksums.
        """
        self._wait("ready")
        self._raise_failure()
        lines = sorted(self._store.get("objects").splitlines())
        return lines, [self._store.get(bucket) for bucket in self._buckets()]

    def end(self, outcome: Outcome) -> None:
        if outcome.error is not None:
            self._store.compare_set("failure", "", outcome.error)
        self._store.set("outcome", json.dumps(outcome))
        self._store.set("begun", "")

    def await_end(self) -> Outcome:
        self._wait("outcome")
        return Outcome(*json.loads(self._store.get("outcome")))

    def forget(self) -> None:
        """On rank 0, when no rank can ask for this save any more."""
        names = (
            "begun",
            "objects",
            "reports",
            "ready",
            "failure",
            "warnings",
            "progress",
            "outcome",
        )
        for key in (*names, *self._buckets()):
            self._store.delete_key(key)

    def _bucket(self, rank: int) -> str:
        """Where a rank's checksums go. At scale they are many megabytes: rank 0 reads them in
        parts, since copying them out of the store holds the interpreter's lock.
        """
        return f"checksums/{rank % _BUCKETS}"

    def _buckets(self) -> list[str]:
        return [self._bucket(rank) for rank in range(min(self._size, _BUCKETS))]

    def _raise_failure(self) -> None:
        if self._store.check(["failure"]):
            raise CheckpointError(self._store.get("failure").decode())

    def _wait(self, name: str) -> None:
        """Return when `name` is set. Silence is counted in waits, not by the clock: a rank that was
        stopped itself must not take its own absence for the others'.
        """
        seen = self._store.add("progress", 0)
        silent = 0
        while True:
            try:
                self._store.wait([name], timedelta(seconds=self._timeout / _SLICES))
                return
            except (
                RuntimeError
            ):  # the time is over, or the store is lost: then the next line says so
                progress = self._store.add("progress", 0)
            seen, silent = progress, 0 if progress != seen else silent + 1
            if silent == _SLICES:
                raise CheckpointError(self._silence(name))

    def _silence(self, name: str) -> str:
        who = "rank 0"
        if name == "ready":
            lines = (
                self._store.get("objects").splitlines() if self._store.check(["objects"]) else []
            )
            late = sorted(set(range(self._size)) - {json.loads(line)[0] for line in lines})
            who = f"rank {', '.join(map(str, late[:20]))}"
        return (
            f"nothing was heard from {who} for {self._timeout:g} s, and no rank has written anything: "
            "dead or hanging"
        )


@dataclass
class SaveReport:
    """How a save went on this rank. Seconds: `blocking` is what the training thread was held up,
    the others overlap with training; `bytes` are this rank's, `total_bytes` all ranks'. `error` is
    None for a committed checkpoint, to which `warning` says what it lacks; `superseded` says that
    another start has taken over the directory.
    """

    directory: Path
    error: str | None = None
    superseded: bool = False
    warning: str | None = None
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


class Hooks(NamedTuple):
    """What the caller wants rank 0 to do around the commit; see `AsyncSaver.save`."""

    before_writing: Callable[[], None]
    rewrite: Rewrite | None
    extra_files: Mapping[str, bytes]
    on_commit: Callable[[], None]


class SaveHandle:
    """One save under way; callers use `done` and `wait`, the rest is the saver's."""

    def __init__(
        self,
        plan: PreparedPlan,
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
        self.report = SaveReport(
            pending.directory, bytes=plan.files.nbytes, total_bytes=plan.total_bytes
        )
        self.common = b""  # the content of common.pt, on rank 0
        self.transfer: StageAndWrite | None = (
            None  # of tensors and objects; None if the snapshot has failed
        )
        self.failure: BaseException | None = None  # of the snapshot
        self.device_wait: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._finished = threading.Event()

    def done(self) -> bool:
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> SaveReport:
        """The report, when the checkpoint is committed or the save has failed. Raises TimeoutError."""
        if not self._finished.wait(timeout):
            raise TimeoutError(f"{self.report.directory}: still being saved after {timeout} s")
        return self.report

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


class SaveThread:
    """A thread that takes one save after the other from its snapshot to the commit.

    Every rank has one, and all conduct the same saves in the same order. A save fails when no rank
    has written anything for `timeout` seconds. `progress` is called from other threads with the
    number of bytes just written.
    """

    def __init__(
        self, coordination: Coordination, timeout: float, progress: Progress, name: str
    ) -> None:
        self._coordination = coordination
        self._timeout = timeout
        self._progress = progress
        self._store = open_store(timedelta(seconds=timeout))
        self._current: SaveHandle | None = None
        self._reports: list[SaveReport] = []
        self._past: deque[SaveBarrier] = (
            deque()
        )  # a slow rank may still ask how the last save ended
        self._leftover: PendingCheckpoint | None = (
            None  # of a failed save, whose removal may have failed, too
        )
        self._thread = Workers(1, name)

    @property
    def busy(self) -> bool:
        """Whether a save is under way on this rank; the next one would wait for it."""
        return self._current is not None and not self._current.done()

    def poll(self) -> list[SaveReport]:
        """Reports of saves that have ended since the last call, in order; never blocks."""
        if self._current is not None and self._current.has_ended():
            self._wait_for_current()
        reports = self._reports
        self._reports = []
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
        return SaveBarrier(
            self._store, save_id, self._coordination.rank, self._coordination.size, self._timeout
        )

    def _run_save(self, save: SaveHandle) -> None:
        """One save in the background: write, commit, agree on the outcome. On every rank.

        However it goes, `save.finish` is called: the training thread waits for that without a
        deadline.
        """
        try:
            self._write(save)
            if self._coordination.is_coordinator:
                self._commit(save)
            failure: BaseException | None = None
        except BaseException as error:
            failure = error
            if save.transfer is not None:
                with contextlib.suppress(Exception):  # the first failure is the one that is told
                    save.transfer.abort()
        try:
            outcome = self._agree(save, failure)
        except (
            BaseException
        ) as error:  # contact with the others is lost, so this rank tells what it knows
            outcome = Outcome(_describe(failure or error))
        try:
            save.pending.end(outcome)
        finally:
            save.finish(outcome)

    def _write(self, save: SaveHandle) -> None:
        """Begin, wait until rank 0 has made the directory, write, and report that all of it is
        durable.
        """
        if save.failure is not None:
            raise save.failure
        assert save.transfer is not None
        save.transfer.begin()
        if self._coordination.is_coordinator:
            self._forget_past(save.barrier)
            self._remove_leftover()
            save.hooks.before_writing()
            save.pending.begin(save.plan.total_bytes)
            save.barrier.begin()
        else:
            save.barrier.await_begin()

        barrier = save.barrier

        # It must not know `save`, which knows the transfer that keeps it: the buffers would outlive
        # the saver until the next garbage collection, and in a forked child, which has other memory
        # in their place, unmap that.
        def wrote(nbytes: int) -> None:
            barrier.show_progress()
            self._progress(nbytes)

        checksums = save.transfer.write(save.pending, wrote)
        save.report.staging = max(0.0, save.transfer.staged_at - save.started)
        save.report.writing = save.elapsed()
        name_of = save.pending.name_of
        places = save.transfer.objects.locations.items()
        objects = {key: place._replace(file=name_of(place.file)) for key, place in places}
        if (
            not self._coordination.is_coordinator
        ):  # which may have some more to tell after the commit
            save.barrier.warn(save.pending.warnings)
        save.barrier.report(objects, checksum_records(checksums))

    def _commit(self, save: SaveHandle) -> None:
        """On rank 0, when all ranks have reported."""
        objects, checksums = save.barrier.collect()
        assert save.plan.metadata is not None
        metadata = save.plan.metadata.encode(objects, save.pending.name_of)
        alive = save.barrier.show_progress
        save.pending.commit(
            checksums, metadata, save.common, save.hooks.extra_files, save.hooks.rewrite, alive
        )
        save.barrier.warn(save.pending.warnings)
        try:
            save.hooks.on_commit()
        except SupersededError:
            raise
        except Exception as error:
            raise _AfterCommitError(
                f"committed, but what follows the commit failed: {_describe(error)}"
            ) from error

    def _agree(self, save: SaveHandle, failure: BaseException | None) -> Outcome:
        """Rank 0 decides how the save ended and removes what has failed; the others tell it why
        they cannot go on.
        """
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
        """Delete the store's keys of saves before the last one, whose end a slow rank may still ask
        for.
        """
        while len(self._past) > 1:
            self._past.popleft().forget()
        self._past.append(barrier)

    def _remove_leftover(self) -> None:
        """Of the last failed save: a rank may have come too late for its removal, or the disk was
        read-only then.
        """
        if self._leftover is not None:
            self._leftover.abandon()
            self._leftover = None


class _AfterCommitError(CheckpointError):
    """The checkpoint is committed, what should follow it failed."""


def _describe(error: BaseException) -> str:
    if isinstance(error, (CheckpointError, OSError)):
        return str(error)
    return f"{type(error).__name__}: {error}"
