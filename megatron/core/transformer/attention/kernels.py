"""Attention of some queries to some keys, which also returns the log-sum-exp of the scores.

Fused kernels of torch compute it, and a plain implementation for scores with a softcap. On a CPU
the fused kernel computes in fp32 for every dtype: in bf16 both passes together take 1.5 to 3.8
times as long, including the casts (AVX-512 with bf16; AMX was not tried).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten
_NO_DROPOUT = 0.0
SCORES_AT_ONCE = 1 << 24
"""Maximum number of fp32 scores that the plain implementation computes at once."""
# With fewer key heads than query heads, the CPU kernel of older versions reads and writes out of
# bounds without an error: seen in 2.6 and 2.7, fixed in 2.13.
_CPU_SUPPORTS_GROUPS = torch.__version__ >= "2.13"


class Scoring(NamedTuple):
    """Computation of a score from the dot product of a query and a key."""

    scale: float | None = None
    """Factor of the product. Default: 1 / sqrt(d)."""
    softcap: float | None = None
    """If given, a score x becomes softcap * tanh(x / softcap), which torch's fused kernels do not
    support.
    """

    def get_scale(self, width: int) -> float:
        """Return the factor for heads of `width` elements."""
        if self.scale is not None:
            return self.scale
        return 1 / math.sqrt(width)


Document = tuple[slice, slice, slice]
"""The position of a document in `[b, heads, s]`."""


class Block(NamedTuple):
    """The queries of this rank, and the keys of a rank that they attend to."""

    rows: slice
    """Queries."""
    columns: slice
    """Keys."""
    causal: bool = False
    """Row i sees the columns up to i."""
    mask: Tensor | None = None
    """Additive mask, or on a CPU also a boolean one (True: visible); broadcastable to `[b, heads,
    rows, columns]`.
    """
    documents: tuple[Document, ...] = ()
    """Documents, if the rank has whole sequences: each attends to itself only."""

    def select_document(self, document: Document) -> Block:
        """Return the block of a single document; masks depend on distances only."""
        _, _, positions = document
        length = positions.stop - positions.start
        all_positions = slice(None)
        mask = self.mask
        if mask is not None:
            mask = mask[..., :length, :length]
        return Block(all_positions, all_positions, self.causal, mask)


def attend(
    query: Tensor, key: Tensor, value: Tensor, block: Block, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """Return the output `[b, heads, s, d]` and the log-sum-exp of the scores `[b, heads, s]` fp32.

    `key` and `value` are `[b, groups, s, d]`.
    """
    if block.documents:
        return _attend_to_documents(query, key, value, block, scoring)
    if scoring.softcap is not None:
        return _attend_with_softcap(query, key, value, block, scoring)
    if not _supports_groups(query, block):
        key = _repeat_heads(key, query)
        value = _repeat_heads(value, query)
    scale = scoring.scale
    # The private operators, because the public function does not return the log-sum-exp.
    if query.device.type != "cuda":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            query.float(),
            key.float(),
            value.float(),
            _NO_DROPOUT,
            block.causal,
            attn_mask=_make_cpu_mask(block),
            scale=scale,
        )
        return out.to(query.dtype), lse
    if _supports_flash(query, block):
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(
            query, key, value, _NO_DROPOUT, block.causal, scale=scale
        )
        return out, lse
    # Masks and fp32: the memory-efficient kernel.
    mask = _align_mask(block.mask, query, key)
    returns_lse = True
    out, padded_lse, _, _ = _aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, returns_lse, _NO_DROPOUT, block.causal, scale=scale
    )
    num_rows = query.shape[2]
    return out, padded_lse[:, :, :num_rows]  # the kernel pads the rows


def attend_backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    block: Block,
    scoring: Scoring,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value from the scores of this block.

    `out` and `lse` are the merged ones of all blocks.
    """
    if block.documents:
        return _attend_to_documents_backward(dout, query, key, value, out, lse, block, scoring)
    if scoring.softcap is not None:
        return _attend_with_softcap_backward(dout, query, key, value, out, lse, block, scoring)
    groups = key.shape[1]
    if not _supports_groups(query, block):
        key = _repeat_heads(key, query)
        value = _repeat_heads(value, query)
    dq, dk, dv = _run_fused_backward(dout, query, key, value, out, lse, block, scoring.scale)
    if dk.shape[1] != groups:
        # Sum over the copies of each head: [b, groups, copies, s, d]
        dk = dk.unflatten(1, (groups, -1)).sum(2)
        dv = dv.unflatten(1, (groups, -1)).sum(2)
    return dq, dk, dv


