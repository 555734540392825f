"""Top-k routing with load balancing (auxiliary losses, expert bias).

The semantics are Megatron-LM's (`moe_utils.py`, `router.py` of 0.16): Shazeer et al. 2017, Fedus et
al. 2022 (auxiliary loss), Zoph et al. 2022 (z-loss), DeepSeek-AI 2024 (groups, expert bias, loss
per sequence).
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
LOSS_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Names in logs, as in Megatron-LM, by --moe-router-load-balancing-type."""
Z_LOSS = "z_loss"
LOAD = "load"
"""The largest load of an expert divided by the mean load."""
_TOKENS_PER_EXPERT = "tokens_per_expert"


@dataclass(frozen=True)
class Routing:
    """The experts selected for t tokens."""

    experts: Tensor
    """`[t, k]` indices of the experts."""
    probs: Tensor
    """`[t, k]` weights of their outputs."""
    kept: Tensor | None
    """`[t, k]`, False where the token exceeds the capacity of the expert; None if no token
    is dropped.
    """


class TopKRouter(MegatronModule):
    """Selects for each token the k experts with the highest scores; replicated over TP.

    Auxiliary losses are attached to the weights: in the backward pass each has the gradient
    `loss_scale`, independent of the model's loss. The backward pass also records their values, so
    that recomputed activations are counted once.
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
        info = ParamInfo(Normal(config.init_method_std), partial_grad=partial_grad)
        weight_shape = (self.num_experts, config.hidden_size)
        bias_shape = (self.num_experts,)
        self.weight = make_parameter(weight_shape, config.params_dtype, device, info)
        self.bias = None
        if config.add_bias_linear:
            self.bias = make_parameter(bias_shape, config.params_dtype, device, info)
        self.expert_bias = None
        if config.moe_router_enable_expert_bias:
            bias_info = ParamInfo(Constant(0.0), trained=False)
            self.expert_bias = make_parameter(bias_shape, torch.float32, device, bias_info)
        self.loss_scale: float | Tensor = 1.0
        self.per_token_loss = False
        # Sums over the micro-batches of the step, on the device.
        self.recorded: dict[str, Tensor] = {}
        self._global_counts: Tensor | None = None
        self._num_microbatches = 0

    def start_step(self, loss_scale: float | Tensor, per_token_loss: bool) -> None:
        """Prepare for the micro-batches of a step.

        `loss_scale` is the gradient of an auxiliary loss. `per_token_loss`: the model's loss is a
        sum over tokens, so auxiliary losses are multiplied by the number of tokens.
        """
        self.loss_scale = loss_scale
        self.per_token_loss = per_token_loss
        self.recorded = {}
        self._global_counts = None
        self._num_microbatches = 0

    def forward(self, tokens: Tensor, batch: int) -> Routing:
        """Route `tokens` `[s * b, h]`, in the order of `[s, b]`; `batch` is b."""
        dtype = self.dtype or tokens.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        logits = F.linear(tokens.to(dtype), self.weight.to(dtype), bias)  # [t, experts]
        if self.config.moe_router_force_load_balancing:
            # Random values, with the gradients of the logits.
            logits = logits + (torch.randn_like(logits) - logits.detach())
        if self.config.by_sinkhorn:
            experts, probs = choose_by_sinkhorn(logits, self.config, self.training)
        else:
            experts, probs = choose(logits, self.config, self.expert_bias)
        kept = None
        if self.config.moe_expert_capacity_factor is not None:
            kept = self._apply_capacity(experts, probs, self.config.moe_expert_capacity_factor)
        if self.training and torch.is_grad_enabled():
            probs = self._attach_losses(logits, experts, probs, kept, batch)
        return Routing(experts, probs, kept)

    def _apply_capacity(self, experts: Tensor, probs: Tensor, factor: float) -> Tensor:
        """Return which choices are within the capacity of their experts, `[t, k]`."""
        num_tokens, topk = experts.shape
        capacity = math.ceil(num_tokens * topk / self.num_experts * factor)
        if capacity >= num_tokens:
            return torch.ones_like(experts, dtype=torch.bool)
        by_position = self.config.moe_token_drop_policy == "position"
        priorities = torch.ones_like(probs) if by_position else probs.detach()
        by_expert = priorities.new_zeros(num_tokens, self.num_experts)  # [t, experts]
        by_expert.scatter_(1, experts, priorities)
        best = torch.topk(by_expert, capacity, dim=0, sorted=False).indices  # [capacity, experts]
        is_within = torch.zeros_like(by_expert, dtype=torch.bool).scatter_(0, best, True)
        return is_within.gather(1, experts)

    def _attach_losses(
        self, logits: Tensor, experts: Tensor, probs: Tensor, kept: Tensor | None, batch: int
    ) -> Tensor:
        """Return `probs` with the auxiliary losses attached."""
        config = self.config
        losses: list[Tensor] = []
        names: list[str] = []
        coefficients: list[float] = []
        if config.load_balancing:
            scores = compute_loss_scores(logits, config)
            choices = torch.topk(scores, config.moe_router_topk, dim=1).indices
            counts = _count_choices(choices, self.num_experts, batch)
        for kind, coefficient in config.load_balancing.items():
            loss = self._compute_balancing_loss(kind, scores, counts, batch)
            losses.append(coefficient * loss)
            names.append(LOSS_NAMES[kind])
            coefficients.append(coefficient)
        if config.moe_z_loss_coeff:
            log_sums = torch.logsumexp(logits.float(), dim=-1)  # [t]
            z_loss = log_sums.square().mean() / self.axes.token_ranks
            losses.append(config.moe_z_loss_coeff * z_loss)
            names.append(Z_LOSS)
            coefficients.append(config.moe_z_loss_coeff)

        # Number of tokens per expert; dropped choices count for an additional expert at the end.
        used = experts if kept is None else experts.masked_fill(~kept, self.num_experts)
        used = used.view(-1)
        loads = used.new_zeros(self.num_experts + 1).scatter_add_(0, used, torch.ones_like(used))
        scale: float | Tensor = self.loss_scale
        if self.per_token_loss:
            num_tokens = len(logits) * self.axes.token_ranks  # of the micro-batch, in any layout
            scale = scale * num_tokens
        report = _LossReport(self, tuple(names), tuple(coefficients), scale)
        return _AttachLosses.apply(probs, report, loads[: self.num_experts], *losses)

    def _compute_balancing_loss(
        self, kind: str, scores: Tensor, counts: Tensor, batch: int
    ) -> Tensor:
        """Return a load balancing loss without its coefficient.

        `scores` are `[t, experts]`; `counts` `[b, experts]` are those of top-k without groups, bias
        or capacity.
        """
        num_tokens = len(scores) * self.axes.token_ranks  # of the micro-batch
        if kind == "seq_aux_loss":
            counts = _sum_over_axes(counts, *self.axes.tokens)
            num_tokens = num_tokens // batch
            sums = scores.view(-1, batch, self.num_experts).sum(0)  # [b, experts]
            products = (sums * counts).sum() / batch
        elif kind == "global_aux_loss":
            total = _sum_over_axes(counts.sum(0), *self.axes.everyone)
            # The mean over the micro-batches of all replicas, and of the step so far.
            total = total * (self.axes.token_ranks / self.axes.all_ranks)
            products = (scores.sum(0) * self._compute_mean_over_microbatches(total)).sum()
        else:
            total = _sum_over_axes(counts.sum(0), *self.axes.tokens)
            products = (scores.sum(0) * total).sum()
        return products * (self.num_experts / (self.config.moe_router_topk * num_tokens**2))

    def _compute_mean_over_microbatches(self, counts: Tensor) -> Tensor:
        """Return the mean of the `counts` of this step so far."""
        if self._global_counts is not None:
            counts = self._global_counts + counts
        self._global_counts = counts
        self._num_microbatches += 1
        return counts / self._num_microbatches

    def record(self, name: str, value: Tensor) -> None:
        """Add `value` to the sum of `name` over the micro-batches of this step."""
        if name in self.recorded:
            value = self.recorded[name] + value
        self.recorded[name] = value


def choose(
    logits: Tensor, config: TransformerConfig, expert_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the k experts of each row of `logits` `[t, experts]` and their weights, both
    `[t, k]`.
    """
    if config.moe_router_score_function == "softmax":
        experts, probs = _choose_by_softmax(logits, config)
    else:
        experts, probs = _choose_by_sigmoid(logits, config, expert_bias)
    if config.moe_router_topk_scaling_factor:
        probs = probs * config.moe_router_topk_scaling_factor
    return experts, probs


