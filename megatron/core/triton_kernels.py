"""Triton kernels of SwiGLU, the loss and AdamW, each with a reference in plain PyTorch.

An operator reads and writes every element once, computes in fp32 and rounds results once. It runs
its kernel on CUDA tensors and the reference on CPU tensors. Kernels mask rows of any size, and
offsets of rows are 64-bit. `core/wings.py` imports this module on demand.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements that a program of a pointwise kernel processes: 8 per thread.
_BLOCK = 1024
_NUM_WARPS = 4
# Logits that a program keeps in registers at a time.
_LOGITS_BLOCK = 4096
_LOGITS_WARPS = 8
# Operators live as long as this object.
_LIBRARY = torch.library.Library("megatron", "FRAGMENT")


def make_operator(
    name: str,
    schema: str,
    mutated: tuple[str, ...],
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    make_outputs: Callable[..., Any],
) -> Callable[..., Any]:
    """Register an operator of torch: `kernel` on CUDA, `reference` on the CPU.

    `torch.library.custom_op` would do the same, but imports the compiler at the first call.
    """
    _LIBRARY.define(name + schema)
    operator = getattr(torch.ops.megatron, name).default
    arguments = [argument.name for argument in operator._schema.arguments]
    indices = [arguments.index(argument) for argument in mutated]
    for device, function in (("CUDA", kernel), ("CPU", reference)):
        _LIBRARY.impl(name, partial(_run, function, indices), device)
    torch.library.register_fake(operator, make_outputs, lib=_LIBRARY)
    result: Callable[..., Any] = operator
    return result


def _run(function: Callable[..., Any], mutated: list[int], *arguments: Any) -> Any:
    """Call a function, and count the change of the arguments with these indices.

    A save in progress notices changes by this count.
    """
    for index in mutated:
        if arguments[index] is not None:
            torch.autograd.graph.increment_version(arguments[index])
    return function(*arguments)


@triton.jit
def load_float(address, mask):
    """Load elements as fp32, 0 outside of the mask."""
    return tl.load(address, mask=mask, other=0.0).to(tl.float32)


def allocate_nothing(*arguments: Any) -> None:
    """Describe the output of an operator that only overwrites its arguments."""


# -------------------------------------------------------------------------------------------------
# SwiGLU
# -------------------------------------------------------------------------------------------------


@triton.jit
def _swiglu_kernel(x, y, size, BLOCK: tl.constexpr):
    """One block of a row: `x` [rows, 2 * size], `y` [rows, size]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    gate_address = x + row * 2 * size + column
    gate = load_float(gate_address, mask)
    up = load_float(gate_address + size, mask)
    result = gate * tl.sigmoid(gate) * up
    tl.store(y + row * size + column, result, mask=mask)


