"""Linear layers as operators that torch.compile does not trace (`--compile`).

A graph of a layer can then contain its products: they exchange data between ranks and add to
gradient buffers, which a graph could not express.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    compute_linear,
    compute_linear_gradients,
)

Linear = ColumnParallelLinear | RowParallelLinear

# By number. Operators get the number in a tensor, so that all layers share one graph.
_layers: list[weakref.ref[Linear]] = []


def number_layer(layer: Linear) -> None:
    """Let `run_opaque_linear` compute `layer`."""
    layer.opaque_number = torch.tensor(len(_layers))  # type: ignore[assignment]
    _layers.append(weakref.ref(layer))


def run_opaque_linear(layer: Linear, x: Tensor) -> Tensor:
    """Return the output of a numbered layer, whose weight must have a `main_grad`."""
    multiple = 1
    divisor = 1
    if layer.sequence_parallel:
        if layer.layout.column:
            multiple = layer.tp.size
        else:
            divisor = layer.tp.size
    output: Tensor = _linear(x, layer.weight, layer.bias, layer.opaque_number, multiple, divisor)
    return output


def _find_layer(number: Tensor) -> Linear:
    layer = _layers[int(number)]()
    assert layer is not None
    return layer


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor, multiple: int, divisor: int
) -> Tensor:
    return compute_linear(x, weight, bias, _find_layer(number).layout)


_linear = torch.library.custom_op(
    "megatron::linear",
    _forward,
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, Tensor number, int multiple, int divisor) "
    "-> Tensor",
)


@_linear.register_fake
def _allocate_output(
    x: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor, multiple: int, divisor: int
) -> Tensor:
    rows = x.shape[0] * multiple // divisor
    return x.new_empty(rows, *x.shape[1:-1], weight.shape[0])


def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, number: Tensor, needs_db: bool
) -> tuple[Tensor, Tensor]:
    layer = _find_layer(number)
    needs_gradient = (True, True, needs_db)
    gradients = compute_linear_gradients(
        dy.contiguous(), x, weight, layer.weight, layer.layout, needs_gradient
    )
    assert gradients.x is not None and gradients.weight is None, "the weight has no main_grad"
    if gradients.bias is None:
        return gradients.x, dy.new_empty(0)
    return gradients.x, gradients.bias


_linear_backward = torch.library.custom_op(
    "megatron::linear_backward",
    _backward,
    mutates_args=(),  # of those that a graph contains
    schema="(Tensor dy, Tensor x, Tensor weight, Tensor number, bool needs_db) -> (Tensor, Tensor)",
)
# It adds to the gradient of the weight even if nobody needs that of x.
has_side_effect(_linear_backward._opoverload)


@_linear_backward.register_fake
def _allocate_gradients(
    dy: Tensor, x: Tensor, weight: Tensor, number: Tensor, needs_db: bool
) -> tuple[Tensor, Tensor]:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return dx, dy.new_empty(weight.shape[0] if needs_db else 0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, number, _, _ = inputs
    ctx.save_for_backward(x, weight, number)
    ctx.has_bias = bias is not None


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, number = ctx.saved_tensors
    dx, db = _linear_backward(dy, x, weight, number, ctx.has_bias)
    return dx, None, db if ctx.has_bias else None, None, None, None


_linear.register_autograd(_differentiate, setup_context=_save)
