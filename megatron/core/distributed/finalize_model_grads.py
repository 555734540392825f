"""The reductions of gradients that are not, or not only, over data parallelism."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.parallel_state import Axis, ParallelState


def finalize_model_grads(
    chunks: Sequence[DistributedDataParallel], ps: ParallelState, num_tokens: torch.Tensor | None = None
) -> None:
    """After it every bucket's `grad_shard` over `grad_divisor` is the gradient of the whole global batch.

    First the sum over DP, which may have started during backward. All other sums run on its result, as sums commute:
    on the shards alone, with a DP-th of the bytes. That needs equal shards at both ends: tensor-parallel ranks have
    equal plans, and a tied embedding is a bucket of its own, so its shards on the first and last stage correspond.

    `num_tokens` (with --calculate-per-token-loss, where the loss is a sum over tokens): tokens that this rank's last
    virtual stage has seen in this iteration, 0 on the other pipeline stages.
    """
    for chunk in chunks:
        chunk.finish_grad_sync()
    buckets = [bucket for chunk in chunks for bucket in chunk.buckets]
    _all_reduce([g for b in buckets for g in b.grad_ranges(lambda info: info.shared_embedding)], ps.embedding)
    _all_reduce([g for b in buckets for g in b.grad_ranges(lambda info: info.partial_grad)], ps.tp)
    if num_tokens is not None:
        total = num_tokens.to(torch.float64, copy=True)
        _all_reduce([total], ps.pp)
        _all_reduce([total], ps.dp_cp)
        for chunk in chunks:
            chunk.grad_divisor = total.clamp(min=1.0)


def _all_reduce(tensors: Sequence[torch.Tensor], axis: Axis) -> None:
    """Sum every tensor over `axis`, all at once."""
    if axis.size == 1:
        return
    work = [dist.all_reduce(tensor, group=axis.group, async_op=True) for tensor in tensors]
    for pending in work:
        pending.wait()
