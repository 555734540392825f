"""AdEMAMix (--optimizer ademamix)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.optimizer.flat_shard import FlatShard
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.update_rules import AdamW, OptimizerGroup, UpdateRule


def compute_slow_weight(step: Tensor, alpha: float, warmup: int | None) -> Tensor:
    """Return AdEMAMix's weight of the slow mean at `step`, which rises linearly to `alpha`."""
    if not warmup:
        return torch.full_like(step, alpha)
    return (step * (alpha / warmup)).clamp(max=alpha)


def compute_slow_beta(
    step: Tensor, beta_start: float, beta_end: float, warmup: int | None
) -> Tensor:
    """Return AdEMAMix's decay of the slow mean at `step`.

    Its half-life grows linearly from that of `beta_start` to that of `beta_end`.
    """
    if not warmup:
        return torch.full_like(step, beta_end)
    # The half-life of a decay beta is proportional to 1 / log(beta).
    done = (step / warmup).clamp(max=1.0)
    log_start = math.log(beta_start)
    log_end = math.log(beta_end)
    log_beta = log_start * log_end / ((1.0 - done) * log_end + done * log_start)
    return torch.exp(log_beta).clamp(max=beta_end)


class AdEMAMix(UpdateRule):
    """Adam with a second, much slower running mean of the gradient (Pagliardini et al. 2024).

    `exp_avg` is the fast mean, `exp_avg_slow` the slow one. Weight decay is decoupled.
    """

    STATE_SETS = (("exp_avg", "exp_avg_slow", "exp_avg_sq"),)
    MUP_POWERS = AdamW.MUP_POWERS

    @classmethod
    def from_config(
        cls, config: OptimizerConfig, groups: Sequence[OptimizerGroup], shards: Sequence[FlatShard]
    ) -> UpdateRule:
        hyperparameters = {
            "betas": (config.adam_beta1, config.adam_beta2, config.ademamix_beta3),
            "eps": config.adam_eps,
            "alpha": config.ademamix_alpha,
            "alpha_warmup": config.ademamix_alpha_warmup,
            "beta3_warmup": config.ademamix_beta3_warmup,
        }
        return cls(groups, hyperparameters)

    def update_group(self, group: OptimizerGroup) -> None:
        keep = 1.0 - self.found_inf  # 0 skips the step without waiting for the device
        for param in group["params"]:
            self._update_param(param, group, keep)

    def _update_param(self, param: Tensor, group: OptimizerGroup, keep: Tensor) -> None:
        """Update a parameter and its state, without any effect if `keep` is 0."""
        beta1, beta2, beta3 = group["betas"]
        state = self.state[param]
        step = state["step"].add_(keep)
        step = step.clamp(min=1.0)  # a first step that is skipped must not divide by zero
        gradient = self.copy_gradient(param)

        # Running means
        # A rate of 0 leaves a mean unchanged.
        slow_rate = 1.0 - compute_slow_beta(step, beta1, beta3, group["beta3_warmup"])
        state["exp_avg"].lerp_(gradient, (1.0 - beta1) * keep)
        state["exp_avg_slow"].lerp_(gradient, slow_rate * keep)
        state["exp_avg_sq"].lerp_(gradient.square_(), (1.0 - beta2) * keep)

        # Update: (fast mean + alpha * slow mean) / root mean square
        slow_weight = compute_slow_weight(step, group["alpha"], group["alpha_warmup"])
        update = state["exp_avg"] / (1.0 - beta1**step)
        update.addcmul_(state["exp_avg_slow"], slow_weight)
        mean_square = state["exp_avg_sq"] / (1.0 - beta2**step)
        update /= mean_square.sqrt_().add_(group["eps"])
        update.add_(param, alpha=group["weight_decay"])
        param.sub_(update.mul_(group["lr"] * keep))
