"""Copy of whole checksum blocks to a staging slot that computes their digests.

`hashed_copy.cpp` reads each byte once and writes past the processor's cache, which takes 0.6 times
the time of `memmove`. Without it (not compiled, or a processor without AVX2), each block is hashed
after its copy.
"""

from __future__ import annotations

import ctypes

from megatron.core.dist_checkpointing.background import Slot
from megatron.core.dist_checkpointing.format.checksums import BLOCK_SIZE, hash_blocks

try:
    from megatron.core.dist_checkpointing.saving import hashed_copy_cpp
except ImportError:
    IS_SUPPORTED = False
else:
    IS_SUPPORTED = hashed_copy_cpp.is_supported()


def copy_and_hash(slot: Slot, at: int, source: int, length: int) -> bytes:
    """Copy bytes from the address `source` to a slot and return the digests of their blocks.

    Args:
        slot: The target.
        at: Offset in the slot, a multiple of BLOCK_SIZE.
        source: Address of host memory.
        length: Number of bytes, a multiple of BLOCK_SIZE.
    """
    assert at % BLOCK_SIZE == 0 and length % BLOCK_SIZE == 0
    if IS_SUPPORTED:
        num_blocks = length // BLOCK_SIZE
        return hashed_copy_cpp.copy_and_hash(slot.address + at, source, num_blocks, BLOCK_SIZE)
    digests = []
    for start in range(0, length, BLOCK_SIZE):
        # While the block is in the processor's second-level cache: reading a slot of 8 MB from
        # memory again takes a third of the time of its copy.
        target = at + start
        ctypes.memmove(slot.address + target, source + start, BLOCK_SIZE)
        digests.append(hash_blocks(slot.view[target : target + BLOCK_SIZE]))
    return b"".join(digests)
