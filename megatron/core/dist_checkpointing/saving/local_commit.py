"""A checkpoint on the nodes' own disks: every rank writes to its node, and sends the same bytes to its neighbours.

A piece goes from the host buffer to the own disk and then over the clique's gloo group, by the thread that wrote it.
On the other side one thread for each source writes what comes and hashes what it writes. At the end the source sends
its marker; the receiver compares, keeps the marker if all files are as the source hashed them, and answers. So no
collective is needed, and a neighbour that is dead or has no room costs a warning: the save itself is on the own disk.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from enum import IntEnum
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing.background import SLOT_SIZE, Slot, StagingBuffer, Workers
from megatron.core.dist_checkpointing.format.checksums import (
    FileChecksums,
    checksum_records,
    checksums_of,
    decode_checksums,
    seal_checksums,
)
from megatron.core.dist_checkpointing.generation import Generation
from megatron.core.dist_checkpointing.local_tier import (
    LocalTier,
    Replication,
    checkpoint_name,
    marker_name,
    order_of,
)
from megatron.core.dist_checkpointing.saving.commit import Outcome, PendingCheckpoint
from megatron.core.dist_checkpointing.saving.shard_file import Shard, ShardFile
from megatron.core.durable_files import fsync_directory, remove, write_flushed
from megatron.core.object_storage import first_line

_HEADER, _PAYLOAD, _ANSWER = 1, 2, 3  # tags
_ANSWER_SIZE = 512


class _Kind(IntEnum):
    OPEN = 0  # (number of the file, its size); the name follows
    DATA = 1  # (number of the file, offset); the bytes follow
    SEAL = 2  # the last message: the marker follows, its name in front of it; an answer comes back
    ABORT = 3  # the last message of a save that failed


class LocalSaver:
    """What saves on this node share: who receives, and which earlier save may not be removed yet."""

    def __init__(self, tier: LocalTier, generation: Generation, kept: str | None) -> None:
        """`kept` is the local checkpoint that this start has loaded."""
        self.tier, self._generation, self._kept = tier, generation, kept
        sources = [] if tier.replication is None else tier.replication.sources
        self._drained: tuple[str, Callable[[], bool]] = "", lambda: True
        self._receivers = Workers(len(sources), "checkpoint-receiver")
        self._buffers = [StagingBuffer(1, pinned=False) for _ in sources]

    def checkpoint(self, iteration: int, save_id: str) -> LocalCheckpoint:
        """Begins to receive: all ranks make the same checkpoint at the same time."""
        pending = LocalCheckpoint(self, iteration, save_id, self._generation)
        if self.tier.replication is not None:
            pending.received = [
                self._receivers.submit(partial(_receive, pending.directory, source, self.tier.replication, buffer))
                for source, buffer in zip(
                    self.tier.replication.sources, (b.slots[0] for b in self._buffers), strict=True
                )
            ]
        return pending

    def keep_until(self, name: str, drained: Callable[[], bool]) -> None:
        """`name` is being copied to --save until `drained` is true."""
        self._drained = name, drained

    def remove_superseded(self, name: str, replicated: bool) -> None:
        """`name` is whole on all nodes. Two stay: it, and the last one before it that has all its replicas; and one
        that is being copied."""
        being_copied, drained = self._drained
        keep = (name, self._kept, None if drained() else being_copied)
        if self.tier.rank == self.tier.node:
            for other in self.tier.names():
                if other not in keep and order_of(other) <= order_of(name):
                    remove(self.tier.root / other)
        if replicated:
            self._kept = name

    def close(self) -> None:
        self._receivers.close()


class LocalCheckpoint(PendingCheckpoint):
    """Every rank writes into its node's directory of that name; the marker of rank 0 is the commit."""

    def __init__(self, saver: LocalSaver, iteration: int, save_id: str, generation: Generation) -> None:
        tier = saver.tier
        super().__init__(tier.root / checkpoint_name(iteration, generation.number, save_id), save_id, generation)
        self._saver, self._rank, self._size = saver, tier.rank, len(tier.nodes)
        self._sums: dict[str, FileChecksums] = {}
        self.received: list[Future[None]] = []
        replication = tier.replication
        self._links = [] if replication is None else [_Link(target, replication) for target in replication.targets]

    @property
    def pending(self) -> Path:  # type: ignore[override]
        return self.directory

    def keep_until(self, drained: Callable[[], bool]) -> None:
        self._saver.keep_until(self.directory.name, drained)

    def data_files(self) -> dict[str, FileChecksums]:
        """Of this rank, when the save has ended."""
        return {name: sums for name, sums in self._sums.items() if name.endswith(".distcp")}

    def begin(self, nbytes: int) -> None:
        """Every node finds out for itself whether it has room."""

    def open_shard(self, name: str, size: int) -> Shard:
        self.directory.mkdir(parents=True, exist_ok=True)
        return _ReplicatedShard(ShardFile(self.directory / name, size), self._links, name, size)

    def write_file(self, name: str, *parts: bytes) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        write_flushed(self.directory / name, *parts)
        self._sums[name] = checksums_of(*parts)
        content = bytearray(b"".join(parts))
        for link in self._links:
            number = link.open(name, len(content))
            for offset in range(0, len(content), SLOT_SIZE):
                link.send(number, offset, memoryview(content)[offset : offset + SLOT_SIZE])

    def finish(self, sums: Mapping[str, FileChecksums]) -> None:
        self._sums |= sums
        if self._rank != 0:
            self._seal()

    def _publish(self) -> None:
        self._seal()

    def _seal(self) -> None:
        """This rank's files are durable here; then ask whether they are on the other nodes."""
        name, content = marker_name(self._rank, self._size), b"".join(seal_checksums(checksum_records(self._sums)))
        self.directory.mkdir(parents=True, exist_ok=True)
        _write_marker(self.directory / name, content)
        for link in self._links:
            if (problem := link.seal(name, content)) is not None:
                self.warnings.append(f"no replica on rank {link.target}: {problem}")

    def abandon(self) -> None:
        """`end` removes it on every node."""

    def end(self, outcome: Outcome) -> None:
        for link in self._links:
            link.abort()
        for received in self.received:
            received.exception()
        with contextlib.suppress(OSError):  # what stays is removed after the next save
            if outcome.error is None:
                self._saver.remove_superseded(self.directory.name, outcome.warning is None)
            elif self._rank == self._saver.tier.node:
                remove(self.directory)


