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
from megatron.core.tensor_parallel.mappings import all_gather_sequence
from megatron.core.transformer.config_parts import LOAD, LOSS_NAMES, Z_LOSS, get_metric_names
from megatron.core.transformer.placement import compute_local_positions
from megatron.core.transformer.transformer_config import TransformerConfig

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
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

        # Parameters
        info = ParamInfo(Normal(config.hidden_init_std), partial_grad=partial_grad)
        weight_shape = (self.num_experts, config.hidden_size)
        bias_shape = (self.num_experts,)
        self.weight = make_parameter(weight_shape, config.params_dtype, device, info)
        self.bias = None
        if config.add_bias_linear:
            self.bias = make_parameter(bias_shape, config.params_dtype, device, info)
        self.expert_bias = None
        if config.moe_router_enable_expert_bias:
            # Updated by `finish_step` from the loads of the experts instead of gradients. In fp32,
            # because an update is far smaller than the rounding errors of bf16.
            bias_info = ParamInfo(Constant(0.0), trained=False)
            self.expert_bias = make_parameter(bias_shape, torch.float32, device, bias_info)

        # State of a step, which `start_step` resets
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
        config = self.config
        logits = self._compute_logits(tokens)  # [t, experts]
        if config.by_sinkhorn:
            experts, probs = choose_by_sinkhorn(logits, config, self.axes.tokens, self.training)
        else:
            experts, probs = choose(logits, config, self.expert_bias)
        kept = None
        if config.moe_expert_capacity_factor is not None:
            kept = self._apply_capacity(experts, probs, config.moe_expert_capacity_factor, batch)
        if self.training and torch.is_grad_enabled():
            losses, coefficients = self._compute_losses(logits, batch)
            loads = self._count_loads(experts, kept)
            probs = self.attach_losses(probs, losses, coefficients, loads)
        return Routing(experts, probs, kept)

    def _compute_logits(self, tokens: Tensor) -> Tensor:
        """Return the scores of all experts, not normalized, `[t, experts]`.

        Small differences between scores decide between experts, so the dtype may be wider than that
        of the model (--moe-router-dtype).
        """
        dtype = self.dtype or tokens.dtype
        bias: Tensor | None = self.bias
        if bias is not None:
            bias = bias.to(dtype)
        logits = F.linear(tokens.to(dtype), self.weight.to(dtype), bias)
        if self.config.moe_router_force_load_balancing:
            # Random values, with the gradients of the logits.
            logits = logits + (torch.randn_like(logits) - logits.detach())
        return logits

    def _apply_capacity(self, experts: Tensor, probs: Tensor, factor: float, batch: int) -> Tensor:
        """Return which choices are within the capacity of their experts, `[t, k]`.

        An expert has the same capacity for each micro-batch, whichever ranks share its tokens.
        """
        num_tokens, topk = experts.shape
        priorities = probs.detach().float()  # [t, k]
        if self.config.moe_token_drop_policy == "position":
            # All choices of a token have the same priority, and earlier tokens a higher one.
            order = compute_order(num_tokens // batch, batch, self.axes.tokens)
            num_all = num_tokens * self.axes.token_ranks
            by_token = (num_all - order).to(priorities)  # [t]
            priorities = by_token.unsqueeze(1).expand_as(priorities)
        by_expert = priorities.new_zeros(num_tokens, self.num_experts)  # [t, experts]
        by_expert.scatter_(1, experts, priorities)
        of_microbatch, local_rows = gather_tokens(by_expert, self.axes.tokens)

        mean_load = len(of_microbatch) * topk / self.num_experts
        capacity = math.ceil(mean_load * factor)
        if capacity >= len(of_microbatch):
            return torch.ones_like(experts, dtype=torch.bool)

        # Each expert keeps the tokens with the highest priorities.
        best = torch.topk(of_microbatch, capacity, dim=0, sorted=False).indices
        is_within = torch.zeros_like(of_microbatch, dtype=torch.bool)
        is_within.scatter_(0, best, True)
        return is_within[local_rows].gather(1, experts)

    def attach_losses(
        self, probs: Tensor, losses: list[Tensor], coefficients: dict[str, float], loads: Tensor
    ) -> Tensor:
        """Return `probs` with the auxiliary losses attached; not traced with --compile."""
        scale: float | Tensor = self.loss_scale
        if self.per_token_loss:
            num_tokens = len(probs) * self.axes.token_ranks  # of the micro-batch, in any layout
            scale = scale * num_tokens
        report = _LossReport(self, coefficients, scale)
        return _AttachLosses.apply(probs, report, loads, *losses)

    def _compute_losses(self, logits: Tensor, batch: int) -> tuple[list[Tensor], dict[str, float]]:
        """Return the auxiliary losses, multiplied by their coefficients, and the coefficients.

        The coefficients are in the order of the losses, by the names of the losses in logs.
        """
        config = self.config
        losses: list[Tensor] = []
        coefficients: dict[str, float] = {}

        # Load balancing. All kinds have the same probabilities, and the same choices, which are
        # top-k without groups, bias or capacity.
        if config.load_balancing:
            scores = compute_loss_scores(logits, config)  # [t, experts]
            choices = torch.topk(scores, config.moe_router_topk, dim=1).indices  # [t, k]
            counts = _count_choices(choices, self.num_experts, batch)  # [b, experts]
        for loss_type, coefficient in config.load_balancing.items():
            loss = self._compute_balancing_loss(loss_type, scores, counts, batch)
            losses.append(coefficient * loss)
            coefficients[LOSS_NAMES[loss_type]] = coefficient

        # z-loss
        if config.moe_z_loss_coeff:
            log_sums = torch.logsumexp(logits.float(), dim=-1)  # [t]
            # Each rank adds its part of the mean over the tokens of the micro-batch.
            z_loss = log_sums.square().mean() / self.axes.token_ranks
            losses.append(config.moe_z_loss_coeff * z_loss)
            coefficients[Z_LOSS] = config.moe_z_loss_coeff
        return losses, coefficients

    def _count_loads(self, experts: Tensor, kept: Tensor | None) -> Tensor:
        """Return the number of tokens that each expert processes, `[experts]`."""
        if kept is not None:
            # Dropped choices count for an additional expert at the end.
            experts = experts.masked_fill(~kept, self.num_experts)
        experts = experts.view(-1)  # [t * k]
        loads = experts.new_zeros(self.num_experts + 1)
        loads.scatter_add_(0, experts, torch.ones_like(experts))
        return loads[: self.num_experts]

    def _compute_balancing_loss(
        self, loss_type: str, scores: Tensor, counts: Tensor, batch: int
    ) -> Tensor:
        """Return a load balancing loss without its coefficient.

        The loss is `experts / (k * t^2) * sum(scores * counts)`, with the sum of the scores and the
        number of choices of each expert over t tokens. `scores` are `[t, experts]` and `counts`
        `[b, experts]`, of this rank. Only the scores have gradients: every rank adds the product of
        its own scores and the counts of all ranks.
        """
        axes = self.axes
        num_tokens = len(scores) * axes.token_ranks  # of the micro-batch
        if loss_type == "seq_aux_loss":
            # The mean of the losses of the sequences.
            total = _sum_over_axes(counts, *axes.tokens)  # [b, experts]
            num_tokens = num_tokens // batch
            by_sequence = scores.view(-1, batch, self.num_experts)  # [s, b, experts]
            score_sums = by_sequence.sum(0)  # [b, experts]
            products = (score_sums * total).sum() / batch
        elif loss_type == "global_aux_loss":
            total = _sum_over_axes(counts.sum(0), *axes.everyone)  # [experts]
            # The mean over the micro-batches of all replicas, and of the step so far.
            total = total * (axes.token_ranks / axes.all_ranks)
            mean_counts = self._compute_mean_over_microbatches(total)
            products = (scores.sum(0) * mean_counts).sum()
        else:
            total = _sum_over_axes(counts.sum(0), *axes.tokens)  # [experts]
            products = (scores.sum(0) * total).sum()
        factor = self.num_experts / (self.config.moe_router_topk * num_tokens**2)
        return products * factor

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
    """Return the k experts of each token and their weights, both `[t, k]`.

    `logits` are `[t, experts]`.
    """
    if config.moe_router_score_function == "softmax":
        experts, probs = _choose_by_softmax(logits, config, expert_bias)
    else:
        experts, probs = _choose_by_sigmoid(logits, config, expert_bias)
    if config.moe_router_topk_scaling_factor:
        probs = probs * config.moe_router_topk_scaling_factor
    return experts, probs


def _choose_by_softmax(
    logits: Tensor, config: TransformerConfig, expert_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Choose experts by logit, with a softmax over all experts or over the chosen ones.

    The softmax over all experts (--moe-router-pre-softmax) leaves weights with a sum below 1. An
    expert bias is added to that softmax, for the selection only (ERNIE 4.5).
    """
    # Select the experts.
    scores = logits
    if config.moe_router_pre_softmax or expert_bias is not None:
        scores = _softmax_in_fp32(logits)
    experts = _choose_highest(scores, config, expert_bias)

    # Compute their weights.
    if config.moe_router_pre_softmax:
        return experts, scores.gather(1, experts)
    chosen_logits = logits.gather(1, experts)
    return experts, _softmax_in_fp32(chosen_logits)  # [t, k]


def _choose_highest(
    scores: Tensor, config: TransformerConfig, expert_bias: Tensor | None
) -> Tensor:
    """Return the experts with the highest scores of each token, `[t, k]`.

    The bias affects the selection but not the weights.
    """
    candidates = scores  # [t, experts]
    if expert_bias is not None:
        candidates = scores + expert_bias
    candidates = _mask_other_groups(candidates, config)
    return torch.topk(candidates, config.moe_router_topk, dim=1).indices


def _softmax_in_fp32(logits: Tensor) -> Tensor:
    """Return the softmax over the last dimension, computed in fp32, in the dtype of `logits`."""
    probs = torch.softmax(logits, dim=-1, dtype=torch.float32)
    return probs.to(logits.dtype)


def _choose_by_sigmoid(
    logits: Tensor, config: TransformerConfig, expert_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Choose experts by the sigmoid of the logit plus the expert bias (DeepSeek-V3)."""
    scores = torch.sigmoid(logits.float()).to(logits.dtype)  # [t, experts]
    experts = _choose_highest(scores, config, expert_bias)
    probs = scores.gather(1, experts)  # [t, k]
    if config.normalizes_sigmoid:  # sigmoids do not add up to 1
        total = probs.sum(dim=-1, keepdim=True)  # [t, 1]
        probs = probs / (total + 1e-20)
    return experts, probs


def gather_tokens(rows: Tensor, axes: Sequence[Axis]) -> tuple[Tensor, slice]:
    """Return the `rows` `[t, ...]` of all tokens of a micro-batch, and which are of this rank.

    Collective over `axes`, which share the tokens.
    """
    num_rows = len(rows)
    start = 0
    for axis in axes:
        start += axis.rank * len(rows)
        rows = all_gather_sequence(rows, axis)
    return rows, slice(start, start + num_rows)


def compute_order(length: int, batch: int, axes: Sequence[Axis]) -> Tensor:
    """Return the index of each token of this rank in its micro-batch, `[length * batch]`.

    `length` is that of this rank's sequences. `axes` are tensor parallelism, which splits the
    sequences under sequence parallelism, and context parallelism.
    """
    if not axes:
        return torch.arange(length * batch)
    tp, cp = axes
    positions = compute_local_positions(length * tp.size * cp.size, cp.rank, cp.size)
    positions = positions[tp.rank * length : (tp.rank + 1) * length]
    return (positions.unsqueeze(1) * batch + torch.arange(batch)).flatten()


def choose_by_sinkhorn(
    logits: Tensor, config: TransformerConfig, axes: Sequence[Axis], training: bool
) -> tuple[Tensor, Tensor]:
    """Return experts and weights as `choose`, balanced by Sinkhorn's algorithm in training.

    The tokens of a micro-batch, which `axes` share, are balanced over the experts; the weights are
    the plain scores.
    """
    scores = _compute_sinkhorn_scores(logits, config)
    candidates = scores
    if training:
        of_microbatch, local_rows = gather_tokens(logits.detach().float(), axes)
        candidates = run_sinkhorn(of_microbatch)[local_rows]
    experts = torch.topk(candidates, config.moe_router_topk, dim=1).indices  # [t, k]
    probs = scores.gather(1, experts)  # [t, k]
    return experts, probs


def _compute_sinkhorn_scores(logits: Tensor, config: TransformerConfig) -> Tensor:
    """Return the scores `[t, experts]` that are the weights of the experts."""
    if config.moe_router_topk == 1:
        # As in Megatron-LM: the weight of a single expert does not depend on the others.
        return torch.sigmoid(logits)
    return _softmax_in_fp32(logits)


def run_sinkhorn(logits: Tensor, tolerance: float = 1e-4) -> Tensor:
    """Scale rows and columns of exp(logits) `[t, experts]` to equal sums (Sinkhorn 1964).

    All rows, and all columns, then have an even share of the total sum 1. Each iteration waits for
    the device.
    """
    values = logits.exp()
    tokens, experts = values.shape
    tiny = 1e-8
    # The factor of each column, and the factor of each row
    by_expert = values.new_ones(experts)
    by_token = values.new_ones(tokens)
    change = torch.inf
    while change > tolerance:
        previous = by_expert
        row_sums = (by_expert * values).sum(1)  # [t]
        by_token = 1 / tokens / (row_sums + tiny)
        column_sums = (by_token.unsqueeze(1) * values).sum(0)  # [experts]
        by_expert = 1 / experts / (column_sums + tiny)
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

    # Choose the groups.
    by_group = scores.view(len(scores), groups, -1)  # [t, groups, experts per group]
    best_scores = by_group.topk(config.group_score_topk, dim=-1).values
    group_scores = best_scores.sum(dim=-1)  # [t, groups]
    best_groups = group_scores.topk(group_topk, dim=-1, sorted=False).indices  # [t, chosen groups]

    # Mask the others.
    is_allowed = torch.zeros_like(group_scores, dtype=torch.bool)
    is_allowed.scatter_(1, best_groups, True)
    is_masked = ~is_allowed.unsqueeze(-1)  # [t, groups, 1]
    masked = by_group.masked_fill(is_masked, float("-inf"))
    return masked.view_as(scores)


def compute_loss_scores(logits: Tensor, config: TransformerConfig) -> Tensor:
    """Return the probabilities of all experts for load balancing losses, `[t, experts]` fp32."""
    if config.moe_router_score_function == "softmax":
        return torch.softmax(logits, dim=-1, dtype=torch.float32)
    scores = torch.sigmoid(logits.float())
    # Normalized, because sigmoids do not add up to 1.
    total = scores.sum(dim=-1, keepdim=True)
    return scores / (total + 1e-20)


def _count_choices(experts: Tensor, num_experts: int, batch: int) -> Tensor:
    """Count the choices of each expert per sequence: `[s * b, k]` -> `[b, experts]` fp32."""
    topk = experts.shape[1]
    by_position = experts.view(-1, batch, topk)  # [s, b, k]
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
    coefficients: dict[str, float]
    """By name in logs, in the order of the losses."""
    scale: float | Tensor
    """The gradient of each loss."""


class _AttachLosses(torch.autograd.Function):
    """Identity on `probs`, whose backward pass records each loss and sets its gradient."""

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
        router = report.router
        router.record(_TOKENS_PER_EXPERT, loads)
        loss_grads = []
        for (name, coefficient), loss in zip(report.coefficients.items(), losses, strict=True):
            # Logs report the losses without their coefficients.
            router.record(name, loss / coefficient)
            loss_grad = torch.ones_like(loss) * report.scale
            loss_grads.append(loss_grad)
        return grad, None, None, *loss_grads


def find_routers(chunks: Iterable[nn.Module]) -> list[TopKRouter]:
    """Return the routers of all layers with experts in these chunks, in order."""
    routers = []
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                routers.append(module)
    return routers


@torch.no_grad()
def finish_step(routers: Sequence[TopKRouter]) -> None:
    """Sum the loads of a step over all ranks and update the expert biases. Collective.

    Called with the routers of this rank after the last backward pass of the step.
    """
    if not routers:
        return
    # One reduction for all layers: [layers, experts].
    recorded = [router.recorded[_TOKENS_PER_EXPERT] for router in routers]
    everyone = routers[0].axes.everyone
    loads = _sum_over_axes(torch.stack(recorded), *everyone)

    for router, load in zip(routers, loads.float(), strict=True):
        router.recorded[_TOKENS_PER_EXPERT] = load
        if router.expert_bias is not None:
            # Experts below the mean load become more attractive, by a fixed amount per step.
            direction = torch.sign(load.mean() - load)
            router.expert_bias.add_(direction, alpha=router.config.moe_router_bias_update_rate)


def compute_metrics(
    config: TransformerConfig,
    routers: Sequence[TopKRouter],
    num_microbatches: int,
    device: torch.device,
) -> Tensor:
    """Return this rank's share of the metrics of each layer, `[metrics, layers]` fp64.

    The rows are those of `get_metric_names`. The metrics are the sum over the world divided by the
    number of data-parallel ranks. Called with the routers of this rank after `finish_step`.
    """
    names = get_metric_names(config)
    num_layers = config.num_layers + config.num_mtp_layers
    values = torch.zeros(len(names), num_layers, dtype=torch.float64, device=device)
    for router in routers:
        for row, name in enumerate(names):
            if name == LOAD:
                load = router.recorded[_TOKENS_PER_EXPERT]
                ratio = load.max() / load.mean().clamp(min=1e-9)
                values[row, router.layer_number] = ratio / router.axes.token_ranks
            else:
                values[row, router.layer_number] = router.recorded[name] / num_microbatches
    return values


def start_step(chunks: Iterable[nn.Module], loss_scale: float | Tensor, per_token: bool) -> None:
    """Prepare the routers of these chunks for the micro-batches of a step."""
    for router in find_routers(chunks):
        router.start_step(loss_scale, per_token)


def measure_step(
    chunks: Iterable[nn.Module],
    config: TransformerConfig,
    num_microbatches: int,
    device: torch.device,
) -> Tensor:
    """Finish the step of the routers of these chunks, and return its metrics. Collective."""
    routers = find_routers(chunks)
    finish_step(routers)
    return compute_metrics(config, routers, num_microbatches, device)
