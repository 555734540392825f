"""A checkpoint whose files lie on the disks of several nodes, read by all ranks as if it were one
directory.

While it is open, a thread of every rank serves ranges of the files that its node holds.
`LocalCheckpointPath` is the directory, and `open_file` of a file in it gives what every reader of
checkpoints uses: so any layout reads its boxes, on any number of nodes. Whatever is read is
compared with the checksums of its writer, block by block, where it is used; a block that is damaged
on one node, or cannot be read there, is taken from the next one.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import struct
import threading
from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing.background import Workers
from megatron.core.dist_checkpointing.format.checksums import (
    BLOCK_SIZE,
    DIGEST_SIZE,
    FileChecksums,
    decode_checksums,
    hash_blocks,
)
from megatron.core.dist_checkpointing.format.schema import (
    OPENERS,
    CheckpointError,
    OpenFile,
    file_name,
    open_file,
)
from megatron.core.dist_checkpointing.format.torch_zip import view_bytes
from megatron.core.dist_checkpointing.local_tier import LocalTier, marker_name, order_of, writer_of
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.object_storage import first_line

logger = logging.getLogger(__name__)

_MOST_BLOCKS = 16  # of one request
_SERVERS = 4  # threads: one reads from the disk while another one sends
# tags; every answer has its own
_ASK = 1
_FIRST_ANSWER = 2
_REQUEST = struct.Struct(
    "<QQQ256p"
)  # position, length, tag of the answer, file; length 0 ends the service
_IDLE = timedelta(days=1)  # a rank may have nothing to serve for as long as a load takes
_PATIENCE = timedelta(minutes=10)  # for one answer


class LocalCheckpointInfo(NamedTuple):
    """A checkpoint that all nodes have together; `writers[w]` is (size of the marker, nodes with
    the files) of w.
    """

    name: str
    writers: list[tuple[int, list[int]]]

    @property
    def order(self) -> tuple[int, int]:
        """(start of the job, iteration)."""
        return order_of(self.name)


def find_local_checkpoints(tier: LocalTier) -> list[LocalCheckpointInfo]:
    """On rank 0: what can be read, newest first; empty elsewhere. A collective."""
    mine = _held_here(tier) if tier.rank == tier.node else {}

    def merge(
        nodes: list[dict[str, dict[int, tuple[int, int]]]],
    ) -> list[list[LocalCheckpointInfo]]:
        merged: dict[str, dict[int, tuple[int, list[int]]]] = defaultdict(dict)
        sizes: dict[str, int] = {}
        for node, checkpoints in enumerate(nodes):
            for name, writers in checkpoints.items():
                merged[name].update({})
                for writer, (count, marker_size) in writers.items():
                    merged[name].setdefault(writer, (marker_size, []))[1].append(node)
                    sizes[name] = count
        found = []
        for name in sorted(merged, key=order_of, reverse=True):
            writers_of = merged[name]
            count = sizes.get(name, 1)
            missing = [writer for writer in range(count) if writer not in writers_of]
            if missing:
                logger.warning(
                    f"local checkpoint {name} cannot be used: no node has what "
                    f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing[:8]))} of {count} wrote"
                )
            else:
                found.append(
                    LocalCheckpointInfo(name, [writers_of[writer] for writer in range(count)])
                )
        return [found, *([] for _ in nodes[1:])]

    result: list[LocalCheckpointInfo] = Coordination.of(None).gather_compute_scatter(mine, merge)
    return result


def _in_time(work: dist.Work | None) -> None:
    assert work is not None
    work.wait(_PATIENCE)


def _held_here(tier: LocalTier) -> dict[str, dict[int, tuple[int, int]]]:
    """What cannot be read on this node may be on others: its ranks must not miss the collective for
    that.
    """
    held: dict[str, dict[int, tuple[int, int]]] = {}
    for name in tier.names():
        try:
            held[name] = tier.held(name)
        except OSError as error:
            logger.warning(
                f"local checkpoint {name} cannot be read: {error}", extra={"every_rank": True}
            )
    return held


class _Kept(threading.local):
    """A buffer of each thread: new pages cost more than the copy."""

    buffer = torch.empty(0, dtype=torch.uint8)


class DistributedLocalCheckpoint:
    """One open `LocalCheckpointInfo`; opening and closing are collectives."""

    def __init__(self, tier: LocalTier, held: LocalCheckpointInfo) -> None:
        self._tier = tier
        self._held = held
        self.directory = LocalCheckpointPath(tier.root / held.name)
        self.directory.checkpoint = self
        self._markers: dict[int, dict[str, FileChecksums]] = {}
        self._reported: set[tuple[str, int]] = set()
        self._group: dist.ProcessGroup | None = None
        if len(set(tier.nodes)) > 1:
            self._group = dist.new_group(backend="gloo", timeout=_IDLE)
            self._tags = itertools.count(_FIRST_ANSWER)
            self._kept = _Kept()
            self._servers = Workers(_SERVERS, "checkpoint-server")
            self._thread = threading.Thread(
                target=self._serve, name="checkpoint-server", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """When all ranks have read what they want."""
        if self._group is None:
            return
        ranks = Coordination.of(None)
        ranks.all_true(True)
        self._request((ranks.rank + 1) % ranks.size, "", 0, 0)
        self._thread.join()
        self._servers.close()
        ranks.all_true(True)
        dist.destroy_process_group(self._group)
        self._group = None

    def sums(self, file: str) -> FileChecksums:
        """Raises FileNotFoundError for a file that is not part of the checkpoint."""
        writer = writer_of(file)
        if writer >= len(self._held.writers):
            raise FileNotFoundError(str(self.directory / file))
        if writer not in self._markers:
            self._markers[writer] = self._read_marker(writer)
        try:
            return self._markers[writer][file]
        except KeyError as error:
            raise FileNotFoundError(str(self.directory / file)) from error

    def blocks_into(self, view: memoryview, file: str, first: int) -> None:
        """Fill `view`, some whole blocks of a file from block `first` on, with what was written
        there.
        """
        sums = self.sums(file)
        start = first * BLOCK_SIZE
        expected = sums.blocks[first * DIGEST_SIZE :][: -(-len(view) // BLOCK_SIZE) * DIGEST_SIZE]
        for node, arrived in self._copies(writer_of(file), file, start, view):
            if arrived and hash_blocks(view) == expected:
                return
            damaged = f"is damaged in bytes {start}..{start + len(view)}"
            self._report(file, node, damaged if arrived else "cannot be read")
        raise CheckpointError(
            f"{self.directory / file}: no node has bytes {start}..{start + len(view)} undamaged"
        )

    def _read_marker(self, writer: int) -> dict[str, FileChecksums]:
        file = marker_name(writer, len(self._held.writers))
        content = bytearray(self._held.writers[writer][0])
        for node, arrived in self._copies(writer, file, 0, memoryview(content)):
            try:
                if arrived:
                    return decode_checksums(bytes(content), str(self.directory / file))
                self._report(file, node, "cannot be read")
            except CheckpointError:
                self._report(file, node, "is damaged")
        raise CheckpointError(f"{self.directory / file}: no node has it undamaged")

    def _copies(
        self, writer: int, file: str, position: int, view: memoryview
    ) -> Iterator[tuple[int, bool]]:
        """Fill `view` with what each of the nodes that hold `file` has there, this node first, and
        say whether it could.
        """
        nodes = self._held.writers[writer][1]
        node = self._tier.node
        turn = self._tier.rank % len(nodes)  # readers spread over the holders
        for holder in sorted(nodes[turn:] + nodes[:turn], key=lambda other: other != node):
            fill = self._read if holder == node else partial(self._ask, holder)
            yield holder, fill(file, position, view)

    def _read(self, file: str, position: int, view: memoryview) -> bool:
        """From the own disk."""
        try:
            with open_file(self._tier.root / self._held.name / file) as opened:
                opened.read_into(view, position)
        except (OSError, CheckpointError):
            return False
        return True

    def _ask(self, node: int, file: str, position: int, view: memoryview) -> bool:
        """From the disk of `node`."""
        ranks = self._tier.ranks_of(node)
        rank = ranks[self._tier.rank % len(ranks)]
        arrives = torch.empty(1, dtype=torch.uint8)
        try:
            tag = self._request(rank, file, position, len(view))
            for part in (arrives, torch.frombuffer(view, dtype=torch.uint8)):
                _in_time(dist.irecv(part, rank, self._group, tag))
                if not arrives.item():
                    return False
        except RuntimeError as error:
            text = f"{self.directory / file}: rank {rank}, whose node has it, is dead or hanging"
            raise CheckpointError(f"{text}: {first_line(error)}") from error
        return True

    def _request(self, rank: int, file: str, position: int, length: int) -> int:
        """Returns the tag of the answer."""
        tag = next(self._tags)
        request = bytearray(_REQUEST.pack(position, length, tag, file.encode()))
        _in_time(dist.isend(torch.frombuffer(request, dtype=torch.uint8), rank, self._group, _ASK))
        return tag

    def _serve(self) -> None:
        """Take requests, of which several are answered at once."""
        request = torch.empty(_REQUEST.size, dtype=torch.uint8)
        while True:
            try:
                source = dist.recv(request, None, self._group, _ASK)
            except RuntimeError:  # a rank is gone: the next collective says so
                return
            position, length, tag, file = _REQUEST.unpack(view_bytes(request))
            if not length:
                return
            self._servers.submit(
                partial(self._answer, source, tag, file.decode(), position, length)
            )

    def _answer(self, rank: int, tag: int, file: str, position: int, length: int) -> None:
        """A 1 and the bytes, or a 0 alone."""
        if len(self._kept.buffer) < length:
            self._kept.buffer = torch.empty(length, dtype=torch.uint8)
        content = self._kept.buffer[:length]
        found = self._read(file_name(file, "a request"), position, view_bytes(content))
        with contextlib.suppress(RuntimeError):  # the rank is gone: the next collective says so
            dist.send(torch.tensor([found], dtype=torch.uint8), rank, self._group, tag)
            if found:
                dist.send(content, rank, self._group, tag)

    def _report(self, file: str, node: int, what: str) -> None:
        if (file, node) not in self._reported:
            self._reported.add((file, node))
            logger.warning(
                f"local checkpoint {self._held.name}: {file} on the node of rank {node} {what}: "
                "trying the next node that has it",
                extra={"every_rank": True},
            )


class LocalCheckpointPath(type(Path())):  # type: ignore[misc]
    """The directory of a `DistributedLocalCheckpoint`, or a file in it, for readers of checkpoints."""

    __slots__ = ("checkpoint",)
    checkpoint: DistributedLocalCheckpoint

    def __truediv__(self, name: Any) -> LocalCheckpointPath:
        child = LocalCheckpointPath(super().__truediv__(name))
        child.checkpoint = self.checkpoint
        return child

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        try:
            return self.checkpoint.sums(self.name).size >= 0
        except FileNotFoundError:
            return False


class _LocalCheckpointFile(OpenFile):
    closest_gap = BLOCK_SIZE  # blocks are read as a whole in any case

    def __init__(self, path: Path) -> None:
        assert isinstance(path, LocalCheckpointPath)
        self.path = path
        self.descriptor = None
        self._checkpoint = path.checkpoint
        self.size = self._checkpoint.sums(path.name).size
        # those of which only a part was asked for at last
        self._first = 0
        self._blocks = memoryview(b"")

    def measure_directory(self) -> int:
        return self.size  # reported by ranks of this job

    def _read_some(self, view: memoryview, position: int) -> int:
        view = view[: self.size - position]
        if not view:
            return 0
        first, start = divmod(position, BLOCK_SIZE)
        whole = (
            len(view) if position + len(view) == self.size else len(view) // BLOCK_SIZE * BLOCK_SIZE
        )
        if start == 0 and whole:
            direct = view[: min(whole, _MOST_BLOCKS * BLOCK_SIZE)]
            self._checkpoint.blocks_into(direct, self.path.name, first)
            return len(direct)
        if not 0 <= position - self._first < len(self._blocks):
            self._blocks = memoryview(b"")  # if the next line raises
            blocks = memoryview(bytearray(min(BLOCK_SIZE, self.size - first * BLOCK_SIZE)))
            self._checkpoint.blocks_into(blocks, self.path.name, first)
            self._first = first * BLOCK_SIZE
            self._blocks = blocks
        part = self._blocks[position - self._first :][: len(view)]
        view[: len(part)] = part
        return len(part)


OPENERS[LocalCheckpointPath] = _LocalCheckpointFile
