"""Staging of a save: a bitwise snapshot while the copied tensors wait to change."""

import pytest
import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing import AsyncSaver, load
from megatron.core.dist_checkpointing.background import SLOT_SIZE, StagingBuffer
from megatron.core.dist_checkpointing.mapping import ShardedTensor


def changed_behind_a_save(rank, world_size, device, directory, limit):
    """Save two tensors of several slots and change them as soon as allowed; return saved and live
    values.
    """
    torch.manual_seed(0)
    tensors = [
        torch.randn(3 * SLOT_SIZE // 4 + 7, device=device),
        torch.randn(1000, 300, device=device).bfloat16(),
    ]
    before = [t.clone() for t in tensors]

    def state(tensors):
        return {f"t{i}": ShardedTensor.replicated(f"t{i}", t) for i, t in enumerate(tensors)}

    saver = AsyncSaver(staging_mem_limit=limit)
    saver.save(state(tensors), directory, common={})
    saver.wait_staged()
    for t in tensors:
        t.add_(1.0)
    (report,) = saver.finish()
    saver.close()
    assert report.error is None, report.error
    loaded = [torch.zeros_like(t) for t in tensors]
    load(state(loaded), directory)
    return all(torch.equal(a, b) for a, b in zip(loaded, before, strict=True)), dist.get_rank()


@pytest.mark.parametrize("limit", [None, 2 * SLOT_SIZE])
def test_snapshot(pool, device, tmp_path, limit):
    assert pool.run(changed_behind_a_save, 1, device, str(tmp_path / "saved"), limit) == [(True, 0)]


@pytest.mark.gpu
def test_buffers_are_pinned():
    buffer = StagingBuffer(2, pinned=True)
    assert all(slot.tensor.is_pinned() for slot in buffer.slots)
    buffer.close()
