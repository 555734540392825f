"""Copies and writes of whole checksum blocks that compute their digests.

`hashed_copy.cpp` copies past the processor's cache, reading each byte once, which takes 0.6 times
the time of `memmove`. Its writes need the interpreter once for many megabytes. Without it (not
compiled, or a processor without AVX2), each block is hashed after its copy or before its write.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from megatron.core.dist_checkpointing.format.checksums import BLOCK_SIZE, hash_blocks

try:
    from megatron.core.dist_checkpointing.format import hashed_copy_cpp
except ImportError:
    IS_SUPPORTED = False
else:
    IS_SUPPORTED = hashed_copy_cpp.is_supported()

ALIGNMENT = 32
"""Of targets in bytes."""


def copy_and_hash(target: int, source: int, length: int) -> bytes:
    """Copy host memory and return the digests of its blocks.

    Args:
        target: Address, a multiple of ALIGNMENT.
        source: Address.
        length: Number of bytes, a multiple of BLOCK_SIZE.
    """
    assert target % ALIGNMENT == 0 and length % BLOCK_SIZE == 0
    if IS_SUPPORTED:
        return hashed_copy_cpp.copy_and_hash(target, source, length // BLOCK_SIZE, BLOCK_SIZE)
    digests = []
    for start in range(0, length, BLOCK_SIZE):
        block = (ctypes.c_char * BLOCK_SIZE).from_address(target + start)
        ctypes.memmove(block, source + start, BLOCK_SIZE)
        # While the block is in the processor's second-level cache: reading 8 MB from memory again
        # takes a third of the time of their copy.
        digests.append(hash_blocks(memoryview(block)))
    return b"".join(digests)


def hash_and_write(descriptor: int, pieces: Sequence[tuple[int, int, int]]) -> list[bytes]:
    """Write the first of some pieces of a file, and return the digests of their blocks.

    A piece is (position in the file, address, length); its length is a multiple of BLOCK_SIZE.
    Returns one result for each piece that is completely written, none if this is not supported. The
    caller writes the others: the error may be one that it knows how to avoid.
    """
    if not IS_SUPPORTED:
        return []
    in_blocks = []
    for position, address, length in pieces:
        assert length % BLOCK_SIZE == 0
        in_blocks.append((position, address, length // BLOCK_SIZE))
    digests: list[bytes] = hashed_copy_cpp.hash_and_write(descriptor, in_blocks, BLOCK_SIZE)
    return digests
