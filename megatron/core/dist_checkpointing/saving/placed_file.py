"""Files that several threads and ranks write at arbitrary positions.

Large pieces bypass the page cache like the files of a checkpoint (`shard.py`): a buffered write
takes ten times the processor time, which training needs. Direct writes require whole pages in
page-aligned memory, so a piece is copied to such memory and cast on the way. Small pieces and the
two ends of a large one, in pages that other pieces share, are written via the page cache.
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
from megatron.core.dist_checkpointing.format.torch_zip import view_bytes
from megatron.core.durable_files import naming

DIRECT_SIZE = 256 << 10
"""Smallest piece in bytes that is written directly: below, waiting for the disk takes longer."""
_DIRECT = os.O_DIRECT if hasattr(os, "O_DIRECT") else 0
_BUFFER_SIZE = 2 << 20
_thread = threading.local()


class PlacedFile:
    """An existing file that any thread writes at any position."""

    def __init__(self, path: Path) -> None:
        self._path = path
        flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags)
        self._direct = -1
        if _DIRECT:
            with contextlib.suppress(OSError):  # not every file system has direct writes
                self._direct = os.open(path, flags | _DIRECT)
        self._writes_directly = self._direct >= 0

    def write(self, position: int, data: memoryview) -> None:
        """Write bytes via the page cache."""
        with naming(self._path):
            while data:
                count = os.pwrite(self._descriptor, data, position)
                data = data[count:]
                position += count

    def write_elements(self, position: int, elements: torch.Tensor, dtype: torch.dtype) -> None:
        """Write the elements of a contiguous vector, cast to `dtype`; directly if it is large."""
        nbytes = elements.numel() * dtype.itemsize
        is_aligned = position % dtype.itemsize == 0
        if nbytes < DIRECT_SIZE or not is_aligned or not self._writes_directly:
            self.write(position, view_bytes(elements.to(dtype)))
            return
        buffer = _get_buffer()
        while elements.numel():
            # Bytes have the same place in the pages of the buffer as in those of the file.
            start = position % PAGE
            count = min(elements.numel(), (_BUFFER_SIZE - start) // dtype.itemsize)
            stop = start + count * dtype.itemsize
            target = buffer.tensor[start:stop].view(dtype)
            if elements.dtype == dtype:
                # This releases the interpreter's lock and starts no threads of torch's own.
                ctypes.memmove(target.data_ptr(), elements.data_ptr(), stop - start)
            else:
                target.copy_(elements[:count])
            self._write_pages(position - start, buffer.view, start, stop)
            elements = elements[count:]
            position += stop - start

    def close(self, durable: bool) -> None:
        """Close the file. Raises the first OSError, also of earlier writes."""
        with naming(self._path), contextlib.ExitStack() as stack:
            stack.callback(os.close, self._descriptor)
            if self._direct >= 0:
                stack.callback(os.close, self._direct)
            if durable:
                os.fsync(self._descriptor)

    def _write_pages(self, base: int, pages: memoryview, start: int, stop: int) -> None:
        """Write bytes `[start, stop)` of `pages`, whose first page is at `base` of the file."""
        first = -(-start // PAGE) * PAGE
        last = stop // PAGE * PAGE
        self.write(base + start, pages[start:first])
        while first < last and self._writes_directly:
            try:
                with naming(self._path):
                    first += os.pwrite(self._direct, pages[first:last], base + first)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # Some file systems open direct files but refuse to write them.
                self._writes_directly = False
            if first % PAGE:
                break  # a short write left us unaligned
        self.write(base + first, pages[first:stop])


class _Buffer:
    """Page-aligned memory."""

    def __init__(self) -> None:
        self.view = memoryview(mmap.mmap(-1, _BUFFER_SIZE))
        self.tensor = torch.frombuffer(self.view, dtype=torch.uint8)


def _get_buffer() -> _Buffer:
    """Return the buffer of this thread."""
    if not hasattr(_thread, "buffer"):
        _thread.buffer = _Buffer()
    buffer: _Buffer = _thread.buffer
    return buffer
