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

    # Sort the copies of the tokens by destination; each travels with its weight.
    sent = _sort_by_destination(routing, num_local, axes)
    rows = sent.gather(tokens)  # [n, h]
    probs = sent.gather(routing.probs.reshape(-1, 1))  # [n, 1]
    if num_ranks == 1:
        outputs = experts(rows, probs, sent.counts)
        return sent.combine(outputs, len(tokens))

    # Exchange the numbers of rows first, because the receivers allocate the memory for the rows.
    received_counts = torch.empty_like(sent.counts)
    dist.all_to_all_single(received_counts, sent.counts.contiguous(), group=axes.all.group)
    sent_counts = sent.counts.view(num_ranks, num_local)
    received_counts = received_counts.view(num_ranks, num_local)
    rows_to_rank = sent_counts.sum(1)  # [ranks]
    rows_from_rank = received_counts.sum(1)  # [ranks]
    # A single copy to the host for both, because every copy waits for the device.
    outgoing, incoming = torch.stack([rows_to_rank, rows_from_rank]).tolist()

    # Exchange the rows, apply the local experts, and return the outputs the same way.
    rows, probs = _AllToAll.apply(axes.all, outgoing, incoming, rows, probs)
    outputs = _apply_local_experts(experts, rows, probs, received_counts)
    (outputs,) = _AllToAll.apply(axes.all, incoming, outgoing, outputs)
    return sent.combine(outputs, len(tokens))


def _sort_by_destination(routing: Routing, num_local: int, axes: ExpertAxes) -> Permutation:
    """Return the order in which all-to-all sends the copies of the tokens.

    A token has `k * etp` copies: one for each ETP rank of each of its experts. Copies that exceed
    the capacity of their expert are left out.
    """
    num_keys = axes.all.size * num_local
    keys = _compute_destinations(routing.experts, num_local, axes.etp.size)  # [t, k, etp]
    is_complete = routing.kept is None
    if routing.kept is not None:
        is_dropped = ~routing.kept.unsqueeze(-1)  # [t, k, 1]
        keys = keys.masked_fill(is_dropped, num_keys)
    return Permutation(keys, num_keys, complete=is_complete)


def _compute_destinations(experts: Tensor, num_local: int, etp_size: int) -> Tensor:
    """Return the position of each part of an expert among all local experts, `[..., etp]`.

    Positions count the local experts of all ranks of ETP x EP in rank order (ETP fastest), so rows
    sorted by position are sorted by destination rank.
    """
    etp_ranks = torch.arange(etp_size, device=experts.device)
    ep_rank = experts // num_local
    local_index = experts % num_local
    first_position = ep_rank * (etp_size * num_local) + local_index
    return first_position.unsqueeze(-1) + etp_ranks * num_local


def _apply_local_experts(experts: Experts, rows: Tensor, probs: Tensor, counts: Tensor) -> Tensor:
    """Return the outputs `[n, h]` of the experts in the order in which `rows` `[n, h]` arrived.

    `counts` `[ranks, local experts]` are the numbers of rows from each rank. Rows arrive sorted by
    (source rank, expert); the grouped matrix products of the experts need them sorted by expert.
    """
    num_ranks, num_local = counts.shape
    local_experts = torch.arange(num_local, device=rows.device).repeat(num_ranks)
    # [n]; without the size, the operator would wait for the device to count the rows.
    expert_of_row = local_experts.repeat_interleave(counts.view(-1), output_size=len(rows))
    by_expert = Permutation(expert_of_row.unsqueeze(-1), num_local)
    sorted_rows = by_expert.gather(rows)
    sorted_probs = by_expert.gather(probs)
    outputs = experts(sorted_rows, sorted_probs, by_expert.counts)
    return by_expert.combine(outputs, len(rows))


