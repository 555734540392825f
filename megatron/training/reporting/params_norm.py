"""The norm of all parameters of the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.core.distributed import DistributedDataParallel
from megatron.core.module import param_info
from megatron.core.parallel_state import ParallelState


@torch.no_grad()
def params_norm(chunks: Sequence[DistributedDataParallel], ps: ParallelState) -> torch.Tensor:
    """Euclidean norm over the whole model, each parameter counted once; a scalar on the device. Collective."""
    total = torch.zeros((), dtype=torch.float64, device=chunks[0].flat_buffers[0].param_data.device)
    for chunk in chunks:
        chunk.finish_param_sync()
        for param in chunk.parameters():
            info = param_info(param)
            if info.counted and (info.tp_split or ps.tp.is_first):
                total += torch.linalg.vector_norm(param.float()).double().square()
    if ps.model.size > 1:
        dist.all_reduce(total, group=ps.model.group)
    return total.sqrt()
