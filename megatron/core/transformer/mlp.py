"""The MLP of a transformer layer with its norm, and activation functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.fused_kernels import find_kernel
from megatron.core.module import MegatronModule
from megatron.core.private_operators import write_silu_gradient, write_tanh_gelu_gradient
from megatron.core.transformer.layer_spec import select_layer_spec
from megatron.core.transformer.placement import Placement
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.wings import resolve

_XIELU = "megatron.core.transformer.xielu:XIELU"


class MLP(MegatronModule):
    """`act(norm(x) W1^T) W2^T`, gated `(act(norm(x) Wg^T) * norm(x) Wu^T) W2^T`.

    The inner width is split over TP: W1 by rows, W2 by columns. A gated MLP stacks gate and up
    projection in one matrix, and each of them is split.
    """

    def __init__(
        self,
        config: TransformerConfig,
        placement: Placement,
        *,
        ffn_size: int | None = None,
        shared_expert: bool = False,
    ) -> None:
        """Initialize the MLP of a layer, or a `shared_expert`, whose input is normalized."""
        super().__init__()
        spec = select_layer_spec(config)
        ffn_size = ffn_size or config.ffn_size
        # The rows of a gated MLP are two stacked matrices: gate and up.
        num_blocks = 2 if config.gated else 1
        self.activation: Callable[[Tensor], Tensor]
        if config.xielu:
            self.activation = resolve(_XIELU)(config, placement)
        else:
            self.activation = get_activation(config)
        self.linear_fc1 = spec.make_input_projection(
            config,
            placement,
            config.hidden_size,
            num_blocks * ffn_size,
            bias=config.add_bias_linear,
            normed=not shared_expert and config.has_input_norms,
            num_blocks=num_blocks,
        )
        self.linear_fc2 = spec.make_output_projection(
            config, placement, ffn_size, normed=not shared_expert
        )

    def forward(self, hidden_states: Tensor, *, is_normalized: bool = False) -> Tensor:
        """Return the output of the branch, `[s, b, h]` (or `[s/tp, b, h]`) as its input.

        `is_normalized`: the norm of the first projection has been applied to the input.
        """
        project = self.linear_fc1.project if is_normalized else self.linear_fc1
        inner = project(hidden_states)  # [s, b, ffn/tp], twice that when gated
        return self.linear_fc2(self.activation(inner))


class _Gate(NamedTuple):
    """The activation function of a gate, and its gradient."""

    forward: Callable[[Tensor], Tensor]
    write_gradient: Callable[[Tensor, Tensor, Tensor], None]
    """Writes the gradient for (dy, x) to the third tensor."""


_tanh_gelu = partial(F.gelu, approximate="tanh")
_GATES = {
    "swiglu": _Gate(F.silu, write_silu_gradient),
    "swiglu, not fused": _Gate(F.silu, write_silu_gradient),
    "geglu": _Gate(_tanh_gelu, write_tanh_gelu_gradient),
}


def _apply_gated(x: Tensor, name: str) -> Tensor:
    """Return activation(gate) * up of `[..., gate; up]` (Shazeer 2020)."""
    kernel = find_kernel(name, x)
    if kernel is not None:
        return kernel(x)
    if torch.compiler.is_compiling():
        # Plain operations, which the compiler fuses.
        activate = _GATES[name].forward
        gate, up = x.chunk(2, -1)
        return activate(gate) * up
    return _GatedActivation.apply(x, name)


class _GatedActivation(torch.autograd.Function):
    """Gated activation that keeps only its input and writes both gradients to one tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.name = name
        gate, up = x.chunk(2, -1)  # views of [s, b, ffn / tp] each
        return _GATES[name].forward(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        activation = _GATES[ctx.name]
        gate, up = x.chunk(2, -1)
        dx = torch.empty_like(x)
        dgate, dup = dx.chunk(2, -1)  # views of dx, into which the gradients are written
        # y = activation(gate) * up
        torch.mul(dy, activation.forward(gate), out=dup)
        activation.write_gradient(dy * up, gate, dgate)
        return dx, None


def _apply_squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _apply_quick_geglu(x: Tensor, offset: float, clamp: float | None) -> Tensor:
    """Return quick_gelu(gate) * (up + offset) of `[..., gate; up]`.

    quick_gelu(x) = x * sigmoid(1.702 x) approximates GELU (Hendrycks and Gimpel 2016).
    """
    # The gate is limited from above only: for negative inputs it is close to 0 anyway.
    gate, up = x.chunk(2, -1)
    if clamp is not None:
        gate = gate.clamp(max=clamp)
        up = up.clamp(-clamp, clamp)
    return gate * torch.sigmoid(1.702 * gate) * (up + offset)


class _RecomputeFromInput(torch.autograd.Function):
    """`function(x)`, which keeps only x; the backward pass computes it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.function = function
        return function(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (saved,) = ctx.saved_tensors
        # A separate graph that begins with x; `detach` does not copy it.
        with torch.enable_grad():
            x = saved.detach().requires_grad_()
            y = ctx.function(x)
            (dx,) = torch.autograd.grad(y, x, dy)
        return dx, None


def get_activation(config: TransformerConfig) -> Callable[[Tensor], Tensor]:
    """Return the activation function between the projections of an MLP.

    It is the same object for all MLPs: torch before 2.8 compiles again for every object.
    """
    if config.quick_geglu:
        return _get_quick_geglu(config.glu_linear_offset, config.activation_func_clamp_value)
    if config.activation == "swiglu" and not config.bias_swiglu_fusion:
        return _ACTIVATIONS["swiglu, not fused"]
    return _ACTIVATIONS[config.activation]


@functools.cache
def _get_quick_geglu(offset: float, clamp: float | None) -> Callable[[Tensor], Tensor]:
    function = partial(_apply_quick_geglu, offset=offset, clamp=clamp)

    def apply(x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return function(x)
        return _RecomputeFromInput.apply(x, function)

    return apply


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": partial(_apply_gated, name="swiglu"),
    "swiglu, not fused": partial(_apply_gated, name="swiglu, not fused"),
    "geglu": partial(_apply_gated, name="geglu"),
    "squared_relu": _apply_squared_relu,
    "relu": F.relu,
    "gelu (tanh)": _tanh_gelu,
    "gelu (erf)": F.gelu,
}
"""Activation functions by `TransformerConfig.activation`."""
