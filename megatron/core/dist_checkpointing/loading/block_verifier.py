"""Checking what a load reads against the checksums, block by block."""

from __future__ import annotations

import os
from pathlib import Path

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.files import CHECKSUMS, OLD_CHECKSUMS
from megatron.core.dist_checkpointing.format.checksums import (
    BLOCK_SIZE,
    DIGEST_SIZE,
    FileChecksums,
    decode_checksums,
    hash_blocks,
)
from megatron.core.dist_checkpointing.format.input_files import open_descriptor, read_regular


def find_checksums(directory: Path) -> Path | None:
    """The file with the checksums of a checkpoint; None if another program wrote it."""
    return next((directory / name for name in (CHECKSUMS, OLD_CHECKSUMS) if (directory / name).exists()), None)


def read_checksums(directory: Path) -> dict[str, FileChecksums]:
    """By file name. Raises CheckpointError if there are none (another program wrote the checkpoint)."""
    path = find_checksums(directory)
    if path is None:
        raise CheckpointError(
            f"{directory / CHECKSUMS}: missing: the checkpoint was written without checksums, so it cannot be verified"
        )
    return decode_checksums(read_regular(path, limit=1 << 40), str(path))


class BlockVerifier:
    """Compares blocks with their checksums, each block once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._sums = read_checksums(directory)
        self._good: set[tuple[str, int]] = set()

    def check_file(self, name: str) -> None:
        """All of a file. Raises CheckpointError if it is missing, truncated or damaged."""
        try:
            descriptor = open_descriptor(self._directory / name)
        except OSError as error:
            raise CheckpointError(f"{self._directory / name}: cannot be opened: {error.strerror}") from error
        try:
            self.check_range(name, descriptor, 0, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)

    def check_range(self, name: str, descriptor: int, start: int, stop: int) -> None:
        """All blocks that bytes `[start, stop)` of file `name` touch."""
        path = self._directory / name
        if name not in self._sums:
            raise CheckpointError(f"{path}: no checksums of it")
        expected = self._sums[name]
        size = os.fstat(descriptor).st_size
        if size != expected.size:
            raise CheckpointError(f"{path}: has {size} bytes instead of {expected.size}")
        for block in range(start // BLOCK_SIZE, -(-stop // BLOCK_SIZE)):
            if (name, block) in self._good:
                continue
            content = os.pread(descriptor, BLOCK_SIZE, block * BLOCK_SIZE)
            if hash_blocks(content) != expected.blocks[block * DIGEST_SIZE : (block + 1) * DIGEST_SIZE]:
                first = block * BLOCK_SIZE
                raise CheckpointError(f"{path}: damaged: wrong checksum of bytes {first}..{first + len(content)}")
            self._good.add((name, block))
