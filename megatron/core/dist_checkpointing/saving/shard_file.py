"""The files of one rank: shards as large writes past the page cache with block checksums on the way, objects as bytes.

Direct writes cost a tenth of the CPU time of buffered ones and leave the page cache to the data loader. Objects become
bytes at the moment of the save call: whatever changes afterwards does not reach the checkpoint.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.core.dist_checkpointing.format.checksums import BLOCK_SIZE, DIGEST_SIZE, FileChecksums, hash_blocks
from megatron.core.dist_checkpointing.format.metadata import Location
from megatron.core.dist_checkpointing.format.torch_zip import object_archive, pad_archive
from megatron.core.dist_checkpointing.format.unpickler import safe_load
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.durable_files import naming

_PAGE = 4096
_DIRECT = os.O_DIRECT if hasattr(os, "O_DIRECT") else 0


class ShardFile:
    """A new file of known size, written in aligned pieces by any thread and durable after `close`."""

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._size = path, size
        self._digests = bytearray(-(-size // BLOCK_SIZE) * DIGEST_SIZE)
        self._lock = threading.Lock()
        self._direct = bool(_DIRECT)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            self._descriptor = os.open(path, flags | _DIRECT, 0o644)
        except OSError as error:
            if error.errno != errno.EINVAL or not _DIRECT:
                raise
            self._direct = False  # not every file system has direct writes
            self._descriptor = os.open(path, flags, 0o644)

    def write(self, offset: int, slot: memoryview, length: int) -> None:
        """Write the first `length` bytes of `slot`; the rest of its last page is zeroed and cut off by `close`."""
        padded = min(len(slot), -(-length // _PAGE) * _PAGE)
        slot[length:padded] = bytes(padded - length)
        view = slot[:length]
        first = offset // BLOCK_SIZE * DIGEST_SIZE
        digests = hash_blocks(view)
        self._digests[first : first + len(digests)] = digests
        self._pwrite(slot[:padded] if self._direct else view, offset)

    def close(self, durable: bool) -> FileChecksums:
        try:
            if durable:
                with naming(self._path):
                    os.ftruncate(self._descriptor, self._size)
                    os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)
        return FileChecksums(self._size, bytes(self._digests))

    def _pwrite(self, view: memoryview, offset: int) -> None:
        position = 0
        while position < len(view):
            direct = self._direct
            try:
                with naming(self._path):
                    position += os.pwrite(self._descriptor, view[position:], offset + position)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                self._leave_direct()
            else:
                if position % _PAGE and position < len(view):
                    self._leave_direct()  # a short write left us unaligned

    def _leave_direct(self) -> None:
        """Some file systems accept direct files and refuse direct writes: go on with buffered ones."""
        with self._lock:
            if self._direct:
                flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
                fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
                self._direct = False


_GRANULE = 1024  # objects are padded, so that a growing step count rarely changes a length


class ObjectFile(NamedTuple):
    """The file of one rank's objects; empty if it has none."""

    name: str
    content: bytes
    locations: dict[str, Location]


def object_file(objects: Sequence[ShardedObject], rank: int, workers: int) -> ObjectFile:
    """`__{rank}_{workers}.distcp`; one object under several keys is stored once.

    Raises CheckpointError for a value that could not be read back.
    """
    name = f"__{rank}_{workers}.distcp"
    content, locations = bytearray(), {}
    stored: dict[int, Location] = {}
    for entry in objects:
        if id(entry.value) in stored:
            locations[entry.key] = stored[id(entry.value)]
            continue
        archive = object_archive(entry.value)
        safe_load(archive, where=entry.key, placeholders=False)
        padded = pad_archive(archive, -(-len(archive) // _GRANULE) * _GRANULE)
        locations[entry.key] = stored[id(entry.value)] = Location(name, len(content), len(padded))
        content += padded
    return ObjectFile(name, bytes(content), locations)


def common_archive(common: dict[str, Any]) -> bytes:
    """The content of `common.pt`. Raises CheckpointError for a value that could not be read back."""
    buffer = io.BytesIO()
    torch.save(common, buffer)
    safe_load(buffer.getvalue(), where="common", placeholders=False)
    return buffer.getvalue()
