"""Checkpoints on the nodes' own disks: which node keeps what, and how it gets there.

`<directory>/<run>/iter_0000030-0000007.1a2b3c4d-5/` on every node: the iteration, the start of the job that saved it
(`Generation.number`) and the id of the save. The files in it are those of one ordinary torch_dist checkpoint: a node
has the ones that its ranks wrote, and replicas of its neighbours' under the same names. A marker
for each writer, written last, holds the checksums of that writer's files. Rank 0 writes the files
that belong to all, and its marker is the last of all: a save is whole if every writer's marker is
on some node.

No name contains a rank of the run that reads: after a node was replaced, the launcher may give a
surviving node other ranks, or there may be fewer.

A piece goes from the host buffer to the own disk and then over the clique's gloo group, by the
thread that wrote it. On the other side one thread for each source writes what comes and hashes what
it writes. At the end the source sends its marker; the receiver compares, keeps the marker if all
files are as the source hashed them, and answers. So no collective is needed, and a neighbour that
is dead or has no room costs a warning: the save itself is on the own disk.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import struct
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing.background import (
    PAGE,
    SLOT_SIZE,
    Slot,
    StagingBuffer,
    Workers,
)
from megatron.core.dist_checkpointing.format.checksums import (
    FileChecksums,
    compute_checksums,
    decode_checksums,
    encode_checksum_records,
    seal_checksums,
)
from megatron.core.dist_checkpointing.format.schema import CheckpointError, read_regular
from megatron.core.dist_checkpointing.format.torch_zip import view_bytes
from megatron.core.dist_checkpointing.generation import Generation
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.dist_checkpointing.saving.commit import PendingCheckpoint, ShardFile
from megatron.core.dist_checkpointing.saving.save_barrier import Outcome
from megatron.core.durable_files import committed, fsync_directory, remove, write_flushed
from megatron.core.object_storage import first_line

logger = logging.getLogger(__name__)

_NODE = ".node"  # its random content names the node: two ranks that read the same share a directory
_NAME = re.compile(r"iter_(\d+)-(\d+)\.[\w-]+")
_MARKER = re.compile(r"\.done-(\d+)-of-(\d+)")
_DATA_FILE = re.compile(r"__(\d+)_\d+\.distcp")

# What a source sends: pieces of files, a header in the page before each, as one message: under
# load, every message costs a millisecond. After the marker, an answer comes back: why there is no
# replica, empty if there is one. A header without a name ends a save that has failed.
_HEADER = struct.Struct("<QQQ256p")  # size of the file, position, length, name
_ANSWER = struct.Struct("512s")
# tags
_PIECES = 1
_ANSWERS = 2


def order_of(name: str) -> tuple[int, int]:
    """(start of the job, iteration): what a later start saved replaces what an earlier one did, as after a rollback."""
    match = _NAME.fullmatch(name)
    assert match is not None, name
    return int(match[2]), int(match[1])


def marker_name(writer: int, size: int) -> str:
    return f".done-{writer}-of-{size}"


def writer_of(file: str) -> int:
    """The rank of the save that wrote `file`."""
    match = _DATA_FILE.fullmatch(file)
    return 0 if match is None else int(match[1])


def cliques(size: int, jump: int, factor: int) -> list[list[int]]:
    """Ranks that keep replicas of each other: `jump` apart, `factor` of them, or more where that is
    not even.

    A rank is in one of them whatever the size of the world, so its connections do not grow with it.
    """
    groups = []
    for first in range(min(jump, size)):
        members = list(range(first, size, jump))
        count = len(members) // factor
        if count == 0:
            raise CheckpointError(
                f"{factor} copies of what rank {first} writes, on ranks {jump} apart, need {factor * jump} ranks, "
                f"but there are {size}: use a smaller --replication-jump or --replication-factor, or more nodes"
            )
        starts = [factor * number for number in range(count)]
        groups += [members[a:b] for a, b in zip(starts, [*starts[1:], len(members)], strict=True)]
    return groups


class Replication(NamedTuple):
    """Where the replicas of this rank's files go, and whose come here; `group` is the clique's own
    (gloo).
    """

    targets: list[int] = []
    sources: list[int] = []
    group: dist.ProcessGroup | None = None


class LocalTier(NamedTuple):
    """`root` is this run's directory on this node; `nodes[r]` is the node of rank r, named by its lowest rank."""

    root: Path
    rank: int
    nodes: list[int]
    replication: Replication

    @classmethod
    def create(
        cls,
        root: Path,
        copies: int = 1,
        jump: int | None = None,
        timeout: timedelta = timedelta(minutes=10),
    ) -> LocalTier:
        """A collective. With `copies` > 1 every file is on that many nodes, on ranks that are
        `jump` apart, by default the ranks of a node; with fewer nodes on fewer. Raises
        CheckpointError on every rank.
        """
        ranks = Coordination.of(None)
        # Read again when all have written: without hard links a rank may replace what another one
        # has read.
        ranks.run_on_all(lambda: _node_token(root))
        token = ranks.run_on_all(lambda: _node_token(root))
        first: dict[str, int] = {}
        nodes = [first.setdefault(name, rank) for rank, name in enumerate(ranks.all_gather(token))]
        count = len(first)
        if count < copies:  # a job that goes on with fewer nodes must not end for that
            logger.warning(
                f"local checkpoints are kept {count} times instead of {copies}: there are no more nodes"
            )
            copies = count
        replication = (
            _replicate(ranks.rank, nodes, copies, jump, timeout) if copies > 1 else Replication()
        )
        return cls(root, ranks.rank, nodes, replication)

    @property
    def node(self) -> int:
        return self.nodes[self.rank]

    def ranks_of(self, node: int) -> list[int]:
        return [rank for rank, other in enumerate(self.nodes) if other == node]

    def names(self) -> list[str]:
        """The checkpoints of which this node has anything, oldest first."""
        names = [path.name for path in self.root.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(names, key=order_of)

    def held(self, name: str) -> dict[int, tuple[int, int]]:
        """The writers whose files this node has, to (number of writers of the save, size of the
        marker).

        Sizes are compared; contents are when they are read.
        """
        result = {}
        for path in (self.root / name).iterdir():
            match = _MARKER.fullmatch(path.name)
            if match is None:
                continue
            with contextlib.suppress(
                OSError, CheckpointError
            ):  # a marker or a file that is damaged is not held
                content = read_regular(path)
                sums = decode_checksums(content, str(path))
                if all(
                    (path.parent / file).stat().st_size == size for file, (size, _) in sums.items()
                ):
                    result[int(match[1])] = int(match[2]), len(content)
        return result


def _node_token(root: Path) -> str:
    path = root / _NODE
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            with committed(
                path, replace=False
            ) as temporary:  # of the ranks of a node, the first one's stays
                temporary.write_text(secrets.token_hex(8))
        return path.read_text()
    except OSError as error:
        raise CheckpointError(f"local checkpoints cannot be saved to {root}: {error}") from error


def _replicate(
    rank: int, nodes: list[int], copies: int, jump: int | None, timeout: timedelta
) -> Replication:
    jump = jump or nodes.count(nodes[0])
    (clique,) = (group for group in cliques(len(nodes), jump, copies) if rank in group)
    place = clique.index(rank)
    size = len(clique)
    targets = [clique[(place + step) % size] for step in range(1, copies)]
    on_node = defaultdict(list)
    for member in (rank, *targets):
        on_node[nodes[member]].append(member)
    together = [
        f"ranks {', '.join(map(str, members))}" for members in on_node.values() if len(members) > 1
    ]
    error = None
    if together:
        error = CheckpointError(
            f"{' and '.join(together)} keep copies of the same files, but share a directory, so they would be lost "
            f"together: give a --replication-jump (now {jump}) that leads to another node, and each node its own "
            "--non-persistent-local-ckpt-dir"
        )
    Coordination.of(None).raise_on_all(error)
    group = dist.new_group(clique, timeout=timeout, backend="gloo", use_local_synchronization=True)
    return Replication(targets, [clique[(place - step) % size] for step in range(1, copies)], group)


class LocalSaver:
    """What saves on this node share: who receives, and which earlier save may not be removed yet."""

    def __init__(self, tier: LocalTier, generation: Generation, kept: str | None) -> None:
        """`kept` is the local checkpoint that this start has loaded."""
        self.tier = tier
        self._generation = generation
        self._kept = kept
        self._drained: tuple[str, Callable[[], bool]] = "", lambda: True
        sources = len(tier.replication.sources)
        self._receivers = Workers(sources, "checkpoint-receiver")
        self._buffer = StagingBuffer(max(1, sources), pinned=False)

    def checkpoint(self, iteration: int, save_id: str) -> LocalCheckpoint:
        """Begins to receive: all ranks make the same checkpoint at the same time."""
        pending = LocalCheckpoint(self, iteration, save_id, self._generation)
        replication = self.tier.replication
        for source, slot in zip(replication.sources, self._buffer.slots, strict=False):
            task = partial(_receive, pending.directory, source, replication.group, slot)
            pending.received.append(self._receivers.submit(task))
        return pending

    def keep_until(self, name: str, drained: Callable[[], bool]) -> None:
        """`name` is being copied to --save until `drained` is true."""
        self._drained = name, drained

    def remove_superseded(self, name: str, replicated: bool) -> None:
        """`name` is whole on all nodes. Two stay: it, and the last one before it that has all its replicas; and one
        that is being copied.
        """
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

    def __init__(
        self, saver: LocalSaver, iteration: int, save_id: str, generation: Generation
    ) -> None:
        tier = saver.tier
        directory = tier.root / f"iter_{iteration:07d}-{generation.number:07d}.{save_id}"
        super().__init__(directory, save_id, generation, directory)
        self._saver = saver
        self._rank = tier.rank
        self._size = len(tier.nodes)
        self._sums: dict[str, FileChecksums] = {}
        self.received: list[Future[None]] = []
        self._links = [_Link(target, tier.replication.group) for target in tier.replication.targets]

    def keep_until(self, drained: Callable[[], bool]) -> None:
        self._saver.keep_until(self.directory.name, drained)

    def data_files(self) -> dict[str, FileChecksums]:
        """Of this rank, when the save has ended."""
        return {name: sums for name, sums in self._sums.items() if name.endswith(".distcp")}

    def begin(self, nbytes: int) -> None:
        """Every node finds out for itself whether it has room."""

    def open_shard(self, name: str, size: int) -> ShardFile:
        self.directory.mkdir(parents=True, exist_ok=True)
        return _ReplicatedShard(self.directory / name, size, self._links)

    def write_file(self, name: str, *parts: bytes) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        write_flushed(self.directory / name, *parts)
        self._sums[name] = compute_checksums(*parts)
        self._send(name, b"".join(parts))

    def _send(self, name: str, content: bytes) -> None:
        for position in range(0, len(content), SLOT_SIZE) if self._links else ():
            part = content[position : position + SLOT_SIZE]
            frame = torch.frombuffer(bytearray(PAGE) + part, dtype=torch.uint8)
            for link in self._links:
                link.send(frame, name, len(content), position, len(part))

    def finish(self, sums: Mapping[str, FileChecksums]) -> None:
        self._sums |= sums
        if self._rank != 0:
            self._seal()

    def _publish(self) -> None:
        self._seal()

    def _seal(self) -> None:
        """This rank's files are durable here; then ask whether they are on the other nodes."""
        name = marker_name(self._rank, self._size)
        content = b"".join(seal_checksums(encode_checksum_records(self._sums)))
        _write_marker(self.directory / name, content)
        self._send(name, content)
        for link in self._links:
            if (problem := link.answer()) is not None:
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


class _ReplicatedShard(ShardFile):
    """A file on the own disk whose pieces are also sent."""

    def __init__(self, path: Path, size: int, links: list[_Link]) -> None:
        super().__init__(path, size)
        self._links = links

    def write(self, offset: int, slot: Slot, length: int) -> None:
        super().write(offset, slot, length)
        for link in self._links:
            link.send(slot.frame, self._path.name, self._size, offset, length)


class _Link:
    """The way to one neighbour during one save, from any thread; after the first error nothing is
    sent any more.
    """

    def __init__(self, target: int, group: dist.ProcessGroup | None) -> None:
        self.target = target
        self._group = group
        self._problem: str | None = None
        self._over = False

    def send(self, frame: torch.Tensor, name: str, size: int, position: int, length: int) -> None:
        """A piece of a file of `size` bytes; the `length` bytes behind the page at the beginning of
        `frame`.
        """
        if self._problem is not None:
            return
        _HEADER.pack_into(view_bytes(frame), 0, size, position, length, name.encode())
        try:
            dist.send(frame[: PAGE + length], self.target, self._group, _PIECES)
        except RuntimeError as error:  # the connection is lost, and gloo does not make another one
            self._problem = first_line(error)

    def answer(self) -> str | None:
        """To the marker: why the neighbour has no replica; None if it has one."""
        self._over = True
        answer = torch.zeros(_ANSWER.size, dtype=torch.uint8)
        if self._problem is None:
            try:
                dist.recv(answer, self.target, self._group, _ANSWERS)
            except RuntimeError as error:
                self._problem = first_line(error)
        return (
            self._problem
            or bytes(view_bytes(answer)).rstrip(b"\0").decode(errors="replace")
            or None
        )

    def abort(self) -> None:
        if not self._over:
            self._over = True
            self.send(torch.zeros(PAGE, dtype=torch.uint8), "", 0, 0, 0)


def _receive(directory: Path, source: int, group: dist.ProcessGroup | None, slot: Slot) -> None:
    """Write one save of `source` to this node's `directory`."""
    files: dict[str, ShardFile] = {}
    problem = ""
    marker = b""
    try:
        while True:
            dist.recv(slot.frame, source, group, _PIECES)  # or less
            size, position, length, encoded = _HEADER.unpack_from(view_bytes(slot.frame))
            name = encoded.decode()
            if not name:
                return
            if _MARKER.fullmatch(name):
                marker += slot.view[:length]
                if len(marker) < size:
                    continue
                problem = problem or _keep(directory / name, marker, files)
                answer = bytearray(_ANSWER.pack(problem.encode()))
                dist.send(torch.frombuffer(answer, dtype=torch.uint8), source, group, _ANSWERS)
                return
            try:  # the source goes on sending whatever happens here
                if not problem:
                    directory.mkdir(parents=True, exist_ok=True)
                    if name not in files:
                        files[name] = ShardFile(directory / name, size)
                    files[name].write(position, slot, length)
            except OSError as error:
                problem = str(error)
    finally:
        for file in files.values():
            with contextlib.suppress(OSError):
                file.close(durable=False)


def _keep(marker: Path, content: bytes, files: dict[str, ShardFile]) -> str:
    """Make the replicas durable and sign them with the source's marker; else why not."""
    try:
        written = {}
        for name in sorted(files):
            written[name] = files.pop(name).close(
                durable=True
            )  # what stays is closed by the caller
        expected = decode_checksums(content, str(marker))
        damaged = [
            name
            for name in expected.keys() | written.keys()
            if expected.get(name) != written.get(name)
        ]
        if damaged:
            return f"{', '.join(sorted(damaged)[:3])} came damaged"
        _write_marker(marker, content)
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def _write_marker(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fsync_directory(path.parent)
    write_flushed(path, content)
    fsync_directory(path.parent)
