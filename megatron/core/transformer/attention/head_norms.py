"""Norms of queries and keys whose weights, or the norms themselves, involve all heads."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.parallel_state import Axis
from megatron.core.sharding import Sharding
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_parallel,
    reduce_from_tensor_parallel,
)
from megatron.core.transformer.norm import Norm
from megatron.core.transformer.transformer_config import TransformerConfig


class NormPerHead(Norm):
    """Norm of each head, which has weights of its own; heads are split over TP."""

    def __init__(
        self, config: TransformerConfig, heads: int, tp: Axis, device: torch.device | None
    ) -> None:
        self.size = heads * config.head_dim
        sharding = Sharding(dim=0, axis=tp)
        super().__init__(config, self.size, partial_grad=False, sharding=sharding, device=device)
        self.tp = tp

    def forward(self, x: Tensor) -> Tensor:
        """Normalize each head of `[s, b, groups/tp, heads, d]`."""
        normalized = self.normalize(x.float(), None, None)
        return self.apply_weights(normalized).to(x.dtype)

    def apply_weights(self, normalized: Tensor) -> Tensor:
        """Return `normalized * w + b` for fp32 `[s, b, groups/tp, heads, d]`."""
        shape = normalized.shape[2:]
        if self.weight is not None:
            weight = self.weight.float().view(shape)
            if self.normalize.zero_centered:
                weight = weight + 1.0
            normalized = normalized * weight
        if self.bias is not None:
            normalized = normalized + self.bias.float().view(shape)
        return normalized


class NormAcrossHeads(NormPerHead):
    """RMSNorm over the elements of all heads, which are split over TP."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `[s, b, groups/tp, heads, d]`. Collective over TP."""
        # Squares of bf16 or fp16 would lose precision, or overflow.
        wide = x.float()
        local_squares = wide.square().sum((2, 3, 4), keepdim=True)  # [s, b, 1, 1, 1]
        # Each rank normalizes its own heads by the common mean, so that its gradient is a sum.
        squares = reduce_from_tensor_parallel(local_squares, self.tp)
        mean = copy_to_tensor_parallel(squares, self.tp) / self.size
        scale = torch.rsqrt(mean + self.normalize.epsilon)
        return self.apply_weights(wide * scale).to(x.dtype)
