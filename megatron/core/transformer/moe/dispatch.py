"""Transport of tokens to the ranks of their experts and back.

Tokens are moved by index operations only, which are deterministic in both passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.core.parallel_state import Axis, ExpertAxes
from megatron.core.tensor_parallel.mappings import gather_from_sequence, reduce_scatter_to_sequence
from megatron.core.transformer.moe.router import Routing

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rows sorted by local expert `[n, h]`, their weights `[n, 1]`, rows per expert) -> `[n, h]`"""

Dispatcher = Callable[[Tensor, Routing, Experts, int, ExpertAxes], Tensor]
"""(tokens `[t, h]`, routing, experts, number of local experts, axes) -> the sum of the outputs of
each token's experts `[t, h]`
"""


def dispatch_by_all_to_all(
    tokens: Tensor, routing: Routing, experts: Experts, num_local: int, axes: ExpertAxes
) -> Tensor:
    """Send each token to all ETP ranks of its experts, and sum the results that return.

    Collective over ETP x EP.
    """
    num_ranks = axes.all.size
    num_keys = num_ranks * num_local
    keys = _compute_destinations(routing.experts, num_local, axes.etp.size)  # [t, k, etp]
    if routing.kept is not None:
        keys = keys.masked_fill(~routing.kept.unsqueeze(-1), num_keys)
    sent = Permutation(keys, num_keys, complete=routing.kept is None)
    rows = sent.gather(tokens)
    probs = sent.gather(routing.probs.reshape(-1, 1))
    if num_ranks == 1:
        return sent.combine(experts(rows, probs, sent.counts), len(tokens))

    # Exchange the numbers of rows, then the rows.
    received = torch.empty_like(sent.counts)
    dist.all_to_all_single(received, sent.counts.contiguous(), group=axes.all.group)
    received = received.view(num_ranks, num_local)
    sent_counts = sent.counts.view_as(received).sum(1)
    # One copy to the host for both, since each waits for the device.
    outgoing, incoming = torch.stack([sent_counts, received.sum(1)]).tolist()
    rows, probs = _AllToAll.apply(axes.all, outgoing, incoming, rows, probs)

    # Rows arrive sorted by (source rank, expert); experts need them sorted by expert.
    local_experts = torch.arange(num_local, device=tokens.device).repeat(num_ranks)
    expert_of_row = local_experts.repeat_interleave(received.view(-1))
    by_expert = Permutation(expert_of_row.unsqueeze(-1), num_local)
    outputs = experts(by_expert.gather(rows), by_expert.gather(probs), by_expert.counts)
    outputs = by_expert.combine(outputs, len(expert_of_row))

    (outputs,) = _AllToAll.apply(axes.all, incoming, outgoing, outputs)
    return sent.combine(outputs, len(tokens))


def _compute_destinations(experts: Tensor, num_local: int, etp_size: int) -> Tensor:
    """Return the position of each part of an expert among all local experts, `[..., etp]`.

    Positions count the local experts of all ranks of ETP x EP in rank order (ETP fastest), so rows
    sorted by position are sorted by destination rank.
    """
    etp_ranks = torch.arange(etp_size, device=experts.device)
    ep_rank = experts // num_local
    first_position = ep_rank * (etp_size * num_local) + experts % num_local
    return first_position.unsqueeze(-1) + etp_ranks * num_local


def dispatch_by_all_gather(
    tokens: Tensor, routing: Routing, experts: Experts, num_local: int, axes: ExpertAxes
) -> Tensor:
    """Gather the tokens of all ranks, and sum and scatter the outputs of all experts.

    Collective over ETP x EP.
    """
    tokens = gather_from_sequence(tokens, axes.all)
    probs = gather_from_sequence(routing.probs, axes.all)
    local_index = gather_from_sequence(routing.experts, axes.all) - axes.ep.rank * num_local
    is_local = (local_index >= 0) & (local_index < num_local)
    if routing.kept is not None:
        is_local &= gather_from_sequence(routing.kept.byte(), axes.all).bool()
    # Choices of experts on other ranks are left out.
    keys = local_index.masked_fill(~is_local, num_local)
    permutation = Permutation(keys, num_local, complete=False)
    rows = permutation.gather(tokens)
    row_probs = permutation.gather(probs.reshape(-1, 1))
    outputs = experts(rows, row_probs, permutation.counts)
    partial_sums = permutation.combine(outputs, len(tokens))  # [t of all ranks, h]
    return reduce_scatter_to_sequence(partial_sums, axes.all)


