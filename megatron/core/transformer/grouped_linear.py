"""One linear layer per expert of a rank: a single parameter, and grouped matrix products."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.module import Constant, Init, MegatronModule, ParamInfo, make_parameter
from megatron.core.parallel_state import ExpertAxes
from megatron.core.private_operators import multiply_groups
from megatron.core.sharding import Sharding
from megatron.core.tensor_parallel.layers import open_main_grad
from megatron.core.transformer.transformer_config import TransformerConfig


class GroupedLinear(MegatronModule):
    """`y = x W[e]^T + b[e]` for the rows x of expert e.

    Experts are distributed over EP, and dimension `split_dim` of each is split over ETP: the weight
    is `[experts / EP, out, in]` with dimension 1 or 2 divided by ETP. With `num_blocks` > 1 each
    matrix is a stack of several (gate and up), each of which is split. The bias `[experts / EP,
    out]` is split like the rows. Where columns are split, every ETP rank has the whole bias and the
    first one adds it to the sum.
    """

    def __init__(
        self,
        config: TransformerConfig,
        input_size: int,
        output_size: int,
        *,
        init: Init,
        split_dim: int,
        axes: ExpertAxes,
        num_blocks: int = 1,
        bias: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        assert config.num_experts is not None
        shape = (config.num_experts, output_size, input_size)  # global
        sharding = Sharding(dim=split_dim, axis=axes.etp, blocks=num_blocks, ep=axes.ep)
        weight_info = ParamInfo(init, sharding)
        self.weight = make_parameter(shape, config.params_dtype, device, weight_info)
        # With split columns the outputs of the ETP ranks are summed: only the first one adds the
        # bias.
        self.adds_bias = split_dim == 1 or axes.etp.is_first
        self.bias = None
        if bias:
            bias_sharding = sharding
            if split_dim == 2:
                # Split columns: every ETP rank has the whole bias.
                bias_sharding = Sharding(axis=axes.etp, ep=axes.ep)
            bias_info = ParamInfo(Constant(0.0), bias_sharding)
            bias_shape = (config.num_experts, output_size)
            self.bias = make_parameter(bias_shape, config.params_dtype, device, bias_info)

    def forward(self, x: Tensor, counts: Tensor, probs: Tensor | None = None) -> Tensor:
        """Apply the experts to `x` `[rows, in]`, sorted by expert.

        `counts` `[experts]` are the numbers of rows. `probs` `[rows, 1]`, which are already factors
        of x, are also applied to the bias.
        """
        y = self.project(x, counts)  # [rows, out], or a summand of it with split columns
        if self.bias is None:
            return y
        # The gradient of a sum over the ETP ranks is the same on all of them: a replicated bias is
        # added once, but has its gradient on each rank.
        bias_rows = _RepeatBias.apply(self.bias, counts, len(y), self.adds_bias)
        if probs is not None:
            bias_rows = (bias_rows * probs).to(y.dtype)
        return y + bias_rows

    def project(self, x: Tensor, counts: Tensor) -> Tensor:
        """Return the products without the bias."""
        return apply_grouped_product(x, self.weight, counts)


def apply_grouped_product(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Multiply the rows `x` `[n, in]` of each expert by its matrix of `[experts, out, in]`."""
    return _GroupedProduct.apply(x, weight, counts)


def repeat_rows(values: Tensor, counts: Tensor, num_rows: int) -> Tensor:
    """Repeat row e of `[experts, n]` `counts[e]` times, `num_rows` in total."""
    return _RepeatBias.apply(values, counts, num_rows, True)


class _RepeatBias(torch.autograd.Function):
    """Repeat row e of `[experts, n]` `counts[e]` times; gradients are summed in a fixed order.

    If the bias is not added on this rank, the result is zero with the same gradients.
    """

    @staticmethod
    def forward(ctx: Any, bias: Tensor, counts: Tensor, rows: int, is_added: bool) -> Tensor:
        ctx.save_for_backward(counts)
        if not is_added:
            return bias.new_zeros(rows, bias.shape[1])
        return bias.repeat_interleave(counts, 0, output_size=rows)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (counts,) = ctx.saved_tensors
        # In fp32: sums in the model's precision would lose small gradients. `unsafe` skips a check
        # of the counts, which would wait for the device.
        dbias = torch.segment_reduce(dy.float(), "sum", lengths=counts, axis=0, unsafe=True)
        return dbias.to(dy.dtype), None, None, None


