"""LayerNorm and RMSNorm over the last dimension."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.module import Constant, MegatronModule, ParamInfo, make_parameter
from megatron.core.transformer.transformer_config import TransformerConfig


class Norm(MegatronModule):
    """Weight and bias are replicated over TP; `partial_grad` where each TP rank normalizes other elements."""

    def __init__(
        self, config: TransformerConfig, size: int, *, partial_grad: bool, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.rms, self.epsilon = config.normalization == "RMSNorm", config.norm_epsilon
        self.from_one = config.apply_layernorm_1p  # the weight is stored as its difference from 1
        ones, zeros = (ParamInfo(Constant(value), partial_grad=partial_grad) for value in (1.0, 0.0))
        ones = zeros if self.from_one else ones
        self.weight = make_parameter((size,), config.params_dtype, device, ones)
        self.bias = None if self.rms else make_parameter((size,), config.params_dtype, device, zeros)

    def forward(self, x: Tensor) -> Tensor:
        if not self.from_one:
            return self._normalized(x, self.weight, self.bias)
        bias = None if self.bias is None else self.bias.float()
        return self._normalized(x.float(), self.weight.float() + 1.0, bias).to(x.dtype)  # bf16 would round 1 + weight

    def _normalized(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.rms and torch.compiler.is_compiling():
            return F.rms_norm(x, weight.shape, weight, self.epsilon)  # fused with its neighbours
        if self.rms:
            return _RMSNorm.apply(x, weight, self.epsilon)
        return F.layer_norm(x, weight.shape, weight, bias, self.epsilon)


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
