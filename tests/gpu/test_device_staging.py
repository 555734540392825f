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


class LimitedDriver:
    """CUDA's runtime on a host that pins blocks of at most `limit` bytes."""

    def __init__(self, driver, limit):
        self._driver = driver
        self._limit = limit

    def __getattr__(self, name):
        return getattr(self._driver, name)

    def cudaHostRegister(self, address, size, flags):
        if size > self._limit:
            return 2  # cudaErrorMemoryAllocation
        return self._driver.cudaHostRegister(address, size, flags)


@pytest.mark.gpu
@pytest.mark.parametrize(("limit", "pinned"), [(20 * SLOT_SIZE, True), (0, False)])
def test_save_uses_less_memory_if_it_cannot_be_pinned(limit, pinned, monkeypatch, tmp_path, caplog):
    driver = LimitedDriver(torch.cuda.cudart(), limit)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    value = torch.randn(24 * SLOT_SIZE // 4, device="cuda")
    state = {"t": ShardedTensor.replicated("t", value)}
    with AsyncSaver(workers=2) as saver:
        for index in range(2):
            report = saver.save(state, tmp_path / str(index), common={}).wait()
            assert report.error is None, report.error

    assert caplog.text.count("asynchronous saves use 128 MiB") == 1
    assert ("not pinned" in caplog.text) != pinned

    loaded = torch.zeros_like(value)
    load({"t": ShardedTensor.replicated("t", loaded)}, tmp_path / "1")
    assert torch.equal(loaded, value)
