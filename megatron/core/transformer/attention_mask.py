"""What each query may see: causal order, a sliding window, documents, and ALiBi's distances."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron.core.parallel_state import Axis
from megatron.core.transformer.transformer_config import TransformerConfig


def alibi_slopes(num_heads: int) -> Tensor:
    """Slope of every head (Press et al. 2022): powers of 2^(-8/n), with every other of 2n's when n is no power of 2."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = 2.0 ** (-8.0 / power * torch.arange(1, power + 1, dtype=torch.float64))
    extra = 2.0 ** (-4.0 / power * torch.arange(1, 2 * (num_heads - power) + 1, 2, dtype=torch.float64))
    return torch.cat((slopes, extra)).float()


class AttentionMask:
    """The `attn_mask` of scaled_dot_product_attention; None means plain causal order, which needs no mask at all."""

    def __init__(self, config: TransformerConfig, tp: Axis) -> None:
        self.window = config.window_size
        self.slopes = None
        if config.position_embedding_type == "alibi":
            per_rank = config.num_attention_heads // tp.size
            self.slopes = alibi_slopes(config.num_attention_heads)[tp.rank * per_rank : (tp.rank + 1) * per_rank]
        self._kept: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}

    def __call__(self, length: int, masked: Tensor | None, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """`masked` is `[b, 1, s, s]`, True where attention is forbidden (it includes causal order), or None.

        Returns a bool mask (True: visible) or an additive one in `dtype`, broadcastable to `[b, heads, s, s]`.
        """
        if masked is None and self.window is None and self.slopes is None:
            return None
        key = (length, dtype, device)
        if key not in self._kept:
            self._kept[key] = self._fixed(length, dtype).to(device)
        fixed = self._kept[key]
        if masked is None:
            return fixed
        return fixed & ~masked if fixed.dtype == torch.bool else fixed.masked_fill(masked, -torch.inf)

    def _fixed(self, length: int, dtype: torch.dtype) -> Tensor:
        """The part that does not depend on the data."""
        distance = torch.arange(length).unsqueeze(1) - torch.arange(length)  # query - key
        visible = distance >= 0
        if self.window is not None:
            visible &= distance <= self.window[0]
        if self.slopes is None:
            return visible
        # [1, heads/tp, s, s]: with fewer dimensions attention falls back to a kernel that keeps all probabilities
        bias = self.slopes.view(1, -1, 1, 1) * -distance.float()
        return bias.masked_fill(~visible, -torch.inf).to(dtype)
