"""Collectives of tensor, sequence and context parallelism that autograd can go through.

Every function takes the `Axis` and does nothing on an axis of size 1. Forward and backward are a
pair of conjugate operations (f and g of Shoeybi et al. 2019; g-bar of Korthikanti et al. 2022):

    function                     forward                       backward
    copy_to_tensor_parallel      identity                      all-reduce
    reduce_from_tensor_parallel  all-reduce                    identity
    gather_from_tensor_parallel  all-gather along the last dim own part of the last dim
    gather_from_sequence         all-gather along the sequence reduce-scatter along the sequence
    reduce_scatter_to_sequence   reduce-scatter                all-gather along the sequence
    exchange_sequence_for_heads  all-to-all                    all-to-all back
    exchange_heads_for_sequence  all-to-all                    all-to-all back

The sequence is dimension 0 of `[s, b, h]`; heads are dimension 2 of `[s, b, heads, ...]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.arithmetic import divide, even_range
from megatron.core.parallel_state import Axis

# torch 2.13 renamed these two collectives and warns on the old names.
all_gather_into_tensor = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

Operation = Callable[[Tensor, Axis], Tensor]


class Pending:
    """A tensor whose collective may still be under way; `wait()` gives the finished tensor."""

    def __init__(self, tensor: Tensor, work: dist.Work | None) -> None:
        self._tensor = tensor
        self._work = work

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
        return self._tensor


def start_all_reduce(tensor: Tensor, tp: Axis) -> Pending:
    """Sum the contiguous `tensor` over the axis, in place."""
    if tp.size == 1:
        return Pending(tensor, None)
    return Pending(tensor, dist.all_reduce(tensor, group=_group(tp), async_op=True))


def start_sequence_all_gather(part: Tensor, tp: Axis) -> Pending:
    """`[s/tp, ...]` of every rank -> `[s, ...]`."""
    if tp.size == 1:
        return Pending(part, None)
    whole = part.new_empty(part.shape[0] * tp.size, *part.shape[1:])
    return Pending(
        whole, all_gather_into_tensor(whole, part.contiguous(), group=_group(tp), async_op=True)
    )


def start_sequence_reduce_scatter(whole: Tensor, tp: Axis) -> Pending:
    """Sum of `[s, ...]` over the axis, of which this rank keeps its `[s/tp, ...]`."""
    if tp.size == 1:
        return Pending(whole, None)
    part = whole.new_empty(_sequence_part(whole, tp), *whole.shape[1:])
    return Pending(
        part, reduce_scatter_tensor(part, whole.contiguous(), group=_group(tp), async_op=True)
    )


def _group(tp: Axis) -> dist.ProcessGroup:
    assert tp.group is not None, f"{tp} only describes a layout: it has no process group"
    return tp.group


def _sequence_part(whole: Tensor, tp: Axis) -> int:
    return divide(
        whole.shape[0],
        tp.size,
        "sequence length over the tensor-parallel ranks (sequence parallelism)",
    )


def _identity(tensor: Tensor, tp: Axis) -> Tensor:
    return tensor.view_as(tensor)


def _all_reduce(tensor: Tensor, tp: Axis) -> Tensor:
    return start_all_reduce(tensor.clone(memory_format=torch.contiguous_format), tp).wait()


def _all_gather_sequence(part: Tensor, tp: Axis) -> Tensor:
    return start_sequence_all_gather(part, tp).wait()


def _reduce_scatter_sequence(whole: Tensor, tp: Axis) -> Tensor:
    return start_sequence_reduce_scatter(whole, tp).wait()


def _all_gather_last(part: Tensor, tp: Axis) -> Tensor:
    stacked = start_sequence_all_gather(part.unsqueeze(0), tp).wait()  # [tp, ..., part]
    return stacked.movedim(0, -2).reshape(*part.shape[:-1], -1)


def _slice_last(whole: Tensor, tp: Axis) -> Tensor:
    start, stop = even_range(whole.shape[-1], tp.rank, tp.size)
    return whole[..., start:stop].clone()


def _to_heads(part: Tensor, cp: Axis) -> Tensor:
    by_rank = (
        part.unflatten(2, (cp.size, -1)).movedim(2, 0).contiguous()
    )  # [cp, s/cp, b, heads/cp, ...]
    return _all_to_all(by_rank, cp).flatten(0, 1)


def _to_sequence(part: Tensor, cp: Axis) -> Tensor:
    by_rank = part.unflatten(0, (cp.size, -1)).contiguous()  # [cp, s/cp, b, heads/cp, ...]
    return _all_to_all(by_rank, cp).movedim(0, 2).flatten(2, 3)


def _all_to_all(by_rank: Tensor, axis: Axis) -> Tensor:
    received = torch.empty_like(by_rank)
    dist.all_to_all_single(received, by_rank, group=_group(axis))
    return received


class _Conjugate(torch.autograd.Function):
    """Apply `forward_operation`; the gradient goes through `backward_operation`."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        tp: Axis,
        forward_operation: Operation,
        backward_operation: Operation,
    ) -> Tensor:
        ctx.tp = tp
        ctx.backward_operation = backward_operation
        return forward_operation(tensor, tp)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return ctx.backward_operation(grad, ctx.tp), None, None, None


def _conjugate(
    tensor: Tensor, tp: Axis, forward_operation: Operation, backward_operation: Operation
) -> Tensor:
    if tp.size == 1:
        return tensor
    return _Conjugate.apply(tensor, tp, forward_operation, backward_operation)


def copy_to_tensor_parallel(tensor: Tensor, tp: Axis) -> Tensor:
    """Enter a tensor-parallel region: every rank uses the whole tensor, its gradients are summed."""
    return _conjugate(tensor, tp, _identity, _all_reduce)


def reduce_from_tensor_parallel(tensor: Tensor, tp: Axis) -> Tensor:
    """Leave a tensor-parallel region: sum the partial results of all ranks."""
    return _conjugate(tensor, tp, _all_reduce, _identity)


def gather_from_tensor_parallel(tensor: Tensor, tp: Axis) -> Tensor:
    """Join the parts of the last dimension; what follows is the same on all ranks."""
    return _conjugate(tensor, tp, _all_gather_last, _slice_last)


def gather_from_sequence(tensor: Tensor, tp: Axis) -> Tensor:
    """Enter a tensor-parallel region from a sequence-parallel one."""
    return _conjugate(tensor, tp, _all_gather_sequence, _reduce_scatter_sequence)


def reduce_scatter_to_sequence(tensor: Tensor, tp: Axis) -> Tensor:
    """Leave a tensor-parallel region to a sequence-parallel one."""
    return _conjugate(tensor, tp, _reduce_scatter_sequence, _all_gather_sequence)


def exchange_sequence_for_heads(tensor: Tensor, cp: Axis) -> Tensor:
    """From some positions of all heads, `[s/cp, b, heads, ...]`, to all positions of some heads,
    rank by rank.
    """
    return _conjugate(tensor, cp, _to_heads, _to_sequence)


def exchange_heads_for_sequence(tensor: Tensor, cp: Axis) -> Tensor:
    """From all positions of some heads, `[s, b, heads/cp, ...]`, to some positions of all heads."""
    return _conjugate(tensor, cp, _to_sequence, _to_heads)
