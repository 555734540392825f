"""A local checkpoint whose files are on the disks of several nodes, read as one directory.

While it is open, a thread of every rank serves ranges of the files that its node has.
`LocalCheckpointPath` is the directory, and `open_file` of a file in it returns the `OpenFile` that
all readers of checkpoints use: any layout can read its boxes, on any number of nodes. Everything
that is read is compared with the checksums of its writer, block by block. A block that is damaged
on one node, or cannot be read there, is read from the next node that has it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import struct
import threading
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
from megatron.core.dist_checkpointing.local_tier import LocalTier, order_of
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.dist_checkpointing.replication import (
    MAX_MARKER,
    MAX_WRITERS,
    MessageAuthenticator,
    marker_name,
    writer_of,
)
from megatron.core.object_storage import first_line

logger = logging.getLogger(__name__)

_MAX_BLOCKS = 16  # of one request
_SERVERS = 4  # threads: one reads from the disk while another one sends
_REQUEST_TAG = 1
_FIRST_ANSWER_TAG = 2  # every answer has its own tag
# Position, length, tag of the answer, file; a request of length 0 ends the service. Followed by its
# MAC. The answer is a byte (whether the range could be read), the MAC, and in a second message the
# content.
_REQUEST = struct.Struct("<QQQ256p")
_IDLE = timedelta(days=1)  # a rank may not receive any request during the whole load
_PATIENCE = timedelta(minutes=10)  # for one answer


class LocalCheckpointInfo(NamedTuple):
    """A checkpoint that is complete on all nodes together.

    `writers[w]` is (size of the marker, nodes with the files) of writer w.
    """

    name: str
    writers: list[tuple[int, list[int]]]

    @property
    def order(self) -> tuple[int, int]:
        """(start of the job, iteration)."""
        return order_of(self.name)


def find_local_checkpoints(tier: LocalTier) -> list[LocalCheckpointInfo]:
    """Return the complete local checkpoints on rank 0, newest first; [] elsewhere. Collective."""
    # The first rank of each node reports the files of the node.
    mine: _CheckpointsOfNode = {}
    if tier.rank == tier.node:
        mine = _find_on_this_node(tier)

    def merge(nodes: list[_CheckpointsOfNode]) -> list[list[LocalCheckpointInfo]]:
        results: list[list[LocalCheckpointInfo]] = [[] for _ in nodes]
        results[0] = _merge_nodes(nodes)
        return results

    result: list[LocalCheckpointInfo] = Coordination.of(None).gather_compute_scatter(mine, merge)
    return result


_CheckpointsOfNode = dict[str, dict[int, tuple[int, int]]]  # name -> `LocalTier.find_writers`


def _find_on_this_node(tier: LocalTier) -> _CheckpointsOfNode:
    """Return the checkpoints on this node, without those that cannot be read.

    Other nodes may have their files: the ranks of this node must take part in the collective.
    """
    found: _CheckpointsOfNode = {}
    for name in tier.list_checkpoints():
        try:
            found[name] = tier.find_writers(name)
        except OSError as error:
            logger.warning(
                f"local checkpoint {name} cannot be read: {error}", extra={"every_rank": True}
            )
    return found


def _merge_nodes(nodes: list[_CheckpointsOfNode]) -> list[LocalCheckpointInfo]:
    """Return the checkpoints that are complete on all nodes together, newest first."""
    # For each checkpoint and writer: (size of the marker, nodes with the files).
    merged: dict[str, dict[int, tuple[int, list[int]]]] = {}
    counts: dict[str, int] = {}
    for node, checkpoints in enumerate(nodes):
        for name, writers in checkpoints.items():
            writers_of_name = merged.setdefault(name, {})
            for writer, (count, marker_size) in writers.items():
                is_valid = 0 <= writer < count <= MAX_WRITERS and 0 < marker_size <= MAX_MARKER
                if is_valid:
                    _, holders = writers_of_name.setdefault(writer, (marker_size, []))
                    holders.append(node)
                    counts[name] = count

    complete = []
    for name in sorted(merged, key=order_of, reverse=True):
        writers_of_name = merged[name]
        count = counts.get(name, 1)
        # The files of every writer must be on some node.
        missing = [writer for writer in range(count) if writer not in writers_of_name]
        if missing:
            ranks = "rank" if len(missing) == 1 else "ranks"
            logger.warning(
                f"local checkpoint {name} cannot be used: no node has what "
                f"{ranks} {', '.join(map(str, missing[:8]))} of {count} wrote"
            )
            continue
        writers_in_order = [writers_of_name[writer] for writer in range(count)]
        complete.append(LocalCheckpointInfo(name, writers_in_order))
    return complete


class _ThreadBuffer(threading.local):
    """A buffer per thread, kept because allocating new pages costs more than the copy."""

    buffer = torch.empty(0, dtype=torch.uint8)


class DistributedLocalCheckpoint:
    """An open `LocalCheckpointInfo`. Opening and closing are collective."""

    def __init__(self, tier: LocalTier, info: LocalCheckpointInfo) -> None:
        self._tier = tier
        self._info = info
        self.directory = LocalCheckpointPath(tier.root / info.name)
        self.directory.checkpoint = self
        self._markers: dict[int, dict[str, FileChecksums]] = {}
        self._reported: set[tuple[str, int]] = set()
        self._group: dist.ProcessGroup | None = None
        is_single_node = len(set(tier.nodes)) == 1
        if not is_single_node:
            self._start_serving()

    def _start_serving(self) -> None:
        """Serve the files of this node to the ranks of other nodes. Collective."""
        self._group = dist.new_group(backend="gloo", timeout=_IDLE)
        self._authenticator = MessageAuthenticator.create(self._group)
        self._tags = itertools.count(_FIRST_ANSWER_TAG)
        self._thread_buffer = _ThreadBuffer()
        self._servers = Workers(_SERVERS, "checkpoint-server")
        self._thread = threading.Thread(target=self._serve, name="checkpoint-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving, once all ranks have read their data."""
        if self._group is None:
            return
        coordination = Coordination.of(None)
        # All ranks have read: no request follows, except for those that end the service.
        coordination.all_true(True)
        next_rank = (coordination.rank + 1) % coordination.size
        self._send_request(next_rank, "", 0, 0)
        self._thread.join()
        self._servers.close()
        # All ranks have received their last request.
        coordination.all_true(True)
        dist.destroy_process_group(self._group)
        self._group = None

    def sums(self, file: str) -> FileChecksums:
        """Return the checksums of a file.

        Raises FileNotFoundError for a file that is not part of the checkpoint.
        """
        writer = writer_of(file)
        if writer >= len(self._info.writers):
            raise FileNotFoundError(str(self.directory / file))
        if writer not in self._markers:
            self._markers[writer] = self._read_marker(writer)
        try:
            return self._markers[writer][file]
        except KeyError as error:
            raise FileNotFoundError(str(self.directory / file)) from error

    def read_blocks_into(self, view: memoryview, file: str, first: int) -> None:
        """Fill `view` with whole blocks of a file, from block `first` on, as they were written."""
        start = first * BLOCK_SIZE
        stop = start + len(view)
        count = -(-len(view) // BLOCK_SIZE)
        digests = self.sums(file).blocks
        expected = digests[first * DIGEST_SIZE : (first + count) * DIGEST_SIZE]
        # Try the copies of all nodes until one has the recorded hashes.
        for node, arrived in self._read_copies(writer_of(file), file, start, view):
            if not arrived:
                self._report(file, node, "cannot be read")
                continue
            if hash_blocks(view) == expected:
                return
            self._report(file, node, f"is damaged in bytes {start}..{stop}")
        raise CheckpointError(
            f"{self.directory / file}: no node has bytes {start}..{stop} undamaged"
        )

    def _read_marker(self, writer: int) -> dict[str, FileChecksums]:
        """Return the checksums of the files of a writer, from the first node with a valid copy."""
        file = marker_name(writer, len(self._info.writers))
        marker_size, _ = self._info.writers[writer]
        content = bytearray(marker_size)
        for node, arrived in self._read_copies(writer, file, 0, memoryview(content)):
            if not arrived:
                self._report(file, node, "cannot be read")
                continue
            try:
                return decode_checksums(bytes(content), str(self.directory / file))
            except CheckpointError:
                self._report(file, node, "is damaged")
        raise CheckpointError(f"{self.directory / file}: no node has it undamaged")

    def _read_copies(
        self, writer: int, file: str, position: int, view: memoryview
    ) -> Iterator[tuple[int, bool]]:
        """Fill `view` from each node that has `file`, this node first.

        Yields (node, whether it could be read) for each of them.
        """
        _, nodes = self._info.writers[writer]
        this_node = self._tier.node
        # Rotated, which distributes the readers over the nodes; this node first.
        turn = self._tier.rank % len(nodes)
        rotated = nodes[turn:] + nodes[:turn]
        for node in sorted(rotated, key=lambda node: node != this_node):
            if node == this_node:
                yield node, self._read(file, position, view)
            else:
                yield node, self._read_remotely(node, file, position, view)

    def _read(self, file: str, position: int, view: memoryview) -> bool:
        """Read from the disk of this node. Returns whether that was possible."""
        try:
            with open_file(self._tier.root / self._info.name / file) as opened:
                opened.read_into(view, position)
        except (OSError, CheckpointError):
            return False
        return True

    def _read_remotely(self, node: int, file: str, position: int, view: memoryview) -> bool:
        """Read from the disk of `node`. Returns whether that was possible."""
        # Distribute the requests over the ranks of the node.
        ranks = self._tier.ranks_of(node)
        rank = ranks[self._tier.rank % len(ranks)]
        head = torch.empty(1 + self._authenticator.size, dtype=torch.uint8)
        try:
            tag = self._send_request(rank, file, position, len(view))
            _wait(dist.irecv(head, rank, self._group, tag))
            status = view_bytes(head)[:1]
            mac = view_bytes(head)[1:]
            parts = [status]
            is_found = bool(status[0])
            if is_found:
                content = torch.frombuffer(view, dtype=torch.uint8)
                _wait(dist.irecv(content, rank, self._group, tag))
                parts.append(view)
        except RuntimeError as error:
            text = f"{self.directory / file}: rank {rank}, whose node has it, is dead or hanging"
            raise CheckpointError(f"{text}: {first_line(error)}") from error
        # The code authenticates the content as the answer to this request of this rank.
        purpose = f"answer {rank} {self._tier.rank} {tag}"
        is_authentic = self._authenticator.is_valid(mac, purpose, *parts)
        return is_found and is_authentic

    def _send_request(self, rank: int, file: str, position: int, length: int) -> int:
        """Send a request and return the tag of the answer."""
        tag = next(self._tags)
        content = _REQUEST.pack(position, length, tag, file.encode())
        purpose = f"request {self._tier.rank} {rank}"
        mac = self._authenticator.sign(purpose, content)
        request = torch.frombuffer(bytearray(content + mac), dtype=torch.uint8)
        _wait(dist.isend(request, rank, self._group, _REQUEST_TAG))
        return tag

    def _serve(self) -> None:
        """Receive requests until one ends the service; several are answered at the same time."""
        request = torch.empty(_REQUEST.size + self._authenticator.size, dtype=torch.uint8)
        while True:
            try:
                source = dist.recv(request, None, self._group, _REQUEST_TAG)
            except RuntimeError:  # a rank is lost: the next collective reports it
                return
            message = bytes(view_bytes(request))
            content = message[: _REQUEST.size]
            mac = message[_REQUEST.size :]
            purpose = f"request {source} {self._tier.rank}"
            if not self._authenticator.is_valid(mac, purpose, content):
                logger.warning(f"a request of rank {source} is not authentic: ignored")
                continue
            position, length, tag, file = _REQUEST.unpack(content)
            if not length:
                return
            self._servers.submit(partial(self._answer, source, tag, file, position, length))

    def _answer(self, rank: int, tag: int, file: bytes, position: int, length: int) -> None:
        """Send whether the range of the file can be read here, and its content."""
        content = self._read_requested(file, position, length)
        status = bytes([content is not None])
        parts: list[bytes | memoryview] = [status]
        if content is not None:
            parts.append(view_bytes(content))
        purpose = f"answer {self._tier.rank} {rank} {tag}"
        mac = self._authenticator.sign(purpose, *parts)
        head = torch.frombuffer(bytearray(status + mac), dtype=torch.uint8)
        with contextlib.suppress(RuntimeError):  # the rank is lost: the next collective reports it
            dist.send(head, rank, self._group, tag)
            if content is not None:
                dist.send(content, rank, self._group, tag)

    def _read_requested(self, file: bytes, position: int, length: int) -> torch.Tensor | None:
        """Return the requested range; None if it cannot be read or no reader would request it."""
        if length > max(MAX_MARKER, _MAX_BLOCKS * BLOCK_SIZE):
            return None
        try:
            name = file_name(file.decode(), "a request")
        except ValueError:
            return None
        buffer = self._thread_buffer
        if len(buffer.buffer) < length:
            buffer.buffer = torch.empty(length, dtype=torch.uint8)
        content = buffer.buffer[:length]
        if not self._read(name, position, view_bytes(content)):
            return None
        return content

    def _report(self, file: str, node: int, problem: str) -> None:
        """Warn about a copy of a file, once."""
        if (file, node) in self._reported:
            return
        self._reported.add((file, node))
        logger.warning(
            f"local checkpoint {self._info.name}: {file} on the node of rank {node} {problem}: "
            "trying the next node that has it",
            extra={"every_rank": True},
        )


def _wait(work: dist.Work | None) -> None:
    """Wait for a message. Raises RuntimeError if it does not arrive in time."""
    assert work is not None
    work.wait(_PATIENCE)


class LocalCheckpointPath(type(Path())):  # type: ignore[misc]
    """The directory of a `DistributedLocalCheckpoint`, or a file in it."""

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
    """An open file of a `DistributedLocalCheckpoint`; blocks are read whole."""

    closest_gap = BLOCK_SIZE

    def __init__(self, path: Path) -> None:
        assert isinstance(path, LocalCheckpointPath)
        self.path = path
        self.descriptor = None
        self._checkpoint = path.checkpoint
        self.size = self._checkpoint.sums(path.name).size
        # The last block of which only a part was requested, and its position.
        self._block = memoryview(b"")
        self._block_position = 0

    def measure_directory(self) -> int:
        return self.size  # reported by ranks of this job

    def _read_some(self, view: memoryview, position: int) -> int:
        view = view[: self.size - position]
        if not view:
            return 0

        # Whole blocks are read directly into `view`. The last block of the file may be shorter.
        block_number, start_in_block = divmod(position, BLOCK_SIZE)
        whole = len(view)
        if position + len(view) < self.size:
            whole = len(view) // BLOCK_SIZE * BLOCK_SIZE
        if start_in_block == 0 and whole:
            direct = view[: min(whole, _MAX_BLOCKS * BLOCK_SIZE)]
            self._checkpoint.read_blocks_into(direct, self.path.name, block_number)
            return len(direct)

        # A part of a block is copied from the block, which is kept for the next request.
        is_kept = 0 <= position - self._block_position < len(self._block)
        if not is_kept:
            self._block = memoryview(b"")  # if reading raises
            block_position = block_number * BLOCK_SIZE
            block_size = min(BLOCK_SIZE, self.size - block_position)
            block = memoryview(bytearray(block_size))
            self._checkpoint.read_blocks_into(block, self.path.name, block_number)
            self._block_position = block_position
            self._block = block
        rest_of_block = self._block[position - self._block_position :]
        part = rest_of_block[: len(view)]
        view[: len(part)] = part
        return len(part)


OPENERS[LocalCheckpointPath] = _LocalCheckpointFile
