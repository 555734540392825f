"""Files whose content is compared with the checksums of their checkpoint while it is read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.dist_checkpointing.files import COMMON
from megatron.core.dist_checkpointing.format import hashed_copy
from megatron.core.dist_checkpointing.format.checksums import (
    BLOCK_SIZE,
    DIGEST_SIZE,
    FileChecksums,
    count_blocks,
    find_checksums,
    hash_blocks,
    read_checksums,
    split_at_blocks,
)
from megatron.core.object_path import path_of
from megatron.core.safe_files.errors import CheckpointError, DamagedError
from megatron.core.safe_files.reading import OpenFile, open_file
from megatron.core.safe_files.torch_load import safe_load

_BLOCKS_AT_ONCE = 4


class ChecksumVerifier:
    """The checksums of one checkpoint, and the blocks of its files that are known to be intact."""

    def __init__(self, directory: Path) -> None:
        """Read the checksums. Raises CheckpointError if there are none, or if they are damaged."""
        self._checksums = read_checksums(directory)
        # One byte per block, nonzero once the block was compared. Threads may compare a block
        # twice, which is harmless.
        self._verified: dict[str, bytearray] = {}

    @classmethod
    def find(cls, directory: Path) -> ChecksumVerifier | None:
        """Return the verifier of `directory`, or None if the checkpoint has no checksums."""
        if find_checksums(directory) is None:
            return None
        return cls(directory)

    def open(self, path: Path) -> VerifiedFile:
        """Open a file of the checkpoint. Raises DamagedError if its size is wrong."""
        name = path.name
        if name not in self._checksums:
            raise DamagedError(
                f"{path}: damaged checkpoint: its checksums do not list this file, which was "
                "changed or added after the save"
            )
        expected = self._checksums[name]
        # All readers of a file share the record of verified blocks.
        num_blocks = len(expected.blocks) // DIGEST_SIZE
        verified = self._verified.setdefault(name, bytearray(num_blocks))
        file = open_file(path)
        if file.size != expected.size:
            file.close()
            state = "damaged"
            if file.size < expected.size:
                state = "truncated"
            raise DamagedError(
                f"{path}: {state}: it has {file.size} bytes instead of {expected.size}"
            )
        return VerifiedFile(file, expected, verified)

    def read_file(self, path: Path) -> bytes:
        """Return a whole file. Raises CheckpointError if it is missing, truncated or damaged."""
        try:
            with self.open(path) as file:
                return file.read(0, file.size)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from error


class VerifiedFile(OpenFile):
    """An open file that compares every block with its checksum before returning bytes of it.

    A block (1 MiB) of which only a part is requested is read whole, once. Blocks that are known to
    be intact are read directly from then on.
    """

    closest_gap = BLOCK_SIZE  # blocks are read whole in any case, and with them the gaps in them

    def __init__(self, file: OpenFile, expected: FileChecksums, verified: bytearray) -> None:
        self.path = file.path
        self.size = file.size
        self.descriptor = file.descriptor
        self._file = file
        self._expected = expected.blocks
        self._verified = verified

    def measure_directory(self) -> int:
        return self._file.measure_directory()

    def close(self) -> None:
        self._file.close()
        self.descriptor = None

    def read_into(self, view: memoryview, position: int) -> None:
        """Fill `view`. Raises DamagedError that names the file and the damaged bytes."""
        stop = position + len(view)
        if stop > self.size:
            raise CheckpointError(
                f"{self.path}: truncated: it has {self.size} bytes, data should be at "
                f"{position}..{stop}"
            )
        first, last = self.widen(position, stop)
        if (first, last) == (position, stop):
            self._read_blocks(view, position)
        elif self.descriptor is None:
            # Object storage: one request for the whole range takes less time than three.
            content = memoryview(bytearray(last - first))
            self._read_blocks(content, first)
            view[:] = content[position - first : stop - first]
        else:
            self._read_with_edges(view, position)

    def widen(self, start: int, stop: int) -> tuple[int, int]:
        """Return the smallest range that contains `[start, stop)` and can be verified by itself."""
        first = start // BLOCK_SIZE
        last = count_blocks(stop) - 1
        if first > last:  # an empty range
            return start, stop
        if not self._is_verified(first):
            start = first * BLOCK_SIZE
        if not self._is_verified(last):
            end_of_block = min((last + 1) * BLOCK_SIZE, self.size)
            stop = max(stop, end_of_block)
        return start, stop

    def check(self, view: memoryview, position: int) -> None:
        """Compare the blocks of `view`, a range returned by `widen` that begins at `position`."""
        stop = position + len(view)
        first = position // BLOCK_SIZE
        for block in range(first, count_blocks(stop)):
            if self._is_verified(block):
                continue
            start = block * BLOCK_SIZE
            content = view[start - position : start + BLOCK_SIZE - position]
            self._compare(block, hash_blocks(content))

    def _compare(self, block: int, digest: bytes) -> None:
        """Record that a block is intact. Raises DamagedError if its digest is another one."""
        start = block * DIGEST_SIZE
        if digest != self._expected[start : start + DIGEST_SIZE]:
            first = block * BLOCK_SIZE
            stop = min(first + BLOCK_SIZE, self.size)
            raise DamagedError(
                f"{self.path}: damaged: wrong checksum of bytes {first}..{stop}"
                " (the file has changed since the save, or belongs to another checkpoint)"
            )
        self._verified[block] = 1

    def _is_verified(self, block: int) -> bool:
        """Return whether a block was compared. A block after the end of the file never is."""
        return block < len(self._verified) and bool(self._verified[block])

    def _read_blocks(self, view: memoryview, position: int) -> None:
        """Read and compare a range returned by `widen`."""
        stop = position + len(view)
        ranges: Iterable[tuple[int, int]] = [(position, stop)]
        if self.descriptor is not None:
            # Pieces that are still in the CPU's cache when they are hashed
            ranges = split_at_blocks(position, stop, _BLOCKS_AT_ONCE)
        for start, end in ranges:
            subview = view[start - position : end - position]
            if not self._copy_from_page_cache(subview, start):
                self._file.read_into(subview, start)
                self.check(subview, start)

    def _copy_from_page_cache(self, view: memoryview, position: int) -> bool:
        """Copy and compare whole blocks via a mapping of the file, in half the processor time.

        Returns False if the range must be read instead. This includes ranges that are not in the
        page cache, because a disk is read faster without a mapping.
        """
        length = len(view)
        is_whole_blocks = position % BLOCK_SIZE == 0 and length % BLOCK_SIZE == 0 and length > 0
        if not is_whole_blocks or not hashed_copy.IS_SUPPORTED:
            return False
        if not self._is_cached(position + length):
            return False
        target = np.frombuffer(view, np.uint8).ctypes.data
        if target % hashed_copy.ALIGNMENT != 0:
            return False
        mapped = self.map(position, position + length)
        if mapped is None:
            return False
        with mapped:
            source = np.frombuffer(mapped, np.uint8).ctypes.data
            digests = hashed_copy.copy_and_hash(target, source, length)
        first = position // BLOCK_SIZE
        for index in range(length // BLOCK_SIZE):
            start = index * DIGEST_SIZE
            self._compare(first + index, digests[start : start + DIGEST_SIZE])
        return True

    def _is_cached(self, stop: int) -> bool:
        """Return whether the byte before `stop` can be read without waiting for a disk."""
        if self.descriptor is None or not hasattr(os, "RWF_NOWAIT"):
            return False
        try:
            return os.preadv(self.descriptor, [bytearray(1)], stop - 1, os.RWF_NOWAIT) == 1
        except OSError:  # not cached, or not supported by the file system
            return False

    def _read_with_edges(self, view: memoryview, position: int) -> None:
        """Read the first and the last block via a buffer, and the ones between directly."""
        stop = position + len(view)
        start_of_last = stop // BLOCK_SIZE * BLOCK_SIZE
        start = position
        while start < stop:
            end_of_block = (start // BLOCK_SIZE + 1) * BLOCK_SIZE
            end = min(end_of_block, stop)
            first, last = self.widen(start, end)
            can_be_verified = (first, last) == (start, end)
            if can_be_verified:
                # Extend the direct read up to the last block, which may be a partial one.
                end = max(end, start_of_last)
                subview = view[start - position : end - position]
                self._read_blocks(subview, start)
            else:
                # Read the whole block, and copy the requested part of it.
                block = memoryview(bytearray(last - first))
                self._read_blocks(block, first)
                subview = view[start - position : end - position]
                subview[:] = block[start - first : end - first]
            start = end


def load_common(directory: str | os.PathLike[str], *, verify: bool = True) -> dict[str, Any]:
    """Return the dictionary saved as `common`; {} if the checkpoint has no `common.pt`.

    `verify` compares the file with its checksum if the checkpoint has checksums.
    """
    path = path_of(directory) / COMMON
    if not path.exists():
        return {}
    verifier = None
    if verify:
        verifier = ChecksumVerifier.find(path.parent)
    if verifier is not None:
        common = safe_load(verifier.read_file(path), location=str(path))
    else:
        common = safe_load(path, mmap=False)
    if not isinstance(common, dict):
        raise CheckpointError(f"{path}: contains a {type(common).__name__} instead of a dict")
    return common
