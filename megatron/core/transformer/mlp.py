"""The MLP of a transformer layer, with the norm in front of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.module import MegatronModule
from megatron.core.transformer.backends import select_layer_spec
from megatron.core.transformer.placement import Placement
from megatron.core.transformer.transformer_config import TransformerConfig


class MLP(MegatronModule):
    """Norm and MLP. The inner width is split over TP; a gated MLP stacks gate and up in a matrix,
    and splits each.
    """

    def __init__(
        self,
        config: TransformerConfig,
        place: Placement,
        *,
        ffn_size: int | None = None,
        shared_expert: bool = False,
    ) -> None:
        """A `shared_expert` has an input that is normalized already."""
        super().__init__()
        spec = select_layer_spec(config)
        blocks = 2 if config.gated else 1
        ffn_size = ffn_size or config.ffn_size
        self.activation = get_activation(config)
        self.linear_fc1 = spec.projection_in(
            config,
            place,
            config.hidden_size,
            blocks * ffn_size,
            bias=config.add_bias_linear,
            normed=not shared_expert and config.norm_placement != "post",
            num_blocks=blocks,
        )
        self.linear_fc2 = spec.projection_out(config, place, ffn_size, normed=not shared_expert)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[s, b, h]` (or `[s/tp, b, h]`) to the same."""
        inner = self.linear_fc1(hidden_states)  # [s, b, ffn/tp], twice that when gated
        return self.linear_fc2(self.activation(inner))


def _gated(x: Tensor, name: str) -> Tensor:
    """activation(gate) * up of `[..., gate; up]` (Shazeer 2020)."""
    if torch.compiler.is_compiling():
        gate, up = x.chunk(2, -1)
        return _GATES[name][0](gate) * up
    return _Gated.apply(x, name)


class _Gated(torch.autograd.Function):
    """Keeps the input alone, and writes both gradients into one tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.name = name
        gate, up = x.chunk(2, -1)
        return _GATES[name][0](gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (x,), (activation, gradient) = ctx.saved_tensors, _GATES[ctx.name]
        gate, up = x.chunk(2, -1)
        dx = torch.empty_like(x)
        dgate, dup = dx.chunk(2, -1)
        torch.mul(dy, activation(gate), out=dup)
        gradient(dy * up, gate, grad_input=dgate)
        return dx, None


_tanh_gelu = partial(F.gelu, approximate="tanh")
_GATES: dict[
    str, tuple[Callable[[Tensor], Tensor], Callable[..., Tensor]]
] = {  # the activation and its gradient
    "swiglu": (F.silu, torch.ops.aten.silu_backward.grad_input),
    "geglu": (_tanh_gelu, partial(torch.ops.aten.gelu_backward.grad_input, approximate="tanh")),
}


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _quick_geglu(x: Tensor, offset: float, clamp: float | None) -> Tensor:
    """quick_gelu(gate) * (up + offset) of `[..., gate; up]` (Hendrycks and Gimpel 2016 for the
    approximation).
    """
    gate, up = x.chunk(2, -1)
    if clamp is not None:
        gate = gate.clamp(max=clamp)
        up = up.clamp(-clamp, clamp)
    return gate * torch.sigmoid(1.702 * gate) * (up + offset)


class _KeepsInput(torch.autograd.Function):
    """`function(x)`, all of it computed again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.function = function
        return function(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            return torch.autograd.grad(ctx.function(x), x, dy)[0], None


def get_activation(config: TransformerConfig) -> Callable[[Tensor], Tensor]:
    """What the MLPs of a model compute between their matrices; one object for all of them (see
    `TransformerLayer`).
    """
    if not config.quick_geglu:
        return _ACTIVATIONS[config.activation]
    return _quick_geglu_of(config.glu_linear_offset, config.activation_func_clamp_value)


@functools.cache
def _quick_geglu_of(offset: float, clamp: float | None) -> Callable[[Tensor], Tensor]:
    function = partial(_quick_geglu, offset=offset, clamp=clamp)
    return lambda x: (
        function(x) if torch.compiler.is_compiling() else _KeepsInput.apply(x, function)
    )


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": partial(_gated, name="swiglu"),
    "geglu": partial(_gated, name="geglu"),
    "squared_relu": _squared_relu,
    "gelu (tanh)": _tanh_gelu,
    "gelu (erf)": F.gelu,
}
