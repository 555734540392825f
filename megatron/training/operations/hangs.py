"""Reports of hangs: which rank is missing, the last collective of every rank, and Python stacks.

A thread of each rank publishes its progress in the store of the job. A rank without progress prints
its stacks, and one of them compares the progress of all ranks. Training is not affected: a stopped
process, a deadlock and a slow disk look alike, and the timeout of the collectives decides.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Mapping
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron.core.parallel_state import ParallelState
from megatron.core.terminal import print_text
from megatron.training.operations.collectives import (
    CollectiveRecorder,
    Operation,
    describe_ranks,
)

_LONGEST_PAUSE = 5.0  # seconds between two heartbeats
_STORE_TIMEOUT = 30.0  # maximum seconds of a request


class Status(NamedTuple):
    """The progress of a rank when it last published it."""

    rank: int
    host: str
    heartbeats: int
    iteration: int
    last_operation: str
    is_waiting: bool  # in a collective
    counts: dict[str, int]
    """Number of collectives that it has started, by group."""

    def describe(self) -> str:
        """Return the text that follows the rank in a report."""
        operation = self.last_operation or "none"
        state = "waits in collective" if self.is_waiting else "last collective"
        return f"iteration {self.iteration}, {state} {operation}"


class HangMonitor:
    """Thread that reports when this rank makes no progress for `seconds`.

    Progress is an iteration or a collective of the training thread. Use it as a context manager.
    """

    def __init__(self, seconds: float, ps: ParallelState, recorder: CollectiveRecorder) -> None:
        self.iteration = 0  # in progress; set by the training thread
        self._seconds = seconds
        self._pause = min(seconds / 4, _LONGEST_PAUSE)
        self._ps = ps
        self._recorder = recorder
        self._training_thread = threading.get_ident()
        self._store = connect_store(min(seconds, _STORE_TIMEOUT))
        self._heartbeats = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hang-monitor", daemon=True)

    def __enter__(self) -> HangMonitor:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join(self._pause)

    def _run(self) -> None:
        position: tuple[int, Operation | None] | None = None
        since = time.monotonic()
        is_reported = False
        while not self._ended.wait(self._pause):
            now = time.monotonic()
            last_position = position
            position = (self.iteration, self._recorder.last)
            if position != last_position:
                if is_reported:
                    print_text(f"{self._name} continues after {now - since:.0f} s", file=sys.stderr)
                since = now
                is_reported = False
            elif now - since >= self._seconds and not is_reported:
                is_reported = True
                self._report(now - since)
            self._publish()

    @property
    def _name(self) -> str:
        return f"rank {self._ps.rank} of {self._ps.world_size} ({socket.gethostname()})"

    def _status(self) -> Status:
        recorder = self._recorder
        return Status(
            self._ps.rank,
            socket.gethostname(),
            self._heartbeats,
            self.iteration,
            str(recorder.last or ""),
            recorder.is_waiting,
            dict(recorder.counts),
        )

    def _publish(self) -> None:
        """Store the progress of this rank, if the store responds."""
        self._heartbeats += 1
        if self._store is None:
            return
        try:
            self._store.set(f"status/{self._ps.rank}", json.dumps(self._status()))
        except RuntimeError:  # the store is lost, or a restart in the process closes connections
            self._store = None

    def _report(self, stalled: float) -> None:
        """Print the state of this rank, and let the first rank that arrives here compare all."""
        status = self._status()
        stacks = format_stacks(self._training_thread)
        print_text(
            f"{self._name}: no progress for {stalled:.0f} s; {status.describe()}\n{stacks}",
            file=sys.stderr,
        )
        if self._ps.world_size == 1:
            return
        try:
            if self._store is None:
                raise RuntimeError("no connection")
            if self._store.add(f"reports/{status.iteration}", 1) == 1:
                before = self._read_all()
                # Ranks that respond publish twice in this time.
                for _ in range(3):
                    self._ended.wait(self._pause)
                    self._publish()
                print_text(format_summary(before, self._read_all(), stalled), file=sys.stderr)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            print_text(
                f"{self._name}: the other ranks are unknown, because the store of the job cannot "
                f"be read: {reason}; the process that hosts it may be lost, or torch is too old",
                file=sys.stderr,
            )

    def _read_all(self) -> dict[int, Status]:
        """Return the published status of each rank that has one."""
        if self._store is None:
            raise RuntimeError("no connection")
        keys = {rank: f"status/{rank}" for rank in range(self._ps.world_size)}
        keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
        values = self._store.multi_get(list(keys.values()))
        return {rank: Status(*json.loads(value)) for rank, value in zip(keys, values, strict=True)}


def connect_store(timeout: float) -> dist.Store | None:
    """Return a client of the job's store for another thread, None if there is no other rank.

    The clients of the training thread wait for other ranks, and block all of their users.
    """
    store = distributed_c10d._get_default_store()
    # Older versions of torch cannot clone a client.
    if dist.get_world_size() == 1 or not hasattr(store, "clone"):
        return None
    client = dist.PrefixStore("hangs", store.clone())
    client.set_timeout(timedelta(seconds=timeout))
    return client


def format_stacks(training_thread: int) -> str:
    """Return the Python stacks of all threads, that of the training thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    idents = sorted(frames, key=lambda ident: ident != training_thread)
    texts = []
    for ident in idents:
        if ident == threading.get_ident():
            continue
        stack = "".join(traceback.format_stack(frames[ident]))
        texts.append(f"  thread {names.get(ident, ident)}:\n{stack}")
    return "".join(texts).rstrip()


def find_missing(before: Mapping[int, Status], now: Mapping[int, Status]) -> dict[int, str]:
    """Return the ranks that the others wait for, with the reason.

    `before` and `now` are the published progress at two times, between which every rank that
    responds has published again.
    """
    # A stopped or lost process, or a Python interpreter that another thread blocks
    missing = {}
    for rank, status in now.items():
        if rank in before and before[rank].heartbeats == status.heartbeats:
            missing[rank] = "does not respond"
    if missing:
        return missing
    # A rank that computes, reads or waits for something else
    for rank, status in now.items():
        if not status.is_waiting:
            missing[rank] = "is not in a collective"
    if missing:
        return missing
    # All wait, but not for the same: a rank has skipped a collective.
    largest: defaultdict[str, int] = defaultdict(int)
    for status in now.values():
        for group, count in status.counts.items():
            largest[group] = max(largest[group], count)
    for rank, status in now.items():
        for group, count in status.counts.items():
            if count < largest[group]:
                missing[rank] = f"has started {count} of {largest[group]} collectives of {group}"
    return missing


def format_summary(before: Mapping[int, Status], now: Mapping[int, Status], stalled: float) -> str:
    """Return the report about all ranks."""
    rows = [f"no progress for {stalled:.0f} s; missing:"]
    missing = find_missing(before, now)
    for rank, reason in missing.items():
        status = now[rank]
        rows.append(f"  rank {rank} ({status.host}) {reason}: {status.describe()}")
    if not missing:
        rows.append("  no single rank: all wait in the same collective")
    # Many ranks have the same state.
    ranks_by_text: defaultdict[str, list[int]] = defaultdict(list)
    for rank, status in now.items():
        if rank not in missing:
            ranks_by_text[status.describe()].append(rank)
    for text, ranks in ranks_by_text.items():
        rows.append(f"  {describe_ranks(ranks)}: {text}")
    return "\n".join(rows)
