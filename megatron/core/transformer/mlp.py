"""The MLP of a transformer layer, with the norm in front of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.module import MegatronModule, Normal
from megatron.core.parallel_state import Axis
from megatron.core.transformer.layer_spec import layer_spec, output_norm
from megatron.core.transformer.transformer_config import TransformerConfig


class MLP(MegatronModule):
    """Norm and MLP. The inner width is split over TP; a gated MLP stacks gate and up in a matrix, and splits each."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        tp: Axis,
        sequence_parallel: bool = False,
        device: torch.device | None = None,
        ffn_size: int | None = None,
        shared_expert: bool = False,
    ) -> None:
        """A `shared_expert` has an input that is normalized already."""
        super().__init__()
        spec = layer_spec(config)
        ffn_size = ffn_size or config.ffn_size
        self.activation = ACTIVATIONS[config.activation]
        num_blocks = 2 if config.gated else 1
        normed = not shared_expert and config.norm_placement != "post"
        column = partial(spec.norm_column, config) if normed else partial(spec.column, dtype=config.params_dtype)
        self.linear_fc1 = column(
            config.hidden_size,
            num_blocks * ffn_size,
            init=Normal(config.init_method_std),
            tp=tp,
            sequence_parallel=sequence_parallel,
            bias=config.add_bias_linear,
            num_blocks=num_blocks,
            device=device,
        )
        self.linear_fc2 = spec.row(
            ffn_size,
            config.hidden_size,
            init=Normal(config.output_init_std),
            tp=tp,
            sequence_parallel=sequence_parallel,
            bias=config.add_bias_linear,
            output_norm=None if shared_expert else output_norm(config, sequence_parallel, device),
            dtype=config.params_dtype,
            device=device,
        )

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
_GATES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[..., Tensor]]] = {  # the activation and its gradient
    "swiglu": (F.silu, torch.ops.aten.silu_backward.grad_input),
    "geglu": (_tanh_gelu, partial(torch.ops.aten.gelu_backward.grad_input, approximate="tanh")),
}


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _quick_geglu(x: Tensor) -> Tensor:
    """quick_gelu(gate) * up of `[..., gate; up]` (Hendrycks and Gimpel 2016 for the approximation)."""
    gate, up = x.chunk(2, -1)
    return gate * torch.sigmoid(1.702 * gate) * up


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": partial(_gated, name="swiglu"),
    "geglu": partial(_gated, name="geglu"),
    "quick_geglu": _quick_geglu,
    "squared_relu": _squared_relu,
    "gelu (tanh)": _tanh_gelu,
    "gelu (erf)": F.gelu,
}
