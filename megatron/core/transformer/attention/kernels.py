"""Attention of some queries to some keys, with the log-sum-exp of its scores: fused kernels, and a
plain one.

On a CPU the fused kernel computes in fp32 whatever the type: with bf16 both passes together take
1.5 to 3.8 times as long, casts included (AVX-512 with bf16; not tried with AMX).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten
SCORES_AT_ONCE = 1 << 24  # of the plain kernel, in fp32
# The CPU kernel of older versions reads and writes beyond keys with fewer heads than queries,
# without an error: seen in 2.6 and 2.7, gone in 2.13.
_CPU_TAKES_GROUPS = torch.__version__ >= "2.13"


class Scoring(NamedTuple):
    """How the product of a query and a key becomes a score."""

    scale: float | None = None
    """Its factor; None is 1 / sqrt(d)."""
    softcap: float | None = None
    """A score x becomes softcap * tanh(x / softcap), for which no fused kernel of torch has room.
    """


Document = tuple[slice, slice, slice]
"""Where a document lies in `[b, heads, s]`."""


class Block(NamedTuple):
    """Which of a rank's queries see which keys of another rank (or its own), and how."""

    rows: slice
    columns: slice
    causal: bool = False
    mask: Tensor | None = None
    """Added to the scores, or (on a CPU) what a query sees; broadcastable to `[b, heads, rows,
    columns]`.
    """
    documents: tuple[Document, ...] = ()
    """Those of a rank that has whole sequences: each sees itself alone."""

    def inside(self, document: Document) -> Block:
        """The block of that document; a mask depends on distances alone."""
        length = document[2].stop - document[2].start
        everything = slice(None)
        mask = None if self.mask is None else self.mask[..., :length, :length]
        return Block(everything, everything, self.causal, mask)


def attend(
    query: Tensor, key: Tensor, value: Tensor, block: Block, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """The output `[b, heads, s, d]` and the log-sum-exp of the scores `[b, heads, s]` in fp32."""
    if block.documents:
        output = torch.empty_like(query)
        sums = query.new_empty(query.shape[:3], dtype=torch.float32)
        for at in block.documents:
            output[at], sums[at] = attend(query[at], key[at], value[at], block.inside(at), scoring)
        return output, sums
    if scoring.softcap is not None:
        return _attend_capped(query, key, value, block, scoring)
    scale = scoring.scale
    if not _takes_groups(query, block):
        key, value = (_per_head(x, query) for x in (key, value))
    if query.device.type != "cuda":
        exact = (x.float() for x in (query, key, value))
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            *exact, 0.0, block.causal, attn_mask=_exact_mask(block), scale=scale
        )
        return out.to(query.dtype), lse
    if _takes_flash(query, block):
        return _aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, block.causal, scale=scale
        )[:2]
    out, lse, _, _ = _aten._scaled_dot_product_efficient_attention(
        query, key, value, _aligned(block.mask, query, key), True, 0.0, block.causal, scale=scale
    )
    return out, lse[:, :, : query.shape[2]]  # the kernel pads rows


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
    """The gradients of this block's scores, for the `out` and `lse` of all blocks together."""
    if block.documents:
        gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        for at in block.documents:
            do, q, k, v, o, sums = (x[at] for x in (dout, query, key, value, out, lse))
            parts = attend_backward(do, q, k, v, o, sums, block.inside(at), scoring)
            for whole, part in zip(gradients, parts, strict=True):
                whole[at] = part
        return gradients
    if scoring.softcap is not None:
        return _attend_capped_backward(dout, query, key, value, out, lse, block, scoring)
    groups = key.shape[1]
    if not _takes_groups(query, block):
        key, value = (_per_head(x, query) for x in (key, value))
    dq, dk, dv = _fused_backward(dout, query, key, value, out, lse, block, scoring.scale)
    if dk.shape[1] != groups:
        dk, dv = (grad.unflatten(1, (groups, -1)).sum(2) for grad in (dk, dv))
    return dq, dk, dv


class CpuAttention(torch.autograd.Function):
    """`attend` to all keys without documents or softcap: `(query, key, value, mask, scale)`, causal without a mask."""

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
        return (
            *attend_backward(dout, query, key, value, out, lse, ctx.block, ctx.scoring),
            None,
            None,
        )


def _fused_backward(
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
        exact = (x.float() for x in (dout, query, key, value, out))
        gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *exact, lse, 0.0, block.causal, attn_mask=_exact_mask(block), scale=scale
        )
        dq, dk, dv = (gradient.to(query.dtype) for gradient in gradients)
        return dq, dk, dv
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
    if _takes_flash(query, block):
        return _aten._scaled_dot_product_flash_attention_backward(
            dout, query, key, value, out, lse.contiguous(), None, None, query.shape[2], key.shape[2], 0.0, block.causal,
            no_dropout, no_dropout, scale=scale,
        )  # fmt: skip
    lse = F.pad(lse, (0, -lse.shape[2] % 32), value=torch.inf)  # rows as the kernel pads them
    return _aten._scaled_dot_product_efficient_attention_backward(
        dout, query, key, value, _aligned(block.mask, query, key), out, lse, no_dropout[0], no_dropout[1], 0.0,
        [True, True, True, False], block.causal, scale=scale,
    )[:3]  # fmt: skip


