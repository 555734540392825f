"""Coordination of a save in the background: messages and heartbeats via the job's store.

Ranks use the job's TCPStore and never poll the file system. The store carries notifications only:
whether a checkpoint is committed is decided by the file system. If the store is lost during a save,
the save either fails or commits its checkpoint.

Liveness comes from processes, not from the progress of their system calls: a single `fsync`,
`mkdir` or `rmtree` may take longer than the timeout. A thread of every rank increments a counter
while a save is in progress, and a rank that waits for another one watches that counter.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron.core.dist_checkpointing.box_table import Location
from megatron.core.safe_files.errors import CheckpointError

_LOOKS = 4  # per timeout: a rank is given up after 4 to 5 quarters of the timeout
_BEATS = 8  # per timeout: at least one between two looks
_LONGEST_BEAT = 5.0  # seconds; also how soon a rank notices that the save failed on another one
_BUCKETS = 64
_LINES_PARSED_AT_ONCE = 256


class Outcome(NamedTuple):
    """The outcome of a save; `error` is None for a committed checkpoint."""

    error: str | None = None
    superseded: bool = False  # another launch has taken over the directory
    warning: str | None = None  # missing parts of the committed checkpoint, e.g., a replica


def open_store(timeout: timedelta) -> dist.Store:
    """Return a separate client of the job's store for the background threads.

    A client that waits is locked for other threads.
    """
    if not dist.is_initialized():
        return dist.HashStore()
    # The store below all prefixes of process groups
    store = distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        return dist.TCPStore(store.host, store.port, is_master=False, timeout=timeout)
    if not isinstance(store, dist.HashStore):
        raise ValueError(
            f"checkpoints cannot be saved over a {type(store).__name__}: start the process group "
            "with env:// or tcp://"
        )
    return store


class Heartbeat:
    """Sign of life of this rank during its saves, and a view of those of the other ranks.

    `timeout` seconds without a heartbeat mean that a process is dead or suspended.
    """

    def __init__(self, store: dist.Store, name: str, rank: int, size: int, timeout: float) -> None:
        self.timeout = timeout
        self._store = dist.PrefixStore(f"checkpoint/heartbeat/{name}", store)
        self._rank = rank
        self._alone = size == 1
        self._lock = threading.Lock()
        self._stop: threading.Event | None = None
        self._last_beat = time.monotonic()
        self._longest_silence = 0.0  # seconds between two heartbeats since `start`
        self._on_beat: Callable[[], None] = lambda: None

    def start(self, on_beat: Callable[[], None]) -> None:
        """Beat until `stop`; `on_beat` runs after every beat."""
        self._last_beat = time.monotonic()
        self._longest_silence = 0.0
        self._on_beat = on_beat
        if self._alone or self._stop is not None:
            return
        self._stop = threading.Event()
        threading.Thread(
            target=self._run, args=(self._stop,), name="checkpoint-heartbeat", daemon=True
        ).start()

    def stop(self) -> None:
        self._on_beat = lambda: None
        if self._stop is not None:
            self._stop.set()
            self._stop = None

    def beat(self) -> None:
        """Increment the counter of this rank. Raises RuntimeError if the store is lost."""
        with self._lock:
            began = time.monotonic()
            self._store.add(str(self._rank), 1)
            self._longest_silence = max(self._longest_silence, began - self._last_beat)
            self._last_beat = began
        self._on_beat()

    def count(self, rank: int) -> int:
        """Return the number of heartbeats of `rank` so far."""
        return self._store.add(str(rank), 0)

    def check(self) -> None:
        """Raise CheckpointError if the other ranks may have given this one up.

        They do so only after `timeout` seconds without a heartbeat, as when this process was
        suspended. Rank 0 must not commit then, because the others report that the save failed. It
        stops a quarter earlier, as clocks and waits are not exact.
        """
        with self._lock:
            silent = max(self._longest_silence, time.monotonic() - self._last_beat)
        if not self._alone and silent >= self.timeout * (_LOOKS - 1) / _LOOKS:
            raise CheckpointError(
                f"rank {self._rank} was suspended, or had no contact with the store, for "
                f"{silent:.0f} s: the other ranks have given the save up"
            )

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(min(_LONGEST_BEAT, self.timeout / _BEATS)):
            try:
                self.beat()
            except RuntimeError:  # the store is lost: the save notices it by itself
                return


class SaveBarrier:
    """The coordination of one save, as seen by one rank. Every rank calls

        rank 0:  begin        report  collect  end
        others:  await_begin  report           await_end

    and `raise_if_failed` while it writes. A rank that fails calls `fail` instead of `report`, and
    rank 0 `end` with the reason. Waiting ends with CheckpointError if the process that is waited
    for is dead or suspended.
    """

    def __init__(
        self, store: dist.Store, save_id: str, rank: int, size: int, heartbeat: Heartbeat
    ) -> None:
        self._store = dist.PrefixStore(f"checkpoint/{save_id}", store)
        self._rank = rank
        self._size = size
        self._heartbeat = heartbeat
        self._failure: str | None = None  # of any rank, noticed with a heartbeat

    def start_heartbeat(self) -> None:
        """Send heartbeats from now on, and look for failures of other ranks with each of them."""
        self._heartbeat.start(self._look_for_failure)

    def stop_heartbeat(self) -> None:
        self._heartbeat.stop()

    def begin(self) -> None:
        """Announce that the directory exists and has room."""
        self._store.set("begun", "")

    def await_begin(self) -> None:
        self._wait("begun", lambda: [0])
        self._look_for_failure()
        self.raise_if_failed()

    def report(self, objects: Mapping[str, Location], checksums: bytes) -> None:
        """Report that the files of this rank are durable. The last report wakes rank 0."""
        record = json.dumps([self._rank, objects]).encode() + b"\n"
        self._store.append("objects", record)  # type: ignore[attr-defined]
        self._store.append(self._bucket(self._rank), checksums)  # type: ignore[attr-defined]
        # Counted after both are appended: the last rank to count knows that all of them are there.
        if self._store.add("reports", 1) == self._size:
            self._store.set("ready", "")

    def warn(self, warnings: Sequence[str]) -> None:
        """Record missing parts of the checkpoint on this rank; call it before `report`."""
        for text in warnings:
            self._store.append("warnings", f"rank {self._rank}: {text}\n")  # type: ignore[attr-defined]

    def read_warnings(self) -> str | None:
        """Return the warnings of all ranks; on rank 0 after `collect`."""
        if not self._store.check(["warnings"]):
            return None
        return self._store.get("warnings").decode().strip()

    def count_exported(self, nbytes: int) -> None:
        """Add bytes that this rank has exported durably; call it before `report`."""
        self._store.add("exported", nbytes)

    def read_exported(self) -> int:
        """Return the bytes that all ranks have exported; on rank 0 after `collect`."""
        return self._store.add("exported", 0)

    def fail(self, reason: str) -> None:
        """Report that this rank failed. Only the first failure is kept."""
        # Wakes rank 0, which waits for the reports; the other ranks look at every heartbeat.
        self._store.compare_set("failure", "", f"rank {self._rank}: {reason}")
        self._store.set("ready", "")

    def raise_if_failed(self) -> None:
        """Raise CheckpointError if the save is known to have failed on another rank."""
        if self._failure is not None:
            raise CheckpointError(self._failure)

    def check_before_commit(self) -> None:
        """Raise CheckpointError on rank 0 if other ranks may regard the save as failed."""
        self._look_for_failure()
        self.raise_if_failed()
        self._heartbeat.check()

    def collect(self) -> tuple[dict[str, Location], list[bytes]]:
        """Return the reports of all ranks: the locations of objects by key, and checksums."""
        self._wait("ready", self._find_late_ranks)
        self._look_for_failure()
        self.raise_if_failed()
        # Ranks append in any order; sorted reports make the metadata reproducible.
        records = sorted(self._store.get("objects").splitlines())
        objects = {}
        # Parsing many lines at once is faster, all of them would hold the interpreter's lock.
        for start in range(0, len(records), _LINES_PARSED_AT_ONCE):
            content = b"[" + b",".join(records[start : start + _LINES_PARSED_AT_ONCE]) + b"]"
            for _, locations in json.loads(content):
                for key, location in locations.items():
                    objects[key] = Location(*location)
        return objects, [self._store.get(bucket) for bucket in self._buckets()]

    def end(self, outcome: Outcome) -> None:
        if outcome.error is not None:
            self._store.compare_set("failure", "", outcome.error)
        # Ranks that still wait for `begun` are woken up, too.
        self._store.set("outcome", json.dumps(outcome))
        self._store.set("begun", "")

    def await_end(self) -> Outcome:
        """Return the outcome; waits for as long as rank 0 is alive."""
        self._wait("outcome", lambda: [0])
        return Outcome(*json.loads(self._store.get("outcome")))

    def forget(self) -> None:
        """Delete the keys of this save; on rank 0, once no rank can need them any more."""
        names = ("begun", "objects", "reports", "ready", "failure", "warnings", "outcome")
        for key in (*names, "exported", *self._buckets()):
            self._store.delete_key(key)

    def _bucket(self, rank: int) -> str:
        """Return the key for the checksums of a rank.

        At scale they are many megabytes. Rank 0 reads them in parts, because copying them out of
        the store holds the interpreter's lock.
        """
        return f"checksums/{rank % _BUCKETS}"

    def _buckets(self) -> list[str]:
        return [self._bucket(rank) for rank in range(min(self._size, _BUCKETS))]

    def _look_for_failure(self) -> None:
        if self._failure is None and self._store.check(["failure"]):
            self._failure = self._store.get("failure").decode()

    def _find_late_ranks(self) -> list[int]:
        """Return the ranks that have not reported yet."""
        records = self._store.get("objects").splitlines() if self._store.check(["objects"]) else []
        return sorted(set(range(self._size)) - {json.loads(record)[0] for record in records})

    def _wait(self, name: str, awaited: Callable[[], Iterable[int]]) -> None:
        """Return when `name` is set. Raises CheckpointError if an `awaited` rank has died.

        Silence is counted in waits, not by the clock: a rank that was suspended itself must not
        take its own absence for that of others.
        """
        beats: dict[int, int] = {}
        silent: Counter[int] = Counter()
        while True:
            try:
                self._store.wait([name], timedelta(seconds=self._heartbeat.timeout / _LOOKS))
                return
            except RuntimeError:  # timed out; if the store is lost, the next call raises
                self._heartbeat.beat()
            # A rank is silent if its counter is the same as at the last look.
            for rank in awaited():
                count = self._heartbeat.count(rank)
                silent[rank] = silent[rank] + 1 if beats.get(rank) == count else 0
                beats[rank] = count
            # Each look takes timeout / _LOOKS, so that _LOOKS silent ones take the whole timeout.
            dead = [rank for rank, looks in silent.items() if looks >= _LOOKS]
            if dead:
                raise CheckpointError(
                    f"nothing was heard from rank {', '.join(map(str, dead[:20]))} for "
                    f"{self._heartbeat.timeout:g} s: the process is dead or suspended"
                )
