"""Attention over a sequence that is split over ranks, one block of keys at a time.

A block contains the keys of one rank. It yields its output and the log-sum-exp of its scores, from
which blocks are merged into exact attention (Liu et al. 2023, "Ring Attention with Blockwise
Transformers"; Dao et al. 2022). The local keys come first, while those of other ranks are in
transit. No data of other ranks is kept for the backward pass: keys and values are exchanged again,
and their gradients return in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.parallel_state import Axis
from megatron.core.transformer.attention.core import has_flash_window, make_causal_block
from megatron.core.transformer.attention.exchange import EXCHANGES, Exchange
from megatron.core.transformer.attention.kernels import (
    Block,
    Scoring,
    add_sink,
    attend,
    attend_backward,
    compute_sink_gradient,
)
from megatron.core.transformer.attention.masks import AttentionMask, find_documents


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
        # Without any block: a weight of zero in the merge.
        out = torch.zeros_like(query, dtype=torch.float32)  # [b, heads, s/cp, d]
        lse_shape = query.shape[:3]  # [b, heads, s/cp]
        lse = query.new_full(lse_shape, -torch.inf, dtype=torch.float32)

        # Merge the blocks of one rank after the other.
        exchange = make_exchange(cp)
        blocks_of: dict[int, list[Block]] = {}  # by rank, also for the backward pass
        for source, (key, value) in exchange.fetch(key_value):
            blocks_of[source] = _list_blocks(query, source, mask, documents, cp, scoring)
            for block in blocks_of[source]:
                samples = block.samples
                rows = block.rows
                columns = block.columns
                block_out, block_lse = attend(
                    query[samples, :, rows],
                    key[samples, :, columns],
                    value[samples, :, columns],
                    block,
                    scoring,
                )
                _merge_block(out[samples, :, rows], lse[samples, :, rows], block_out, block_lse)
        if sink is not None:
            out, lse = add_sink(out, lse, sink)

        out = out.to(query.dtype)
        ctx.save_for_backward(query, key_value, sink, out, lse)
        ctx.blocks_of = blocks_of
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
            # exchange needs it even without any visible key, since it is collective.
            dkey_value_of_source = torch.zeros_like(key_value)
            for block in ctx.blocks_of[source]:
                samples = block.samples
                rows = block.rows
                columns = block.columns
                dq, dk, dv = attend_backward(
                    dout[samples, :, rows],
                    query[samples, :, rows],
                    key[samples, :, columns],
                    value[samples, :, columns],
                    out[samples, :, rows],
                    lse[samples, :, rows],
                    block,
                    ctx.scoring,
                )
                dquery[samples, :, rows] += dq
                dkey_value_of_source[0, samples, :, columns] += dk
                dkey_value_of_source[1, samples, :, columns] += dv
            exchange.add_gradient(source, dkey_value_of_source)

        dsink = None
        if sink is not None:
            dsink = compute_sink_gradient(sink, dout, out, lse)
        dquery = dquery.to(query.dtype)
        # Last, because it waits for gradients in transit.
        dkey_value = exchange.finish()
        return dquery, dkey_value, dsink, None, None, None, None, None


def _merge_block(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge a block into `out` `[b, heads, rows, d]` and `lse` `[b, heads, rows]`, in place.

    Both outputs are weighted by their share of the sum of the exponentials:
    exp(block_lse) / (exp(lse) + exp(block_lse)) = sigmoid(block_lse - lse).
    """
    share_of_block = torch.sigmoid(block_lse - lse).unsqueeze(-1)  # [b, heads, rows, 1]
    out.lerp_(block_out.float(), share_of_block)
    lse.copy_(torch.logaddexp(lse, block_lse))