@triton.jit
def _swiglu_backward_kernel(dy, x, dx, size, BLOCK: tl.constexpr):
    """One block of a row: `dy` [rows, size], `x` and `dx` [rows, 2 * size]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    offset = row * 2 * size + column
    gate = load_float(x + offset, mask)
    up = load_float(x + offset + size, mask)
    grad = load_float(dy + row * size + column, mask)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    dgate = grad * up * (sigmoid + silu * (1.0 - sigmoid))
    tl.store(dx + offset, dgate, mask=mask)
    tl.store(dx + offset + size, grad * silu, mask=mask)


def run_swiglu(x: Tensor) -> Tensor:
    x = x.contiguous()
    y = allocate_swiglu(x)
    if y.numel():
        size = y.shape[-1]
        grid = (y.numel() // size, triton.cdiv(size, _BLOCK))
        _swiglu_kernel[grid](x, y, size, BLOCK=_BLOCK, num_warps=_NUM_WARPS)
    return y


def run_swiglu_backward(dy: Tensor, x: Tensor) -> Tensor:
    x = x.contiguous()
    dy = dy.contiguous()
    dx = allocate_swiglu_gradient(dy, x)
    if dy.numel():
        size = dy.shape[-1]
        grid = (dy.numel() // size, triton.cdiv(size, _BLOCK))
        _swiglu_backward_kernel[grid](dy, x, dx, size, BLOCK=_BLOCK, num_warps=_NUM_WARPS)
    return dx


def allocate_swiglu(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


def allocate_swiglu_gradient(dy: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def compute_swiglu(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up).to(x.dtype)


def compute_swiglu_backward(dy: Tensor, x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, -1)
    grad = dy.float()
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    dgate = grad * up * (sigmoid + silu * (1.0 - sigmoid))
    return torch.cat((dgate, grad * silu), -1).to(x.dtype)


swiglu = make_operator(
    "swiglu", "(Tensor x) -> Tensor", (), run_swiglu, compute_swiglu, allocate_swiglu
)
"""Return silu(gate) * up of `[..., gate; up]`. Differentiable."""

swiglu_backward = make_operator(
    "swiglu_backward",
    "(Tensor dy, Tensor x) -> Tensor",
    (),
    run_swiglu_backward,
    compute_swiglu_backward,
    allocate_swiglu_gradient,
)
"""Return the gradient of `swiglu`, contiguous."""


def _save_swiglu(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_swiglu(ctx: Any, dy: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    dx: Tensor = swiglu_backward(dy, x)
    return dx


torch.library.register_autograd(
    "megatron::swiglu", _differentiate_swiglu, setup_context=_save_swiglu
)


# -------------------------------------------------------------------------------------------------
# Cross entropy
# -------------------------------------------------------------------------------------------------


@triton.jit
def _softmax_kernel(
    logits,
    columns,
    largest,
    total,
    predicted,
    stride,
    valid,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row of `logits`, of which the first `valid` columns are read once."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    maximum = tl.full((), float("-inf"), tl.float32)
    denominator = tl.zeros((), tl.float32)
    for block in range(BLOCKS):
        column = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(start + column, mask=column < valid, other=float("-inf")).to(tl.float32)
        new_maximum = tl.maximum(maximum, tl.max(x, 0))
        # Rows that begin with -inf only: -inf - -inf would be NaN.
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        denominator = denominator * tl.exp(maximum - shift) + tl.sum(tl.exp(x - shift), 0)
        maximum = new_maximum
    label = tl.load(columns + row)
    has_label = label >= 0
    x_label = tl.load(start + label, mask=has_label & (label < valid), other=float("-inf"))
    tl.store(largest + row, maximum)
    tl.store(total + row, denominator)
    tl.store(predicted + row, tl.where(has_label, x_label.to(tl.float32), 0.0))


@triton.jit
def _softmax_gradient_kernel(
    logits,
    columns,
    largest,
    total,
    dloss,
    stride,
    width,
    valid,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Overwrite one row of `logits` with its gradient, block by block."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    label = tl.load(columns + row)
    grad = tl.load(dloss + row)
    maximum = tl.load(largest + row)
    factor = grad / tl.load(total + row)
    for block in range(BLOCKS):
        column = block * BLOCK + tl.arange(0, BLOCK)
        mask = column < width
        x = load_float(start + column, mask)
        dx = tl.where(column < valid, tl.exp(x - maximum) * factor, 0.0)
        dx = tl.where(column == label, dx - grad, dx)
        if HAS_SOFTCAP:
            ratio = x / softcap
            dx = tl.where(column < valid, dx * (1.0 - ratio * ratio), 0.0)
        tl.store(start + column, dx, mask=mask)


def run_softmax(logits: Tensor, columns: Tensor, valid: int) -> tuple[Tensor, Tensor, Tensor]:
    assert logits.stride(1) == 1 and columns.is_contiguous()
    largest, total, predicted = allocate_softmax(logits, columns, valid)
    if len(logits):
        _softmax_kernel[(len(logits),)](
            logits,
            columns,
            largest,
            total,
            predicted,
            logits.stride(0),
            valid,
            BLOCKS=triton.cdiv(valid, _LOGITS_BLOCK),
            BLOCK=_LOGITS_BLOCK,
            num_warps=_LOGITS_WARPS,
        )
    return largest, total, predicted


def run_softmax_gradient(
    logits: Tensor,
    columns: Tensor,
    largest: Tensor,
    total: Tensor,
    dloss: Tensor,
    valid: int,
    softcap: float | None,
) -> None:
    assert logits.stride(1) == 1
    for vector in (columns, largest, total, dloss):
        assert vector.is_contiguous() and len(vector) == len(logits)
    if logits.numel():
        _softmax_gradient_kernel[(len(logits),)](
            logits,
            columns,
            largest,
            total,
            dloss,
            logits.stride(0),
            logits.shape[1],
            valid,
            1.0 if softcap is None else float(softcap),
            HAS_SOFTCAP=softcap is not None,
            BLOCKS=triton.cdiv(logits.shape[1], _LOGITS_BLOCK),
            BLOCK=_LOGITS_BLOCK,
            num_warps=_LOGITS_WARPS,
        )


def allocate_softmax(logits: Tensor, columns: Tensor, valid: int) -> tuple[Tensor, Tensor, Tensor]:
    num_rows = logits.shape[0]
    largest = logits.new_empty(num_rows, dtype=torch.float32)
    return largest, torch.empty_like(largest), torch.empty_like(largest)


def compute_softmax(logits: Tensor, columns: Tensor, valid: int) -> tuple[Tensor, Tensor, Tensor]:
    largest = logits.new_full((len(logits),), -torch.inf, dtype=torch.float32)
    counted = logits[:, :valid].float()
    if valid > 0:
        largest = counted.amax(-1)
    shift = largest.masked_fill(largest == -torch.inf, 0.0)
    total = (counted - shift.unsqueeze(1)).exp().sum(-1)
    whole = logits.float()
    whole[:, valid:] = -torch.inf
    predicted = whole.gather(1, columns.clamp(min=0).unsqueeze(1)).squeeze(1)
    return largest, total, predicted.masked_fill(columns < 0, 0.0)


def compute_softmax_gradient(
    logits: Tensor,
    columns: Tensor,
    largest: Tensor,
    total: Tensor,
    dloss: Tensor,
    valid: int,
    softcap: float | None,
) -> None:
    x = logits.float()
    dx = (x - largest.unsqueeze(1)).exp() * (dloss / total).unsqueeze(1)
    dx[:, valid:] = 0.0
    is_label = torch.arange(x.shape[1], device=x.device) == columns.unsqueeze(1)
    dx = torch.where(is_label, dx - dloss.unsqueeze(1), dx)
    if softcap is not None:
        dx = dx * (1.0 - (x / softcap).square())
        dx[:, valid:] = 0.0
    logits.copy_(dx)


softmax = make_operator(
    "softmax",
    "(Tensor logits, Tensor columns, int valid) -> (Tensor, Tensor, Tensor)",
    (),
    run_softmax,
    compute_softmax,
    allocate_softmax,
)
"""Return maximum, sum of e^(x - maximum) and the logit of the label of each row of `logits` [n, v].

