"""Attention over whole sequences on one rank, where torch's SDPA would need a mask of `[s, s]` for
each sample or layer, or does not support the scores.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.core.transformer.attention.kernels import (
    Block,
    Documents,
    Scoring,
    add_sink,
    attend,
    attend_backward,
    compute_sink_gradient,
    supports_flash,
)
from megatron.core.transformer.attention.masks import AttentionMask


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
