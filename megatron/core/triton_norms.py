"""Triton kernels of the sum of a branch with the residual stream, and the norm of the sum.

As in `triton_kernels.py`, with a reference in plain PyTorch each.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.triton_kernels import load_float, make_operator

# Programs of the backward pass in Triton's interpreter
_NORM_PROGRAMS_ON_CPU = 3


@triton.jit
def _residual_norm_kernel(
    x,
    branch,
    weight,
    bias,
    total,
    y,
    means,
    scales,
    size,
    epsilon,
    weight_offset,
    IS_RMS: tl.constexpr,
    HAS_BRANCH: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row of `x`, `branch`, `total` and `y` [rows, size]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < size
    offset = row * size + column
    value = load_float(x + offset, mask)
    if HAS_BRANCH:
        value += load_float(branch + offset, mask)
        # The norm is that of the rounded sum.
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + offset, rounded, mask=mask)
        value = rounded.to(tl.float32)
    if not IS_RMS:
        mean = tl.sum(value, 0) / size
        value = tl.where(mask, value - mean, 0.0)
        tl.store(means + row, mean)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / size + epsilon)
    tl.store(scales + row, scale)
    result = value * scale
    if HAS_WEIGHT:
        w = load_float(weight + column, mask)
        result = result * (w + weight_offset)
    if HAS_BIAS:
        result += load_float(bias + column, mask)
    tl.store(y + offset, result, mask=mask)


@triton.jit
def _residual_norm_backward_kernel(
    dy,
    dtotal,
    total,
    weight,
    means,
    scales,
    dx,
    dweights,
    dbiases,
    rows,
    size,
    weight_offset,
    IS_RMS: tl.constexpr,
    HAS_DTOTAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Every n-th row, n being the number of programs, and their sums for weight and bias.

    `dweights` and `dbiases` are [programs, size].
    """
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < size
    dweight = tl.zeros((BLOCK,), tl.float32)
    dbias = tl.zeros((BLOCK,), tl.float32)
    if HAS_WEIGHT:
        w = load_float(weight + column, mask) + weight_offset
    for step in range(STEPS):
        row = program.to(tl.int64) + step * tl.num_programs(0)
        exists = row < rows
        row_mask = mask & exists
        offset = row * size + column
        value = load_float(total + offset, row_mask)
        grad = load_float(dy + offset, row_mask)
        scale = tl.load(scales + row, mask=exists, other=0.0)
        if not IS_RMS:
            value = value - tl.load(means + row, mask=exists, other=0.0)
        normalized = tl.where(row_mask, value * scale, 0.0)
        if HAS_BIAS:
            dbias += grad
        if HAS_WEIGHT:
            dweight += grad * normalized
            grad = grad * w
        result = grad - normalized * (tl.sum(grad * normalized, 0) / size)
        if not IS_RMS:
            result = result - tl.sum(grad, 0) / size
        result = result * scale
        if HAS_DTOTAL:
            result += load_float(dtotal + offset, row_mask)
        tl.store(dx + offset, result, mask=row_mask)
    if HAS_WEIGHT:
        tl.store(dweights + program * size + column, dweight, mask=mask)
    if HAS_BIAS:
        tl.store(dbiases + program * size + column, dbias, mask=mask)


