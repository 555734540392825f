"""A checkpoint whose files lie on the disks of several nodes, read by all ranks as if it were one directory.

While it is open, a thread of every rank serves ranges of the files that its node holds. `SpreadPath` is the directory,
and `open_file` of a file in it gives what every reader of checkpoints uses: so any layout reads its boxes, on any
number of nodes. Whatever is read is compared with the checksums of its writer, block by block, where it is used; a
block that is damaged on one node, or cannot be read there, is taken from the next one.
"""

from __future__ import annotations

import itertools
import logging
import struct
import threading
from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing.format.checksums import (
    BLOCK_SIZE,
    DIGEST_SIZE,
    FileChecksums,
    decode_checksums,
    hash_blocks,
)
from megatron.core.dist_checkpointing.format.schema import OPENERS, CheckpointError, OpenFile, file_name, open_file
from megatron.core.dist_checkpointing.format.torch_zip import bytes_of
from megatron.core.dist_checkpointing.local_tier import LocalTier, marker_name, order_of, writer_of
from megatron.core.dist_checkpointing.planning.coordination import Coordination

logger = logging.getLogger(__name__)

_MOST_BLOCKS = 16  # of one request
_ASK, _FIRST_ANSWER = 1, 2  # tags; every answer has its own
_REQUEST = struct.Struct("<QQQ256p")  # position, length, tag of the answer, file; length 0 ends the service
_IDLE = timedelta(days=1)  # a rank may have nothing to serve for as long as a load takes


class HeldCheckpoint(NamedTuple):
    """A checkpoint that all nodes have together; `writers[w]` is (size of the marker, nodes with the files) of w."""

    name: str
    writers: list[tuple[int, list[int]]]

    @property
    def order(self) -> tuple[int, int]:
        """(start of the job, iteration)."""
        return order_of(self.name)


def find_held(tier: LocalTier) -> list[HeldCheckpoint]:
    """On rank 0: what can be read, newest first; empty elsewhere. A collective."""
    mine = {name: tier.held(name) for name in tier.names()} if tier.rank == tier.node else {}

    def merge(nodes: list[dict[str, dict[int, tuple[int, int]]]]) -> list[list[HeldCheckpoint]]:
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
            writers_of, count = merged[name], sizes.get(name, 1)
            missing = [writer for writer in range(count) if writer not in writers_of]
            if missing:
                logger.warning(
                    f"local checkpoint {name} cannot be used: no node has what "
                    f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing[:8]))} of {count} wrote"
                )
            else:
                found.append(HeldCheckpoint(name, [writers_of[writer] for writer in range(count)]))
        return [found, *([] for _ in nodes[1:])]

    result: list[HeldCheckpoint] = Coordination.of(None).map_at_coordinator(mine, merge)
    return result


