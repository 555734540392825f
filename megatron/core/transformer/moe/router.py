"""Which experts a token goes to, with which weights, and what keeps experts in use: losses, and a
bias.

Megatron-LM's semantics (`moe_utils.py`, `router.py` of 0.16): Shazeer et al. 2017, Fedus et al.
2022 (auxiliary loss), Zoph et al. 2022 (z-loss), DeepSeek-AI 2024 (groups, expert bias, loss per
sequence).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.module import Constant, MegatronModule, Normal, ParamInfo, make_parameter
from megatron.core.parallel_state import Axis, ExpertAxes
from megatron.core.transformer.transformer_config import TransformerConfig

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
LOSS_NAMES = {  # by --moe-router-load-balancing-type, as Megatron-LM logs them
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
Z_LOSS = "z_loss"
LOAD = "load"  # the largest load of an expert over the mean one


@dataclass(frozen=True)
class Routing:
    """The choice of t tokens."""

    experts: Tensor
    """`[t, k]` numbers of the experts."""
    probs: Tensor
    """`[t, k]` weights of their outputs."""
    kept: Tensor | None
    """`[t, k]`: False where the expert has no capacity left for the token; None: nothing is dropped.
    """


class TopKRouter(MegatronModule):
    """Scores of all experts for each token, of which the k highest win; replicated over TP.

    Auxiliary losses are attached to the weights: their backward has the gradient `loss_scale`,
    whatever the loss of the model is. What a step reports is recorded by the backward pass as well,
    so recomputed activations count once.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        layer_number: int,
        axes: ExpertAxes,
        partial_grad: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        assert config.num_experts is not None
        self.config = config
        self.axes = axes
        self.num_experts = config.num_experts
        self.layer_number = layer_number
        self.dtype = _DTYPES.get(config.moe_router_dtype or "")
        shape = (self.num_experts, config.hidden_size)
        info = ParamInfo(Normal(config.init_method_std), partial_grad=partial_grad)
        self.weight = make_parameter(shape, config.params_dtype, device, info)
        self.bias = (
            make_parameter((self.num_experts,), config.params_dtype, device, info)
            if config.add_bias_linear
            else None
        )
        bias = ParamInfo(Constant(0.0), trained=False)
        self.expert_bias = (
            make_parameter((self.num_experts,), torch.float32, device, bias)
            if config.moe_router_enable_expert_bias
            else None
        )
        self.loss_scale: float | Tensor = 1.0
        self.per_token_loss = False
        self.recorded: dict[
            str, Tensor
        ] = {}  # sums over the micro-batches of the step, on the device
        self._global_counts: Tensor | None = None
        self._microbatches = 0

    def start_step(self, loss_scale: float | Tensor, per_token_loss: bool) -> None:
        """Before the micro-batches of a step: the gradient of an auxiliary loss, and whether the
        model's loss is a sum over tokens, to which one over this rank's tokens corresponds.
        """
        self.loss_scale = loss_scale
        self.per_token_loss = per_token_loss
        self.recorded = {}
        self._global_counts = None
        self._microbatches = 0

    def forward(self, tokens: Tensor, batch: int) -> Routing:
        """The choice for `tokens` `[s * b, h]`, in the order of `[s, b]`; `batch` is b."""
        dtype = self.dtype or tokens.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        logits = F.linear(tokens.to(dtype), self.weight.to(dtype), bias)  # [t, experts]
        if self.config.moe_router_force_load_balancing:
            logits = logits + (
                torch.randn_like(logits) - logits.detach()
            )  # with gradients all the same
        if self.config.by_sinkhorn:
            experts, probs = choose_by_sinkhorn(logits, self.config, self.training)
        else:
            experts, probs = choose(logits, self.config, self.expert_bias)
        kept = (
            None
            if self.config.moe_expert_capacity_factor is None
            else self._within_capacity(experts, probs)
        )
        if self.training and torch.is_grad_enabled():
            probs = self._with_losses(logits, experts, probs, kept, batch)
        return Routing(experts, probs, kept)

    def _within_capacity(self, experts: Tensor, probs: Tensor) -> Tensor:
        """Which choices their experts have room for."""
        factor = self.config.moe_expert_capacity_factor
        num_tokens = len(experts)
        assert factor is not None
        capacity = math.ceil(num_tokens * experts.shape[1] / self.num_experts * factor)
        if capacity >= num_tokens:
            return torch.ones_like(experts, dtype=torch.bool)
        by_position = self.config.moe_token_drop_policy == "position"
        values = torch.ones_like(probs) if by_position else probs.detach()
        columns = values.new_zeros(num_tokens, self.num_experts).scatter_(1, experts, values)
        best = torch.topk(columns, capacity, dim=0, sorted=False).indices
        room = torch.zeros_like(columns, dtype=torch.bool).scatter_(0, best, True)
        return room.gather(1, experts)

    def _with_losses(
        self, logits: Tensor, experts: Tensor, probs: Tensor, kept: Tensor | None, batch: int
    ) -> Tensor:
        """`probs`, with the losses attached."""
        config = self.config
        losses = []
        names = []
        coefficients = []
        if config.load_balancing:
            scores = loss_scores(logits, config)
            counts = _counts(
                torch.topk(scores, config.moe_router_topk, dim=1).indices, self.num_experts, batch
            )
        for kind, coefficient in config.load_balancing.items():
            losses.append(coefficient * self._balance(kind, scores, counts, batch))
            names.append(LOSS_NAMES[kind])
            coefficients.append(coefficient)
        if config.moe_z_loss_coeff:
            z_loss = torch.logsumexp(logits.float(), dim=-1).square().mean() / self.axes.token_ranks
            losses.append(config.moe_z_loss_coeff * z_loss)
            names.append(Z_LOSS)
            coefficients.append(config.moe_z_loss_coeff)
        used = experts if kept is None else experts.masked_fill(~kept, self.num_experts)
        loads = used.new_zeros(self.num_experts + 1).scatter_add_(
            0, used.view(-1), torch.ones_like(used.view(-1))
        )
        scale: float | Tensor = self.loss_scale
        if self.per_token_loss:
            scale = scale * (
                len(logits) * self.axes.token_ranks
            )  # the tokens of the micro-batch, on any layout
        reports = _Reports(self, tuple(names), tuple(coefficients), scale)
        return _Attached.apply(probs, reports, loads[: self.num_experts], *losses)

    def _balance(self, kind: str, scores: Tensor, counts: Tensor, batch: int) -> Tensor:
        """The loss without its coefficient; `scores` `[t, experts]`, `counts` `[b, experts]` of the
        plain choice.
        """
        num_tokens = len(scores) * self.axes.token_ranks  # of the micro-batch
        if kind == "seq_aux_loss":
            counts = _summed(counts, *self.axes.tokens)
            num_tokens = num_tokens // batch
            means = scores.view(-1, batch, self.num_experts).sum(0)
            products = (means * counts).sum() / batch
        else:
            spread = self.axes.everyone if kind == "global_aux_loss" else self.axes.tokens
            counts = _summed(counts.sum(0), *spread)
            if (
                kind == "global_aux_loss"
            ):  # the mean over the micro-batches of all replicas, and so far
                counts = self._mean_over_microbatches(
                    counts * (self.axes.token_ranks / self.axes.all_ranks)
                )
            products = (scores.sum(0) * counts).sum()
        return products * (self.num_experts / (self.config.moe_router_topk * num_tokens**2))

    def _mean_over_microbatches(self, counts: Tensor) -> Tensor:
        """Of all that this step has seen so far."""
        self._global_counts = (
            counts if self._global_counts is None else self._global_counts + counts
        )
        self._microbatches += 1
        return self._global_counts / self._microbatches

    def record(self, name: str, value: Tensor) -> None:
        self.recorded[name] = self.recorded[name] + value if name in self.recorded else value


