"""Data files of a checkpoint, written in aligned pieces with a hash of every block.

Writes are large and bypass the page cache (O_DIRECT), which costs a tenth of the CPU time of
buffered writes and leaves the page cache to the data loader.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

from megatron.core.dist_checkpointing.background import PAGE, Slot
from megatron.core.dist_checkpointing.format.checksums import (
    BLOCK_SIZE,
    DIGEST_SIZE,
    FileChecksums,
    hash_blocks,
)
from megatron.core.dist_checkpointing.format.hashed_copy import hash_and_write
from megatron.core.durable_files import naming

_DIRECT = os.O_DIRECT if hasattr(os, "O_DIRECT") else 0
_MODE = 0o666  # less the umask, as for every file that `open` creates
# Not os.posix_fallocate: it writes to every block where the file system cannot reserve space.
_FALLOCATE = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
if _FALLOCATE is not None:
    _FALLOCATE.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_OUT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def reserve_space(descriptor: int, size: int) -> None:
    """Reserve disk space for the first `size` bytes of an open file, and make it that long.

    Raises OSError if there is not enough. File systems that cannot reserve space are left to fail
    in the writes. On ext4, writes to reserved space run in parallel; those that extend a file take
    turns.
    """
    if _FALLOCATE is None or size == 0:
        return
    if _FALLOCATE(descriptor, 0, 0, size) == 0:
        return
    error_number = ctypes.get_errno()
    if error_number in _OUT_OF_SPACE:
        raise OSError(error_number, os.strerror(error_number))


Piece = tuple[int, Slot, int]
"""Position in a file, and the slot whose first bytes belong there, with their number."""


class Shard:
    """A data file of known size, written in aligned pieces by any thread.

    Every block is hashed before it is written.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._digests = bytearray(-(-size // BLOCK_SIZE) * DIGEST_SIZE)

    def write(self, offset: int, slot: Slot, length: int, digests: bytes | None = None) -> None:
        """Write the first `length` bytes of `slot`, which may be reused afterwards.

        `digests` are those of its blocks, if they are known.
        """
        if digests is None:
            digests = hash_blocks(slot.view[:length])
        self._set_digests(offset, digests)
        self._write(offset, slot.view, length)

    def _set_digests(self, offset: int, digests: bytes) -> None:
        first = offset // BLOCK_SIZE * DIGEST_SIZE
        self._digests[first : first + len(digests)] = digests

    def write_pieces(self, pieces: Sequence[Piece]) -> None:
        """Write several pieces; the interpreter is needed as little as possible."""
        for piece in pieces:
            self.write(*piece)

    def close(self, durable: bool) -> FileChecksums:
        """Close the file and return its checksums; without `durable` it is given up."""
        self._close(durable)
        return FileChecksums(self._size, bytes(self._digests))

    def _write(self, offset: int, view: memoryview, length: int) -> None:
        raise NotImplementedError

    def _close(self, durable: bool) -> None:
        raise NotImplementedError


class ShardFile(Shard):
    """A shard in a file system.

    Direct writes have whole pages: the rest of the last page is zeroed, and cut off by `close`.
    """

    def __init__(self, path: Path, size: int) -> None:
        super().__init__(size)
        self._path = path
        self._direct = bool(_DIRECT)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            self._descriptor = os.open(path, flags | _DIRECT, _MODE)
        except OSError as error:
            if error.errno != errno.EINVAL or not _DIRECT:
                raise
            self._direct = False  # not every file system has direct writes
            self._descriptor = os.open(path, flags, _MODE)
        try:
            with naming(path):
                reserve_space(self._descriptor, size)
        except OSError:
            os.ftruncate(self._descriptor, 0)  # a part may be reserved, which others lack
            os.close(self._descriptor)
            raise

    def write_pieces(self, pieces: Sequence[Piece]) -> None:
        # Only the last piece of a file may be short.
        whole = []
        for offset, slot, length in pieces:
            if length % BLOCK_SIZE == 0:
                whole.append((offset, slot.address, length))
        written = hash_and_write(self._descriptor, whole)
        for (offset, _, _), digests in zip(whole, written, strict=False):
            self._set_digests(offset, digests)
        super().write_pieces(pieces[len(written) :])

    def _write(self, offset: int, view: memoryview, length: int) -> None:
        padded = min(len(view), -(-length // PAGE) * PAGE) if self._direct else length
        view[length:padded] = bytes(padded - length)  # cut off by `close`
        position = 0
        while position < padded:
            direct = self._direct
            try:
                with naming(self._path):
                    position += os.pwrite(
                        self._descriptor, view[position:padded], offset + position
                    )
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                self._leave_direct()
            else:
                if position % PAGE and position < padded:
                    self._leave_direct()  # a short write left us unaligned

    def _leave_direct(self) -> None:
        """Continue with buffered writes: some file systems open direct files but refuse to write
        them.
        """
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
        self._direct = False

    def _close(self, durable: bool) -> None:
        try:
            if durable:
                with naming(self._path):
                    os.ftruncate(self._descriptor, self._size)
                    os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)