def dispatch_by_all_gather(
    tokens: Tensor, routing: Routing, experts: Experts, num_local: int, axes: ExpertAxes
) -> Tensor:
    """Gather the tokens of all ranks, and sum and scatter the outputs of all experts.

    Collective over ETP x EP.
    """
    # Every rank sees the tokens and the routing of all ranks.
    tokens = gather_from_sequence(tokens, axes.all)  # [t of all ranks, h]
    probs = gather_from_sequence(routing.probs, axes.all)  # [t of all ranks, k]
    chosen = gather_from_sequence(routing.experts, axes.all)  # [t of all ranks, k]

    # Sort the choices of local experts; those of experts on other ranks are left out.
    local_index = chosen - axes.ep.rank * num_local
    is_local = (local_index >= 0) & (local_index < num_local)
    if routing.kept is not None:
        kept = gather_from_sequence(routing.kept.byte(), axes.all)
        is_local &= kept.bool()
    keys = local_index.masked_fill(~is_local, num_local)
    permutation = Permutation(keys, num_local, complete=False)

    # Sum the outputs of the local experts here, and those of all ranks in the reduce-scatter.
    rows = permutation.gather(tokens)
    row_probs = permutation.gather(probs.reshape(-1, 1))
    outputs = experts(rows, row_probs, permutation.counts)
    partial_sums = permutation.combine(outputs, len(tokens))  # [t of all ranks, h]
    return reduce_scatter_to_sequence(partial_sums, axes.all)


DISPATCHERS: dict[str, Dispatcher] = {
    # Moves each token only to the ranks of its experts: less data if k is less than EP.
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
    num_received = sum(incoming)
    # The backend reads the sent tensors until `wait`: the list keeps contiguous copies alive.
    sent = [tensor.contiguous() for tensor in tensors]
    received = []
    works = []
    for tensor in sent:
        target = tensor.new_empty(num_received, *tensor.shape[1:])
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
        flat = keys.reshape(-1)  # [n * c]
        self.complete = complete

        # Number of rows per key. The additional counter of copies that are left out is cut off.
        counts = torch.zeros(num_keys + 1, dtype=flat.dtype, device=flat.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        self.counts = counts[:num_keys]

        # Indices of the copies in sorted order, [m]. The key `num_keys` is sorted to the end.
        order = torch.argsort(flat, stable=True)
        if not complete:
            num_kept = int(self.counts.sum())
            order = order[:num_kept]
        self._order = order

        # Position of each copy in the sorted order; len(order) for copies that are left out.
        sorted_positions = torch.arange(len(order), device=flat.device)
        self._position = torch.full_like(flat, len(order))  # [n * c]
        self._position.scatter_(0, order, sorted_positions)

    def gather(self, rows: Tensor) -> Tensor:
        """Return the sorted copies `[m, h]` of rows `[n, h]`.

        Rows that differ between the copies are given one per copy, `[n * c, h]`.
        """
        return _Gather.apply(rows, self, len(rows))

    def combine(self, copies: Tensor, num_rows: int) -> Tensor:
        """Sum the copies `[m, h]` of each of `num_rows` rows: `[n, h]`."""
        return _Combine.apply(copies, self, num_rows)

    def _gather_rows(self, rows: Tensor) -> Tensor:
        """Return the sorted copies `[m, h]`."""
        copies_per_row = self._count_copies_per_row(len(rows))
        row_of_copy = self._order // copies_per_row  # [m]
        return rows.index_select(0, row_of_copy)

    def _sum_copies(self, copies: Tensor, num_rows: int) -> Tensor:
        """Return the sums over the copies of each row `[n, h]`."""
        if not self.complete:
            # The last row is the contribution of copies that are left out.
            zero_row = copies.new_zeros(1, copies.shape[1])
            copies = torch.cat([copies, zero_row])
        copies_per_row = self._count_copies_per_row(num_rows)
        if copies_per_row == 1:
            return copies.index_select(0, self._position)
        # Sums in fp32, without materializing `copies[position]`.
        positions = self._position.view(num_rows, copies_per_row)
        return F.embedding_bag(positions, copies, mode="sum")

    def _count_copies_per_row(self, num_rows: int) -> int:
        """Return c, or 1 if the rank has no rows."""
        if num_rows == 0:
            return 1
        return len(self._position) // num_rows


class _Gather(torch.autograd.Function):
    """Copies of rows in sorted order; the gradient of a row is the sum over its copies."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, permutation: Permutation, num_rows: int) -> Tensor:
        ctx.permutation = permutation
        ctx.num_rows = num_rows
        return permutation._gather_rows(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        row_grad = ctx.permutation._sum_copies(grad, ctx.num_rows)
        return row_grad, None, None


class _Combine(torch.autograd.Function):
    """Sums of sorted copies; every copy has the gradient of its row."""

    @staticmethod
    def forward(ctx: Any, copies: Tensor, permutation: Permutation, num_rows: int) -> Tensor:
        ctx.permutation = permutation
        return permutation._sum_copies(copies, num_rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        copy_grad = ctx.permutation._gather_rows(grad)
        return copy_grad, None, None