def choose(
    logits: Tensor, config: TransformerConfig, expert_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The k experts of each row of `logits` `[t, experts]` and the weights of their outputs, both
    `[t, k]`.
    """
    k = config.moe_router_topk
    after = not config.moe_router_pre_softmax
    if config.moe_router_score_function == "softmax":
        scores = (
            logits if after else torch.softmax(logits, dim=-1, dtype=torch.float32).to(logits.dtype)
        )
        chosen = torch.topk(_within_groups(scores, config), k, dim=1)
        experts = chosen.indices
        probs = scores.gather(1, chosen.indices)
        if after:
            probs = torch.softmax(probs, dim=-1, dtype=torch.float32).to(logits.dtype)
    else:
        scores = torch.sigmoid(logits.float()).to(logits.dtype)
        biased = scores if expert_bias is None else scores + expert_bias
        experts = torch.topk(_within_groups(biased, config), k, dim=1).indices
        probs = scores.gather(1, experts)
        if k > 1:
            probs = probs / (probs.sum(dim=-1, keepdim=True) + 1e-20)
    if config.moe_router_topk_scaling_factor:
        probs = probs * config.moe_router_topk_scaling_factor
    return experts, probs


def choose_by_sinkhorn(
    logits: Tensor, config: TransformerConfig, training: bool
) -> tuple[Tensor, Tensor]:
    """As `choose`; in training the tokens here are spread over the experts, the weights are those
    of plain scores.
    """
    k = config.moe_router_topk
    # A softmax over one expert would teach nothing.
    scores = (
        torch.sigmoid(logits)
        if k == 1
        else torch.softmax(logits, -1, dtype=torch.float32).to(logits.dtype)
    )
    experts = torch.topk(
        sinkhorn(logits.detach().float()) if training else scores, k, dim=1
    ).indices
    return experts, scores.gather(1, experts)


def sinkhorn(logits: Tensor, tolerance: float = 1e-4) -> Tensor:
    """exp(logits) `[t, experts]` with rows and columns scaled until every token, and every expert,
    has an even share of the sum 1 (Sinkhorn 1964). Each round waits for the device.
    """
    values = logits.exp()
    change = torch.inf
    (tokens, experts), tiny = values.shape, 1e-8
    by_expert = values.new_ones(experts)
    while change > tolerance:
        by_token = 1 / tokens / ((by_expert * values).sum(1) + tiny)
        before = by_expert
        by_expert = 1 / experts / ((by_token.unsqueeze(1) * values).sum(0) + tiny)
        change = (before - by_expert).abs().mean().item()
    return by_expert * values * by_token.unsqueeze(1)


def _within_groups(scores: Tensor, config: TransformerConfig) -> Tensor:
    """-inf outside of the groups with the highest sums of their best scores."""
    groups = config.moe_router_num_groups
    taken = config.moe_router_group_topk
    if not groups or not taken:
        return scores
    by_group = scores.view(len(scores), groups, -1)
    sums = by_group.topk(config.group_score_topk, dim=-1).values.sum(dim=-1)
    best = sums.topk(taken, dim=-1, sorted=False).indices
    allowed = torch.zeros_like(sums, dtype=torch.bool).scatter_(1, best, True)
    return by_group.masked_fill(~allowed.unsqueeze(-1), float("-inf")).view_as(scores)


def loss_scores(logits: Tensor, config: TransformerConfig) -> Tensor:
    """The probabilities of all experts that the load-balancing losses see, `[t, experts]` in fp32."""
    if config.moe_router_score_function == "softmax":
        return torch.softmax(logits, dim=-1, dtype=torch.float32)
    scores = torch.sigmoid(logits.float())
    return scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)


def _counts(experts: Tensor, num_experts: int, batch: int) -> Tensor:
    """How often each expert was chosen in each sequence, `[b, experts]`; `experts` `[s * b, k]`."""
    by_sequence = experts.view(-1, batch, experts.shape[1]).transpose(0, 1).reshape(batch, -1)
    return (
        by_sequence.new_zeros(batch, num_experts)
        .scatter_add_(1, by_sequence, torch.ones_like(by_sequence))
        .float()
    )


def _summed(counts: Tensor, *axes: Axis) -> Tensor:
    counts = counts.clone()
    for axis in axes:
        if axis.size > 1:
            dist.all_reduce(counts, group=axis.group)
    return counts


@dataclass(frozen=True)
class _Reports:
    """Where the values of attached losses go, and the gradient that they get."""

    router: TopKRouter
    names: tuple[str, ...]
    coefficients: tuple[float, ...]
    scale: float | Tensor


class _Attached(torch.autograd.Function):
    """The identity on `probs`; in backward every one of the losses gets the gradient `scale`, and
    is recorded.
    """

    @staticmethod
    def forward(
        ctx: Any, probs: Tensor, reports: _Reports, loads: Tensor, *losses: Tensor
    ) -> Tensor:
        ctx.reports = reports
        ctx.save_for_backward(loads, *losses)
        return probs.view_as(probs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        loads, *losses = ctx.saved_tensors
        reports: _Reports = ctx.reports
        reports.router.record("tokens_per_expert", loads)
        for name, coefficient, loss in zip(
            reports.names, reports.coefficients, losses, strict=True
        ):
            reports.router.record(name, loss / coefficient)
        return grad, None, None, *(torch.ones_like(loss) * reports.scale for loss in losses)


def find_routers(chunks: Iterable[nn.Module]) -> list[TopKRouter]:
    """Of all layers with experts in these chunks, in order."""
    return [
        module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)
    ]


@torch.no_grad()
def finish_step(of_rank: Sequence[TopKRouter]) -> None:
    """After the last backward pass of a step: the loads of all micro-batches of all ranks, and by
    them the bias.
    """
    if not of_rank:
        return
    axes = of_rank[0].axes
    loads = torch.stack([router.recorded["tokens_per_expert"] for router in of_rank])
    for axis in axes.everyone:
        if axis.size > 1:
            dist.all_reduce(loads, group=axis.group)
    for router, load in zip(of_rank, loads.float(), strict=True):
        router.recorded["tokens_per_expert"] = load
        if router.expert_bias is not None:
            router.expert_bias.add_(
                torch.sign(load.mean() - load), alpha=router.config.moe_router_bias_update_rate
            )


def get_metric_names(config: TransformerConfig) -> list[str]:
    """The names of what `compute_metrics` has, in its order."""
    losses = [LOSS_NAMES[kind] for kind in config.load_balancing] + (
        [Z_LOSS] if config.moe_z_loss_coeff else []
    )
    return [*losses, LOAD]


def compute_metrics(
    config: TransformerConfig,
    of_rank: Sequence[TopKRouter],
    num_microbatches: int,
    device: torch.device,
) -> Tensor:
    """This rank's share of the losses of each layer, `[metrics, layers]` in fp64: a sum over the
    world, divided by the number of data-parallel ranks, gives them. After `finish_step`.
    """
    names = get_metric_names(config)
    values = torch.zeros(len(names), config.num_layers, dtype=torch.float64, device=device)
    for router in of_rank:
        for row, name in enumerate(names):
            if name == LOAD:
                load = router.recorded["tokens_per_expert"]
                values[row, router.layer_number] = (
                    load.max() / load.mean().clamp(min=1e-9) / router.axes.token_ranks
                )
            else:
                values[row, router.layer_number] = router.recorded[name] / num_microbatches
    return values