def _exact_mask(block: Block) -> Tensor | None:
    """As the CPU kernel adds it, fp32."""
    mask = block.mask
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)
    return mask.float()


def _takes_groups(query: Tensor, block: Block) -> bool:
    """Whether keys may have fewer heads than queries."""
    return _takes_flash(query, block) if query.device.type == "cuda" else _CPU_TAKES_GROUPS


def _takes_flash(query: Tensor, block: Block) -> bool:
    return (
        block.mask is None
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[3] % 8 == 0
    )


def _per_head(x: Tensor, query: Tensor) -> Tensor:
    """Keys or values, a copy for every query head."""
    times = query.shape[1] // x.shape[1]
    return x if times == 1 else x.repeat_interleave(times, dim=1)


def _aligned(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """`mask` with the strides that the memory-efficient kernel asks for, at the full shape."""
    if mask is None:
        return None
    padded = F.pad(mask, (0, -mask.shape[-1] % 16))[..., : mask.shape[-1]]
    return padded.expand(*query.shape[:3], key.shape[2])


def _capped_scores(
    query: Tensor, key: Tensor, block: Block, scoring: Scoring
) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """Scores of some queries at a time: (rows, the columns they may see, scores, tanh of them), in
    fp32.

    Scores are `[b, groups, queries per group, rows, columns]`.
    """
    assert scoring.softcap is not None
    cap = scoring.softcap
    length = query.shape[2]
    columns = key.shape[2]
    scale = scoring.scale if scoring.scale is not None else 1 / math.sqrt(query.shape[3])
    step = max(1, SCORES_AT_ONCE // (query.shape[0] * query.shape[1] * columns))
    for start in range(0, length, step):
        rows = slice(start, min(start + step, length))
        seen = slice(0, rows.stop if block.causal else columns)
        product = _by_group(query[:, :, rows], key) @ key[:, :, None, seen].mT
        tanh = product.float().mul_(scale / cap).tanh_()
        scores = tanh * cap
        if block.causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(
                start + 1
            )
            scores.masked_fill_(later, -torch.inf)
        if block.mask is not None:
            mask = block.mask[:, :, rows, seen]
            scores += mask.unsqueeze(1) if mask.shape[1] == 1 else _by_group(mask, key)
        yield rows, seen, scores, tanh


def _by_group(x: Tensor, key: Tensor) -> Tensor:
    """`[b, heads, ...]` as `[b, groups, queries per group, ...]`."""
    return x.unflatten(1, (key.shape[1], -1))


def _attend_capped(
    query: Tensor, key: Tensor, value: Tensor, block: Block, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """`attend` with a softcap: all scores of some queries at a time."""
    out = torch.empty_like(query)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    for rows, seen, scores, _ in _capped_scores(query, key, block, scoring):
        sums = scores.logsumexp(-1)
        probabilities = scores.sub_(sums.unsqueeze(-1)).exp_().to(value.dtype)
        out[:, :, rows] = (probabilities @ value[:, :, None, seen]).flatten(1, 2)
        lse[:, :, rows] = sums.flatten(1, 2)
    return out, lse


def _attend_capped_backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    block: Block,
    scoring: Scoring,
) -> tuple[Tensor, Tensor, Tensor]:
    """`attend_backward` with a softcap: the scores again, and d tanh(x) = 1 - tanh(x)^2."""
    dquery = torch.empty_like(query)
    dkey, dvalue = (torch.zeros_like(x, dtype=torch.float32) for x in (key, value))
    scale = scoring.scale if scoring.scale is not None else 1 / math.sqrt(query.shape[3])
    expected = (dout.float() * out).sum(
        -1
    )  # of the gradient of a probability, over the probabilities of a query
    for rows, seen, scores, tanh in _capped_scores(query, key, block, scoring):
        q, do, log_sums, mean = (
            _by_group(x[:, :, rows], key) for x in (query, dout, lse, expected)
        )
        probabilities = scores.sub_(log_sums.unsqueeze(-1)).exp_()
        dvalue[:, :, seen] += (probabilities.to(do.dtype).mT @ do).sum(2)
        dscores = (
            (do @ value[:, :, None, seen].mT).float().sub_(mean.unsqueeze(-1)).mul_(probabilities)
        )
        dproduct = dscores.mul_(1 - tanh.square_()).mul_(scale).to(query.dtype)
        dquery[:, :, rows] = (dproduct @ key[:, :, None, seen]).flatten(1, 2)
        dkey[:, :, seen] += (dproduct.mT @ q).sum(2)
    return dquery, dkey.to(key.dtype), dvalue.to(value.dtype)