def _choose_by_softmax(logits: Tensor, config: TransformerConfig) -> tuple[Tensor, Tensor]:
    scores = logits
    if config.moe_router_pre_softmax:
        scores = torch.softmax(logits, dim=-1, dtype=torch.float32).to(logits.dtype)
    candidates = _mask_other_groups(scores, config)
    experts = torch.topk(candidates, config.moe_router_topk, dim=1).indices
    probs = scores.gather(1, experts)
    if not config.moe_router_pre_softmax:
        probs = torch.softmax(probs, dim=-1, dtype=torch.float32).to(logits.dtype)
    return experts, probs


def _choose_by_sigmoid(
    logits: Tensor, config: TransformerConfig, expert_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    topk = config.moe_router_topk
    scores = torch.sigmoid(logits.float()).to(logits.dtype)
    # The bias affects the selection but not the weights.
    biased = scores if expert_bias is None else scores + expert_bias
    experts = torch.topk(_mask_other_groups(biased, config), topk, dim=1).indices
    probs = scores.gather(1, experts)
    if topk > 1:
        probs = probs / (probs.sum(dim=-1, keepdim=True) + 1e-20)
    return experts, probs


def choose_by_sinkhorn(
    logits: Tensor, config: TransformerConfig, training: bool
) -> tuple[Tensor, Tensor]:
    """Return experts and weights as `choose`, balanced by Sinkhorn's algorithm in training.

    Tokens of this rank are balanced over the experts; the weights are the plain scores.
    """
    scores = _compute_sinkhorn_scores(logits, config)
    candidates = run_sinkhorn(logits.detach().float()) if training else scores
    experts = torch.topk(candidates, config.moe_router_topk, dim=1).indices
    return experts, scores.gather(1, experts)


def _compute_sinkhorn_scores(logits: Tensor, config: TransformerConfig) -> Tensor:
    if config.moe_router_topk == 1:
        # A softmax over a single expert would have no gradient.
        return torch.sigmoid(logits)
    return torch.softmax(logits, -1, dtype=torch.float32).to(logits.dtype)


def run_sinkhorn(logits: Tensor, tolerance: float = 1e-4) -> Tensor:
    """Scale rows and columns of exp(logits) `[t, experts]` to equal sums (Sinkhorn 1964).

    All rows, and all columns, then have an even share of the total sum 1. Each iteration waits for
    the device.
    """
    values = logits.exp()
    tokens, experts = values.shape
    tiny = 1e-8
    by_expert = values.new_ones(experts)
    change = torch.inf
    while change > tolerance:
        by_token = 1 / tokens / ((by_expert * values).sum(1) + tiny)
        previous = by_expert
        by_expert = 1 / experts / ((by_token.unsqueeze(1) * values).sum(0) + tiny)
        change = (previous - by_expert).abs().mean().item()
    return by_expert * values * by_token.unsqueeze(1)


def _mask_other_groups(scores: Tensor, config: TransformerConfig) -> Tensor:
    """Return `scores` with -inf outside of the best groups of experts.

    Groups are ranked by the sum of their best scores.
    """
    groups = config.moe_router_num_groups
    group_topk = config.moe_router_group_topk
    if not groups or not group_topk:
        return scores
    by_group = scores.view(len(scores), groups, -1)  # [t, groups, experts per group]
    group_scores = by_group.topk(config.group_score_topk, dim=-1).values.sum(dim=-1)
    best = group_scores.topk(group_topk, dim=-1, sorted=False).indices
    is_allowed = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, best, True)
    return by_group.masked_fill(~is_allowed.unsqueeze(-1), float("-inf")).view_as(scores)