class CpuAttention(torch.autograd.Function):
    """Attention to all keys via `attend`, without documents or softcap.

    `apply(query, key, value, mask, scale)`; without a mask it is causal.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float | None,
    ) -> Tensor:
        ctx.block = Block(slice(None), slice(None), mask is None, mask)
        ctx.scoring = Scoring(scale)
        out, lse = attend(query, key, value, ctx.block, ctx.scoring)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, out, lse = ctx.saved_tensors
        gradients = attend_backward(dout, query, key, value, out, lse, ctx.block, ctx.scoring)
        return *gradients, None, None


def _attend_to_documents(
    query: Tensor, key: Tensor, value: Tensor, block: Block, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """Compute `attend` for each document on its own."""
    out = torch.empty_like(query)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    for document in block.documents:
        part = block.select_document(document)
        out[document], lse[document] = attend(
            query[document], key[document], value[document], part, scoring
        )
    return out, lse


def _attend_to_documents_backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    block: Block,
    scoring: Scoring,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `attend_backward` for each document on its own."""
    dquery = torch.empty_like(query)
    dkey = torch.empty_like(key)
    dvalue = torch.empty_like(value)
    for document in block.documents:
        dquery[document], dkey[document], dvalue[document] = attend_backward(
            dout[document],
            query[document],
            key[document],
            value[document],
            out[document],
            lse[document],
            block.select_document(document),
            scoring,
        )
    return dquery, dkey, dvalue


def _run_fused_backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    block: Block,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Call the backward pass of the kernel that `attend` calls for these tensors."""
    if query.device.type != "cuda":
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout.float(),
            query.float(),
            key.float(),
            value.float(),
            out.float(),
            lse,
            _NO_DROPOUT,
            block.causal,
            attn_mask=_make_cpu_mask(block),
            scale=scale,
        )
        return dq.to(query.dtype), dk.to(query.dtype), dv.to(query.dtype)
    # Seed and offset of the dropout that the forward pass would have applied
    rng_state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    num_rows = query.shape[2]
    num_columns = key.shape[2]
    if _supports_flash(query, block):
        return _aten._scaled_dot_product_flash_attention_backward(
            dout,
            query,
            key,
            value,
            out,
            lse.contiguous(),
            None,  # offsets of the sequences in a packed batch: none
            None,
            num_rows,
            num_columns,
            _NO_DROPOUT,
            block.causal,
            rng_state,
            rng_state,
            scale=scale,
        )
    # Rows are padded to a multiple of 32, as the kernel does in the forward pass.
    padded_lse = F.pad(lse, (0, -lse.shape[2] % 32), value=torch.inf)
    needs_gradient = [True, True, True, False]  # query, key, value, mask
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
        dout,
        query,
        key,
        value,
        _align_mask(block.mask, query, key),
        out,
        padded_lse,
        rng_state[0],
        rng_state[1],
        _NO_DROPOUT,
        needs_gradient,
        block.causal,
        scale=scale,
    )
    return dq, dk, dv


def _make_cpu_mask(block: Block) -> Tensor | None:
    """Return the additive fp32 mask that the CPU kernel requires."""
    mask = block.mask
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)
    return mask.float()


def _supports_groups(query: Tensor, block: Block) -> bool:
    """Return whether the kernel accepts fewer key heads than query heads."""
    if query.device.type == "cuda":
        return _supports_flash(query, block)
    return _CPU_SUPPORTS_GROUPS


def _supports_flash(query: Tensor, block: Block) -> bool:
    """Return whether the flash attention kernel of CUDA supports these queries."""
    head_dim = query.shape[3]
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    return block.mask is None and is_half and head_dim % 8 == 0


def _repeat_heads(x: Tensor, query: Tensor) -> Tensor:
    """Return keys or values with one copy for each query head: `[b, heads, s, d]`."""
    copies = query.shape[1] // x.shape[1]
    if copies == 1:
        return x
    return x.repeat_interleave(copies, dim=1)


def _align_mask(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return `mask` in full shape, with the strides that the memory-efficient kernel requires."""
    if mask is None:
        return None
    # Rows that begin at multiples of 16 elements: pad the rows, and return a view of the columns.
    columns = mask.shape[-1]
    padded = F.pad(mask, (0, -columns % 16))
    aligned = padded[..., :columns]
    batch, heads, rows, _ = query.shape
    return aligned.expand(batch, heads, rows, key.shape[2])


class _CappedScores(NamedTuple):
    """Scores of some consecutive queries."""

    rows: slice
    """The queries."""
    columns: slice
    """The keys that they may see."""
    scores: Tensor
    """`[b, groups, queries per group, rows, columns]` fp32."""
    tanh: Tensor
    """tanh(x / softcap) of the uncapped scores x, in the same shape."""