class _GroupedProduct(torch.autograd.Function):
    """One product per expert with rows; on a GPU in bf16 a single kernel for all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, counts)
        # The parameter itself, for main_grad: recomputation replaces saved tensors by copies.
        ctx.weight = weight
        return compute_grouped_product(x, weight.mT, counts)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        x, weight, counts = ctx.saved_tensors
        dx = None
        dw = None
        if ctx.needs_input_grad[0]:
            dx = compute_grouped_product(dy, weight, counts)
        if ctx.needs_input_grad[1]:
            dw = _compute_weight_grad(ctx.weight, dy, x, counts)
        return dx, dw, None


def has_grouped_kernel(x: Tensor) -> bool:
    """Return whether torch computes all products of a group in one kernel.

    Otherwise torch loops as we do, and is slower.
    """
    return x.is_cuda and x.dtype == torch.bfloat16 and hasattr(F, "grouped_mm")


def compute_grouped_product(x: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """Multiply the rows `x` `[n, in]` of each expert by its matrix of `[experts, in, out]`."""
    if has_grouped_kernel(x):
        return multiply_groups(x, matrices, _compute_row_ends(counts))
    output_size = matrices.shape[2]
    y = x.new_empty(len(x), output_size)
    for expert, start, stop in _find_row_ranges(counts):
        num_rows = stop - start
        rows = _pad_rows(x[start:stop])
        # Without padding the product is written in place.
        if len(rows) == num_rows:
            torch.mm(rows, matrices[expert], out=y[start:stop])
        else:
            padded = rows @ matrices[expert]
            y[start:stop] = padded[:num_rows]
    return y


def _compute_weight_grad(weight: Tensor, dy: Tensor, x: Tensor, counts: Tensor) -> Tensor | None:
    """Compute `dW[e] = dy[e]^T x[e]`.

    It is added to `main_grad` if the parameter has one (see `tensor_parallel.layers`); then the
    result is None.
    """
    if hasattr(weight, "main_grad"):
        _add_weight_grad(open_main_grad(weight), dy, x, counts)
        return None
    grad = torch.zeros_like(weight)
    _add_weight_grad(grad, dy, x, counts)
    return grad


def _add_weight_grad(grad: Tensor, dy: Tensor, x: Tensor, counts: Tensor) -> None:
    """Add `dy[e]^T x[e]` to `grad[e]` of each expert e."""
    if has_grouped_kernel(x):
        products = multiply_groups(dy.t(), x, _compute_row_ends(counts))  # [experts, out, in]
        # On Blackwell the kernel does not write the products of experts without rows.
        products.masked_fill_((counts == 0).view(-1, 1, 1), 0)
        grad.add_(products)
        return
    for expert, start, stop in _find_row_ranges(counts):
        # Rows of zeros do not change the sums over rows.
        rows = _pad_rows(x[start:stop])
        dy_rows = _pad_rows(dy[start:stop])
        # One kernel, which cannot add to an fp32 gradient of bf16 inputs.
        if grad.dtype == x.dtype:
            grad[expert].addmm_(dy_rows.t(), rows)
        else:
            grad[expert].add_(dy_rows.t() @ rows)


def _compute_row_ends(counts: Tensor) -> Tensor:
    """Return the end of the rows of each expert, as the grouped kernel expects them."""
    return counts.cumsum(0).int()


def _pad_rows(rows: Tensor) -> Tensor:
    """Pad `[n, k]` with zero rows, on a CPU in bf16 or fp16, to one of 8 sizes per power of two.

    oneDNN compiles a kernel for each new shape (3 to 17 ms of processor time, while the product
    itself takes 2 to 13), and the number of rows of an expert differs in every step.
    """
    if rows.device.type != "cpu" or rows.dtype == torch.float32:
        return rows
    num_rows = len(rows)
    granularity = 1 << max(4, num_rows.bit_length() - 4)
    num_zeros = -num_rows % granularity
    return F.pad(rows, (0, 0, 0, num_zeros))


def _find_row_ranges(counts: Tensor) -> list[tuple[int, int, int]]:
    """Return (expert, first row, end) of each expert with rows."""
    ranges = []
    start = 0
    for expert, count in enumerate(counts.tolist()):
        stop = start + count
        if count:
            ranges.append((expert, start, stop))
        start = stop
    return ranges
