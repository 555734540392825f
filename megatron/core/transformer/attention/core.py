"""Attention between queries, keys and values: torch's fused kernels, or blocks over
context-parallel ranks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.module import MegatronModule, Normal, ParamInfo, make_parameter
from megatron.core.sharding import Sharding
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.attention.blockwise import AttentionMask, blockwise_attention
from megatron.core.transformer.attention.kernels import CpuAttention, Scoring
from megatron.core.transformer.placement import Placement
from megatron.core.transformer.transformer_config import TransformerConfig


class CoreAttention(MegatronModule):
    """Softmax of scores, times values: heads are split over TP, positions over CP, which says what
    is exchanged.

    `scale` multiplies the scores; None means 1 / sqrt(d). `window` is the layer's. With --softmax-type learnable,
    `softmax_offset` has the attention sink of every head (Xiao et al. 2023; gpt-oss).
    """

    def __init__(
        self,
        config: TransformerConfig,
        place: Placement,
        *,
        scale: float | None = None,
        window: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        tp = place.tp
        heads = place.cp.head_axis
        self.config = config
        self.rng = place.rng
        self.tp = tp
        self.cp = place.cp
        self.scale = scale
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            info = ParamInfo(Normal(config.init_method_std), Sharding(dim=0, axis=tp))
            shape = (config.num_attention_heads,)
            self.softmax_offset = make_parameter(shape, config.params_dtype, place.device, info)
        self.mask = AttentionMask(
            config, (tp.rank * heads.size + heads.rank, tp.size * heads.size), window
        )

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None
    ) -> Tensor:
        """`[s, b, g, heads, d]` each, of keys and values with 1 for heads; returns `[s, b, g * heads * d]`."""
        if self.config.recomputes("core_attn") and self.training:
            # Not by the backend's, which repeats fp8, too: there is none here, and every repetition
            # in Transformer Engine ends in a reduction of the maxima of all modules, and moves
            # their histories on.
            context: Tensor = checkpoint(self._attend, self.rng, query, key, value, documents)
            return context
        return self._attend(query, key, value, documents)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None
    ) -> Tensor:
        length, batch = query.shape[:2]
        split_over = self.cp.attention_axis
        # [s, b, heads/tp, d] -> [b, heads/tp, s, d], views: the kernels take any strides and answer
        # with the same
        q, k, v = (x.flatten(2, 3).permute(1, 2, 0, 3) for x in (query, key, value))
        dropout = self.config.attention_dropout if self.training else 0.0
        one_by_one = documents is not None and not dropout  # no mask of all positions by all
        if split_over.size > 1 or self.config.attends_in_blocks or one_by_one:
            assert dropout == 0.0, (
                "the kernels that give a log-sum-exp have no dropout on every device"
            )
            how = Scoring(self.scale, self.config.attn_logit_softcapping), self._sink(q)
            context = blockwise_attention(
                q, k, v, self.mask, documents, split_over, self.cp.comm_type, *how
            )
        elif dropout == 0.0:
            context = self._sdpa(q, k, v, documents, 0.0)
        else:
            with self.rng.fork():
                context = self._sdpa(q, k, v, documents, dropout)
        return context.permute(2, 0, 1, 3).reshape(length, batch, -1)

    def _sink(self, query: Tensor) -> Tensor | None:
        """The sinks of the heads here, fp32."""
        if self.config.softmax_type == "vanilla":
            return None
        heads = self.cp.head_axis
        if self.softmax_offset is None:
            return query.new_zeros(query.shape[1], dtype=torch.float32)
        return self.softmax_offset.float().chunk(heads.size)[heads.rank]

    def _sdpa(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, dropout: float
    ) -> Tensor:
        mask = self.mask(q.shape[2], documents, q.dtype, q.device)
        if q.device.type == "cpu" and q.dtype != torch.float32 and not dropout:
            context: Tensor = CpuAttention.apply(q, k, v, mask, self.scale)
            return context
        grouped = q.shape[1] > k.shape[1]
        if grouped and not supports_grouped_heads(q.device.type, q.dtype, mask is not None):
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
            grouped = False
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=grouped,
        )


def supports_grouped_heads(device_type: str, dtype: torch.dtype, masked: bool) -> bool:
    """Whether a fused kernel takes fewer key and value heads than query heads.

    On CUDA that is flash attention alone, which has no masks and no fp32. Without it torch would
    fall back to plain matrix products that keep all probabilities; copies of keys and values for
    every query head cost far less.
    """
    return device_type != "cuda" or (not masked and dtype in (torch.float16, torch.bfloat16))
