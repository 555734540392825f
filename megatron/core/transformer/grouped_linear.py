"""One linear layer for each expert of a rank: one parameter for all of them, and one grouped
product.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.module import Constant, Init, MegatronModule, ParamInfo, make_parameter
from megatron.core.parallel_state import ExpertAxes
from megatron.core.sharding import Sharding
from megatron.core.transformer.transformer_config import TransformerConfig


class GroupedLinear(MegatronModule):
    """`y = x W[e]^T + b[e]` for the rows x of expert e; experts are split over EP, and `split_dim` of each over ETP.

    The weight is `[experts / EP, out, in]` with dimension 1 or 2 divided by ETP. `num_blocks` > 1:
    every matrix is that many stacked ones (gate and up), each of which is split. The bias `[experts
    / EP, out]` is split as the rows of the matrices are; where columns are split, every rank of ETP
    has all of it and the first one adds it to the sum.
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
        self.axes = axes
        self.split_dim = split_dim
        shape = (config.num_experts, output_size, input_size)
        sharding = Sharding(dim=split_dim, axis=axes.etp, blocks=num_blocks, ep=axes.ep)
        weight_info = ParamInfo(init, sharding)
        self.weight = make_parameter(shape, config.params_dtype, device, weight_info)
        self.bias = None
        if bias:
            bias_sharding = sharding if split_dim == 1 else Sharding(axis=axes.etp, ep=axes.ep)
            bias_info = ParamInfo(Constant(0.0), bias_sharding)
            self.bias = make_parameter(shape[:2], config.params_dtype, device, bias_info)

    def forward(self, x: Tensor, counts: Tensor, probs: Tensor | None = None) -> Tensor:
        """`x` `[rows, in]` in the order of the experts, which have `counts` `[experts]` rows each.

        `probs` `[rows, 1]`, which are in x already, are factors of the bias, too.
        """
        y = self.project(x, counts)
        if self.bias is None:
            return y
        # What the ranks of ETP have of a row is summed; the gradient of that sum is the same on all
        # of them.
        added = self.split_dim == 1 or self.axes.etp.is_first
        rows = _ForEachRow.apply(self.bias, counts, len(y), added)
        return y + (rows if probs is None else (rows * probs).to(y.dtype))

    def project(self, x: Tensor, counts: Tensor) -> Tensor:
        """Return the products without the bias."""
        return _GroupedProduct.apply(x, self.weight, counts)


class _ForEachRow(torch.autograd.Function):
    """Row e of `[experts, n]` for each of expert e's `counts[e]` rows; gradients are summed in a
    fixed order.

    Zeros where another rank adds it (not `added`), with the same gradients.
    """

    @staticmethod
    def forward(ctx: Any, bias: Tensor, counts: Tensor, rows: int, added: bool) -> Tensor:
        ctx.save_for_backward(counts)
        if not added:
            return bias.new_zeros(rows, bias.shape[1])
        return bias.repeat_interleave(counts, 0, output_size=rows)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (counts,) = (
            ctx.saved_tensors
        )  # in fp32: sums of the model's precision would lose small gradients
        return (
            torch.segment_reduce(dy.float(), "sum", lengths=counts, axis=0).to(dy.dtype),
            None,
            None,
            None,
        )


class _GroupedProduct(torch.autograd.Function):
    """One product per expert that has rows; on a GPU in bf16 a single kernel for all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, counts)
        # the parameter itself (main_grad): recomputation replaces saved tensors by copies
        ctx.weight = weight
        return compute_grouped_product(x, weight.mT, counts)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        x, weight, counts = ctx.saved_tensors
        dx = compute_grouped_product(dy, weight, counts) if ctx.needs_input_grad[0] else None
        dw = _grouped_weight_grad(ctx.weight, dy, x, counts) if ctx.needs_input_grad[1] else None
        return dx, dw, None


def has_grouped_kernel(x: Tensor) -> bool:
    """Whether torch runs all products of a group in one kernel; elsewhere it loops, as we do, and
    slower.
    """
    return x.is_cuda and x.dtype == torch.bfloat16 and hasattr(F, "grouped_mm")


def compute_grouped_product(x: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """Rows `x` `[n, in]` of each expert times its matrix `[experts, in, out]`."""
    if has_grouped_kernel(x):
        return F.grouped_mm(x, matrices, offs=counts.cumsum(0).int())
    y = x.new_empty(len(x), matrices.shape[2])
    for expert, start, stop in _ranges(counts):
        rows = _padded(x[start:stop])
        if len(rows) == stop - start:
            torch.mm(rows, matrices[expert], out=y[start:stop])
        else:
            y[start:stop] = (rows @ matrices[expert])[: stop - start]
    return y


def _grouped_weight_grad(weight: Tensor, dy: Tensor, x: Tensor, counts: Tensor) -> Tensor | None:
    """`dW[e] = dy[e]^T x[e]`, added into `main_grad` where the parameter has one (see `weight_grad`)."""
    in_place = hasattr(weight, "main_grad")
    grad: Tensor = weight.main_grad if in_place else torch.zeros_like(weight)  # type: ignore[attr-defined]
    if has_grouped_kernel(x):
        grad.add_(F.grouped_mm(dy.t(), x, offs=counts.cumsum(0).int()))
    else:
        for expert, start, stop in _ranges(counts):
            rows = _padded(x[start:stop])
            dy_rows = _padded(dy[start:stop])
            if grad.dtype == x.dtype:
                grad[expert].addmm_(dy_rows.t(), rows)
            else:
                grad[expert].add_(dy_rows.t() @ rows)
    return None if in_place else grad


def _padded(rows: Tensor) -> Tensor:
    """`rows` `[n, k]`; on a CPU below fp32 with rows of zeros, up to one of eight sizes between two powers of two.

    oneDNN compiles a kernel for every new shape (3 to 17 ms of processor time, the product itself
    takes 2 to 13), and an expert has another number of rows in every step.
    """
    if rows.device.type != "cpu" or rows.dtype == torch.float32:
        return rows
    return F.pad(rows, (0, 0, 0, -len(rows) % (1 << max(4, len(rows).bit_length() - 4))))


def _ranges(counts: Tensor) -> list[tuple[int, int, int]]:
    """(expert, first row, end) of those that have rows."""
    ranges = []
    start = 0
    for expert, count in enumerate(counts.tolist()):
        if count:
            ranges.append((expert, start, start + count))
        start += count
    return ranges
