"""Writes of large blocks into files, past the page cache where possible.

In the page cache, a gigabyte costs about a second of processor time, because the kernel clears and
fills a page for every 4 KiB; a direct write (O_DIRECT) costs a tenth of that. Direct writes need
whole pages in aligned memory: the ends of a block, less than a page each, and small blocks are
written through the page cache.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from pathlib import Path

import torch

from megatron.core.dist_checkpointing.background import PAGE, SLOT_SIZE, Slot, StagingBuffer
from megatron.core.dist_checkpointing.format.torch_zip import view_bytes
from megatron.core.durable_files import naming

_DIRECT = getattr(os, "O_DIRECT", 0)
_LEAST_DIRECT = 1 << 20  # bytes; below, the copy to aligned memory and two descriptors cost more


class _AlignedMemory(threading.local):
    """Aligned memory of this thread, allocated on first use."""

    _buffer: StagingBuffer | None = None

    def get(self) -> Slot:
        if self._buffer is None:
            self._buffer = StagingBuffer(1, pinned=False)
        return self._buffer.slots[0]


_MEMORY = _AlignedMemory()


def write_at(path: Path, tensor: torch.Tensor, position: int) -> None:
    """Write at byte `position` of an existing file.

    The file is closed afterwards, so that a checkpoint may have more files than a process may have
    open.
    """
    content = tensor.reshape(-1).view(torch.uint8)
    first_page = -position % PAGE
    num_whole = (len(content) - first_page) // PAGE * PAGE
    with naming(path):
        if _DIRECT and num_whole >= _LEAST_DIRECT:
            whole = content[first_page : first_page + num_whole]
            written = _write_direct(path, whole, position + first_page)
            _write_buffered(path, content[:first_page], position)
            first_page += written
        else:
            first_page = 0
        _write_buffered(path, content[first_page:], position + first_page)


def _write_direct(path: Path, content: torch.Tensor, position: int) -> int:
    """Write whole pages; return the number of bytes written.

    They are fewer if the file system has no direct writes, or refuses one.
    """
    slot = _MEMORY.get()
    written = 0
    descriptor = -1
    try:
        descriptor = os.open(path, os.O_WRONLY | _DIRECT)
        for part in content.split(SLOT_SIZE):
            # Direct writes need aligned memory, which a tensor may not have.
            ctypes.memmove(slot.address, part.data_ptr(), len(part))
            count = os.pwrite(descriptor, slot.view[: len(part)], position + written)
            written += count
            if count < len(part):
                break  # e.g., a full disk, for which the buffered write raises the error
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return written


def _write_buffered(path: Path, content: torch.Tensor, position: int) -> None:
    view = view_bytes(content)
    if not view:
        return
    descriptor = os.open(path, os.O_WRONLY)
    try:
        while view:
            count = os.pwrite(descriptor, view, position)
            view = view[count:]
            position += count
    finally:
        os.close(descriptor)
