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
from megatron.core.dist_checkpointing.choice import Candidate
from megatron.core.dist_checkpointing.format.checksums import (
    BLOCK_SIZE,
    DIGEST_SIZE,
    FileChecksums,
    count_blocks,
    decode_checksums,
    hash_blocks,
)
from megatron.core.dist_checkpointing.local_checkpoints import (
    LocalCheckpointInfo,
    LocalInventory,
    WriterFiles,
)
from megatron.core.dist_checkpointing.ownership.lineage import (
    LINEAGE,
    Lineage,
    Segment,
    read_lineage,
)
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.dist_checkpointing.tiers.local_tier import LocalTier, order_of
from megatron.core.dist_checkpointing.tiers.replication import (
    MAX_MARKER,
    MAX_WRITERS,
    MessageAuthenticator,
    marker_name,
    writer_of,
)
from megatron.core.object_storage import first_line
from megatron.core.safe_files.errors import CheckpointError
from megatron.core.safe_files.reading import OPENERS, OpenFile, open_file
from megatron.core.safe_files.schema import file_name
from megatron.core.safe_files.torch_zip import view_bytes

logger = logging.getLogger(__name__)

_MAX_BLOCKS = 16  # per request
_SERVERS = 4  # threads: one reads from the disk while another one sends
_REQUEST_TAG = 1
_FIRST_ANSWER_TAG = 2  # every answer has its own tag

# A request is (position, length, tag of the answer, file), followed by its MAC. Length 0 ends the
# service. The answer is a head (one byte: 1 if the range could be read; then the MAC), and a second
# message with the content if there is any.
_REQUEST = struct.Struct("<QQQ256p")
_IDLE = timedelta(days=1)  # a rank may not receive any request during the whole load
_PATIENCE = timedelta(minutes=10)  # for one answer


class _Node(NamedTuple):
    """The local checkpoints of one node, by name, and those of other runs."""

    writers: dict[str, dict[int, tuple[int, int]]]  # results of `LocalTier.find_writers`
    lineages: dict[str, Lineage]
    of_other_runs: list[Candidate]


def find_on_all_nodes(tier: LocalTier) -> LocalInventory:
    """Return the local checkpoints on rank 0, and nothing elsewhere. Collective."""
    # The first rank of each node reports the files of the node.
    node = _Node({}, {}, [])
    if tier.rank == tier.node:
        node = _find_on_this_node(tier)

    def merge(nodes: list[_Node]) -> list[LocalInventory]:
        # One result per rank: only rank 0 chooses the checkpoint to load.
        results = [LocalInventory() for _ in nodes]
        results[0] = _merge_nodes(nodes)
        return results

    result: LocalInventory = Coordination.of(None).gather_compute_scatter(node, merge)
    return result


def _find_on_this_node(tier: LocalTier) -> _Node:
    """Return the checkpoints on this node, without those that cannot be read.

    Other nodes may have their files: the ranks of this node must take part in the collective.
    """
    node = _Node({}, {}, [])
    for name in tier.list_checkpoints() if tier.root.is_dir() else ():
        try:
            node.writers[name] = tier.find_writers(name)
            if (tier.root / name / LINEAGE).exists():
                node.lineages[name] = read_lineage(tier.root / name)
        except OSError as error:
            logger.warning(
                f"local checkpoint {name} cannot be read: {error}", extra={"every_rank": True}
            )
    with contextlib.suppress(OSError):
        for path in tier.root.parent.iterdir():
            newest = _find_newest_of_run(tier._replace(root=path))
            if path != tier.root and newest is not None:
                node.of_other_runs.append(newest)
    return node


def _find_newest_of_run(tier: LocalTier) -> Candidate | None:
    """Return the newest checkpoint in a directory of which rank 0 has saved its files here."""
    if not tier.root.is_dir():
        return None
    for name in reversed(tier.list_checkpoints()):
        if 0 in tier.find_writers(name):
            path = tier.root / name
            return Candidate(str(path), read_lineage(path), None, is_local=True)
    return None


def _merge_nodes(nodes: list[_Node]) -> LocalInventory:
    """Return the checkpoints that any node has files of, newest first."""
    names: dict[str, None] = {}
    of_other_runs: dict[str, Candidate] = {}
    for node in nodes:
        names |= dict.fromkeys(node.writers)
        for candidate in node.of_other_runs:
            of_other_runs.setdefault(candidate.name, candidate)

    checkpoints = []
    for name in sorted(names, key=order_of, reverse=True):
        writers, count = _collect_writers(name, nodes)
        missing = [writer for writer in range(count) if writer not in writers]
        problem = None
        if missing:
            problem = _describe_missing_writers(missing, count)
        in_order = [writers[writer] for writer in range(count) if writer in writers]
        lineage = _find_lineage(name, nodes)
        checkpoints.append(LocalCheckpointInfo(name, in_order, lineage, problem))
    return LocalInventory(checkpoints, list(of_other_runs.values()))