def run_residual_norm(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    epsilon: float,
    rms: bool,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = x.contiguous()
    total, y, mean, scale = allocate_residual_norm(
        x, branch, weight, bias, epsilon, rms, zero_centered
    )
    if branch is not None:
        assert branch.shape == x.shape
        branch = branch.contiguous()
    if x.numel():
        size = x.shape[-1]
        _residual_norm_kernel[(scale.numel(),)](
            x,
            x if branch is None else branch,
            x if weight is None else weight,
            x if bias is None else bias,
            total,
            y,
            mean,
            scale,
            size,
            float(epsilon),
            1.0 if zero_centered else 0.0,
            IS_RMS=rms,
            HAS_BRANCH=branch is not None,
            HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None,
            BLOCK=triton.next_power_of_2(size),
            num_warps=_count_norm_warps(size),
        )
    return total, y, mean, scale


def run_residual_norm_backward(
    dy: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    scale: Tensor,
    has_bias: bool,
    zero_centered: bool,
) -> tuple[Tensor, Tensor]:
    total = total.contiguous()
    dy = dy.contiguous()
    if dtotal is not None:
        dtotal = dtotal.contiguous()
    size = total.shape[-1]
    num_rows = scale.numel()
    dx = torch.empty_like(total)
    num_params = (weight is not None) + has_bias
    if total.numel() == 0:
        return dx, scale.new_zeros(num_params, size)
    programs = min(num_rows, _count_norm_programs(total.device))
    sums = scale.new_empty(num_params, programs, size)
    _residual_norm_backward_kernel[(programs,)](
        dy,
        dy if dtotal is None else dtotal,
        total,
        dy if weight is None else weight,
        mean,
        scale,
        dx,
        sums,
        sums[-1] if has_bias else sums,
        num_rows,
        size,
        1.0 if zero_centered else 0.0,
        IS_RMS=mean.numel() == 0,
        HAS_DTOTAL=dtotal is not None,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=has_bias,
        STEPS=triton.cdiv(num_rows, programs),
        BLOCK=triton.next_power_of_2(size),
        num_warps=_count_norm_warps(size),
    )
    return dx, sums.sum(1)


def _count_norm_warps(size: int) -> int:
    """Return the warps of a program, a power of 2; each thread has 8 elements of a row or more."""
    return min(16, max(1, triton.next_power_of_2(size) // 256))


def _count_norm_programs(device: torch.device) -> int:
    """Return the programs of a backward pass, each with sums of its own for weight and bias."""
    if device.type == "cpu":
        return _NORM_PROGRAMS_ON_CPU
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count


def allocate_residual_norm(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    epsilon: float,
    rms: bool,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = x.new_empty(0) if branch is None else torch.empty_like(y)
    scale = x.new_empty(x.shape[:-1], dtype=torch.float32)
    mean = scale.new_empty(0) if rms else torch.empty_like(scale)
    return total, y, mean, scale


def allocate_residual_norm_gradients(
    dy: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    scale: Tensor,
    has_bias: bool,
    zero_centered: bool,
) -> tuple[Tensor, Tensor]:
    num_params = (weight is not None) + has_bias
    dx = torch.empty_like(total, memory_format=torch.contiguous_format)
    return dx, scale.new_empty(num_params, total.shape[-1])


def compute_residual_norm(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    epsilon: float,
    rms: bool,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = x.new_empty(0)
    if branch is not None:
        total = x + branch
        x = total
    value = x.float()
    mean = value.new_empty(0)
    if not rms:
        mean = value.mean(-1)
        value = value - mean.unsqueeze(-1)
    scale = torch.rsqrt(value.square().mean(-1) + epsilon)
    y = value * scale.unsqueeze(-1)
    if weight is not None:
        y = y * (weight.float() + float(zero_centered))
    if bias is not None:
        y = y + bias.float()
    return total, y.to(x.dtype), mean, scale


def compute_residual_norm_backward(
    dy: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    scale: Tensor,
    has_bias: bool,
    zero_centered: bool,
) -> tuple[Tensor, Tensor]:
    size = total.shape[-1]
    value = total.float()
    grad = dy.float()
    if mean.numel():
        value = value - mean.unsqueeze(-1)
    normalized = value * scale.unsqueeze(-1)
    sums = []
    if weight is not None:
        sums.append((grad * normalized).reshape(-1, size).sum(0))
    if has_bias:
        sums.append(grad.reshape(-1, size).sum(0))
    if weight is not None:
        grad = grad * (weight.float() + float(zero_centered))
    dx = grad - normalized * (grad * normalized).mean(-1, keepdim=True)
    if mean.numel():
        dx = dx - grad.mean(-1, keepdim=True)
    dx = dx * scale.unsqueeze(-1)
    if dtotal is not None:
        dx = dx + dtotal.float()
    dparams = torch.stack(sums) if sums else scale.new_empty(0, size)
    return dx.to(total.dtype), dparams


residual_norm = make_operator(
    "residual_norm",
    "(Tensor x, Tensor? branch, Tensor? weight, Tensor? bias, float epsilon, bool rms, "
    "bool zero_centered) -> (Tensor, Tensor, Tensor, Tensor)",
    (),
    run_residual_norm,
    compute_residual_norm,
    allocate_residual_norm,
)
"""Return `x + branch` [..., size], its RMSNorm or LayerNorm, and the fp32 mean and scale of rows.

A row is normalized by `(x - mean) * scale * weight + bias`; a `zero_centered` weight is w - 1. The
sum is empty without a `branch`, the mean with `rms`.
"""

residual_norm_backward = make_operator(
    "residual_norm_backward",
    "(Tensor dy, Tensor? dtotal, Tensor total, Tensor? weight, Tensor mean, Tensor scale, "
    "bool has_bias, bool zero_centered) -> (Tensor, Tensor)",
    (),
    run_residual_norm_backward,
    compute_residual_norm_backward,
    allocate_residual_norm_gradients,
)
"""Return the gradient of both summands, and those of weight and bias, stacked, in fp32.

`dy` is the gradient of the norm and `dtotal` that of the sum `total` itself.
"""


def add_and_normalize(
    hidden: Tensor,
    branch: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    epsilon: float,
    rms: bool,
    zero_centered: bool,
) -> tuple[Tensor, Tensor]:
    """Return `hidden + branch` and its norm, by a kernel that must support `hidden`."""
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
        total, normed, mean, scale = residual_norm(
            x, branch, weight, bias, epsilon, rms, zero_centered
        )
        if branch is None:
            total = x
        ctx.save_for_backward(total, weight, mean, scale)
        ctx.has_branch = branch is not None
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.zero_centered = zero_centered
        if not torch.compiler.is_compiling():
            # In graphs both results have a gradient.
            ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, dtotal: Tensor | None, dy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        total, weight, mean, scale = ctx.saved_tensors
        if dy is None:
            return dtotal, dtotal if ctx.has_branch else None, *(None,) * 5
        has_bias = ctx.bias_dtype is not None
        dx, dparams = residual_norm_backward(
            dy, dtotal, total, weight, mean, scale, has_bias, ctx.zero_centered
        )
        dweight = None
        if weight is not None:
            dweight = dparams[0].to(weight.dtype)
        dbias = None
        if has_bias:
            dbias = dparams[-1].to(ctx.bias_dtype)
        return dx, dx if ctx.has_branch else None, dweight, dbias, None, None, None
