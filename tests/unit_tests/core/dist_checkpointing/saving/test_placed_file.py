"""Blocks that are written past the page cache, compared with the same writes to memory."""

import errno
import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megatron.core.dist_checkpointing.saving.placed_file import write_at

MB = 1 << 20
FIRST = 4096 + 123  # byte at which the content begins


def cut(length, seed):
    """Return the ends of blocks of very different sizes."""
    numbers = random.Random(seed)
    ends = [0]
    while ends[-1] < length:
        size = numbers.choice([1, 17, 4095, 4096, MB - 1, MB + 4096, 3 * MB + 5, 9 * MB])
        ends.append(min(length, ends[-1] + size))
    return ends


def write_blocks(path, content):
    """Write the blocks of `content` from two threads, in random order."""
    path.write_bytes(b"before")
    os.truncate(path, FIRST + len(content))
    ends = cut(len(content), 0)
    blocks = list(zip(ends, ends[1:], strict=False))
    random.Random(1).shuffle(blocks)
    with ThreadPoolExecutor(2) as pool:
        tasks = []
        for start, stop in blocks:
            block = content[start:stop]
            tasks.append(pool.submit(write_at, path, block, FIRST + start))
        for task in tasks:
            task.result()


def expected(content):
    return b"before".ljust(FIRST, b"\0") + content.numpy().tobytes()


@pytest.fixture
def content():
    return torch.randint(256, (60 * MB + 77,), dtype=torch.uint8)


def test_blocks_at_any_position(content, tmp_path):
    write_blocks(tmp_path / "file", content)
    assert (tmp_path / "file").read_bytes() == expected(content)


@pytest.mark.parametrize("refused", ["open", "first write", "later write", "short write"])
def test_file_systems_without_direct_writes(content, tmp_path, monkeypatch, refused):
    """Files that cannot be opened or written directly are written through the page cache."""
    real_open = os.open
    real_pwrite = os.pwrite
    direct = set()
    writes = []

    def open_file(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT and refused == "open":
            raise OSError(errno.EINVAL, "Invalid argument")
        descriptor = real_open(path, flags, *args, **kwargs)
        direct.discard(descriptor)
        if flags & os.O_DIRECT:
            direct.add(descriptor)
        return descriptor

    def pwrite(descriptor, view, position):
        if descriptor in direct:
            writes.append(len(view))
            is_later = len(writes) % 2 == 0
            if refused == "first write" or (refused == "later write" and is_later):
                raise OSError(errno.EINVAL, "Invalid argument")
            if refused == "short write":
                num_pages = len(view) // 2 // 4096
                view = view[: num_pages * 4096]
        return real_pwrite(descriptor, view, position)

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(os, "pwrite", pwrite)
    write_blocks(tmp_path / "file", content)
    assert (tmp_path / "file").read_bytes() == expected(content)
    assert bool(writes) == (refused != "open")


def test_errors_name_the_file(content, tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.touch()

    def fail(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        write_at(path, content, 0)
