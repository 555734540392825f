"""Products and losses of experts as operators that torch.compile does not trace (`--compile`).

Rows per expert are known on the device only, products add to gradient buffers, and the backward
pass of losses records their values: a graph could not express any of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from megatron.core.tensor_parallel.opaque_linear import find_module
from megatron.core.transformer.grouped_linear import (
    GroupedLinear,
    compute_grouped_product,
    compute_grouped_weight_grad,
)
from megatron.core.transformer.moe.router import TopKRouter


def run_opaque_product(layer: GroupedLinear, x: Tensor, counts: Tensor) -> Tensor:
    """Return the products of a numbered layer, whose weight must have a `main_grad`."""
    output: Tensor = _product(x, layer.weight, counts, layer.opaque_number)
    return output


def attach_opaque_losses(
    router: TopKRouter, probs: Tensor, loads: Tensor, losses: list[Tensor]
) -> Tensor:
    """Return a copy of `probs`, whose backward pass records the losses of a numbered router."""
    attached: Tensor = _attach(probs, loads, losses, router.opaque_number)
    return attached


# Products


def _multiply(x: Tensor, weight: Tensor, counts: Tensor, number: Tensor) -> Tensor:
    return compute_grouped_product(x, weight.mT, counts)


_product = torch.library.custom_op(
    "megatron::grouped_linear",
    _multiply,
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor counts, Tensor number) -> Tensor",
)


@_product.register_fake
def _allocate_output(x: Tensor, weight: Tensor, counts: Tensor, number: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


def _multiply_backward(
    dy: Tensor, x: Tensor, weight: Tensor, counts: Tensor, number: Tensor
) -> Tensor:
    dy = dy.contiguous()
    dw = compute_grouped_weight_grad(find_module(number).weight, dy, x, counts)
    assert dw is None, "the weight has no main_grad"
    return compute_grouped_product(dy, weight, counts)


_product_backward = torch.library.custom_op(
    "megatron::grouped_linear_backward",
    _multiply_backward,
    mutates_args=(),  # of those that a graph contains
    schema="(Tensor dy, Tensor x, Tensor weight, Tensor counts, Tensor number) -> Tensor",
)
# It adds to the gradient of the weight even if nobody needs that of x.
has_side_effect(_product_backward._opoverload)


@_product_backward.register_fake
def _allocate_gradient(
    dy: Tensor, x: Tensor, weight: Tensor, counts: Tensor, number: Tensor
) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save_product(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_product(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
    return _product_backward(dy, *ctx.saved_tensors), None, None, None


_product.register_autograd(_differentiate_product, setup_context=_save_product)


# Losses


def _copy_probs(probs: Tensor, loads: Tensor, losses: list[Tensor], number: Tensor) -> Tensor:
    return probs.clone()


_attach = torch.library.custom_op(
    "megatron::attach_losses",
    _copy_probs,
    mutates_args=(),
    schema="(Tensor probs, Tensor loads, Tensor[] losses, Tensor number) -> Tensor",
)
_attach.register_fake(_copy_probs)


def _record(grad: Tensor, loads: Tensor, losses: list[Tensor], number: Tensor) -> list[Tensor]:
    """Return the gradients of probs and losses."""
    router: TopKRouter = find_module(number)
    # Graphs may use the memory of their tensors again.
    copies = [loss.clone() for loss in losses]
    return [grad.clone(), *router.record_losses(len(grad), loads.clone(), copies)]


_record_losses = torch.library.custom_op(
    "megatron::record_losses",
    _record,
    mutates_args=(),
    schema="(Tensor grad, Tensor loads, Tensor[] losses, Tensor number) -> Tensor[]",
)
has_side_effect(_record_losses._opoverload)


@_record_losses.register_fake
def _allocate_loss_gradients(
    grad: Tensor, loads: Tensor, losses: list[Tensor], number: Tensor
) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in (grad, *losses)]


def _save_losses(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, loads, losses, number = inputs
    ctx.save_for_backward(loads, number, *losses)


def _differentiate_losses(ctx: Any, grad: Tensor) -> tuple[Tensor, None, list[Tensor], None]:
    loads, number, *losses = ctx.saved_tensors
    dprobs, *dlosses = _record_losses(grad, loads, losses, number)
    return dprobs, None, dlosses, None


_attach.register_autograd(_differentiate_losses, setup_context=_save_losses)
