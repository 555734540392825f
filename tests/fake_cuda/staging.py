"""Program: change tensors behind an asynchronous save, and print whether the checkpoint is intact.

    FAKE_CUDA_COPY_US=3000 python -m tests.fake_cuda.staging

The first line is of a program that waits until the tensors are staged, as the trainer does; the
second one of a program that does not.
"""

import tempfile
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.dist_checkpointing import AsyncSaver, load
from megatron.core.dist_checkpointing.background import SLOT_SIZE
from megatron.core.dist_checkpointing.mapping import ShardedTensor


def make_state(tensors: list[Tensor]) -> dict[str, ShardedTensor]:
    return {f"t{i}": ShardedTensor.replicated(f"t{i}", t) for i, t in enumerate(tensors)}


def is_snapshot_intact(directory: Path, waits: bool, limit: int | None, num_slots: int = 3) -> bool:
    """Save tensors of more than `limit` bytes while an update follows; compare with the values
    before.
    """
    torch.manual_seed(0)
    before = [torch.randn(num_slots * SLOT_SIZE // 4 + 7), torch.randn(1000, 300)]
    after = [(-values).pin_memory() for values in before]
    # Copies of the device, which the save must wait for, too.
    tensors = [values.cuda().clone() for values in before]
    for _ in range(30):  # kernels that may still run when the copies are queued
        for tensor in tensors:
            tensor.neg_()

    saver = AsyncSaver(staging_mem_limit=limit)
    saver.save(make_state(tensors), str(directory), common={})
    if waits:
        saver.wait_staged()
    for tensor, values in zip(tensors, after, strict=True):
        # `data` has a version of its own: the saver does not notice the change and report it.
        tensor.data.copy_(values, non_blocking=True)
    (report,) = saver.finish()
    saver.close()
    assert report.error is None, report.error

    loaded = [torch.zeros_like(values) for values in before]
    load(make_state(loaded), str(directory))
    return all(torch.equal(a, b) for a, b in zip(loaded, before, strict=True))


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        for waits in (True, False):
            for name, limit in (("unlimited", None), ("limited", 2 * SLOT_SIZE)):
                directory = Path(root) / f"{name}_{waits}"
                print(name, is_snapshot_intact(directory, waits, limit))


if __name__ == "__main__":
    main()
