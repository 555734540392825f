"""Memory in use: of the CUDA allocator, or of the process."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import torch
import torch.distributed as dist

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
    """The largest of every number over all ranks, with the rank that has it. Collective."""
    gathered: list[dict[str, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(gathered, memory(device))
    parts = []
    for name in gathered[0]:
        largest = max(range(len(gathered)), key=lambda rank: gathered[rank][name])
        value = gathered[largest][name]
        what = name.removeprefix("mem-").removesuffix("-bytes").replace("-", " ")
        amount = f"{value / 1e9:.3f} GB" if name.endswith("-bytes") else f"{value:.0f}"
        parts.append(f"{what} {amount} (rank {largest})")
    return f"memory after iteration {iteration}, the most over ranks: {', '.join(parts)}"
