"""Tensors of messages between two ranks."""

from __future__ import annotations

import torch
from torch import Tensor


def bypass_stream_record(tensor: Tensor) -> Tensor:
    """Return a tensor with the same memory for `dist.P2POp`, to be kept until the wait.

    NCCL calls `record_stream` for the tensors of a message. Their memory is then reusable only when
    the device has passed the message, so that the amount of allocated memory depends on how far the
    host is ahead. torch does not record streams for memory that comes through DLPack. It is not
    needed: the current stream waits for the message before the memory is released.
    """
    if tensor.device.type != "cuda":
        return tensor
    return torch.from_dlpack(tensor.detach())