DISPATCHERS: dict[str, Dispatcher] = {
    "alltoall": dispatch_by_all_to_all,
    "allgather": dispatch_by_all_gather,
}
"""Dispatchers by --moe-token-dispatcher-type."""


class _AllToAll(torch.autograd.Function):
    """Send `outgoing[r]` rows of each tensor to rank r, and receive `incoming[r]` rows from it.

    Gradients return the same way.
    """

    @staticmethod
    def forward(
        ctx: Any, axis: Axis, outgoing: list[int], incoming: list[int], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.axis = axis
        ctx.outgoing = outgoing
        ctx.incoming = incoming
        return _exchange_rows(axis, outgoing, incoming, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        returned = _exchange_rows(ctx.axis, ctx.incoming, ctx.outgoing, grads)
        return None, None, None, *returned


def _exchange_rows(
    axis: Axis, outgoing: list[int], incoming: list[int], tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Exchange all tensors concurrently: ranks with different loads wait for each other once."""
    sent = [tensor.contiguous() for tensor in tensors]
    received = []
    works = []
    for tensor in sent:
        target = tensor.new_empty(sum(incoming), *tensor.shape[1:])
        work = dist.all_to_all_single(
            target, tensor, incoming, outgoing, group=axis.group, async_op=True
        )
        received.append(target)
        works.append(work)
    for work in works:
        work.wait()
    return tuple(received)


class Permutation:
    """Copies of rows sorted by key: the tokens of an expert are adjacent, in their order.

    It is made from the keys `[n, c]` of c copies of each of n rows. Copies with the key `num_keys`
    are left out (there are none if `complete`). `gather` and `combine` are transposes of each
    other, so each is the backward pass of the other. Neither adds to memory by index, because that
    has no fixed order on a GPU.
    """

    def __init__(self, keys: Tensor, num_keys: int, complete: bool = True) -> None:
        flat = keys.reshape(-1)
        counts = torch.zeros(num_keys + 1, dtype=flat.dtype, device=flat.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        self.counts = counts[:num_keys]  # number of rows per key
        self.complete = complete
        order = torch.argsort(flat, stable=True)
        if not complete:
            order = order[: int(self.counts.sum())]
        self._order = order
        # Position of each copy in the sorted order; len(order) for copies that are left out.
        self._position = torch.full_like(flat, len(order))
        self._position.scatter_(0, order, torch.arange(len(order), device=flat.device))

    def gather(self, rows: Tensor) -> Tensor:
        """Return the sorted copies `[m, h]` of rows `[n, h]`, or of one row per copy `[n *
        c, h]`.
        """
        return _Gather.apply(rows, self, len(rows))

    def combine(self, copies: Tensor, num_rows: int) -> Tensor:
        """Sum the copies `[m, h]` of each of `num_rows` rows: `[n, h]`."""
        return _Combine.apply(copies, self, num_rows)

    def _gather_rows(self, rows: Tensor) -> Tensor:
        return rows.index_select(0, self._order // self._count_copies_per_row(len(rows)))

    def _sum_copies(self, copies: Tensor, num_rows: int) -> Tensor:
        if not self.complete:
            # The last row is the contribution of copies that are left out.
            copies = torch.cat([copies, copies.new_zeros(1, copies.shape[1])])
        per_row = self._count_copies_per_row(num_rows)
        if per_row == 1:
            return copies.index_select(0, self._position)
        # Sums in fp32, without materializing `copies[position]`.
        positions = self._position.view(num_rows, per_row)
        return F.embedding_bag(positions, copies, mode="sum")

    def _count_copies_per_row(self, num_rows: int) -> int:
        """Return c, or 1 if the rank has no rows."""
        return len(self._position) // num_rows if num_rows else 1


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, permutation: Permutation, num_rows: int) -> Tensor:
        ctx.permutation = permutation
        ctx.num_rows = num_rows
        return permutation._gather_rows(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.permutation._sum_copies(grad, ctx.num_rows), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, copies: Tensor, permutation: Permutation, num_rows: int) -> Tensor:
        ctx.permutation = permutation
        return permutation._sum_copies(copies, num_rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.permutation._gather_rows(grad), None, None
