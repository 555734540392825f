"""The activation function xIELU (--xielu)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from megatron.core.module import Constant, MegatronModule, ParamInfo, make_parameter
from megatron.core.transformer.placement import Placement
from megatron.core.transformer.transformer_config import TransformerConfig

_XIELU_BETA = 0.5


class XIELU(MegatronModule):
    """Activation function with two learned slopes (Huang and Schlag 2024), replicated over TP.

    It is p x^2 + beta x for positive x, and n (e^x - 1 - x) + beta x for others, where
    p = softplus(alpha_p) and n = beta + softplus(alpha_n).
    """

    def __init__(self, config: TransformerConfig, placement: Placement) -> None:
        super().__init__()
        # Each TP rank applies the slopes to its part of the inner width.
        self.alpha_p = self._make_slope(0.8, config, placement)
        self.alpha_n = self._make_slope(0.8 - _XIELU_BETA, config, placement)
        # Constants of the model, stored with it. `eps` bounds x from above where e^x - 1 is used.
        fixed = ParamInfo(Constant(_XIELU_BETA), trained=False)
        self.beta = make_parameter((1,), torch.float32, placement.device, fixed)
        fixed = ParamInfo(Constant(-1e-6), trained=False)
        self.eps = make_parameter((1,), torch.float32, placement.device, fixed)

    @staticmethod
    def _make_slope(value: float, config: TransformerConfig, placement: Placement) -> Parameter:
        """Make the parameter of which softplus is `value`."""
        info = ParamInfo(Constant(math.log(math.expm1(value))), partial_grad=True)
        return make_parameter((1,), config.params_dtype, placement.device, info)

    def forward(self, x: Tensor) -> Tensor:
        beta = self.beta.to(x.dtype)
        eps = self.eps.to(x.dtype)
        positive = F.softplus(self.alpha_p) * x * x
        negative = (torch.expm1(torch.min(x, eps)) - x) * (beta + F.softplus(self.alpha_n))
        return torch.where(x > 0, positive, negative) + beta * x
