"""Attention over a sequence that is split over ranks: to the keys of one rank at a time.

Every block gives its output and the log-sum-exp of its scores, by which blocks are merged into exact attention (Liu et
al. 2023, "Ring Attention with Blockwise Transformers"; Dao et al. 2022). Own keys come first, those of the other ranks
are on their way meanwhile: `p2p` passes them around a ring, `all_gather` fetches all at once. Nothing of other ranks is
kept for the backward pass: keys and values are exchanged again, and their gradients return in the same manner.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel.mappings import start_sequence_all_gather, start_sequence_reduce_scatter
from megatron.core.transformer.attention_kernels import Block, Scoring, attend, attend_backward
from megatron.core.transformer.attention_mask import AttentionMask


@torch._disable_dynamo  # torch.compiler.disable without importing the compiler, which takes as long as torch itself
def blockwise_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    masked: Tensor | None,
    cp: Axis,
    comm_type: str,
    scoring: Scoring,
) -> Tensor:
    """Causal attention of the local queries `[b, heads, s/cp, d]` to the keys `[b, groups, s/cp, d]` of all ranks.

    `masked` `[b, 1, s/cp, s]` is True where attention is forbidden, or None. Returns the shape of `query`.
    """
    exchange = _EXCHANGES[comm_type if cp.size > 1 else "all_gather"]  # which does nothing with one rank
    context: Tensor = _BlockwiseAttention.apply(query, torch.stack((key, value)), mask, masked, cp, exchange, scoring)
    return context


class _BlockwiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        mine: Tensor,
        mask: AttentionMask,
        masked: Tensor | None,
        cp: Axis,
        exchange: _Exchange,
        scoring: Scoring,
    ) -> Tensor:
        out = lse = query.new_empty(0)
        for source, (key, value) in exchange.fetch(mine, cp):
            block = _block(query, source, mask, masked, cp)
            if block is None:
                continue
            rows, columns = block.rows, block.columns
            part, part_lse = attend(query[:, :, rows], key[:, :, columns], value[:, :, columns], block, scoring)
            if source == cp.rank:  # the first block, in which every query sees at least itself
                out, lse = part.float(), part_lse
                continue
            out[:, :, rows].lerp_(part.float(), torch.sigmoid(part_lse - lse[:, :, rows]).unsqueeze(-1))
            lse[:, :, rows] = torch.logaddexp(lse[:, :, rows], part_lse)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, mine, out, lse, masked)
        ctx.mask, ctx.cp, ctx.exchange, ctx.scoring = mask, cp, exchange, scoring
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, mine, out, lse, masked = ctx.saved_tensors
        dquery = torch.zeros_like(query, dtype=torch.float32)
        returned = ctx.exchange.give_back(ctx.cp)
        for source, (key, value) in ctx.exchange.fetch(mine, ctx.cp):
            gradient = torch.zeros_like(mine)
            block = _block(query, source, ctx.mask, masked, ctx.cp)
            if block is not None:
                rows, columns = block.rows, block.columns
                q, do, o, logs = (x[:, :, rows] for x in (query, dout, out, lse))
                k, v = (x[:, :, columns] for x in (key, value))
                dq, dk, dv = attend_backward(do, q, k, v, o, logs, block, ctx.scoring)
                dquery[:, :, rows] += dq
                gradient[0, :, :, columns], gradient[1, :, :, columns] = dk, dv
            returned.add(source, gradient)
        return dquery.to(query.dtype), returned.finish(), None, None, None, None, None


def _block(query: Tensor, source: int, mask: AttentionMask, masked: Tensor | None, cp: Axis) -> Block | None:
    """The queries of this rank and the keys of rank `source`; None where no query sees any of them.

    In causal order the chunks r and 2 CP - 1 - r of a rank see, of another rank with chunks j and 2 CP - 1 - j: for
    j < r both the first, for j > r the second chunk both.
    """
    length, everything = query.shape[2], slice(None)
    if masked is not None or not mask.is_causal:
        added = mask.block(length * cp.size, cp, source, masked, query.dtype, query.device)
        return None if added is None else Block(everything, everything, mask=added)
    if source == cp.rank:
        return Block(everything, everything, causal=True)
    if source < cp.rank:
        return Block(everything, slice(0, length // 2))
    return Block(slice(length // 2, None), everything)


class _Shift:
    """Every rank's tensor on its way to the next rank of the ring."""

    def __init__(self, tensor: Tensor, cp: Axis) -> None:
        assert cp.group is not None
        self._received = torch.empty_like(tensor)
        after, before = (cp.ranks[(cp.rank + step) % cp.size] for step in (1, -1))
        self._operations = [
            dist.P2POp(dist.isend, tensor, after, cp.group),
            dist.P2POp(dist.irecv, self._received, before, cp.group),
        ]  # they keep the tensors alive until `wait`
        self._works = dist.batch_isend_irecv(self._operations)

    def wait(self) -> Tensor:
        """What the rank before has sent."""
        for work in self._works:
            work.wait()
        self._operations = []
        return self._received


