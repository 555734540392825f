"""Program: two asynchronous saves while the device computes.

    FAKE_CUDA_TRACE=calls.txt FAKE_CUDA_COPY_US=3000 FAKE_CUDA_KERNEL_US=5000 \
        FAKE_CUDA_NUMERICS=0 python -m tests.fake_cuda.saves

Adds lines of "THREAD MARK TEXT" to the trace.
"""

import os
import tempfile
import threading
from pathlib import Path

import torch

from megatron.core.dist_checkpointing import AsyncSaver
from megatron.core.dist_checkpointing.background import SLOT_SIZE
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.saving import device_staging

NUM_SLOTS = 24


def mark(text: str) -> None:
    with open(os.environ["FAKE_CUDA_TRACE"], "a") as trace:
        trace.write(f"{threading.get_native_id()} MARK {text}\n")


def compute(hidden: torch.Tensor) -> None:
    """Launch kernels that need as much memory as the state."""
    activations = torch.empty(NUM_SLOTS * SLOT_SIZE, dtype=torch.uint8, device="cuda")
    for _ in range(12):
        hidden.neg_()
    del activations


def main() -> None:
    device_staging._COPIED_AT_ONCE = 2
    hidden = torch.ones(8, device="cuda")
    weight = torch.ones(NUM_SLOTS * SLOT_SIZE // 4, device="cuda")
    state = {"weight": ShardedTensor.replicated("weight", weight)}
    with AsyncSaver(workers=1) as saver, tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        saver.prepare(state).result()
        mark("training")
        compute(hidden)
        weight.add_(1.0)
        for number in (1, 2):
            mark(f"save {number}")
            saver.save(state, Path(root) / str(number), common={})
            compute(hidden)
            mark(f"update {number}")
            saver.wait_staged()
            mark(f"end {number}")
            weight.add_(1.0)
            (report,) = saver.finish()
            assert report.error is None, report.error


if __name__ == "__main__":
    main()
