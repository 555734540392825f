"""LayerNorm and RMSNorm over the last dimension, alone and in front of a projection."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.apex import import_apex
from megatron.core.module import Constant, MegatronModule, ParamInfo, make_parameter
from megatron.core.parallel_state import Axis
from megatron.core.sharding import REPLICATED, Sharding
from megatron.core.tensor_parallel import ColumnParallelLinear, recompute_intermediate
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_parallel,
    reduce_from_tensor_parallel,
)
from megatron.core.transformer.transformer_config import TransformerConfig


class Norm(MegatronModule):
    """Weight and bias are replicated over TP; `partial_grad` where each TP rank normalizes other
    elements.
    """

    def __init__(
        self,
        config: TransformerConfig,
        size: int,
        *,
        partial_grad: bool,
        sharding: Sharding = REPLICATED,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.normalize = Normalization.from_config(config)
        self.weight, self.bias = norm_parameters(config, size, partial_grad, device, sharding)

    def forward(self, x: Tensor) -> Tensor:
        return self.normalize(x, self.weight, self.bias)


class NormAcrossHeads(Norm):
    """RMSNorm over the elements of all heads, which are split over TP."""

    def __init__(
        self, config: TransformerConfig, heads: int, tp: Axis, device: torch.device | None
    ) -> None:
        self.size = heads * config.head_dim
        sharding = Sharding(dim=0, axis=tp)
        super().__init__(config, self.size, partial_grad=False, sharding=sharding, device=device)
        self.tp = tp

    def forward(self, x: Tensor) -> Tensor:
        """`[s, b, groups/tp, heads, d]`."""
        wide = x.float()
        weight = self.weight.float().view(x.shape[2:])
        squares = reduce_from_tensor_parallel(wide.square().sum((2, 3, 4), keepdim=True), self.tp)
        scale = torch.rsqrt(
            copy_to_tensor_parallel(squares, self.tp) / self.size + self.normalize.epsilon
        )
        return (wide * scale * (weight + 1.0 if self.normalize.from_one else weight)).to(x.dtype)


class NormColumnParallelLinear(ColumnParallelLinear):
    """A column-parallel layer of its normalized input; the norm's parameters belong to it, as on
    disk.

    With --recompute-modules layernorm the normalized input is computed again in the backward pass.
    """

    def __init__(
        self,
        config: TransformerConfig,
        input_size: int,
        output_size: int,
        *,
        sequence_parallel: bool = False,
        device: torch.device | None = None,
        **options: Any,
    ) -> None:
        """`options`: those of `ColumnParallelLinear`."""
        common: dict[str, Any] = {"sequence_parallel": sequence_parallel, "device": device}
        super().__init__(input_size, output_size, dtype=config.params_dtype, **common, **options)
        self.normalize = Normalization.from_config(config)
        self.recompute = config.recomputes("layernorm")
        self.layer_norm_weight, self.layer_norm_bias = norm_parameters(
            config, input_size, sequence_parallel, device
        )
        # The projection's come behind the norm's, as in Transformer Engine: legacy files have that
        # order.
        for name in [name for name in self._parameters if not name.startswith("layer_norm_")]:
            self._parameters[name] = self._parameters.pop(name)

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute and self.training:
            return recompute_intermediate(self._normed, self.project, x)
        return self.project(self._normed(x))

    def _normed(self, x: Tensor) -> Tensor:
        return self.normalize(x, self.layer_norm_weight, self.layer_norm_bias)


@dataclass(frozen=True)
class Normalization:
    """How a norm computes."""

    rms: bool
    epsilon: float
    from_one: bool  # the weight is stored as its difference from 1
    apex: Any = None  # the module with apex's kernels

    @classmethod
    def from_config(cls, config: TransformerConfig) -> Normalization:
        apex = (
            _apex() if config.norm_impl == "apex" and config.transformer_impl == "local" else None
        )
        return _shared(
            config.normalization == "RMSNorm", config.norm_epsilon, config.apply_layernorm_1p, apex
        )

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self.from_one:
            return self._normalized(x, weight, bias)
        bias = None if bias is None else bias.float()
        return self._normalized(x.float(), weight.float() + 1.0, bias).to(
            x.dtype
        )  # bf16 would round 1 + weight

    def _normalized(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.rms and torch.compiler.is_compiling():
            return F.rms_norm(x, weight.shape, weight, self.epsilon)  # fused with its neighbours
        if self.apex is not None and not torch.compiler.is_compiling():
            values, fused = ((x, weight), "rms") if bias is None else ((x, weight, bias), "layer")
            normed: Tensor = getattr(self.apex, f"fused_{fused}_norm_affine")(
                *values, weight.shape, self.epsilon
            )
            return normed
        if self.rms:
            return _RMSNorm.apply(x, weight, self.epsilon)
        return F.layer_norm(x, weight.shape, weight, bias, self.epsilon)


@cache
def _shared(*fields: Any) -> Normalization:
    """One for all layers: torch before 2.8 compiles anew for every object."""
    return Normalization(*fields)


def _apex() -> Any:
    import_apex(
        "fused_layer_norm_cuda", "--norm-impl"
    )  # which the other one imports only when it is called
    return import_apex("apex.normalization.fused_layer_norm", "--norm-impl")


def norm_parameters(
    config: TransformerConfig,
    size: int,
    partial_grad: bool,
    device: torch.device | None,
    sharding: Sharding = REPLICATED,
) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Make the weight and the bias of a norm; RMSNorm has no bias."""
    one = Constant(0.0 if config.apply_layernorm_1p else 1.0)
    weight_info = ParamInfo(one, sharding, partial_grad=partial_grad)
    weight = make_parameter((size,), config.params_dtype, device, weight_info)
    if config.normalization == "RMSNorm":
        return weight, None
    bias_info = ParamInfo(Constant(0.0), sharding, partial_grad=partial_grad)
    return weight, make_parameter((size,), config.params_dtype, device, bias_info)


class _RMSNorm(torch.autograd.Function):
    """y = x / rms(x) * w (Zhang and Sennrich 2019), in fp32 inside; keeps x and 1 / rms.

    On a CPU torch composes its own of a dozen passes each way; this takes half of them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.rsqrt(norm.square() / x.shape[-1] + epsilon)  # 1 / rms, [..., 1]
        ctx.save_for_backward(x, weight, scale)
        if x.dtype == torch.float32:
            return (x * scale).mul_(weight)
        return torch.mul(x * scale, weight, out=torch.empty_like(x))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        size = x.shape[-1]
        normalized = x * scale  # fp32
        dy_normalized = dy * normalized
        dw = dy_normalized.reshape(-1, size).sum(0)
        mean = (dy_normalized @ weight.float()).unsqueeze(-1) / size
        dx = (dy * weight).float().sub_(normalized.mul_(mean)).mul_(scale)
        return dx.to(x.dtype), dw.to(weight.dtype), None
