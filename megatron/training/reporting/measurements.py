"""What is measured besides the loss: memory in use, the norm of the parameters; and how numbers reach the host."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.core.distributed import DistributedDataParallel
from megatron.core.module import param_info
from megatron.core.optimizer import counts_for_model
from megatron.core.parallel_state import ParallelState

_STATM = Path("/proc/self/statm")  # Linux


def memory(device: torch.device) -> dict[str, float]:
    """Numbers of this process, which trains on `device`; those called bytes are."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        return {
            "mem-allocated-bytes": stats.get("allocated_bytes.all.current", 0),
            "mem-max-allocated-bytes": stats.get("allocated_bytes.all.peak", 0),
            "mem-reserved-bytes": stats.get("reserved_bytes.all.current", 0),
            "mem-max-reserved-bytes": stats.get("reserved_bytes.all.peak", 0),
            "mem-alloc-retries": stats.get("num_alloc_retries", 0),
        }
    values: dict[str, float] = {"mem-max-resident-bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    if _STATM.exists():
        values["mem-resident-bytes"] = int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return values


def memory_line(iteration: int, device: torch.device) -> str:
    """The maximum of every number over all ranks, with its rank. Collective."""
    gathered: list[dict[str, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(gathered, memory(device))
    parts = []
    for name in gathered[0]:
        largest = max(range(len(gathered)), key=lambda rank: gathered[rank][name])
        value = gathered[largest][name]
        what = name.removeprefix("mem-").removesuffix("-bytes").replace("-", " ")
        amount = f"{value / 1e9:.3f} GB" if name.endswith("-bytes") else f"{value:.0f}"
        parts.append(f"{what} {amount} (rank {largest})")
    return f"memory after iteration {iteration}, maximum over ranks: {', '.join(parts)}"


@torch.no_grad()
def params_norm(chunks: Sequence[DistributedDataParallel], ps: ParallelState) -> torch.Tensor:
    """Euclidean norm over the whole model, each parameter counted once; a scalar on the device. Collective."""
    total = torch.zeros((), dtype=torch.float64, device=chunks[0].flat_buffers[0].param_data.device)
    for chunk in chunks:
        chunk.finish_param_sync()
        for param in chunk.parameters():
            info = param_info(param)
            if counts_for_model(info, ps, sharded=False):
                for values in info.fp8.tensors if info.fp8 is not None else (param,):
                    total += torch.linalg.vector_norm(values.float()).double().square()
    if ps.config.splits_experts:
        dist.all_reduce(total)
    elif ps.model.size > 1:
        dist.all_reduce(total, group=ps.model.group)
    return total.sqrt()


@dataclass(frozen=True)
class HostCopy:
    """A small number on its way from the device to the host, read later without waiting for newer work."""

    _host: torch.Tensor
    _copied: torch.cuda.Event | None

    @classmethod
    def start(cls, tensor: torch.Tensor) -> HostCopy:
        if tensor.device.type != "cuda":
            return cls(tensor, None)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return cls(host, event)

    def wait(self) -> torch.Tensor:
        if self._copied is not None:
            self._copied.synchronize()
        return self._host