def _list_blocks(
    query: Tensor,  # [b, heads, s/cp, d]
    source: int,
    mask: AttentionMask,
    documents: Tensor | None,  # [b, s]
    cp: Axis,
    scoring: Scoring,
) -> list[Block]:
    """Return the blocks of this rank's queries and the keys of rank `source` that are visible.

    Rank r has the chunks r and 2 CP - 1 - r of a sequence, rank j has j and 2 CP - 1 - j. In causal
    order, for j < r both chunks of r see the first chunk of j; for j > r the second chunk of r sees
    both.
    """
    chunk_length = query.shape[2] // 2
    chunks = (slice(0, chunk_length), slice(chunk_length, None))
    if documents is None and mask.is_causal:
        # Plain causal order: whole chunks at once, without a mask.
        all_positions = slice(None)
        if source == cp.rank:
            return [Block(all_positions, all_positions, causal=True)]
        if source < cp.rank:
            return [Block(all_positions, chunks[0])]
        return [Block(chunks[1], all_positions)]

    # Windows, ALiBi and documents: at most one block per pair of chunks and sample.
    document_ids = None
    if documents is not None:
        # [b, chunks, positions]; `cpu()` does not copy in a training run.
        document_ids = documents.cpu().unflatten(1, (-1, chunk_length))
    last_chunk = 2 * cp.size - 1
    query_chunks = (cp.rank, last_chunk - cp.rank)
    key_chunks = (source, last_chunk - source)
    blocks = []
    for rows, query_chunk in zip(chunks, query_chunks, strict=True):
        for columns, key_chunk in zip(chunks, key_chunks, strict=True):
            if key_chunk == query_chunk:
                # A chunk of queries and its own keys
                documents_of_chunk = None
                if document_ids is not None:
                    documents_of_chunk = find_documents(document_ids[:, query_chunk], query.device)
                block = make_causal_block(query[:, :, rows], mask, documents_of_chunk, scoring)
                blocks.append(block._replace(rows=rows, columns=columns))
            elif key_chunk < query_chunk:
                # The keys of an earlier chunk
                distance = query_chunk - key_chunk
                for visible_part in _list_visible_parts(
                    query_chunk, key_chunk, document_ids, chunk_length
                ):
                    block_of_part = _make_part(query, visible_part, distance, mask, scoring)
                    if block_of_part is not None:
                        blocks.append(_shift(block_of_part, rows.start, columns.start))
    return blocks


class _VisiblePart(NamedTuple):
    """Queries of a chunk that see keys of an earlier chunk: the first ones see the last ones."""

    samples: slice
    num_rows: int  # queries, from the first of their chunk on
    first_column: int  # first key; all after it in their chunk are visible


def _list_visible_parts(
    query_chunk: int, key_chunk: int, document_ids: Tensor | None, chunk_length: int
) -> list[_VisiblePart]:
    """Return the parts of two chunks that documents permit.

    `document_ids` is `[b, chunks, positions]`.
    At most one document of a sample reaches from one chunk into a later one.
    """
    if document_ids is None:
        return [_VisiblePart(slice(None), chunk_length, 0)]
    queries = document_ids[:, query_chunk]  # [b, positions]
    keys = document_ids[:, key_chunk]  # [b, positions]
    first_document = queries[:, :1]  # [b, 1]
    last_document = keys[:, -1:]  # [b, 1]
    num_rows = (queries == first_document).sum(1).tolist()
    num_columns = (keys == last_document).sum(1).tolist()
    is_same = (first_document == last_document).flatten().tolist()

    visible_parts = []
    for sample, continues in enumerate(is_same):
        if continues:
            samples = slice(sample, sample + 1)
            first_column = chunk_length - num_columns[sample]
            visible_parts.append(_VisiblePart(samples, num_rows[sample], first_column))
    return visible_parts


def _make_part(
    query: Tensor,
    visible_part: _VisiblePart,
    num_chunks: int,
    mask: AttentionMask,
    scoring: Scoring,
) -> Block | None:
    """Return the block of `visible_part`, with positions within the chunks, if anything is visible.

    The keys are `num_chunks` chunks before the queries.
    """
    length = query.shape[2] // 2  # positions of a chunk
    distance = num_chunks * length
    samples, num_rows, first_column = visible_part

    # Row i sees column j if distance + i - j is at most the size of the window: leave out rows and
    # columns without any visible score.
    has_invisible_scores = False
    if mask.window is not None:
        window = mask.window[0]
        num_rows = min(num_rows, window - distance + length)
        first_column = max(first_column, distance - window)
        if num_rows <= 0 or first_column >= length:
            return None
        largest_distance = distance + num_rows - 1 - first_column
        has_invisible_scores = largest_distance > window

    # No mask if everything is visible, else the window of flash attention, else a mask
    rows = slice(0, num_rows)
    columns = slice(first_column, length)
    if mask.slopes is None and not has_invisible_scores:
        return Block(rows, columns, samples=samples)
    if has_flash_window(query, mask, scoring):
        assert mask.window is not None
        # Flash attention counts from the last row and column.
        flash_window = mask.window[0] - distance + length - num_rows
        return Block(rows, columns, window=flash_window, samples=samples)
    chunk_mask = mask.make_chunk_mask(length, num_chunks, query.dtype, query.device)
    own_mask = chunk_mask[..., rows, columns]
    return Block(rows, columns, mask=own_mask, samples=samples)


def _shift(block: Block, first_row: int, first_column: int) -> Block:
    """Return the block with its rows and columns counted from earlier positions."""
    rows = slice(block.rows.start + first_row, block.rows.stop + first_row)
    columns = slice(block.columns.start + first_column, block.columns.stop + first_column)
    return block._replace(rows=rows, columns=columns)