def compute_loss_scores(logits: Tensor, config: TransformerConfig) -> Tensor:
    """Return the probabilities of all experts for load balancing losses, `[t, experts]` fp32."""
    if config.moe_router_score_function == "softmax":
        return torch.softmax(logits, dim=-1, dtype=torch.float32)
    scores = torch.sigmoid(logits.float())
    return scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)


def _count_choices(experts: Tensor, num_experts: int, batch: int) -> Tensor:
    """Count the choices of each expert per sequence: `[s * b, k]` -> `[b, experts]` fp32."""
    by_position = experts.view(-1, batch, experts.shape[1])  # [s, b, k]
    by_sequence = by_position.transpose(0, 1).reshape(batch, -1)  # [b, s * k]
    counts = by_sequence.new_zeros(batch, num_experts)
    counts.scatter_add_(1, by_sequence, torch.ones_like(by_sequence))
    return counts.float()


def _sum_over_axes(counts: Tensor, *axes: Axis) -> Tensor:
    """Return the sum of `counts` over the ranks of all axes. Collective."""
    counts = counts.clone()
    for axis in axes:
        if axis.size > 1:
            dist.all_reduce(counts, group=axis.group)
    return counts


@dataclass(frozen=True)
class _LossReport:
    """Destination of the values of attached losses, and their gradient."""

    router: TopKRouter
    names: tuple[str, ...]
    coefficients: tuple[float, ...]
    scale: float | Tensor


