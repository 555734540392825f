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
        return self.scale if self.scale is not None else 1 / math.sqrt(width)


Document = tuple[slice, slice, slice]
"""The position of a document in `[b, heads, s]`."""


class Block(NamedTuple):
    """The queries of this rank, and the keys of a rank that they attend to."""

    rows: slice
    """Queries."""
    columns: slice
    """Keys."""
    causal: bool = False
    mask: Tensor | None = None
    """Additive mask, or on a CPU also a boolean one (True: visible); broadcastable to `[b, heads,
    rows, columns]`.
    """
    documents: tuple[Document, ...] = ()
    """Documents, if the rank has whole sequences: each attends to itself only."""

    def select_document(self, document: Document) -> Block:
        """Return the block of a single document; masks depend on distances only."""
        length = document[2].stop - document[2].start
        all_positions = slice(None)
        mask = None if self.mask is None else self.mask[..., :length, :length]
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
    if query.device.type != "cuda":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            query.float(),
            key.float(),
            value.float(),
            0.0,
            block.causal,
            attn_mask=_make_cpu_mask(block),
            scale=scale,
        )
        return out.to(query.dtype), lse
    if _supports_flash(query, block):
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, block.causal, scale=scale
        )
        return out, lse
    mask = _align_mask(block.mask, query, key)
    out, lse, _, _ = _aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, True, 0.0, block.causal, scale=scale
    )
    return out, lse[:, :, : query.shape[2]]  # the kernel pads the rows


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
    if query.device.type != "cuda":
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout.float(),
            query.float(),
            key.float(),
            value.float(),
            out.float(),
            lse,
            0.0,
            block.causal,
            attn_mask=_make_cpu_mask(block),
            scale=scale,
        )
        return dq.to(query.dtype), dk.to(query.dtype), dv.to(query.dtype)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
    if _supports_flash(query, block):
        return _aten._scaled_dot_product_flash_attention_backward(
            dout,
            query,
            key,
            value,
            out,
            lse.contiguous(),
            None,
            None,
            query.shape[2],
            key.shape[2],
            0.0,
            block.causal,
            no_dropout,
            no_dropout,
            scale=scale,
        )
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
        dout,
        query,
        key,
        value,
        _align_mask(block.mask, query, key),
        out,
        F.pad(lse, (0, -lse.shape[2] % 32), value=torch.inf),  # rows padded as the kernel does
        no_dropout[0],
        no_dropout[1],
        0.0,
        [True, True, True, False],
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
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    return block.mask is None and is_half and query.shape[3] % 8 == 0


def _repeat_heads(x: Tensor, query: Tensor) -> Tensor:
    """Return keys or values with one copy for each query head: `[b, heads, s, d]`."""
    copies = query.shape[1] // x.shape[1]
    return x if copies == 1 else x.repeat_interleave(copies, dim=1)


def _align_mask(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return `mask` in full shape, with the strides that the memory-efficient kernel requires."""
    if mask is None:
        return None
    columns = mask.shape[-1]
    padded = F.pad(mask, (0, -columns % 16))[..., :columns]
    return padded.expand(*query.shape[:3], key.shape[2])


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
    scale = scoring.get_scale(query.shape[3])
    num_queries = query.shape[2]
    num_keys = key.shape[2]
    scores_per_row = query.shape[0] * query.shape[1] * num_keys
    step = max(1, SCORES_AT_ONCE // scores_per_row)
    for start in range(0, num_queries, step):
        rows = slice(start, min(start + step, num_queries))
        columns = slice(0, rows.stop if block.causal else num_keys)
        group_query = _split_groups(query[:, :, rows], key)  # [b, g, q/g, rows, d]
        group_key = key[:, :, None, columns]  # [b, g, 1, columns, d]
        product = group_query @ group_key.mT
        tanh = product.float().mul_(scale / cap).tanh_()
        scores = tanh * cap
        if block.causal:
            ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
            scores.masked_fill_(ones.triu_(start + 1), -torch.inf)
        if block.mask is not None:
            mask = block.mask[:, :, rows, columns]
            scores += mask.unsqueeze(1) if mask.shape[1] == 1 else _split_groups(mask, key)
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
        group_value = value[:, :, None, columns]  # [b, g, 1, columns, d]
        out[:, :, rows] = (probabilities @ group_value).flatten(1, 2)
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

        # Through the product of probabilities and values
        probabilities = scores.sub_(row_lse).exp_()
        dvalue[:, :, columns] += (probabilities.to(row_dout.dtype).mT @ row_dout).sum(2)
        dprobabilities = (row_dout @ group_value.mT).float()
        # Through softmax and softcap
        dscores = dprobabilities.sub_(row_expected).mul_(probabilities)
        dproduct = dscores.mul_(1 - tanh.square_()).mul_(scale).to(query.dtype)
        # Through the product of queries and keys
        dquery[:, :, rows] = (dproduct @ group_key).flatten(1, 2)
        dkey[:, :, columns] += (dproduct.mT @ row_query).sum(2)
    return dquery, dkey.to(key.dtype), dvalue.to(value.dtype)