class SpreadCheckpoint:
    """One open `HeldCheckpoint`; opening and closing are collectives."""

    def __init__(self, tier: LocalTier, held: HeldCheckpoint) -> None:
        self._tier, self._held = tier, held
        self.directory = SpreadPath(tier.root / held.name)
        self.directory.checkpoint = self
        self._markers: dict[int, dict[str, FileChecksums]] = {}
        self._reported: set[tuple[str, int]] = set()
        self._group: dist.ProcessGroup | None = None
        if len(set(tier.nodes)) > 1:
            self._group = dist.new_group(backend="gloo", timeout=_IDLE)
            self._tags = itertools.count(_FIRST_ANSWER)
            self._thread = threading.Thread(target=self._serve, name="checkpoint-server", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """When all ranks have read what they want."""
        if self._group is None:
            return
        ranks = Coordination.of(None)
        ranks.all_true(True)
        self._request((ranks.rank + 1) % ranks.size, "", 0, 0)
        self._thread.join()
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

    def blocks(self, file: str, first: int, last: int, buffer: torch.Tensor) -> memoryview:
        """Blocks [first, last) of a file as they were written, in `buffer`, which has a byte more."""
        sums = self.sums(file)
        start, stop = first * BLOCK_SIZE, min(last * BLOCK_SIZE, sums.size)
        expected = sums.blocks[first * DIGEST_SIZE : last * DIGEST_SIZE]
        for node, content in self._copies(writer_of(file), file, start, buffer[: stop - start + 1]):
            if content is not None and hash_blocks(content) == expected:
                return content
            what = "cannot be read" if content is None else f"is damaged in bytes {start}..{stop}"
            self._report(file, node, what)
        raise CheckpointError(f"{self.directory / file}: no node has bytes {start}..{stop} undamaged")

    def _read_marker(self, writer: int) -> dict[str, FileChecksums]:
        file = marker_name(writer, len(self._held.writers))
        buffer = torch.empty(self._held.writers[writer][0] + 1, dtype=torch.uint8)
        for node, content in self._copies(writer, file, 0, buffer):
            try:
                if content is not None:
                    return decode_checksums(bytes(content), str(self.directory / file))
                self._report(file, node, "cannot be read")
            except CheckpointError:
                self._report(file, node, "is damaged")
        raise CheckpointError(f"{self.directory / file}: no node has it undamaged")

    def _copies(
        self, writer: int, file: str, position: int, buffer: torch.Tensor
    ) -> Iterator[tuple[int, memoryview | None]]:
        """What the nodes that hold `file` have there, this node first; None where it cannot be read.

        The last byte of `buffer` is for the protocol.
        """
        content = bytes_of(buffer)[:-1]
        nodes, node = self._held.writers[writer][1], self._tier.node
        turn = self._tier.rank % len(nodes)  # readers spread over the holders
        for holder in sorted(nodes[turn:] + nodes[:turn], key=lambda other: other != node):
            if holder == node:
                yield node, content if self._read(file, position, content) else None
            else:
                ranks = self._tier.ranks_of(holder)
                rank = ranks[self._tier.rank % len(ranks)]
                dist.recv(buffer, rank, self._group, self._request(rank, file, position, len(content)))
                yield holder, content if buffer[-1] else None

    def _read(self, file: str, position: int, content: memoryview) -> bool:
        """From the own disk."""
        try:
            with open_file(self._tier.root / self._held.name / file) as opened:
                opened.read_into(content, position)
        except (OSError, CheckpointError):
            return False
        return True

    def _request(self, rank: int, file: str, position: int, length: int) -> int:
        """Returns the tag of the answer."""
        tag = next(self._tags)
        request = bytearray(_REQUEST.pack(position, length, tag, file.encode()))
        dist.send(torch.frombuffer(request, dtype=torch.uint8), rank, self._group, _ASK)
        return tag

    def _serve(self) -> None:
        """Answer with the bytes and a 1, or with anything and a 0."""
        request = torch.empty(_REQUEST.size, dtype=torch.uint8)
        buffer = torch.empty(0, dtype=torch.uint8)  # kept: new pages cost more than the copy
        while True:
            try:
                source = dist.recv(request, None, self._group, _ASK)
                position, length, tag, file = _REQUEST.unpack(bytes_of(request))
                if not length:
                    return
                if len(buffer) <= length:
                    buffer = torch.empty(length + 1, dtype=torch.uint8)
                answer = buffer[: length + 1]
                answer[-1] = self._read(file_name(file.decode(), "a request"), position, bytes_of(answer)[:-1])
                dist.send(answer, source, self._group, tag)
            except RuntimeError:  # a rank is gone: the next collective says so
                return

    def _report(self, file: str, node: int, what: str) -> None:
        if (file, node) not in self._reported:
            self._reported.add((file, node))
            logger.warning(
                f"local checkpoint {self._held.name}: {file} on the node of rank {node} {what}: "
                "trying the next node that has it",
                extra={"every_rank": True},
            )


class SpreadPath(type(Path())):  # type: ignore[misc]
    """The directory of a `SpreadCheckpoint`, or a file in it, for readers of checkpoints."""

    __slots__ = ("checkpoint",)
    checkpoint: SpreadCheckpoint

    def __truediv__(self, name: Any) -> SpreadPath:
        child = SpreadPath(super().__truediv__(name))
        child.checkpoint = self.checkpoint
        return child

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        try:
            return self.checkpoint.sums(self.name).size >= 0
        except FileNotFoundError:
            return False


class _SpreadFile(OpenFile):
    closest_gap = BLOCK_SIZE  # blocks are read as a whole in any case

    def __init__(self, path: Path) -> None:
        assert isinstance(path, SpreadPath)
        self.path, self.descriptor, self._checkpoint = path, None, path.checkpoint
        self.size = self._checkpoint.sums(path.name).size
        self._buffer = torch.empty(min(self.size, _MOST_BLOCKS * BLOCK_SIZE) + 1, dtype=torch.uint8)
        self._first, self._last, self._blocks = 0, 0, memoryview(b"")  # the last ones that were read

    def _read_some(self, view: memoryview, position: int) -> int:
        length = min(len(view), self.size - position)
        if length <= 0:
            return 0
        first, last = position // BLOCK_SIZE, -(-(position + length) // BLOCK_SIZE)
        if not self._first <= first < self._last:
            last = min(last, first + _MOST_BLOCKS)
            self._first = self._last = 0  # nothing is in the buffer if the next line raises
            self._blocks = self._checkpoint.blocks(self.path.name, first, last, self._buffer)
            self._first, self._last = first, last
        start = position - self._first * BLOCK_SIZE
        part = self._blocks[start : start + length]
        view[: len(part)] = part
        return len(part)


OPENERS[SpreadPath] = _SpreadFile