def _find_lineage(name: str, nodes: list[_Node]) -> Lineage:
    """Return the lineage of a checkpoint, from the first node with a valid copy."""
    generation, iteration = order_of(name)
    for node in nodes:
        lineage = node.lineages.get(name)
        if lineage is not None and lineage.order == (generation, iteration):
            return lineage
    return Lineage((Segment(generation, iteration),))


def _collect_writers(name: str, nodes: list[_Node]) -> tuple[dict[int, WriterFiles], int]:
    """Return the writers of a checkpoint whose files some node has, and the number of writers."""
    writers: dict[int, WriterFiles] = {}
    num_writers = 1
    for index, node in enumerate(nodes):
        for writer, (count, marker_size) in node.writers.get(name, {}).items():
            # Another program may have changed the names and sizes of files.
            is_valid_writer = 0 <= writer < count <= MAX_WRITERS
            is_valid_marker = 0 < marker_size <= MAX_MARKER
            if is_valid_writer and is_valid_marker:
                files = writers.setdefault(writer, WriterFiles(marker_size, []))
                files.nodes.append(index)
                num_writers = count
    return writers, num_writers


def _describe_missing_writers(missing: list[int], count: int) -> str:
    """Return the problem of a checkpoint of which no node has the files of `missing` writers."""
    ranks = "rank" if len(missing) == 1 else "ranks"
    first_missing = ", ".join(map(str, missing[:8]))
    return f"no node has the files of {ranks} {first_missing} of {count}"


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
        # Checksums by file, for each writer of which a file was requested.
        self._markers: dict[int, dict[str, FileChecksums]] = {}
        # Copies of files (file, node) about which a warning was logged.
        self._reported: set[tuple[str, int]] = set()
        # Connects the ranks for requests and answers; None if all ranks are on one node.
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

        # Wait until all ranks have read: then only the requests follow that end the service.
        coordination.all_true(True)
        next_rank = (coordination.rank + 1) % coordination.size
        self._send_request(next_rank, file="", position=0, length=0)
        self._thread.join()
        self._servers.close()

        # Wait until all ranks have received their last request.
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
        num_blocks = count_blocks(len(view))
        digests = self.sums(file).blocks
        first_digest = first * DIGEST_SIZE
        expected = digests[first_digest : first_digest + num_blocks * DIGEST_SIZE]

        # Try the copies of all nodes until one has the recorded hashes.
        writer = writer_of(file)
        for node, is_read in self._read_copies(writer, file, start, view):
            if not is_read:
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
        path = self.directory / file
        content = bytearray(self._info.writers[writer].marker_size)
        view = memoryview(content)
        for node, is_read in self._read_copies(writer, file, 0, view):
            if not is_read:
                self._report(file, node, "cannot be read")
                continue
            try:
                return decode_checksums(bytes(content), str(path))
            except CheckpointError:
                self._report(file, node, "is damaged")
        raise CheckpointError(f"{path}: no node has it undamaged")

    def _read_copies(
        self, writer: int, file: str, position: int, view: memoryview
    ) -> Iterator[tuple[int, bool]]:
        """Fill `view` from one node after the other, this node first.

        Yields (node, whether it could be read). The caller stops when the content is intact.
        """
        this_node = self._tier.node
        nodes = self._info.writers[writer].nodes
        if this_node in nodes:
            yield this_node, self._read(file, position, view)

        # Ranks begin with different nodes, which distributes the readers.
        turn = self._tier.rank % len(nodes)
        for node in nodes[turn:] + nodes[:turn]:
            if node != this_node:
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
        """Read from the disk of `node`. Returns whether that was possible.

        Raises CheckpointError if the rank that serves the file is lost.
        """
        # Distribute the requests over the ranks of the node.
        ranks = self._tier.ranks_of(node)
        server = ranks[self._tier.rank % len(ranks)]

        # Send the request and receive the answer: the head, then the content, if there is any.
        head = torch.empty(1 + self._authenticator.size, dtype=torch.uint8)
        head_view = view_bytes(head)
        status = head_view[:1]
        mac = head_view[1:]
        answer = [status]
        try:
            tag = self._send_request(server, file, position, len(view))
            _wait(dist.irecv(head, server, self._group, tag))
            is_found = bool(status[0])
            if is_found:
                content = torch.frombuffer(view, dtype=torch.uint8)
                _wait(dist.irecv(content, server, self._group, tag))
                answer.append(view)
        except RuntimeError as error:
            raise CheckpointError(
                f"{self.directory / file}: rank {server}, whose node has it, is dead or hanging: "
                f"{first_line(error)}"
            ) from error

        # The purpose binds the answer to this request: an earlier answer is not accepted.
        purpose = _answer_purpose(server, self._tier.rank, tag)
        is_authentic = self._authenticator.is_valid(mac, purpose, *answer)
        return is_found and is_authentic

    def _send_request(self, rank: int, file: str, position: int, length: int) -> int:
        """Send a request to `rank`. Returns the tag of the answer."""
        tag = next(self._tags)
        content = _REQUEST.pack(position, length, tag, file.encode())
        purpose = _request_purpose(self._tier.rank, rank)
        mac = self._authenticator.sign(purpose, content)
        request = _make_message(content, mac)
        _wait(dist.isend(request, rank, self._group, _REQUEST_TAG))
        return tag

    def _serve(self) -> None:
        """Receive requests until one ends the service, and let the server threads answer them."""
        request = torch.empty(_REQUEST.size + self._authenticator.size, dtype=torch.uint8)
        while True:
            try:
                client = dist.recv(request, None, self._group, _REQUEST_TAG)
            except RuntimeError:  # a rank is lost: the next collective reports it
                return

            # Copied: the next request overwrites the tensor.
            message = bytes(view_bytes(request))
            content = message[: _REQUEST.size]
            mac = message[_REQUEST.size :]
            purpose = _request_purpose(client, self._tier.rank)
            if not self._authenticator.is_valid(mac, purpose, content):
                logger.warning(f"a request of rank {client} is not authentic: ignored")
                continue

            position, length, tag, file = _REQUEST.unpack(content)
            if length == 0:
                return
            answer = partial(self._answer, client, tag, file, position, length)
            self._servers.submit(answer)

    def _answer(self, rank: int, tag: int, file: bytes, position: int, length: int) -> None:
        """Send `rank` the range of the file, or the status that it cannot be read here."""
        content = self._read_requested(file, position, length)
        is_found = content is not None
        status = bytes([is_found])
        answer: list[bytes | memoryview] = [status]
        if content is not None:
            answer.append(view_bytes(content))

        purpose = _answer_purpose(self._tier.rank, rank, tag)
        mac = self._authenticator.sign(purpose, *answer)
        head = _make_message(status, mac)
        # An error means that the rank is lost: the next collective reports it.
        with contextlib.suppress(RuntimeError):
            dist.send(head, rank, self._group, tag)
            if content is not None:
                dist.send(content, rank, self._group, tag)

    def _read_requested(self, file: bytes, position: int, length: int) -> torch.Tensor | None:
        """Return the requested range, or None if it cannot be read.

        A range that readers do not request, or a file outside of the checkpoint, is not read.
        """
        # Readers request markers, and up to `_MAX_BLOCKS` blocks of other files.
        if length > max(MAX_MARKER, _MAX_BLOCKS * BLOCK_SIZE):
            return None
        try:
            name = file_name(file.decode(), "a request")
        except ValueError:
            return None

        # Read into the buffer of this thread.
        local = self._thread_buffer
        if len(local.buffer) < length:
            local.buffer = torch.empty(length, dtype=torch.uint8)
        content = local.buffer[:length]
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


