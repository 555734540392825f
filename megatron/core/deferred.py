"""Communication in the background: messages, and exchanges with a result one iteration later."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def start_max_reduce(values: Sequence[int], device: torch.device) -> Callable[[], list[int]]:
    """Begin to reduce `values` to their maxima over all ranks. Collective.

    `device` is the one that NCCL communicates from. Returns a function that waits for the
    maxima. Without a process group they are the values of this process.
    """
    if not dist.is_initialized():
        local_values = list(values)
        return lambda: local_values
    if dist.get_backend() == "nccl":
        # A pinned source, because a copy from pageable memory waits for the device.
        on_host = torch.tensor(values, dtype=torch.int32, pin_memory=True)
        on_device = on_host.to(device, non_blocking=True)
        dist.all_reduce(on_device, op=dist.ReduceOp.MAX)
        copied = start_copy(on_device)

        def wait_for_copy() -> list[int]:
            maxima: list[int] = copied().tolist()
            return maxima

        return wait_for_copy
    on_host = torch.tensor(values, dtype=torch.int32)
    work = dist.all_reduce(on_host, op=dist.ReduceOp.MAX, async_op=True)

    def wait_for_work() -> list[int]:
        work.wait()
        maxima: list[int] = on_host.tolist()
        return maxima

    return wait_for_work


def start_copy(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Begin to copy a small tensor to the host.

    Returns a function that waits for the copy, but not for work that was queued after it.
    """
    if tensor.device.type != "cuda":
        return lambda: tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    # An event, because a wait for the stream would include later work.
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> torch.Tensor:
        copied.synchronize()
        return host

    return wait


# ---- Tensors of messages between two ranks ----

queueing_lock = threading.Lock()
"""Held while messages are queued. NCCL's communicators must not be aborted meanwhile, because the
group of operations refers to them.
"""


def start_messages(operations: list[dist.P2POp]) -> list[dist.Work]:
    """Start messages together, like `dist.batch_isend_irecv`.

    After an error this ends the group of NCCL operations, which torch leaves open: no later
    operation of this thread would start.
    """
    with queueing_lock:
        try:
            works: list[dist.Work] = dist.batch_isend_irecv(operations)
            return works
        except BaseException:
            _end_group(operations[0])
            raise


def _end_group(operation: dist.P2POp) -> None:
    """End the group of NCCL operations that this thread has begun, if any."""
    device = operation.tensor.device
    if device.type == "cuda" and operation.group is not None:
        with contextlib.suppress(RuntimeError):
            backend = operation.group._get_backend(device)
            backend._group_end()  # type: ignore[attr-defined]


def bypass_stream_record(tensor: Tensor) -> Tensor:
    """Return a tensor with the same memory for `dist.P2POp`, to be kept until the wait.

    NCCL calls `record_stream` for the tensors of a message. Their memory is then reusable only when
    the device has passed the message, so that the amount of allocated memory depends on how far the
    host is ahead. torch does not record streams for memory that comes through DLPack. It is not
    needed: the current stream waits for the message before the memory is released.
    """
    if tensor.device.type != "cuda" or tensor.is_meta:  # a plan has no memory
        return tensor
    return torch.from_dlpack(tensor.detach())
