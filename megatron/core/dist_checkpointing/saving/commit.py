"""From many durable shards to one checkpoint: a directory that grows under another name and gets its own by one rename.

All ranks write their shards to it; rank 0 makes it, adds the small files that belong to all, and renames it.

During a save the ranks talk over the job's own key-value store: nobody polls, least of all files. The store carries
news only. What is committed is decided by the file system: if the store is lost in the middle of a save, the save fails
or its checkpoint stands, but nothing in between.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron.core.dist_checkpointing import files
from megatron.core.dist_checkpointing.format.checksums import (
    CHECKSUMS,
    FileChecksums,
    checksum_records,
    checksums_of,
    seal_checksums,
)
from megatron.core.dist_checkpointing.format.metadata import Location
from megatron.core.dist_checkpointing.format.schema import CheckpointError
from megatron.core.dist_checkpointing.generation import Generation, SupersededError
from megatron.core.dist_checkpointing.saving.shard_file import Progress, Shard, ShardFile
from megatron.core.durable_files import check_free_space, discard, fsync_directory, put_in_place, write_flushed

_SLICES = 4  # of the timeout: silence is noticed after 4 to 5 quarters of it
_BUCKETS = 64
_NEWS_EVERY = 5.0  # seconds, at most, between two signs of life of a rank that writes


def open_store(timeout: timedelta) -> dist.Store:
    """A client of the job's store for the background threads alone: a client that waits is locked for others."""
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


class Outcome(NamedTuple):
    """How a save ended; `error` is None for a committed checkpoint."""

    error: str | None = None
    superseded: bool = False  # another start has taken over the directory
    warning: str | None = None  # it is committed, but lacks something, such as a replica


class SaveBarrier:
    """One save, as one rank sees it. Every rank calls

        rank 0:  begin        report  collect  end
        others:  await_begin  report           await_end

    and `show_progress` while it writes. A rank that cannot go on calls `fail` in place of `report`, rank 0 `end` with
    the reason. Waiting ends with CheckpointError when no rank has shown progress for `timeout` seconds.
    """

    def __init__(self, store: dist.Store, save_id: str, rank: int, size: int, timeout: float) -> None:
        self._store, self._prefix = store, f"checkpoint/{save_id}"
        self._rank, self._size, self._timeout = rank, size, timeout
        self._next_news = 0.0

    def begin(self) -> None:
        """The directory is there and has room."""
        self._store.set(self._key("begun"), "")

    def await_begin(self) -> None:
        self._wait("begun")
        self._raise_failure()

    def report(self, objects: Mapping[str, Location], checksums: bytes) -> None:
        """This rank's files are durable. The last report wakes rank 0."""
        line = json.dumps([self._rank, objects]).encode() + b"\n"
        self._store.append(self._key("objects"), line)  # type: ignore[attr-defined]
        self._store.append(self._bucket(self._rank), checksums)  # type: ignore[attr-defined]
        # Counted after the appends: whoever is last knows that all of them are there.
        if self._store.add(self._key("reports"), 1) == self._size:
            self._store.set(self._key("ready"), "")

    def warn(self, warnings: Sequence[str]) -> None:
        """Before `report`: what the checkpoint lacks on this rank."""
        for text in warnings:
            self._store.append(self._key("warnings"), f"rank {self._rank}: {text}\n")  # type: ignore[attr-defined]

    def warnings(self) -> str | None:
        """On rank 0 after `collect`: those of all ranks."""
        key = self._key("warnings")
        return self._store.get(key).decode().strip() if self._store.check([key]) else None

    def fail(self, reason: str) -> None:
        """This rank cannot go on. The first failure is the one that is told."""
        self._store.compare_set(self._key("failure"), "", f"rank {self._rank}: {reason}")
        self._store.set(self._key("ready"), "")

    def show_progress(self, nbytes: int = 0) -> None:
        """Called whenever something was written; raises CheckpointError if the save has failed elsewhere meanwhile."""
        # Rarely: every rank calls this for every piece, and the store serves all of them alone.
        now = time.monotonic()
        if now < self._next_news or self._size == 1:
            return
        self._next_news = now + min(_NEWS_EVERY, self._timeout / (2 * _SLICES))
        self._store.add(self._key("progress"), 1)
        self._raise_failure()

    def collect(self) -> tuple[list[bytes], list[bytes]]:
        """The reports of all ranks: a line for the objects of each, always in the same order; all checksums."""
        self._wait("ready")
        self._raise_failure()
        lines = sorted(self._store.get(self._key("objects")).splitlines())
        return lines, [self._store.get(bucket) for bucket in self._buckets()]

    def end(self, outcome: Outcome) -> None:
        if outcome.error is not None:
            self._store.compare_set(self._key("failure"), "", outcome.error)
        self._store.set(self._key("outcome"), json.dumps(outcome))
        self._store.set(self._key("begun"), "")

    def await_end(self) -> Outcome:
        self._wait("outcome")
        return Outcome(*json.loads(self._store.get(self._key("outcome"))))

    def forget(self) -> None:
        """On rank 0, when no rank can ask for this save any more."""
        names = ("begun", "objects", "reports", "ready", "failure", "warnings", "progress", "outcome")
        for key in (*map(self._key, names), *self._buckets()):
            self._store.delete_key(key)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _bucket(self, rank: int) -> str:
        """Where a rank's checksums go. At scale they are many megabytes: rank 0 reads them in parts, since copying them
        out of the store holds the interpreter's lock."""
        return self._key(f"checksums/{rank % _BUCKETS}")

    def _buckets(self) -> list[str]:
        return [self._bucket(rank) for rank in range(min(self._size, _BUCKETS))]

    def _raise_failure(self) -> None:
        if self._store.check([self._key("failure")]):
            raise CheckpointError(self._store.get(self._key("failure")).decode())

    def _wait(self, name: str) -> None:
        """Return when `name` is set. Silence is counted in waits, not by the clock: a rank that was stopped itself
        must not take its own absence for the others'."""
        seen, silent = self._store.add(self._key("progress"), 0), 0
        while True:
            try:
                self._store.wait([self._key(name)], timedelta(seconds=self._timeout / _SLICES))
                return
            except RuntimeError:  # the time is over, or the store is lost: then the next line says so
                progress = self._store.add(self._key("progress"), 0)
            seen, silent = progress, 0 if progress != seen else silent + 1
            if silent == _SLICES:
                raise CheckpointError(self._silence(name))

    def _silence(self, name: str) -> str:
        who = "rank 0"
        if name == "ready":
            key = self._key("objects")
            lines = self._store.get(key).splitlines() if self._store.check([key]) else []
            late = sorted(set(range(self._size)) - {json.loads(line)[0] for line in lines})
            who = f"rank {', '.join(map(str, late[:20]))}"
        return (
            f"nothing was heard from {who} for {self._timeout:g} s, and no rank has written anything: dead or hanging"
        )


