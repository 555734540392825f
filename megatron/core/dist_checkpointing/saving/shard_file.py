"""The files of one rank, written in pieces from the host buffers, with a hash of every block on the way.

In a file system: large writes past the page cache, which cost a tenth of the CPU time of buffered ones and leave the
page cache to the data loader. In object storage: one multipart upload for each file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from megatron.core.dist_checkpointing.format.checksums import BLOCK_SIZE, DIGEST_SIZE, FileChecksums, hash_blocks
from megatron.core.durable_files import naming
from megatron.core.object_storage import ObjectPath

_PAGE = 4096
_DIRECT = os.O_DIRECT if hasattr(os, "O_DIRECT") else 0

Progress = Callable[[int], None]  # called now and then with the number of bytes just written


class Shard(Protocol):
    """A file of known size, written in aligned pieces by any thread."""

    def write(self, offset: int, slot: memoryview, length: int) -> None:
        """Write the first `length` bytes of `slot`, which may be used again afterwards."""
        ...

    def close(self, durable: bool) -> FileChecksums:
        """Make it durable, or give it up."""
        ...


class ShardTarget(Protocol):
    """Where the files of a checkpoint grow, as all ranks see it; see `commit.py` for what rank 0 does with it."""

    def name_of(self, name: str) -> str:
        """The name there of the data file that the plan calls `name`."""
        ...

    def open_shard(self, name: str, size: int) -> Shard: ...

    def write_file(self, name: str, *parts: bytes) -> None:
        """A small file as a whole."""
        ...

    def finish(self, sums: Mapping[str, FileChecksums]) -> None:
        """After the last file of this rank: make the names durable. `sums` are those of its files."""
        ...


class _Digests:
    """The hashes of a file whose blocks come in any order."""

    def __init__(self, size: int) -> None:
        self._size, self._digests = size, bytearray(-(-size // BLOCK_SIZE) * DIGEST_SIZE)

    def add(self, offset: int, content: memoryview) -> None:
        first = offset // BLOCK_SIZE * DIGEST_SIZE
        digests = hash_blocks(content)
        self._digests[first : first + len(digests)] = digests

    def of_file(self) -> FileChecksums:
        return FileChecksums(self._size, bytes(self._digests))


class ShardUpload:
    """A new object. Its pieces may come in another order than that of the upload; those that come early are copied."""

    def __init__(self, path: ObjectPath, size: int) -> None:
        self._path, self._size = path, size
        self._digests = _Digests(size)
        self._upload = path.store.upload(path.key, size)
        self._position = 0
        self._early: dict[int, bytes] = {}
        self._lock = threading.Lock()

    def write(self, offset: int, slot: memoryview, length: int) -> None:
        self._digests.add(offset, slot[:length])
        with self._lock:  # one thread of the few that there are sends; what waits here is bounded by their number
            if offset != self._position:
                self._early[offset] = bytes(slot[:length])
                return
            self._send(slot[:length])
            while (piece := self._early.pop(self._position, None)) is not None:
                self._send(piece)

    def _send(self, piece: bytes | memoryview) -> None:
        self._upload.write(piece)
        self._position += len(piece)

    def close(self, durable: bool) -> FileChecksums:
        """An upload that is not closed never becomes an object."""
        if durable:
            assert self._position == self._size, (self._path, self._position, self._size)
            self._upload.close()
        return self._digests.of_file()


class ShardFile:
    """A new file of known size, written in aligned pieces by any thread and durable after `close`."""

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._size = path, size
        self._digests = _Digests(size)
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
        self._digests.add(offset, view)
        self._pwrite(slot[:padded] if self._direct else view, offset)

    def close(self, durable: bool) -> FileChecksums:
        try:
            if durable:
                with naming(self._path):
                    os.ftruncate(self._descriptor, self._size)
                    os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)
        return self._digests.of_file()

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
