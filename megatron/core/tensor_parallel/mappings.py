"""Differentiable collectives of tensor, sequence and context parallelism.

Every function takes the `Axis`, and returns its input on an axis of size 1. Forward and backward
pass are conjugate operations (f and g of Shoeybi et al. 2019; g-bar of Korthikanti et al. 2022):

    function                     forward                       backward
    copy_to_tensor_parallel      identity                      all-reduce
    reduce_from_tensor_parallel  all-reduce                    identity
    gather_from_tensor_parallel  all-gather along the last dim own part of the last dim
    gather_from_sequence         all-gather along the sequence reduce-scatter along the sequence
    reduce_scatter_to_sequence   reduce-scatter                all-gather along the sequence
    exchange_sequence_for_heads  all-to-all                    reverse all-to-all
    exchange_heads_for_sequence  all-to-all                    reverse all-to-all

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

# torch 2.13 renamed these two collectives and warns about the old names.
all_gather_into_tensor = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

Operation = Callable[[Tensor, Axis], Tensor]


class Pending:
    """The result of a collective that may still be running; `wait()` returns the tensor."""

    def __init__(self, tensor: Tensor, work: dist.Work | None) -> None:
        self._tensor = tensor
        self._work = work

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
        return self._tensor


def start_all_reduce(tensor: Tensor, tp: Axis) -> Pending:
    """Start to sum the contiguous `tensor` over the axis, in place."""
    if tp.size == 1:
        return Pending(tensor, None)
    work = dist.all_reduce(tensor, group=_get_group(tp), async_op=True)
    return Pending(tensor, work)


def start_sequence_all_gather(shard: Tensor, tp: Axis) -> Pending:
    """Start to gather `[s/tp, ...]` of every rank to `[s, ...]`."""
    if tp.size == 1:
        return Pending(shard, None)
    whole = shard.new_empty(shard.shape[0] * tp.size, *shard.shape[1:])
    work = all_gather_into_tensor(whole, shard.contiguous(), group=_get_group(tp), async_op=True)
    return Pending(whole, work)


def start_sequence_reduce_scatter(whole: Tensor, tp: Axis) -> Pending:
    """Start to sum `[s, ...]` over the axis; the result is this rank's `[s/tp, ...]`."""
    if tp.size == 1:
        return Pending(whole, None)
    part_length = divide(
        whole.shape[0],
        tp.size,
        "sequence length over the tensor-parallel ranks (sequence parallelism)",
    )
    shard = whole.new_empty(part_length, *whole.shape[1:])
    work = reduce_scatter_tensor(shard, whole.contiguous(), group=_get_group(tp), async_op=True)
    return Pending(shard, work)


def start_input_gather(x: Tensor, tp: Axis, sequence_parallel: bool) -> Pending:
    """Start to gather the input of a split region; without sequence parallelism it is whole."""
    if not sequence_parallel:
        return Pending(x, None)
    return start_sequence_all_gather(x, tp)


def start_output_sum(partial: Tensor, tp: Axis, sequence_parallel: bool) -> Pending:
    """Start to sum the partial outputs of a split region.

    With sequence parallelism each rank keeps its part of the sequence only.
    """
    if not sequence_parallel:
        return start_all_reduce(partial, tp)
    return start_sequence_reduce_scatter(partial, tp)


def _get_group(tp: Axis) -> dist.ProcessGroup:
    assert tp.group is not None, f"{tp} only describes a layout: it does not have a process group"
    return tp.group


def _copy(tensor: Tensor, tp: Axis) -> Tensor:
    return tensor.view_as(tensor)


def _all_reduce(tensor: Tensor, tp: Axis) -> Tensor:
    # A copy, because the sum is in place and autograd may still need the input.
    copy = tensor.clone(memory_format=torch.contiguous_format)
    return start_all_reduce(copy, tp).wait()


def all_gather_sequence(shard: Tensor, tp: Axis) -> Tensor:
    """Gather `[s/tp, ...]` of every rank to `[s, ...]`."""
    return start_sequence_all_gather(shard, tp).wait()


def _reduce_scatter_sequence(whole: Tensor, tp: Axis) -> Tensor:
    return start_sequence_reduce_scatter(whole, tp).wait()


def _all_gather_last_dim(shard: Tensor, tp: Axis) -> Tensor:
    stacked = start_sequence_all_gather(shard.unsqueeze(0), tp).wait()  # [tp, ..., shard]
    by_rank = stacked.movedim(0, -2)  # [..., tp, shard]
    return by_rank.reshape(*shard.shape[:-1], -1)


