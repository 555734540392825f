"""LayerNorm and RMSNorm over the last dimension, alone and combined with a projection."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.fused_kernels import MAX_NORM_SIZE, find_kernel
from megatron.core.module import Constant, MegatronModule, ParamInfo, make_parameter
from megatron.core.private_operators import HAS_FUSED_RMS_NORM
from megatron.core.sharding import REPLICATED, Sharding
from megatron.core.tensor_parallel import ColumnParallelLinear, recompute_intermediate
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.wings import resolve

_IMPORT_APEX_NORMS = "megatron.core.apex:import_apex_norms"


class Norm(MegatronModule):
    """`(x - mean) / std * w + b`, or `x / rms * w`: w and b are replicated over TP by default.

    With --no-norm-weights it has neither.

    `partial_grad`: each TP rank normalizes other elements, so gradients are summed over TP.
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
        self.weight, self.bias = make_norm_parameters(config, size, partial_grad, device, sharding)

    def forward(self, x: Tensor) -> Tensor:
        return self.normalize(x, self.weight, self.bias)

    def add_and_normalize(
        self, hidden: Tensor, branch: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        """See `Normalization.add_and_normalize`."""
        return self.normalize.add_and_normalize(hidden, branch, self.weight, self.bias)


class NormColumnParallelLinear(ColumnParallelLinear):
    """`Y = norm(X) W^T + b`: column-parallel, with the norm of its input stored next to W.

    With --recompute-modules layernorm the backward pass recomputes the normalized input.
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
        """`options` are those of `ColumnParallelLinear`."""
        super().__init__(
            input_size,
            output_size,
            sequence_parallel=sequence_parallel,
            dtype=config.params_dtype,
            device=device,
            **options,
        )
        self.normalize = Normalization.from_config(config)
        self.recompute = config.recomputes("layernorm")
        self.layer_norm_weight, self.layer_norm_bias = make_norm_parameters(
            config, input_size, sequence_parallel, device
        )
        # Move the parameters of the projection after those of the norm: legacy files have the order
        # of Transformer Engine.
        for name in list(self._parameters):
            if not name.startswith("layer_norm_"):
                self._parameters[name] = self._parameters.pop(name)

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute and self.training:
            return recompute_intermediate(self._normalize_input, self.project, x)
        return self.project(self._normalize_input(x))

    def add_and_normalize(
        self, hidden: Tensor, branch: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        """See `Normalization.add_and_normalize`; `project` accepts the result."""
        weight = self.layer_norm_weight
        return self.normalize.add_and_normalize(hidden, branch, weight, self.layer_norm_bias)

    def _normalize_input(self, x: Tensor) -> Tensor:
        return self.normalize(x, self.layer_norm_weight, self.layer_norm_bias)


@dataclass(frozen=True)
class Normalization:
    """The computation of a norm."""

    rms: bool
    epsilon: float
    zero_centered: bool
    """The weight is stored as w - 1."""
    apex: Any = None
    """The module of apex's kernels, if enabled."""
    has_kernel: bool = False
    """Whether a Triton kernel may compute the norm together with the residual sum before it."""

    @classmethod
    def from_config(cls, config: TransformerConfig) -> Normalization:
        # Transformer Engine has norms of its own.
        apex = None
        if config.norm_impl == "apex" and config.transformer_impl == "local":
            apex = resolve(_IMPORT_APEX_NORMS)()
        is_rms = config.normalization == "RMSNorm"
        has_kernel = config.bias_dropout_fusion and apex is None
        zero_centered = config.apply_layernorm_1p
        return _get_shared(is_rms, config.norm_epsilon, zero_centered, apex, has_kernel)

    def __call__(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if weight is None or not self.zero_centered:
            return self._normalize(x, weight, bias)
        # In fp32, since bf16 would round 1 + weight.
        wide_weight = weight.float() + 1.0
        if bias is not None:
            bias = bias.float()
        return self._normalize(x.float(), wide_weight, bias).to(x.dtype)

    def _normalize(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        shape = x.shape[-1:]
        is_compiling = torch.compiler.is_compiling()
        if self.rms and is_compiling:
            return F.rms_norm(x, shape, weight, self.epsilon)  # fused with its neighbors
        if self.apex is not None and weight is not None and not is_compiling:
            return self._run_apex(x, weight, bias)
        if self.rms and _has_fused_rms_norm(x, weight):
            return F.rms_norm(x, shape, weight, self.epsilon)
        if self.rms:
            return _RMSNorm.apply(x, weight, self.epsilon)
        return F.layer_norm(x, shape, weight, bias, self.epsilon)

    def add_and_normalize(
        self, hidden: Tensor, branch: Tensor | None, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        """Return `hidden + branch` and its norm from one kernel, or None without a kernel.

        The gradients of both are added in the kernel of the backward pass, also without a `branch`.
        """
        if not self.has_kernel or hidden.shape[-1] > MAX_NORM_SIZE:
            return None
        kernel = find_kernel("residual_norm", hidden)
        if kernel is None:
            return None
        return kernel(  # type: ignore[no-any-return]
            hidden, branch, weight, bias, self.epsilon, self.rms, self.zero_centered
        )

    def _run_apex(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        normed: Tensor
        if bias is None:
            normed = self.apex.fused_rms_norm_affine(x, weight, weight.shape, self.epsilon)
        else:
            normed = self.apex.fused_layer_norm_affine(x, weight, bias, weight.shape, self.epsilon)
        return normed


def _has_fused_rms_norm(x: Tensor, weight: Tensor | None) -> bool:
    """Return whether torch computes an RMSNorm in one kernel for each direction.

    Otherwise it takes more kernels, and keeps more tensors, than `_RMSNorm`.
    """
    has_one_dtype = weight is None or x.dtype == weight.dtype
    return x.is_cuda and has_one_dtype and HAS_FUSED_RMS_NORM


@cache
def _get_shared(*fields: Any) -> Normalization:
    """Return one object for all layers: torch before 2.8 compiles again for every object."""
    return Normalization(*fields)


def make_norm_parameters(
    config: TransformerConfig,
    size: int,
    partial_grad: bool,
    device: torch.device | None,
    sharding: Sharding = REPLICATED,
) -> tuple[nn.Parameter | None, nn.Parameter | None]:
    """Make the weight and the bias of a norm; RMSNorm does not have a bias."""
    if not config.norm_weights:
        return None, None
    # The initial weight is 1, which is stored as 0 if it is zero-centered.
    one = Constant(0.0 if config.apply_layernorm_1p else 1.0)
    weight_info = ParamInfo(one, sharding, partial_grad=partial_grad)
    weight = make_parameter((size,), config.params_dtype, device, weight_info)
    if config.normalization == "RMSNorm":
        return weight, None
    bias_info = ParamInfo(Constant(0.0), sharding, partial_grad=partial_grad)
    bias = make_parameter((size,), config.params_dtype, device, bias_info)
    return weight, bias


class _RMSNorm(torch.autograd.Function):
    """y = x / rms(x) * w (Zhang and Sennrich 2019), computed in fp32; keeps x and 1 / rms.

    Without a weight w is 1. On a CPU torch's implementation makes a dozen passes over the data in
    each direction; this one makes half as many.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
        size = x.shape[-1]
        # The sum of the squares in fp32, without an fp32 copy of x
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.rsqrt(norm.square() / size + epsilon)  # 1 / rms, [..., 1]
        ctx.save_for_backward(x, weight, scale)
        if weight is None:
            return (x * scale).to(x.dtype)
        if x.dtype == torch.float32:
            return (x * scale).mul_(weight)
        return torch.mul(x * scale, weight, out=torch.empty_like(x))

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, dy: Tensor
    ) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        size = x.shape[-1]
        normalized = x * scale  # fp32
        dy_normalized = dy * normalized
        # dx = (dy * w - normalized * mean(dy * w * normalized)) / rms
        if weight is None:
            dw = None
            mean = dy_normalized.mean(-1, keepdim=True)
            scaled = dy.to(torch.float32, copy=True)  # changed in place below
        else:
            dw = dy_normalized.reshape(-1, size).sum(0).to(weight.dtype)
            mean = (dy_normalized @ weight.float()).unsqueeze(-1) / size
            scaled = (dy * weight).float()
        dx = scaled.sub_(normalized.mul_(mean)).mul_(scale)
        return dx.to(x.dtype), dw, None