def _request_purpose(client: int, server: int) -> str:
    """Return the purpose that the MAC of a request authenticates."""
    return f"request {client} {server}"


def _answer_purpose(server: int, client: int, tag: int) -> str:
    """Return the purpose that the MAC of an answer authenticates."""
    return f"answer {server} {client} {tag}"


def _make_message(content: bytes, mac: bytes) -> torch.Tensor:
    """Return `content` and its MAC as a tensor that can be sent."""
    return torch.frombuffer(bytearray(content + mac), dtype=torch.uint8)


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
        # The last block of which only a part was requested, and its position in the file. Kept,
        # because small requests often follow each other in the same block.
        self._block = memoryview(b"")
        self._block_position = 0

    def measure_directory(self) -> int:
        return self.size  # reported by ranks of this job

    def _read_some(self, view: memoryview, position: int) -> int:
        """Fill the beginning of `view` with the file from `position` on. Returns the bytes read."""
        view = view[: self.size - position]
        if not view:
            return 0

        # Read whole blocks directly into `view`. Only the last block of the file may be shorter.
        reaches_end = position + len(view) == self.size
        whole = len(view)
        if not reaches_end:
            whole -= len(view) % BLOCK_SIZE
        is_aligned = position % BLOCK_SIZE == 0
        if is_aligned and whole > 0:
            direct = view[: min(whole, _MAX_BLOCKS * BLOCK_SIZE)]
            first_block = position // BLOCK_SIZE
            self._checkpoint.read_blocks_into(direct, self.path.name, first_block)
            return len(direct)

        # Copy a part of a block from the whole block, which is kept for the next request.
        is_kept = 0 <= position - self._block_position < len(self._block)
        if not is_kept:
            self._load_block(position // BLOCK_SIZE)
        start_in_block = position - self._block_position
        content = self._block[start_in_block : start_in_block + len(view)]
        view[: len(content)] = content
        return len(content)

    def _load_block(self, block_index: int) -> None:
        """Read a block of the file and keep it."""
        position = block_index * BLOCK_SIZE
        size = min(BLOCK_SIZE, self.size - position)
        block = memoryview(bytearray(size))
        self._checkpoint.read_blocks_into(block, self.path.name, block_index)
        # Set only now: if reading raises, the previous block is still valid.
        self._block_position = position
        self._block = block


OPENERS[LocalCheckpointPath] = _LocalCheckpointFile