def _slice_last_dim(whole: Tensor, tp: Axis) -> Tensor:
    start, stop = even_range(whole.shape[-1], tp.rank, tp.size)
    # A copy, because a view would keep the whole tensor in memory.
    return whole[..., start:stop].clone()


def _send_heads(shard: Tensor, cp: Axis) -> Tensor:
    """`[s/cp, b, heads, ...]` -> `[s, b, heads/cp, ...]`"""
    by_rank = shard.unflatten(2, (cp.size, -1)).movedim(2, 0)  # [cp, s/cp, b, heads/cp, ...]
    received = _all_to_all(by_rank.contiguous(), cp)
    return received.flatten(0, 1)


def _send_positions(shard: Tensor, cp: Axis) -> Tensor:
    """`[s, b, heads/cp, ...]` -> `[s/cp, b, heads, ...]`"""
    by_rank = shard.unflatten(0, (cp.size, -1))  # [cp, s/cp, b, heads/cp, ...]
    received = _all_to_all(by_rank.contiguous(), cp)
    by_head_part = received.movedim(0, 2)  # [s/cp, b, cp, heads/cp, ...]
    return by_head_part.flatten(2, 3)


def _all_to_all(by_rank: Tensor, axis: Axis) -> Tensor:
    received = torch.empty_like(by_rank)
    dist.all_to_all_single(received, by_rank, group=_get_group(axis))
    return received


class _Conjugate(torch.autograd.Function):
    """Apply `forward_operation`, and `backward_operation` to the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        tp: Axis,
        forward_operation: Operation,
        backward_operation: Operation,
    ) -> Tensor:
        # No tensor is saved: linear operations do not need their input in the backward pass.
        ctx.tp = tp
        ctx.backward_operation = backward_operation
        return forward_operation(tensor, tp)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        input_grad = ctx.backward_operation(grad, ctx.tp)
        return input_grad, None, None, None


def _apply_conjugate(
    tensor: Tensor, tp: Axis, forward_operation: Operation, backward_operation: Operation
) -> Tensor:
    if tp.size == 1:
        return tensor
    return _Conjugate.apply(tensor, tp, forward_operation, backward_operation)


def copy_to_tensor_parallel(tensor: Tensor, tp: Axis) -> Tensor:
    """Enter a tensor-parallel region: every rank uses the whole tensor; sum its gradients."""
    return _apply_conjugate(tensor, tp, _copy, _all_reduce)


def reduce_from_tensor_parallel(tensor: Tensor, tp: Axis) -> Tensor:
    """Leave a tensor-parallel region: sum the partial results of all ranks."""
    return _apply_conjugate(tensor, tp, _all_reduce, _copy)


def gather_from_tensor_parallel(tensor: Tensor, tp: Axis) -> Tensor:
    """Concatenate the parts of the last dimension, for computations replicated on all ranks."""
    return _apply_conjugate(tensor, tp, _all_gather_last_dim, _slice_last_dim)


def gather_from_sequence(tensor: Tensor, tp: Axis) -> Tensor:
    """Enter a tensor-parallel region from a sequence-parallel one."""
    return _apply_conjugate(tensor, tp, all_gather_sequence, _reduce_scatter_sequence)


def reduce_scatter_to_sequence(tensor: Tensor, tp: Axis) -> Tensor:
    """Leave a tensor-parallel region to a sequence-parallel one."""
    return _apply_conjugate(tensor, tp, _reduce_scatter_sequence, all_gather_sequence)


def reduce_output(partial: Tensor, tp: Axis, sequence_parallel: bool) -> Tensor:
    """Leave a tensor-parallel region: sum the partial results of all ranks.

    With sequence parallelism each rank keeps its part of the sequence only.
    """
    if sequence_parallel:
        return reduce_scatter_to_sequence(partial, tp)
    return reduce_from_tensor_parallel(partial, tp)


def gather_input(tensor: Tensor, tp: Axis, sequence_parallel: bool) -> Tensor:
    """Enter a tensor-parallel region: every rank uses the whole tensor."""
    if sequence_parallel:
        return gather_from_sequence(tensor, tp)
    return copy_to_tensor_parallel(tensor, tp)


def exchange_sequence_for_heads(tensor: Tensor, cp: Axis) -> Tensor:
    """Exchange `[s/cp, b, heads, ...]` for `[s, b, heads/cp, ...]`, positions in rank order."""
    return _apply_conjugate(tensor, cp, _send_heads, _send_positions)


def exchange_heads_for_sequence(tensor: Tensor, cp: Axis) -> Tensor:
    """Exchange `[s, b, heads/cp, ...]` for `[s/cp, b, heads, ...]`."""
    return _apply_conjugate(tensor, cp, _send_positions, _send_heads)