class _Returned(Protocol):
    """Sums the contributions of all ranks to every rank's gradient."""

    def add(self, source: int, gradient: Tensor) -> None:
        """This rank's contribution to the gradient of `source`; in the order of `fetch`."""

    def finish(self) -> Tensor:
        """The sum of all contributions to this rank's gradient."""


class _Exchange(Protocol):
    """How keys and values get to other ranks, and their gradients back."""

    def fetch(self, mine: Tensor, cp: Axis) -> Iterator[tuple[int, Tensor]]:
        """(rank, its tensor) of all ranks, `mine` first; the next is under way while one is used."""

    def give_back(self, cp: Axis) -> _Returned: ...


class _Ring:
    """The tensors go around a ring, and gradients one step behind them."""

    def fetch(self, mine: Tensor, cp: Axis) -> Iterator[tuple[int, Tensor]]:
        held = mine
        for step in range(cp.size - 1):
            shift = _Shift(held, cp)
            yield (cp.rank - step) % cp.size, held
            held = shift.wait()
        yield (cp.rank + 1) % cp.size, held

    def give_back(self, cp: Axis) -> _Returned:
        return _RingSum(cp)


class _RingSum:
    def __init__(self, cp: Axis) -> None:
        self._cp = cp
        self._shift: _Shift | None = None

    def add(self, source: int, gradient: Tensor) -> None:
        if self._shift is not None:
            gradient += self._shift.wait()  # what the ranks before have added for the same source
        self._shift = _Shift(gradient, self._cp)

    def finish(self) -> Tensor:
        assert self._shift is not None
        return self._shift.wait()


class _AllGather:
    """All tensors are gathered at once, and all gradients scattered."""

    def fetch(self, mine: Tensor, cp: Axis) -> Iterator[tuple[int, Tensor]]:
        gathering = start_sequence_all_gather(mine, cp)
        yield cp.rank, mine
        parts = gathering.wait().chunk(cp.size)
        for source in (*range(cp.rank), *range(cp.rank + 1, cp.size)):
            yield source, parts[source]

    def give_back(self, cp: Axis) -> _Returned:
        return _ScatterSum(cp)


class _ScatterSum:
    def __init__(self, cp: Axis) -> None:
        self._cp = cp
        self._parts: dict[int, Tensor] = {}

    def add(self, source: int, gradient: Tensor) -> None:
        self._parts[source] = gradient

    def finish(self) -> Tensor:
        whole = torch.cat([self._parts[source] for source in range(self._cp.size)])
        return start_sequence_reduce_scatter(whole, self._cp).wait()


_EXCHANGES: dict[str, _Exchange] = {"p2p": _Ring(), "all_gather": _AllGather()}
