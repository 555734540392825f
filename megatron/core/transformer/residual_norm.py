"""A residual sum and its norm in one kernel for each direction, imported where kernels exist."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.core.fused_kernels import find_kernel


def add_and_normalize(
    hidden: Tensor,
    branch: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    epsilon: float,
    rms: bool,
    zero_centered: bool,
) -> tuple[Tensor, Tensor]:
    """Return `hidden + branch` and its norm. A kernel "residual_norm" must support `hidden`."""
    total, normed = _ResidualNorm.apply(hidden, branch, weight, bias, epsilon, rms, zero_centered)
    return total, normed


class _ResidualNorm(torch.autograd.Function):
    """`t = x + branch` and `norm(t)`; keeps t and the mean and scale of each row."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        epsilon: float,
        rms: bool,
        zero_centered: bool,
    ) -> tuple[Tensor, Tensor]:
        kernel = find_kernel("residual_norm", x)
        assert kernel is not None
        total, normed, mean, scale = kernel(x, branch, weight, bias, epsilon, rms, zero_centered)
        if branch is None:
            total = x
        ctx.save_for_backward(total, weight, mean, scale)
        ctx.has_branch = branch is not None
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.zero_centered = zero_centered
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, dtotal: Tensor | None, dy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        total, weight, mean, scale = ctx.saved_tensors
        if dy is None:
            return dtotal, dtotal if ctx.has_branch else None, *(None,) * 5
        kernel = find_kernel("residual_norm_backward", total)
        assert kernel is not None
        has_bias = ctx.bias_dtype is not None
        dx, dparams = kernel(dy, dtotal, total, weight, mean, scale, has_bias, ctx.zero_centered)
        dweight = None
        if weight is not None:
            dweight = dparams[0].to(weight.dtype)
        dbias = None
        if has_bias:
            dbias = dparams[-1].to(ctx.bias_dtype)
        return dx, dx if ctx.has_branch else None, dweight, dbias, None, None, None
