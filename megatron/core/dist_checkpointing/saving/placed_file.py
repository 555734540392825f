"""Files that several threads and processes write at any position, past the page cache if possible.

In the page cache, a gigabyte costs about a second of processor time, because the kernel clears and
fills a page for every 4 KiB; a direct write (O_DIRECT) costs a tenth of that. Direct writes need
whole pages in aligned memory, to which a block is copied, and cast on the way. The ends of a block,
less than a page each, and small blocks are written through the page cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from pathlib import Path

import torch

from megatron.core.dist_checkpointing.background import PAGE
from megatron.core.durable_files import naming
from megatron.core.safe_files.torch_zip import view_bytes

DIRECT_SIZE = 256 << 10
"""Smallest block in bytes that is written directly: below, waiting for the disk takes longer."""
_DIRECT = getattr(os, "O_DIRECT", 0)
_BUFFER_SIZE = 2 << 20


class _AlignedMemory(threading.local):
    """Page-aligned memory of this thread."""

    def __init__(self) -> None:
        # Private memory, because shared memory has no huge pages. With pages of 4 KiB, a direct
        # write needs three times the processor time.
        memory = mmap.mmap(-1, _BUFFER_SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(memory)
        self.tensor = torch.frombuffer(self.view, dtype=torch.uint8)


_MEMORY = _AlignedMemory()


class PlacedFile:
    """An existing file, open for writes at any position by any thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, self._flags)
        # Opened by the first large block.
        self._direct: int | None = None
        self._writes_directly = bool(_DIRECT)
        self._lock = threading.Lock()

    def write(self, position: int, data: memoryview) -> None:
        """Write bytes through the page cache."""
        with naming(self._path):
            while data:
                # A write may be short, e.g., after a signal.
                count = os.pwrite(self._descriptor, data, position)
                data = data[count:]
                position += count

    def write_elements(
        self, position: int, elements: torch.Tensor, dtype: torch.dtype | None = None
    ) -> None:
        """Write a contiguous vector, cast to `dtype` if it is given; directly if it is large."""
        dtype = dtype or elements.dtype
        casts = dtype != elements.dtype
        is_large = elements.numel() * dtype.itemsize >= DIRECT_SIZE
        can_cast_in_place = not casts or position % dtype.itemsize == 0
        if not (is_large and can_cast_in_place and self._open_direct()):
            self.write(position, view_bytes(elements.to(dtype)))
            return

        memory = _MEMORY
        while elements.numel():
            # A byte has the same place in its page of memory as in that of the file.
            start = position % PAGE
            count = min(elements.numel(), (_BUFFER_SIZE - start) // dtype.itemsize)
            stop = start + count * dtype.itemsize
            target = memory.tensor[start:stop]
            if casts:
                target.view(dtype).copy_(elements[:count])
            else:
                # This releases the interpreter's lock and starts no threads of torch's own.
                ctypes.memmove(target.data_ptr(), elements.data_ptr(), stop - start)
            self._write_pages(position - start, memory.view, start, stop)
            elements = elements[count:]
            position += stop - start

    def close(self, durable: bool) -> None:
        """Close the file, which may report that an earlier write has failed."""
        with naming(self._path), contextlib.ExitStack() as stack:
            stack.callback(os.close, self._descriptor)
            if self._direct is not None:
                stack.callback(os.close, self._direct)
            if durable:
                os.fsync(self._descriptor)

    def _open_direct(self) -> bool:
        """Return whether the file is open for direct writes, which not every file system has."""
        with self._lock:
            if self._direct is None and self._writes_directly:
                try:
                    self._direct = os.open(self._path, self._flags | _DIRECT)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    self._writes_directly = False
        return self._writes_directly

    def _write_pages(self, base: int, pages: memoryview, start: int, stop: int) -> None:
        """Write bytes `[start, stop)` of `pages`, whose first byte is at `base` of the file."""
        first = -(-start // PAGE) * PAGE
        last = stop // PAGE * PAGE
        self.write(base + start, pages[start:first])
        if first < last and self._writes_directly:
            assert self._direct is not None
            try:
                with naming(self._path):
                    # A short write, e.g., on a full disk, is continued by the buffered one.
                    first += os.pwrite(self._direct, pages[first:last], base + first)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # Some file systems open direct files but refuse to write them.
                self._writes_directly = False
        self.write(base + first, pages[first:stop])


def write_at(path: Path, tensor: torch.Tensor, position: int) -> None:
    """Write at byte `position` of an existing file.

    The file is closed afterwards, so that a checkpoint may have more files than a process may have
    open.
    """
    file = PlacedFile(path)
    try:
        file.write_elements(position, tensor.reshape(-1))
    except BaseException:
        with contextlib.suppress(OSError):
            file.close(durable=False)
        raise
    file.close(durable=False)
