"""Reads that compare blocks with checksums: from the page cache via a mapping, and otherwise."""

import os
import random

import pytest
import torch

from megatron.core.dist_checkpointing.format import hashed_copy, verified_file
from megatron.core.dist_checkpointing.format.checksums import BLOCK_SIZE, compute_checksums
from megatron.core.dist_checkpointing.format.verified_file import VerifiedFile
from megatron.core.safe_files.errors import CheckpointError
from megatron.core.safe_files.reading import open_file
from megatron.core.safe_files.torch_zip import view_bytes

SIZE = 7 * BLOCK_SIZE + 12345


@pytest.fixture
def content():
    return random.Random(0).randbytes(SIZE)


@pytest.fixture
def path(tmp_path, content):
    path = tmp_path / "shard"
    path.write_bytes(content)
    return path


def open_verified(path, content):
    checksums = compute_checksums(content)
    blocks = bytearray(verified_file.count_blocks(SIZE))
    return VerifiedFile(open_file(path), checksums, blocks)


def make_target(length, misalignment=0):
    """Return a buffer that begins `misalignment` bytes after a multiple of 64."""
    memory = torch.zeros(length + 128, dtype=torch.uint8)
    start = -memory.data_ptr() % 64 + misalignment
    return view_bytes(memory[start : start + length])


@pytest.fixture
def mapped_bytes(monkeypatch):
    """Return a list of the lengths that are copied from a mapping."""
    lengths = []

    def copy_and_hash(target, source, length):
        lengths.append(length)
        return original(target, source, length)

    original = hashed_copy.copy_and_hash
    monkeypatch.setattr(hashed_copy, "copy_and_hash", copy_and_hash)
    return lengths


@pytest.mark.skipif(not hashed_copy.IS_SUPPORTED, reason="this processor has no AVX2")
def test_whole_blocks_in_the_page_cache_are_mapped(path, content, mapped_bytes):
    with open_verified(path, content) as file:
        if not file._is_cached(SIZE):
            pytest.skip("the file system does not report what is in the page cache")
        target = make_target(SIZE)
        file.read_into(target, 0)
    assert bytes(target) == content
    assert sum(mapped_bytes) == 7 * BLOCK_SIZE


def test_ranges_that_are_not_in_the_page_cache_are_read(path, content, mapped_bytes, monkeypatch):
    monkeypatch.setattr(VerifiedFile, "_is_cached", lambda self, stop: False)
    with open_verified(path, content) as file:
        target = make_target(SIZE)
        file.read_into(target, 0)
    assert bytes(target) == content
    assert not mapped_bytes


def test_random_ranges(path, content):
    rng = random.Random(1)
    for _ in range(20):
        with open_verified(path, content) as file:
            # Blocks that were compared by an earlier read are not read whole again.
            for _ in range(4):
                start, stop = sorted(rng.sample(range(SIZE + 1), 2))
                if rng.random() < 0.5:
                    start -= start % BLOCK_SIZE
                target = make_target(stop - start, rng.choice([0, 32, 4, 1]))
                file.read_into(target, start)
                assert bytes(target) == content[start:stop]


@pytest.mark.parametrize("block", range(8))
def test_damaged_block_is_named(path, content, block):
    first = block * BLOCK_SIZE
    with open(path, "r+b") as file:
        file.seek(first + 1000)
        file.write(bytes([content[first + 1000] ^ 1]))
    stop = min(first + BLOCK_SIZE, SIZE)
    with (
        open_verified(path, content) as file,
        pytest.raises(CheckpointError, match=f"wrong checksum of bytes {first}..{stop} "),
    ):
        file.read_into(make_target(SIZE), 0)


def test_file_that_became_shorter_after_it_was_opened(path, content):
    with open_verified(path, content) as file:
        os.truncate(path, 3 * BLOCK_SIZE)
        with pytest.raises(CheckpointError, match="truncated"):
            file.read_into(make_target(SIZE), 0)