All are [n] in fp32. Only the first `valid` columns count. `columns` [n] int64 are those of the
labels; the result for -1 is 0.
"""

softmax_gradient = make_operator(
    "softmax_gradient",
    "(Tensor(a!) logits, Tensor columns, Tensor largest, Tensor total, Tensor dloss, int valid, "
    "float? softcap) -> ()",
    ("logits",),
    run_softmax_gradient,
    compute_softmax_gradient,
    allocate_nothing,
)
"""Overwrite `logits` with `(e^(x - largest) / total - onehot) * dloss`.

With `softcap` the logits x are softcap * tanh(z / softcap), and the result is the gradient of z.
"""


# -------------------------------------------------------------------------------------------------
# AdamW
# -------------------------------------------------------------------------------------------------


@triton.jit
def _adamw_kernel(
    param,
    grad,
    mean,
    square,
    weight,
    scalars,
    size,
    decay,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    epsilon,
    HAS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of flat fp32 tensors; `weight` is in the precision of the model.

    `scalars`: grad_scale, found_inf, lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t).
    """
    if tl.load(scalars + 1) == 0.0:
        offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = offset < size
        p = tl.load(param + offset, mask=mask, other=0.0)
        g = tl.load(grad + offset, mask=mask, other=0.0) / tl.load(scalars)
        m = tl.load(mean + offset, mask=mask, other=0.0)
        v = tl.load(square + offset, mask=mask, other=0.0)
        m = beta1 * m + one_minus_beta1 * g
        v = beta2 * v + one_minus_beta2 * g * g
        denominator = tl.sqrt(v) * tl.load(scalars + 3) + epsilon
        p = p - decay * p - tl.load(scalars + 2) * m / denominator
        tl.store(param + offset, p, mask=mask)
        tl.store(mean + offset, m, mask=mask)
        tl.store(square + offset, v, mask=mask)
        if HAS_WEIGHT:
            tl.store(weight + offset, p, mask=mask)


def run_adamw(
    param: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    weight: Tensor | None,
    scalars: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
) -> None:
    size = param.numel()
    for tensor in (param, grad, mean, square):
        assert tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.numel() == size
    assert weight is None or (weight.is_contiguous() and weight.numel() == size)
    if size:
        # 1 - beta in fp32 would have an error of 5e-5 for beta 0.999.
        _adamw_kernel[(triton.cdiv(size, _BLOCK),)](
            param,
            grad,
            mean,
            square,
            param if weight is None else weight,
            scalars,
            size,
            float(lr * weight_decay),
            float(beta1),
            float(1.0 - beta1),
            float(beta2),
            float(1.0 - beta2),
            float(epsilon),
            HAS_WEIGHT=weight is not None,
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
        )


def compute_adamw(
    param: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    weight: Tensor | None,
    scalars: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
) -> None:
    grad_scale, found_inf, step_size, correction = scalars.unbind()
    g = grad / grad_scale
    m = beta1 * mean + (1.0 - beta1) * g
    v = beta2 * square + (1.0 - beta2) * g * g
    denominator = v.sqrt() * correction + epsilon
    p = param - lr * weight_decay * param - step_size * m / denominator
    updates = [(param, p), (mean, m), (square, v)]
    if weight is not None:
        updates.append((weight, p.to(weight.dtype)))
    is_skipped = found_inf.bool()
    for target, update in updates:
        target.copy_(torch.where(is_skipped, target, update))


adamw = make_operator(
    "adamw",
    "(Tensor(a!) param, Tensor grad, Tensor(b!) mean, Tensor(c!) square, Tensor(d!)? weight, "
    "Tensor scalars, float lr, float beta1, float beta2, float epsilon, float weight_decay) -> ()",
    ("param", "mean", "square", "weight"),
    run_adamw,
    compute_adamw,
    allocate_nothing,
)
"""Update flat fp32 tensors by AdamW, and write the parameters to `weight`, of any precision.

`scalars` [4] fp32: divisor of the gradient; 1 if nothing may change, else 0; lr / (1 - beta1^t);
1 / sqrt(1 - beta2^t).
"""
