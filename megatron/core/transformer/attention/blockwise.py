"""Attention over a sequence that is split over ranks, one block of keys at a time.

A block contains the keys of one rank. It yields its output and the log-sum-exp of its scores, from
which blocks are merged into exact attention (Liu et al. 2023, "Ring Attention with Blockwise
Transformers"; Dao et al. 2022). The local keys come first, while those of other ranks are in
transit. No data of other ranks is kept for the backward pass: keys and values are exchanged again,
and their gradients return in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.core.parallel_state import Axis
from megatron.core.transformer.attention.exchange import EXCHANGES, Exchange
from megatron.core.transformer.attention.kernels import (
    Block,
    Scoring,
    add_sink,
    attend,
    attend_backward,
    compute_sink_gradient,
)
from megatron.core.transformer.attention.masks import AttentionMask


def blockwise_attention(
    query: Tensor,  # [b, heads, s/cp, d]
    key: Tensor,  # [b, groups, s/cp, d]
    value: Tensor,  # [b, groups, s/cp, d]
    mask: AttentionMask,
    documents: Tensor | None,  # [b, s]
    cp: Axis,
    comm_type: str,
    scoring: Scoring,
    sink: Tensor | None = None,  # [heads] fp32
) -> Tensor:
    """Return causal attention of the local queries to the keys of all ranks of `cp`.

    The result is `[b, heads, s/cp, d]`. A token attends to tokens with the same number in
    `documents`, which are of whole sequences. `sink` is an additional score of every query, with a
    value of zero.
    """
    exchange = EXCHANGES[comm_type]
    key_value = torch.stack((key, value))  # one message instead of two
    context: Tensor = _BlockwiseAttention.apply(
        query, key_value, sink, mask, documents, cp, exchange, scoring
    )
    return context


class _BlockwiseAttention(torch.autograd.Function):
    """Sum of the blocks of all ranks.

    The gradients of a block depend on the other blocks only via the merged output and log-sum-exp:
    the probabilities of its scores are exp(scores - lse).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key_value: Tensor,
        sink: Tensor | None,
        mask: AttentionMask,
        documents: Tensor | None,
        cp: Axis,
        make_exchange: Callable[[Axis], Exchange],
        scoring: Scoring,
    ) -> Tensor:
        out = query.new_empty(0)  # [b, heads, s/cp, d] fp32
        lse = query.new_empty(0)  # [b, heads, s/cp] fp32
        exchange = make_exchange(cp)
        for source, (key, value) in exchange.fetch(key_value):
            block = _make_block(query, source, mask, documents, cp)
            if block is None:
                continue
            rows = block.rows
            columns = block.columns
            block_out, block_lse = attend(
                query[:, :, rows],
                key[:, :, columns],
                value[:, :, columns],
                block,
                scoring,
            )
            if source == cp.rank:
                # The first block, in which every query sees at least its own key.
                out = block_out.float()
                lse = block_lse
                continue
            # Both outputs are weighted by their share of the sum of the exponentials:
            # exp(block_lse) / (exp(lse) + exp(block_lse)) = sigmoid(block_lse - lse).
            merged_out = out[:, :, rows]
            merged_lse = lse[:, :, rows]
            share = torch.sigmoid(block_lse - merged_lse).unsqueeze(-1)  # [b, heads, rows, 1]
            merged_out.lerp_(block_out.float(), share)
            lse[:, :, rows] = torch.logaddexp(merged_lse, block_lse)
        if sink is not None:
            out, lse = add_sink(out, lse, sink)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key_value, sink, out, lse)
        ctx.documents = documents
        ctx.mask = mask
        ctx.cp = cp
        ctx.make_exchange = make_exchange
        ctx.scoring = scoring
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key_value, sink, out, lse = ctx.saved_tensors
        # In fp32, since it is a sum over the blocks.
        dquery = torch.zeros_like(query, dtype=torch.float32)
        exchange = ctx.make_exchange(ctx.cp)
        for source, (key, value) in exchange.fetch(key_value):
            # The gradient of the keys and values of `source`: zero where no query sees them. The
            # exchange needs it even for blocks without any visible key, since it is collective.
            gradient = torch.zeros_like(key_value)
            block = _make_block(query, source, ctx.mask, ctx.documents, ctx.cp)
            if block is not None:
                rows = block.rows
                columns = block.columns
                dq, dk, dv = attend_backward(
                    dout[:, :, rows],
                    query[:, :, rows],
                    key[:, :, columns],
                    value[:, :, columns],
                    out[:, :, rows],
                    lse[:, :, rows],
                    block,
                    ctx.scoring,
                )
                dquery[:, :, rows] += dq
                gradient[0, :, :, columns] = dk
                gradient[1, :, :, columns] = dv
            exchange.add_gradient(source, gradient)
        dsink = None
        if sink is not None:
            dsink = compute_sink_gradient(sink, dout, out, lse)
        dquery = dquery.to(query.dtype)
        # Last, because it waits for gradients in transit.
        dkey_value = exchange.finish()
        return dquery, dkey_value, dsink, None, None, None, None, None


def _make_block(
    query: Tensor,  # [b, heads, s/cp, d]
    source: int,
    mask: AttentionMask,
    documents: Tensor | None,  # [b, s]
    cp: Axis,
) -> Block | None:
    """Return the block of this rank's queries and the keys of rank `source`, if any is visible.

    Rank r has the chunks r and 2 CP - 1 - r of a sequence, rank j has j and 2 CP - 1 - j. In causal
    order, for j < r both chunks of r see the first chunk of j; for j > r the second chunk of r sees
    both.
    """
    length = query.shape[2]
    all_positions = slice(None)
    if documents is not None or not mask.is_causal:
        # Windows, ALiBi and documents across ranks need a mask.
        whole_length = length * cp.size
        block_mask = mask.make_block(whole_length, cp, source, documents, query.dtype, query.device)
        if block_mask is None:
            return None
        return Block(all_positions, all_positions, mask=block_mask)

    # Plain causal order: every block consists of whole chunks, so that no mask is needed.
    first_chunk = slice(0, length // 2)
    second_chunk = slice(length // 2, None)
    if source == cp.rank:
        return Block(all_positions, all_positions, causal=True)
    if source < cp.rank:
        return Block(all_positions, first_chunk)
    return Block(second_chunk, all_positions)
