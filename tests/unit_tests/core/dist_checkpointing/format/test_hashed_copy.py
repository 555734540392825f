"""Copies and writes that hash the bytes on their way, compared with xxhash."""

import platform

import pytest
import torch
import xxhash

from megatron.core.dist_checkpointing.background import StagingBuffer
from megatron.core.dist_checkpointing.format import hashed_copy
from megatron.core.dist_checkpointing.format.checksums import BLOCK_SIZE, hash_blocks

MARK = 0x5A


@pytest.fixture(params=["compiled", "not compiled"])
def implementation(request, monkeypatch):
    if request.param == "not compiled":
        monkeypatch.setattr(hashed_copy, "IS_SUPPORTED", False)
    elif not hashed_copy.IS_SUPPORTED:
        pytest.skip("this processor has no AVX2")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 only")
def test_extension_is_compiled():
    assert hashed_copy.hashed_copy_cpp.is_supported() == hashed_copy.IS_SUPPORTED


@pytest.mark.parametrize("misalignment", [0, 1, 8, 63])
def test_bytes_and_digests(implementation, misalignment):
    generator = torch.Generator().manual_seed(misalignment)
    size = 3 * BLOCK_SIZE + misalignment
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    content = source[misalignment:]
    slot = StagingBuffer(1, pinned=False).slots[0]
    slot.tensor.fill_(MARK)

    digests = hashed_copy.copy_and_hash(
        slot.address + BLOCK_SIZE,
        source.data_ptr() + misalignment,
        len(content),
    )

    assert torch.equal(slot.tensor[BLOCK_SIZE : 4 * BLOCK_SIZE], content)
    assert digests == hash_blocks(memoryview(content.numpy()))
    # The memory around the target is unchanged.
    assert torch.all(slot.tensor[:BLOCK_SIZE] == MARK)
    assert torch.all(slot.tensor[4 * BLOCK_SIZE :] == MARK)


def test_any_block_size_that_the_extension_accepts():
    if not hashed_copy.IS_SUPPORTED:
        pytest.skip("this processor has no AVX2")
    copy_and_hash = hashed_copy.hashed_copy_cpp.copy_and_hash
    slot = StagingBuffer(1, pinned=False).slots[0]
    source = torch.randint(0, 256, (8192,), dtype=torch.uint8)
    for block_size in range(256, 8192 + 1, 64):
        digest = copy_and_hash(slot.address, source.data_ptr(), 1, block_size)
        assert digest == xxhash.xxh3_64_digest(source[:block_size].numpy())
        assert torch.equal(slot.tensor[:block_size], source[:block_size])


@pytest.mark.parametrize("offset, block_size", [(16, 1024), (0, 192), (0, 1000)])
def test_unsupported_arguments_are_rejected(offset, block_size):
    if not hashed_copy.IS_SUPPORTED:
        pytest.skip("this processor has no AVX2")
    slot = StagingBuffer(1, pinned=False).slots[0]
    with pytest.raises(ValueError, match="aligned to 32 bytes|whole stripes"):
        hashed_copy.hashed_copy_cpp.copy_and_hash(
            slot.address + offset,
            slot.address,
            1,
            block_size,
        )


def test_writes_return_the_digests_of_their_bytes(implementation, tmp_path):
    lengths = [2 * BLOCK_SIZE, BLOCK_SIZE, 3 * BLOCK_SIZE]
    positions = [4 * BLOCK_SIZE, 0, BLOCK_SIZE]
    contents = [torch.randint(0, 256, (length,), dtype=torch.uint8) for length in lengths]
    addresses = [content.data_ptr() for content in contents]
    pieces = list(zip(positions, addresses, lengths, strict=True))
    path = tmp_path / "file"
    with path.open("wb") as file:
        digests = hashed_copy.hash_and_write(file.fileno(), pieces)
    if not hashed_copy.IS_SUPPORTED:
        assert digests == []
        return
    assert digests == [hash_blocks(memoryview(content.numpy())) for content in contents]

    in_order = torch.cat([contents[1], contents[2], contents[0]])
    assert path.read_bytes() == in_order.numpy().tobytes()


def test_a_write_that_fails_ends_the_list(tmp_path):
    if not hashed_copy.IS_SUPPORTED:
        pytest.skip("this processor has no AVX2")
    content = torch.zeros(BLOCK_SIZE, dtype=torch.uint8)
    address = content.data_ptr()
    with (tmp_path / "file").open("wb") as file:
        pieces = [(0, address, BLOCK_SIZE), (-1, address, BLOCK_SIZE), (0, address, BLOCK_SIZE)]
        assert len(hashed_copy.hash_and_write(file.fileno(), pieces)) == 1
