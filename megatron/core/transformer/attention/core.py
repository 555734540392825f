"""Core attention: torch's SDPA, its kernels with other arguments, or blocks over CP ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.module import MegatronModule, Normal, ParamInfo, make_parameter
from megatron.core.sharding import Sharding
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.attention.kernels import (
    Block,
    CpuAttention,
    Documents,
    Scoring,
    add_sink,
    attend,
    attend_backward,
    compute_sink_gradient,
    supports_flash,
)
from megatron.core.transformer.attention.masks import AttentionMask
from megatron.core.transformer.placement import Placement
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.wings import resolve

# ---- Attention over whole sequences on one rank ----
#
# Used where torch's SDPA would need a mask of `[s, s]` for each sample or layer, or does not
# support the scores.


def local_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    document_ids: Tensor | None,
    scoring: Scoring,
    sink: Tensor | None = None,
) -> Tensor:
    """Return causal attention within whole sequences, without dropout.

    `query` is `[b, heads, s, d]`, as is the result; `key` and `value` are `[b, groups, s, d]`.
    A token attends to tokens with the same number in `document_ids` `[b, s]`.
    `sink` `[heads]` fp32 is an additional score of every query, with a value of zero.
    """
    documents = None
    if document_ids is not None:
        documents = mask.find_documents(document_ids, query.device)
    block = make_causal_block(query, mask, documents, scoring)
    context: Tensor = _LocalAttention.apply(query, key, value, sink, block, scoring)
    return context


def has_flash_window(query: Tensor, mask: AttentionMask, scoring: Scoring) -> bool:
    """Return whether flash attention applies the window of a layer, without a mask."""
    _, _, _, head_dim = query.shape
    is_window = mask.window is not None and mask.slopes is None
    is_plain = scoring.softcap is None
    return is_window and is_plain and supports_flash(query.device.type, query.dtype, head_dim)


def make_causal_block(
    query: Tensor, mask: AttentionMask, documents: Documents | None, scoring: Scoring
) -> Block:
    """Return the block of all queries `[b, heads, s, d]` and the keys at the same positions."""
    length = query.shape[2]
    all_positions = slice(None)
    if mask.is_causal:
        return Block(all_positions, all_positions, True, None, documents)
    if has_flash_window(query, mask, scoring):
        assert mask.window is not None
        return Block(all_positions, all_positions, True, None, documents, mask.window[0])
    block_mask = mask.make_chunk_mask(length, 0, query.dtype, query.device)
    return Block(all_positions, all_positions, False, block_mask, documents)


class _LocalAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor | None,
        block: Block,
        scoring: Scoring,
    ) -> Tensor:
        # out [b, heads, s, d]; lse [b, heads, s], the log-sum-exp of the scores, for backward
        out, lse = attend(query, key, value, block, scoring)
        if sink is not None:
            # The sink takes a share of each query's probability: it only scales the result.
            out, lse = add_sink(out.float(), lse, sink)
            out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, sink, out, lse)
        ctx.block = block
        ctx.scoring = scoring
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, sink, out, lse = ctx.saved_tensors
        gradients = attend_backward(dout, query, key, value, out, lse, ctx.block, ctx.scoring)
        dsink = None
        if sink is not None:
            dsink = compute_sink_gradient(sink, dout, out, lse)
        return *gradients, dsink, None, None


# ---- Core attention ----

_BLOCKWISE = "megatron.core.transformer.attention.blockwise:blockwise_attention"


class CoreAttention(MegatronModule):
    """Softmax of scores, times values: heads are split over TP, positions over CP.

    With --softmax-type learnable, `softmax_offset` contains the attention sink of each head (Xiao
    et al. 2023; gpt-oss).
    """

    def __init__(
        self,
        config: TransformerConfig,
        placement: Placement,
        *,
        scale: float | None = None,
        window: tuple[int, int] | None = None,
    ) -> None:
        """Initialize with the factor of the scores (default 1 / sqrt(d)) and the layer's window."""
        super().__init__()
        tp = placement.tp
        self.config = config
        self.rng = placement.rng
        self.tp = tp
        self.cp = placement.cp
        self.scale = scale
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            sharding = Sharding(dim=0, axis=tp)
            info = ParamInfo(Normal(config.hidden_init_std), sharding)
            shape = (config.num_attention_heads,)
            self.softmax_offset = make_parameter(shape, config.params_dtype, placement.device, info)

        # Heads are split over TP, and those of a TP rank over CP if it exchanges heads.
        cp_heads = placement.cp.head_axis
        part_index = tp.rank * cp_heads.size + cp_heads.rank
        num_parts = tp.size * cp_heads.size
        self.mask = AttentionMask(config, (part_index, num_parts), window)

    def forward(
        self,
        query: Tensor,  # [s, b, g, heads, d], for g groups
        key: Tensor,  # [s, b, g, 1, d]
        value: Tensor,  # [s, b, g, 1, d]
        documents: Tensor | None,
    ) -> Tensor:
        """Return the context `[s, b, g * heads * d]`."""
        if self.config.recomputes("core_attn") and self.training:
            # Not the backend's checkpoint, which also repeats fp8 quantization: there is none here,
            # and in Transformer Engine every repetition ends with a reduction of the maxima of all
            # modules and advances their histories.
            rng = self.rng if self.config.attention_dropout > 0 else None
            context: Tensor = checkpoint(self._attend, rng, query, key, value, documents)
            return context
        return self._attend(query, key, value, documents)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Tensor | None,
    ) -> Tensor:
        """Compute `forward` without recomputation."""
        length, batch = query.shape[:2]
        # [s, b, g, heads, d] -> [b, g * heads, s, d] as views: the kernels accept any strides, and
        # return the layout of the query.
        q = query.flatten(2, 3).permute(1, 2, 0, 3)
        k = key.flatten(2, 3).permute(1, 2, 0, 3)
        v = value.flatten(2, 3).permute(1, 2, 0, 3)
        dropout = self.config.attention_dropout if self.training else 0.0
        scoring = Scoring(self.scale, self.config.attn_logit_softcapping)
        if self.cp.attention_axis.size > 1:
            assert dropout == 0.0, "kernels that return a log-sum-exp do not support dropout"
            context = attend_over_ranks(
                q,
                k,
                v,
                self.mask,
                documents,
                self.cp.attention_axis,
                self.cp.comm_type,
                scoring,
                self._make_sink(q),
            )
        elif self._uses_local_attention(q, documents, dropout, scoring):
            context = local_attention(q, k, v, self.mask, documents, scoring, self._make_sink(q))
        elif dropout == 0.0:
            context = self._run_sdpa(q, k, v, documents, 0.0)
        else:
            # Each TP rank drops different elements, because it has different heads.
            with self.rng.fork():
                context = self._run_sdpa(q, k, v, documents, dropout)
        # [b, g * heads, s, d] -> [s, b, g * heads * d]
        return context.permute(2, 0, 1, 3).reshape(length, batch, -1)

    def _uses_local_attention(
        self, query: Tensor, documents: Tensor | None, dropout: float, scoring: Scoring
    ) -> bool:
        """Return whether `local_attention` computes the context instead of SDPA."""
        if self.config.attends_in_blocks:
            assert dropout == 0.0, "kernels that return a log-sum-exp do not support dropout"
            return True
        if dropout:
            return False
        # Without a mask of `[s, s]` for each sample or layer
        return documents is not None or has_flash_window(query, self.mask, scoring)

    def _make_sink(self, query: Tensor) -> Tensor | None:
        """Return the sinks of this rank's heads in fp32, if the model has any."""
        if self.config.softmax_type == "vanilla":
            return None
        if self.softmax_offset is None:
            # --softmax-type off-by-one: a sink with a fixed score of zero.
            num_heads = query.shape[1]
            return query.new_zeros(num_heads, dtype=torch.float32)
        # The parameter is split over TP; an exchange of heads over CP splits it further.
        cp_heads = self.cp.head_axis
        offset_shards = self.softmax_offset.float().chunk(cp_heads.size)
        return offset_shards[cp_heads.rank]

    def _run_sdpa(
        self,
        q: Tensor,  # [b, heads, s, d]
        k: Tensor,  # [b, groups, s, d]
        v: Tensor,  # [b, groups, s, d]
        documents: Tensor | None,
        dropout: float,
    ) -> Tensor:
        """Return `[b, heads, s, d]` from a single call of a fused kernel."""
        _, num_heads, length, _ = q.shape
        num_key_heads = k.shape[1]
        device_type = q.device.type
        mask = self.mask(length, documents, q.dtype, q.device)
        # In half precision on a CPU, only this function runs the backward pass in fp32.
        is_half_on_cpu = device_type == "cpu" and q.dtype != torch.float32
        if is_half_on_cpu and not dropout:
            context: Tensor = CpuAttention.apply(q, k, v, mask, self.scale)
            return context
        # Copy keys and values only for kernels that cannot share them between heads.
        is_grouped = num_heads > num_key_heads
        if is_grouped and not supports_grouped_heads(device_type, q.dtype, mask is not None):
            copies = num_heads // num_key_heads
            k = k.repeat_interleave(copies, dim=1)
            v = v.repeat_interleave(copies, dim=1)
            is_grouped = False
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=is_grouped,
        )


def attend_over_ranks(*arguments: Any) -> Tensor:
    """Return `blockwise_attention(*arguments)`: attention over CP ranks, imported on demand."""
    context: Tensor = resolve(_BLOCKWISE)(*arguments)
    return context


def supports_grouped_heads(device_type: str, dtype: torch.dtype, is_masked: bool) -> bool:
    """Return whether a fused kernel supports fewer key and value heads than query heads.

    On CUDA flash attention does, which supports neither masks nor fp32. cuDNN also supports masks,
    but not on every GPU. Without both torch would fall back to plain matrix products that keep all
    probabilities; copying keys and values for every query head costs far less.
    """
    if device_type != "cuda":
        return True
    return not is_masked and dtype in (torch.float16, torch.bfloat16)
