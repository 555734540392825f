"""Tokens to the ranks that hold their experts, and the experts' outputs back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.parallel_state import Axis, ExpertAxes
from megatron.core.tensor_parallel.mappings import gather_from_sequence, reduce_scatter_to_sequence
from megatron.core.transformer.moe.permutation import Permutation
from megatron.core.transformer.moe.router import Routing

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rows in the order of the local experts `[n, h]`, their probabilities `[n, 1]`, rows of each) -> `[n, h]`"""

Dispatch = Callable[[Tensor, Routing, Experts, int, ExpertAxes], Tensor]
"""(tokens `[t, h]`, routing, experts, number of experts of a rank, axes) -> the sum of the experts' outputs `[t, h]`"""


def all_to_all(tokens: Tensor, routing: Routing, experts: Experts, num_local: int, axes: ExpertAxes) -> Tensor:
    """Every rank sends the tokens of an expert to the ETP ranks that hold its parts, and sums what they send back."""
    chosen, etp_size, num_ranks = routing.experts, axes.etp.size, axes.all.size
    # Experts are numbered by the ranks of `all` (ETP fastest), so that rows in their order are rows by destination.
    parts = torch.arange(etp_size, device=chosen.device) * num_local
    keys = (chosen // num_local * (etp_size * num_local) + chosen % num_local).unsqueeze(-1) + parts
    if routing.kept is not None:
        keys = keys.masked_fill(~routing.kept.unsqueeze(-1), num_ranks * num_local)
    sent = Permutation(keys, num_ranks * num_local, complete=routing.kept is None)
    rows, probs = sent.gather(tokens), sent.gather(routing.probs.reshape(-1, 1))
    if num_ranks == 1:
        return sent.combine(experts(rows, probs, sent.counts), len(tokens))
    received = torch.empty_like(sent.counts)
    dist.all_to_all_single(received, sent.counts.contiguous(), group=axes.all.group)
    received = received.view(num_ranks, num_local)
    outgoing, incoming = torch.stack([sent.counts.view_as(received).sum(1), received.sum(1)]).tolist()
    local = torch.arange(num_local, device=chosen.device).repeat(num_ranks).repeat_interleave(received.view(-1))
    by_expert = Permutation(local.unsqueeze(-1), num_local)
    rows, probs = (by_expert.gather(_exchange(x, outgoing, incoming, axes.all)) for x in (rows, probs))
    outputs = by_expert.combine(experts(rows, probs, by_expert.counts), len(local))
    return sent.combine(_exchange(outputs, incoming, outgoing, axes.all), len(tokens))


def all_gather(tokens: Tensor, routing: Routing, experts: Experts, num_local: int, axes: ExpertAxes) -> Tensor:
    """Every rank gets the tokens of all, and its experts' outputs are summed and scattered."""
    tokens, probs = (gather_from_sequence(x, axes.all) for x in (tokens, routing.probs))
    chosen = gather_from_sequence(routing.experts, axes.all) - axes.ep.rank * num_local
    here = (chosen >= 0) & (chosen < num_local)
    if routing.kept is not None:
        here &= gather_from_sequence(routing.kept.byte(), axes.all).bool()
    own = Permutation(chosen.masked_fill(~here, num_local), num_local, complete=False)
    outputs = experts(own.gather(tokens), own.gather(probs.reshape(-1, 1)), own.counts)
    return reduce_scatter_to_sequence(own.combine(outputs, len(tokens)), axes.all)


DISPATCHERS: dict[str, Dispatch] = {"alltoall": all_to_all, "allgather": all_gather}


def _exchange(rows: Tensor, outgoing: list[int], incoming: list[int], axis: Axis) -> Tensor:
    return _AllToAll.apply(rows, outgoing, incoming, axis)


class _AllToAll(torch.autograd.Function):
    """`outgoing[r]` rows to rank r of the axis, `incoming[r]` from it; gradients go the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, outgoing: list[int], incoming: list[int], axis: Axis) -> Tensor:
        ctx.outgoing, ctx.incoming, ctx.axis = outgoing, incoming, axis
        return _exchanged(rows, outgoing, incoming, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _exchanged(grad, ctx.incoming, ctx.outgoing, ctx.axis), None, None, None


def _exchanged(rows: Tensor, outgoing: list[int], incoming: list[int], axis: Axis) -> Tensor:
    received = rows.new_empty(sum(incoming), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), incoming, outgoing, group=axis.group)
    return received
