"""Small exchanges that run in the background: their results are needed one iteration later."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist


def start_max_reduce(
    values: Sequence[int], device: torch.device, group: dist.ProcessGroup | None = None
) -> Callable[[], list[int]]:
    """Begin to reduce `values` to their maxima over the ranks of `group`. Collective.

    `device` is the one that an NCCL group communicates from. Returns a function that waits for the
    maxima. Without a process group they are the values of this process.
    """
    if not dist.is_initialized():
        local_values = list(values)
        return lambda: local_values
    if dist.get_backend(group) == "nccl":
        # A pinned source, because a copy from pageable memory waits for the device.
        on_host = torch.tensor(values, dtype=torch.int32, pin_memory=True)
        on_device = on_host.to(device, non_blocking=True)
        dist.all_reduce(on_device, op=dist.ReduceOp.MAX, group=group)
        copied = start_copy(on_device)

        def wait_for_copy() -> list[int]:
            maxima: list[int] = copied().tolist()
            return maxima

        return wait_for_copy
    on_host = torch.tensor(values, dtype=torch.int32)
    work = dist.all_reduce(on_host, op=dist.ReduceOp.MAX, group=group, async_op=True)

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