Rewrite = Callable[[Path, Progress], None]
"""Puts other files in the place of a checkpoint's, durably, in the directory where it grows.

It calls its second argument now and then, with the bytes just written, so that the other ranks know that it works.
"""


@dataclass
class SaveReport:
    """How a save went on this rank. Seconds: `blocking` is what the training thread was held up, the others overlap
    with training; `bytes` are this rank's, `total_bytes` all ranks'. `error` is None for a committed checkpoint,
    to which `warning` says what it lacks; `superseded` says that another start has taken over the directory."""

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


class PendingCheckpoint:
    """A checkpoint that grows under another name and will be `directory`.

    Sequence of calls: `begin` on rank 0; then all ranks write through it as a `ShardTarget`; then, on rank 0, `commit`,
    or `abandon` as often as need be; then all ranks `end`. `warnings` are what the save has not achieved on this rank
    although it can be committed.
    """

    def __init__(self, directory: Path, save_id: str, generation: Generation | None = None) -> None:
        self.directory, self.save_id, self.generation = directory, save_id, generation
        self.warnings: list[str] = []

    @cached_property
    def pending(self) -> Path:
        """Beside `directory`, or inside the `generation` that owns the directory of checkpoints."""
        if self.generation is None:
            return files.pending_directory(self.directory, self.save_id)
        return self.generation.directory / f"saving-{self.directory.name}-{self.save_id}"

    def begin(self, nbytes: int) -> None:
        """Before any rank writes: make the directory. Raises OSError if `nbytes` do not fit."""
        if self.generation is None:
            self.pending.parent.mkdir(parents=True, exist_ok=True)
        self.pending.mkdir()
        check_free_space(self.pending, nbytes)

    def name_of(self, name: str) -> str:
        return name

    def open_shard(self, name: str, size: int) -> Shard:
        return ShardFile(self.pending / name, size)

    def write_file(self, name: str, *parts: bytes) -> None:
        write_flushed(self.pending / name, *parts)

    def finish(self, sums: Mapping[str, FileChecksums]) -> None:
        if sums:
            fsync_directory(self.pending)

    def commit(
        self,
        checksums: Iterable[bytes],
        metadata: Sequence[bytes],
        common: bytes,
        beside: Mapping[str, bytes],
        rewrite: Rewrite | None = None,
        progress: Progress = lambda nbytes: None,
    ) -> None:
        """Complete the checkpoint and give it its name.

        `metadata` is the content of `.metadata`, in parts; `checksums` are the records of all ranks; `beside` are
        further small files, which a `rewrite` does not touch.
        """
        contents = {files.COMMON: [common], files.METADATA: metadata, files.METADATA_JSON: [self._metadata_json()]}
        ours = checksum_records({name: checksums_of(*parts) for name, parts in contents.items()})
        self.write_file(CHECKSUMS, *seal_checksums(*checksums, ours))
        for name, parts in contents.items():
            self.write_file(name, *parts)
        if rewrite is not None:
            rewrite(self.pending, progress)
        for name, content in beside.items():
            self.write_file(name, content)
        self._publish()

    def _publish(self) -> None:
        """All files are there."""
        fsync_directory(self.pending)
        put_in_place(self.pending, self.directory)

    def _metadata_json(self) -> bytes:
        return json.dumps(files.BACKEND).encode()

    def explain(self, failure: BaseException) -> BaseException:
        """The reason behind `failure`: SupersededError if another start has taken over the directory."""
        try:
            if self.generation is not None:
                self.generation.check(failure)
        except SupersededError as superseded:
            return superseded
        return failure

    def abandon(self) -> None:
        """Remove everything, as far as possible."""
        discard(self.pending)

    def end(self, outcome: Outcome) -> None:
        """On every rank, when all know how the save has ended."""