def _compute_capped_scores(
    query: Tensor, key: Tensor, block: Block, scoring: Scoring
) -> Iterator[_CappedScores]:
    """Yield the scores of all queries, at most SCORES_AT_ONCE (or one row) at a time."""
    assert scoring.softcap is not None
    cap = scoring.softcap
    batch, heads, num_queries, head_dim = query.shape
    num_keys = key.shape[2]
    scale = scoring.get_scale(head_dim)
    scores_per_row = batch * heads * num_keys
    step = max(1, SCORES_AT_ONCE // scores_per_row)
    for start in range(0, num_queries, step):
        stop = min(start + step, num_queries)
        rows = slice(start, stop)
        # In causal order no query of these rows sees a key at or after `stop`.
        num_columns = stop if block.causal else num_keys
        columns = slice(0, num_columns)

        # Capped scores, [b, g, q/g, rows, columns] for g groups
        group_query = _split_groups(query[:, :, rows], key)  # [b, g, q/g, rows, d]
        group_key = key[:, :, None, columns]  # [b, g, 1, columns, d]
        product = group_query @ group_key.mT
        tanh = product.float().mul_(scale / cap).tanh_()
        scores = tanh * cap

        # Masks apply after the cap: the score of an invisible key remains infinite.
        if block.causal:
            ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
            is_future = ones.triu_(start + 1)
            scores.masked_fill_(is_future, -torch.inf)
        if block.mask is not None:
            mask = block.mask[:, :, rows, columns]
            if mask.shape[1] == 1:
                scores += mask.unsqueeze(1)
            else:
                scores += _split_groups(mask, key)
        yield _CappedScores(rows, columns, scores, tanh)


def _split_groups(x: Tensor, key: Tensor) -> Tensor:
    """View `[b, heads, ...]` as `[b, groups, queries per group, ...]`."""
    return x.unflatten(1, (key.shape[1], -1))


def _attend_with_softcap(
    query: Tensor, key: Tensor, value: Tensor, block: Block, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """Compute `attend` with a softcap."""
    out = torch.empty_like(query)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    for rows, columns, scores, _ in _compute_capped_scores(query, key, block, scoring):
        row_lse = scores.logsumexp(-1)  # [b, groups, queries per group, rows]
        probabilities = scores.sub_(row_lse.unsqueeze(-1)).exp_().to(value.dtype)
        group_value = value[:, :, None, columns]  # [b, groups, 1, columns, d]
        group_out = probabilities @ group_value  # [b, groups, queries per group, rows, d]
        out[:, :, rows] = group_out.flatten(1, 2)
        lse[:, :, rows] = row_lse.flatten(1, 2)
    return out, lse


def _attend_with_softcap_backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    block: Block,
    scoring: Scoring,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `attend_backward` with a softcap from recomputed scores.

    The gradient of a softmax is p * (dp - sum(p * dp)), and that of tanh is 1 - tanh^2.
    """
    dquery = torch.empty_like(query)
    dkey = torch.zeros_like(key, dtype=torch.float32)
    dvalue = torch.zeros_like(value, dtype=torch.float32)
    scale = scoring.get_scale(query.shape[3])
    # sum(p * dp) of each query, [b, heads, s]
    expected = (dout.float() * out).sum(-1)
    for rows, columns, scores, tanh in _compute_capped_scores(query, key, block, scoring):
        # [b, groups, queries per group, rows, ...]
        row_query = _split_groups(query[:, :, rows], key)
        row_dout = _split_groups(dout[:, :, rows], key)
        row_lse = _split_groups(lse[:, :, rows], key).unsqueeze(-1)
        row_expected = _split_groups(expected[:, :, rows], key).unsqueeze(-1)
        group_key = key[:, :, None, columns]  # [b, groups, 1, columns, d]
        group_value = value[:, :, None, columns]

        # Through the product of probabilities and values. A key serves all queries of its group:
        # its gradient is their sum (dimension 2).
        probabilities = scores.sub_(row_lse).exp_()
        dvalue[:, :, columns] += (probabilities.to(row_dout.dtype).mT @ row_dout).sum(2)
        dprobabilities = (row_dout @ group_value.mT).float()

        # Through softmax and softcap, in place: these are the largest tensors
        dscores = dprobabilities.sub_(row_expected).mul_(probabilities)
        dproduct = dscores.mul_(1 - tanh.square_()).mul_(scale).to(query.dtype)

        # Through the product of queries and keys
        dquery[:, :, rows] = (dproduct @ group_key).flatten(1, 2)
        dkey[:, :, columns] += (dproduct.mT @ row_query).sum(2)
    return dquery, dkey.to(key.dtype), dvalue.to(value.dtype)