class _AttachLosses(torch.autograd.Function):
    """Identity on `probs`; its backward pass records each loss and gives it the gradient
    `scale`.
    """

    @staticmethod
    def forward(
        ctx: Any, probs: Tensor, report: _LossReport, loads: Tensor, *losses: Tensor
    ) -> Tensor:
        ctx.report = report
        ctx.save_for_backward(loads, *losses)
        return probs.view_as(probs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        loads, *losses = ctx.saved_tensors
        report: _LossReport = ctx.report
        report.router.record(_TOKENS_PER_EXPERT, loads)
        loss_grads = []
        for name, coefficient, loss in zip(report.names, report.coefficients, losses, strict=True):
            report.router.record(name, loss / coefficient)
            loss_grads.append(torch.ones_like(loss) * report.scale)
        return grad, None, None, *loss_grads


def find_routers(chunks: Iterable[nn.Module]) -> list[TopKRouter]:
    """Return the routers of all layers with experts in these chunks, in order."""
    routers = []
    for chunk in chunks:
        routers += [module for module in chunk.modules() if isinstance(module, TopKRouter)]
    return routers


@torch.no_grad()
def finish_step(routers: Sequence[TopKRouter]) -> None:
    """Sum the loads of a step over all ranks and update the expert biases. Collective.

    Called with the routers of this rank after the last backward pass of the step.
    """
    if not routers:
        return
    loads = torch.stack([router.recorded[_TOKENS_PER_EXPERT] for router in routers])
    for axis in routers[0].axes.everyone:
        if axis.size > 1:
            dist.all_reduce(loads, group=axis.group)
    for router, load in zip(routers, loads.float(), strict=True):
        router.recorded[_TOKENS_PER_EXPERT] = load
        if router.expert_bias is not None:
            direction = torch.sign(load.mean() - load)
            router.expert_bias.add_(direction, alpha=router.config.moe_router_bias_update_rate)


def get_metric_names(config: TransformerConfig) -> list[str]:
    """Return the names of the rows of `compute_metrics`."""
    names = [LOSS_NAMES[kind] for kind in config.load_balancing]
    if config.moe_z_loss_coeff:
        names.append(Z_LOSS)
    return [*names, LOAD]


def compute_metrics(
    config: TransformerConfig,
    routers: Sequence[TopKRouter],
    num_microbatches: int,
    device: torch.device,
) -> Tensor:
    """Return this rank's share of the metrics of each layer, `[metrics, layers]` fp64.

    The metrics are the sum over the world divided by the number of data-parallel ranks. Called with
    the routers of this rank after `finish_step`.
    """
    names = get_metric_names(config)
    values = torch.zeros(len(names), config.num_layers, dtype=torch.float64, device=device)
    for router in routers:
        for row, name in enumerate(names):
            if name == LOAD:
                load = router.recorded[_TOKENS_PER_EXPERT]
                ratio = load.max() / load.mean().clamp(min=1e-9)
                values[row, router.layer_number] = ratio / router.axes.token_ranks
            else:
                values[row, router.layer_number] = router.recorded[name] / num_microbatches
    return values
