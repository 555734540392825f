"""Attention between queries, keys and values: torch's fused kernels, or blocks over context-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.module import MegatronModule
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel import TensorParallelRng, checkpoint
from megatron.core.transformer.attention_kernels import Scoring
from megatron.core.transformer.attention_mask import AttentionMask
from megatron.core.transformer.blockwise_attention import blockwise_attention
from megatron.core.transformer.context_parallel import WHOLE_SEQUENCES, ContextParallel
from megatron.core.transformer.transformer_config import TransformerConfig


class CoreAttention(MegatronModule):
    """Softmax of scores, times values: heads are split over TP, positions over `cp`, which says what is exchanged.

    `scale` multiplies the scores; None means 1 / sqrt(d). `window` is the layer's.
    """

    checkpoint: Callable[..., Any] = staticmethod(checkpoint)

    def __init__(
        self,
        config: TransformerConfig,
        *,
        tp: Axis,
        rng: TensorParallelRng,
        cp: ContextParallel = WHOLE_SEQUENCES,
        scale: float | None = None,
        window: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.config, self.rng, self.cp, self.scale = config, rng, cp, scale
        heads = cp.head_axis
        self.mask = AttentionMask(config, (tp.rank * heads.size + heads.rank, tp.size * heads.size), window)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None) -> Tensor:
        """`[s, b, g, heads, d]` each, of keys and values with 1 for heads; returns `[s, b, g * heads * d]`."""
        if self.config.recomputes("core_attn") and self.training:
            return self.checkpoint(self._attend, self.rng, query, key, value, attention_mask)
        return self._attend(query, key, value, attention_mask)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None) -> Tensor:
        length, batch = query.shape[:2]
        split_over = self.cp.attention_axis
        # [s, b, heads/tp, d] -> [b, heads/tp, s, d], views: the kernels take any strides and answer with the same
        q, k, v = (x.flatten(2, 3).permute(1, 2, 0, 3) for x in (query, key, value))
        dropout = self.config.attention_dropout if self.training else 0.0
        if split_over.size > 1 or self.config.attn_logit_softcapping is not None:
            assert dropout == 0.0, "the kernels that give a log-sum-exp have no dropout on every device"
            scoring = Scoring(self.scale, self.config.attn_logit_softcapping)
            context = blockwise_attention(q, k, v, self.mask, attention_mask, split_over, self.cp.comm_type, scoring)
        elif dropout == 0.0:
            context = self._sdpa(q, k, v, attention_mask, 0.0)
        else:
            with self.rng.fork():
                context = self._sdpa(q, k, v, attention_mask, dropout)
        return context.permute(2, 0, 1, 3).reshape(length, batch, -1)

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, dropout: float) -> Tensor:
        mask = self.mask(q.shape[2], attention_mask, q.dtype, q.device)
        grouped = q.shape[1] > k.shape[1]
        if grouped and not takes_groups(q.device.type, q.dtype, mask is not None):
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
            grouped = False
        return F.scaled_dot_product_attention(
            q, k, v, mask, dropout_p=dropout, is_causal=mask is None, scale=self.scale, enable_gqa=grouped
        )


def takes_groups(device_type: str, dtype: torch.dtype, masked: bool) -> bool:
    """Whether a fused kernel takes fewer key and value heads than query heads.

    On CUDA that is flash attention alone, which has no masks and no fp32. Without it torch would fall back to plain
    matrix products that keep all probabilities; copies of keys and values for every query head cost far less.
    """
    return device_type != "cuda" or (not masked and dtype in (torch.float16, torch.bfloat16))