class _ReplicatedShard:
    """A file on the own disk whose pieces are also sent."""

    def __init__(self, file: ShardFile, links: Sequence[_Link], name: str, size: int) -> None:
        self._file = file
        self._links = [(link, link.open(name, size)) for link in links]

    def write(self, offset: int, slot: memoryview, length: int) -> None:
        self._file.write(offset, slot, length)
        for link, number in self._links:
            link.send(number, offset, slot[:length])

    def close(self, durable: bool) -> FileChecksums:
        return self._file.close(durable)


class _Link:
    """The way to one neighbour during one save, from any thread; after the first error nothing is sent any more."""

    def __init__(self, target: int, replication: Replication) -> None:
        self.target, self._group = target, replication.group
        self._lock = threading.Lock()
        self._files = 0
        self._problem: str | None = None
        self._over = False

    def open(self, name: str, size: int) -> int:
        number = self._files
        self._files += 1
        self._message(_Kind.OPEN, number, size, name.encode())
        return number

    def send(self, number: int, offset: int, content: memoryview) -> None:
        self._message(_Kind.DATA, number, offset, content)

    def seal(self, name: str, content: bytes) -> str | None:
        """Why the neighbour has no replica; None if it has one."""
        self._message(_Kind.SEAL, len(name), 0, name.encode() + content)
        answer = torch.zeros(_ANSWER_SIZE, dtype=torch.uint8)
        self._over = True
        if self._problem is None:
            try:
                dist.recv(answer, self.target, self._group, _ANSWER)
            except RuntimeError as error:
                self._problem = first_line(error)
        return self._problem or bytes(answer.numpy()).rstrip(b"\0").decode(errors="replace") or None

    def abort(self) -> None:
        if not self._over:
            self._over = True
            self._message(_Kind.ABORT, 0, 0, b"")

    def _message(self, kind: _Kind, first: int, second: int, content: bytes | memoryview) -> None:
        with self._lock:  # the two parts of a message stay together
            if self._problem is not None:
                return
            try:
                header = torch.tensor([kind, first, second, len(content)])
                dist.send(header, self.target, self._group, _HEADER)
                if len(content):
                    writable = bytearray(content) if isinstance(content, bytes) else content
                    dist.send(torch.frombuffer(writable, dtype=torch.uint8), self.target, self._group, _PAYLOAD)
            except RuntimeError as error:  # the connection is lost, and gloo does not make another one
                self._problem = first_line(error)


def _receive(directory: Path, source: int, replication: Replication, slot: Slot) -> None:
    """Write one save of `source` to this node's `directory`."""
    names: list[str] = []
    files: list[ShardFile] = []
    problem = ""
    header = torch.zeros(4, dtype=torch.int64)
    try:
        while True:
            dist.recv(header, source, replication.group, _HEADER)
            kind, first, second, length = header.tolist()
            # A marker may be larger than a slot; data never is.
            payload = torch.zeros(length, dtype=torch.uint8) if length > SLOT_SIZE else slot.tensor[:length]
            if length:
                dist.recv(payload, source, replication.group, _PAYLOAD)
            if kind == _Kind.ABORT:
                return
            if kind == _Kind.SEAL:
                content = bytes(payload.numpy())
                problem = problem or _keep(directory / content[:first].decode(), content[first:], names, files)
                answer = torch.zeros(_ANSWER_SIZE, dtype=torch.uint8)
                text = problem.encode()[:_ANSWER_SIZE]
                answer[: len(text)] = torch.frombuffer(bytearray(text or b"\0"), dtype=torch.uint8)[: len(text)]
                dist.send(answer, source, replication.group, _ANSWER)
                return
            try:  # the source goes on sending whatever happens here
                if kind == _Kind.OPEN and not problem:
                    directory.mkdir(parents=True, exist_ok=True)
                    names.append(bytes(payload.numpy()).decode())
                    files.append(ShardFile(directory / names[-1], second))
                elif not problem:
                    files[first].write(second, slot.view, length)
            except OSError as error:
                problem = str(error)
    finally:
        for file in files:
            with contextlib.suppress(OSError):
                file.close(durable=False)


def _keep(marker: Path, content: bytes, names: list[str], files: list[ShardFile]) -> str:
    """Make the replicas durable and sign them with the source's marker; else why not."""
    try:
        written = {}
        while files:
            file = files.pop()  # what stays in the list is closed by the caller
            written[names[len(files)]] = file.close(durable=True)
        expected = decode_checksums(content, str(marker))
        damaged = [name for name in expected.keys() | written.keys() if expected.get(name) != written.get(name)]
        if damaged:
            return f"{', '.join(sorted(damaged)[:3])} came damaged"
        marker.parent.mkdir(parents=True, exist_ok=True)
        _write_marker(marker, content)
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def _write_marker(path: Path, content: bytes) -> None:
    fsync_directory(path.parent)
    write_flushed(path, content)
    fsync_directory(path.parent)
