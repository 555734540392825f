"""The MLP of a layer with experts, the experts of a rank, and how tokens get to the ranks of theirs
and back.

They move by index operations alone, deterministic in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.module import (
    MegatronModule,
    Normal,
    ParamInfo,
    child_sharded_state_dict,
    make_parameter,
)
from megatron.core.parallel_state import Axis, ExpertAxes
from megatron.core.tensor_parallel import recompute_intermediate
from megatron.core.tensor_parallel.mappings import gather_from_sequence, reduce_scatter_to_sequence
from megatron.core.transformer.backends import select_layer_spec
from megatron.core.transformer.mlp import MLP, get_activation
from megatron.core.transformer.moe.router import Routing, TopKRouter
from megatron.core.transformer.placement import Placement
from megatron.core.transformer.transformer_config import TransformerConfig

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rows in the order of the local experts `[n, h]`, their probabilities `[n, 1]`, rows of each) -> `[n, h]`
"""

Dispatch = Callable[[Tensor, Routing, Experts, int, ExpertAxes], Tensor]
"""(tokens `[t, h]`, routing, experts, number of experts of a rank, axes) -> the sum of the experts' outputs `[t, h]`
"""


def all_to_all(
    tokens: Tensor, routing: Routing, experts: Experts, num_local: int, axes: ExpertAxes
) -> Tensor:
    """Every rank sends the tokens of an expert to the ETP ranks that hold its parts, and sums what
    they send back.
    """
    chosen = routing.experts
    etp_size = axes.etp.size
    num_ranks = axes.all.size
    # Experts are numbered by the ranks of `all` (ETP fastest), so that rows in their order are rows
    # by destination.
    parts = torch.arange(etp_size, device=chosen.device) * num_local
    keys = (chosen // num_local * (etp_size * num_local) + chosen % num_local).unsqueeze(-1) + parts
    if routing.kept is not None:
        keys = keys.masked_fill(~routing.kept.unsqueeze(-1), num_ranks * num_local)
    sent = Permutation(keys, num_ranks * num_local, complete=routing.kept is None)
    rows = sent.gather(tokens)
    probs = sent.gather(routing.probs.reshape(-1, 1))
    if num_ranks == 1:
        return sent.combine(experts(rows, probs, sent.counts), len(tokens))
    received = torch.empty_like(sent.counts)
    dist.all_to_all_single(received, sent.counts.contiguous(), group=axes.all.group)
    received = received.view(num_ranks, num_local)
    outgoing, incoming = torch.stack(
        [sent.counts.view_as(received).sum(1), received.sum(1)]
    ).tolist()
    local = (
        torch.arange(num_local, device=chosen.device)
        .repeat(num_ranks)
        .repeat_interleave(received.view(-1))
    )
    by_expert = Permutation(local.unsqueeze(-1), num_local)
    rows, probs = (
        by_expert.gather(x) for x in _AllToAll.apply(axes.all, outgoing, incoming, rows, probs)
    )
    outputs = by_expert.combine(experts(rows, probs, by_expert.counts), len(local))
    (outputs,) = _AllToAll.apply(axes.all, incoming, outgoing, outputs)
    return sent.combine(outputs, len(tokens))


def all_gather(
    tokens: Tensor, routing: Routing, experts: Experts, num_local: int, axes: ExpertAxes
) -> Tensor:
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


class _AllToAll(torch.autograd.Function):
    """`outgoing[r]` rows of each tensor to rank r of the axis, `incoming[r]` from it; gradients go the way back."""

    @staticmethod
    def forward(
        ctx: Any, axis: Axis, outgoing: list[int], incoming: list[int], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.axis = axis
        ctx.outgoing = outgoing
        ctx.incoming = incoming
        return _exchanged(axis, outgoing, incoming, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return None, None, None, *_exchanged(ctx.axis, ctx.incoming, ctx.outgoing, grads)


def _exchanged(
    axis: Axis, outgoing: list[int], incoming: list[int], tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """All of them at once: ranks that have other loads wait for each other once."""
    sent = [x.contiguous() for x in tensors]
    received = tuple(x.new_empty(sum(incoming), *x.shape[1:]) for x in sent)
    works = [
        dist.all_to_all_single(into, x, incoming, outgoing, group=axis.group, async_op=True)
        for into, x in zip(received, sent, strict=True)
    ]
    for work in works:
        work.wait()
    return received


class Permutation:
    """Copies of rows, sorted by key: the tokens of one expert are neighbours, in the order of the
    tokens.

    Made from the keys `[n, c]` of c copies of each of n rows; copies with the key `num_keys` are
    left out (none where `complete`). `gather` and `combine` are transposed to each other, so each
    is the other's backward; neither adds into memory by index, which has no fixed order on a GPU.
    """

    def __init__(self, keys: Tensor, num_keys: int, complete: bool = True) -> None:
        flat = keys.reshape(-1)
        ones = torch.ones_like(flat)
        counts = torch.zeros(num_keys + 1, dtype=flat.dtype, device=flat.device).scatter_add_(
            0, flat, ones
        )
        self.counts = counts[:num_keys]  # rows of each key
        self.complete = complete
        order = torch.argsort(flat, stable=True)
        self._order = order if complete else order[: int(self.counts.sum())]
        self._place = torch.full_like(flat, len(self._order))  # of each copy; this is none of them
        self._place.scatter_(0, self._order, torch.arange(len(self._order), device=flat.device))

    def gather(self, rows: Tensor) -> Tensor:
        """The sorted copies `[m, h]` of rows `[n, h]`; of `[n * c, h]`, one for each copy, the
        sorted rows.
        """
        return _Gather.apply(rows, self, len(rows))

    def combine(self, copies: Tensor, num_rows: int) -> Tensor:
        """The sum over the copies of each of `num_rows` rows: `[m, h]` to `[n, h]`."""
        return _Combine.apply(copies, self, num_rows)

    def _gathered(self, rows: Tensor) -> Tensor:
        return rows.index_select(0, self._order // self._copies_of_each(len(rows)))

    def _summed(self, copies: Tensor, num_rows: int) -> Tensor:
        if not self.complete:
            copies = torch.cat([copies, copies.new_zeros(1, copies.shape[1])])
        of_each = self._copies_of_each(num_rows)
        if of_each == 1:
            return copies.index_select(0, self._place)
        # in fp32, and without `copies[place]`
        return F.embedding_bag(self._place.view(num_rows, of_each), copies, mode="sum")

    def _copies_of_each(self, num_rows: int) -> int:
        return len(self._place) // num_rows if num_rows else 1  # a rank may get no row at all


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, permutation: Permutation, num_rows: int) -> Tensor:
        ctx.permutation = permutation
        ctx.num_rows = num_rows
        return permutation._gathered(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.permutation._summed(grad, ctx.num_rows), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, copies: Tensor, permutation: Permutation, num_rows: int) -> Tensor:
        ctx.permutation = permutation
        return permutation._summed(copies, num_rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.permutation._gathered(grad), None, None


class MoELayer(MegatronModule):
    """The sum of the chosen experts' outputs, weighted by the router, and of the shared expert's."""

    def __init__(self, config: TransformerConfig, place: Placement, *, layer_number: int) -> None:
        super().__init__()
        assert config.num_experts is not None
        axes = place.experts
        device = place.device
        self.axes = axes
        self.num_local = config.num_experts // axes.ep.size
        self.dispatch = DISPATCHERS[
            config.moe_token_dispatcher_type if axes.all.size > 1 else "alltoall"
        ]
        self.router = TopKRouter(
            config,
            layer_number=layer_number,
            axes=axes,
            partial_grad=place.sequence_parallel,
            device=device,
        )
        self.experts = GroupedExperts(config, axes=axes, device=device)
        self.shared_experts = (
            SharedExperts(config, place) if config.moe_shared_expert_intermediate_size else None
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[s, b, h]` (or `[s/tp, b, h]`) to the same."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        routing = self.router(tokens, hidden_states.shape[1])
        output = self.dispatch(tokens, routing, self.experts, self.num_local, self.axes).view_as(
            hidden_states
        )
        return (
            output if self.shared_experts is None else output + self.shared_experts(hidden_states)
        )


class SharedExperts(MLP):
    """An expert that every token goes to, split over TP like any MLP; with a gate of its own
    (Qwen2-MoE) if wanted.
    """

    def __init__(self, config: TransformerConfig, place: Placement) -> None:
        super().__init__(
            config, place, ffn_size=config.moe_shared_expert_intermediate_size, shared_expert=True
        )
        gate = ParamInfo(Normal(config.init_method_std), partial_grad=place.sequence_parallel)
        self.gate_weight = (
            make_parameter((1, config.hidden_size), config.params_dtype, place.device, gate)
            if config.moe_shared_expert_gate
            else None
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        output = super().forward(hidden_states)
        if self.gate_weight is None:
            return output
        return torch.sigmoid(torch.nn.functional.linear(hidden_states, self.gate_weight)) * output


class GroupedExperts(MegatronModule):
    """The MLPs of a rank's experts. A token's weight multiplies its inner activation."""

    def __init__(
        self, config: TransformerConfig, *, axes: ExpertAxes, device: torch.device | None = None
    ) -> None:
        super().__init__()
        linear = select_layer_spec(config).grouped
        self.recompute = config.recomputes("moe_act") and not config.recomputes("moe")
        self.activation = get_activation(config)
        blocks = 2 if config.gated else 1
        inner = config.moe_ffn_size
        first = Normal(config.init_method_std)
        last = Normal(config.output_init_std)
        options: dict[str, Any] = {"axes": axes, "bias": config.add_bias_linear, "device": device}
        sizes = (config.hidden_size, blocks * inner)
        self.linear_fc1 = linear(
            config, *sizes, init=first, split_dim=1, num_blocks=blocks, **options
        )
        self.linear_fc2 = linear(
            config, inner, config.hidden_size, init=last, split_dim=2, **options
        )

    def forward(self, rows: Tensor, probs: Tensor, counts: Tensor) -> Tensor:
        """`rows` `[n, h]` in the order of the experts, which have `counts` rows each; `probs` `[n, 1]`."""
        inner = self.linear_fc1(rows, counts)
        if not (self.recompute and self.training):
            return self.linear_fc2(self._weighted(inner, probs), counts, probs)
        weighted = partial(
            torch_checkpoint,
            self._weighted,
            probs=probs,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        return recompute_intermediate(
            weighted, partial(self.linear_fc2, counts=counts, probs=probs), inner
        )

    def _weighted(self, inner: Tensor, probs: Tensor) -> Tensor:
        activated = self.activation(inner)
        return (activated * probs).to(activated.dtype)

    def sharded_state_dict(self, prefix: str = "") -> ShardedStateDict:
        """Under Megatron-core's keys, which say `experts` twice."""
        state: ShardedStateDict = {}
        for name, child in self.named_children():
            state.update(child_sharded_state_dict(child, f"{prefix}experts.{name}."))
        return state
