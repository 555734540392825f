"""AdEMAMix: Adam with a second, much slower running mean of the gradient (Pagliardini et al. 2024)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def slow_weight(step: Tensor, alpha: float, warmup: int | None) -> Tensor:
    """Weight of the slow mean at `step`, which rises linearly to `alpha`."""
    return torch.full_like(step, alpha) if not warmup else (step * (alpha / warmup)).clamp(max=alpha)


def slow_beta(step: Tensor, beta_start: float, beta_end: float, warmup: int | None) -> Tensor:
    """Decay of the slow mean at `step`: its half-life grows linearly from that of `beta_start` to `beta_end`'s."""
    if not warmup:
        return torch.full_like(step, beta_end)
    done = (step / warmup).clamp(max=1.0)
    log_start, log_end = math.log(beta_start), math.log(beta_end)
    return torch.exp(log_start * log_end / ((1.0 - done) * log_end + done * log_start)).clamp(max=beta_end)


class AdEMAMix(torch.optim.Optimizer):
    """Over flat fp32 tensors, with decoupled weight decay.

    Like torch's fused optimizers it divides gradients by `grad_scale`, and changes nothing if `found_inf` is 1. State:
    `step`, `exp_avg` (fast mean), `exp_avg_slow`, `exp_avg_sq`.
    """

    grad_scale: Tensor
    found_inf: Tensor

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float, float],
        eps: float,
        alpha: float,
        beta3_warmup: int | None,
        alpha_warmup: int | None,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self._alpha = alpha
        self._beta3_warmup = beta3_warmup
        self._alpha_warmup = alpha_warmup

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        keep = 1.0 - self.found_inf
        for group in self.param_groups:
            for param in group["params"]:
                self._update(param, group, keep)

    def _update(self, param: Tensor, group: dict[str, Any], keep: Tensor) -> None:
        assert param.grad is not None
        beta1, beta2, beta3 = group["betas"]
        state = self.state[param]
        step = state["step"].add_(keep)
        now = step.clamp(min=1.0)  # a first step that is skipped must not divide by zero
        gradient = (param.grad / self.grad_scale).masked_fill_(self.found_inf.bool(), 0.0)
        slow = 1.0 - slow_beta(now, beta1, beta3, self._beta3_warmup)
        state["exp_avg"].lerp_(gradient, (1.0 - beta1) * keep)
        state["exp_avg_slow"].lerp_(gradient, slow * keep)
        state["exp_avg_sq"].lerp_(gradient.square_(), (1.0 - beta2) * keep)
        update = state["exp_avg"] / (1.0 - beta1**now)
        update.addcmul_(state["exp_avg_slow"], slow_weight(now, self._alpha, self._alpha_warmup))
        update /= (state["exp_avg_sq"] / (1.0 - beta2**now)).sqrt_().add_(group["eps"])
        update.add_(param, alpha=group["weight_decay"])
        param.sub_(update.mul_(group["lr"] * keep))
