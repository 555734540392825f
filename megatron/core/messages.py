"""Tensors of messages between two ranks."""

from __future__ import annotations

import contextlib
import threading

import torch
import torch.distributed as dist
from torch import Tensor

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
