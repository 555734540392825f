"""Attention over a sequence that is split over ranks: to the keys of one rank at a time.

Every block gives its output and the log-sum-exp of its scores, by which blocks are merged into exact attention (Liu et
al. 2023, "Ring Attention with Blockwise Transformers"; Dao et al. 2022). Own keys come first, those of the other ranks
are on their way meanwhile: `p2p` passes them around a ring, `all_gather` fetches all at once. Nothing of other ranks is
kept for the backward pass: keys and values are exchanged again, and their gradients return in the same manner.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel.mappings import start_sequence_all_gather, start_sequence_reduce_scatter
from megatron.core.transformer.attention_mask import AttentionMask

_aten = torch.ops.aten


@torch._disable_dynamo  # torch.compiler.disable without importing the compiler, which takes as long as torch itself
def blockwise_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    masked: Tensor | None,
    cp: Axis,
    comm_type: str,
    scale: float | None = None,
) -> Tensor:
    """Causal attention of the local queries `[b, heads, s/cp, d]` to the keys `[b, groups, s/cp, d]` of all ranks.

    `masked` `[b, 1, s/cp, s]` is True where attention is forbidden, or None; `scale` of the scores is 1 / sqrt(d) where
    it is None. Returns the shape of `query`.
    """
    context: Tensor = _BlockwiseAttention.apply(
        query, torch.stack((key, value)), mask, masked, cp, _EXCHANGES[comm_type], scale
    )
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
        scale: float | None,
    ) -> Tensor:
        out = lse = query.new_empty(0)
        for source, (key, value) in exchange.fetch(mine, cp):
            block = _block(query, source, mask, masked, cp)
            if block is None:
                continue
            rows, columns = block.rows, block.columns
            part, part_lse = _attend(query[:, :, rows], key[:, :, columns], value[:, :, columns], block, scale)
            if source == cp.rank:  # the first block, in which every query sees at least itself
                out, lse = part.float(), part_lse
                continue
            out[:, :, rows].lerp_(part.float(), torch.sigmoid(part_lse - lse[:, :, rows]).unsqueeze(-1))
            lse[:, :, rows] = torch.logaddexp(lse[:, :, rows], part_lse)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, mine, out, lse, masked)
        ctx.mask, ctx.cp, ctx.exchange, ctx.scale = mask, cp, exchange, scale
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
                dq, dk, dv = _attend_backward(do, q, k, v, o, logs, block, ctx.scale)
                dquery[:, :, rows] += dq
                gradient[0, :, :, columns], gradient[1, :, :, columns] = dk, dv
            returned.add(source, gradient)
        return dquery.to(query.dtype), returned.finish(), None, None, None, None, None


class _Block(NamedTuple):
    """Which of a rank's queries see which keys of another rank (or its own), and how."""

    rows: slice
    columns: slice
    causal: bool = False
    mask: Tensor | None = None
    """Added to the scores, broadcastable to `[b, heads, rows, columns]`."""


def _block(query: Tensor, source: int, mask: AttentionMask, masked: Tensor | None, cp: Axis) -> _Block | None:
    """The queries of this rank and the keys of rank `source`; None where no query sees any of them.

    In causal order the chunks r and 2 CP - 1 - r of a rank see, of another rank with chunks j and 2 CP - 1 - j: for
    j < r both the first, for j > r the second chunk both.
    """
    length, everything = query.shape[2], slice(None)
    if masked is not None or not mask.is_causal:
        added = mask.block(length * cp.size, cp, source, masked, query.dtype, query.device)
        return None if added is None else _Block(everything, everything, mask=added)
    if source == cp.rank:
        return _Block(everything, everything, causal=True)
    if source < cp.rank:
        return _Block(everything, slice(0, length // 2))
    return _Block(slice(length // 2, None), everything)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, block: _Block, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """The output `[b, heads, s, d]` and the log-sum-exp of the scores `[b, heads, s]` in fp32."""
    if query.device.type != "cuda":
        return _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, block.causal, attn_mask=block.mask, scale=scale
        )
    if _takes_flash(query, block):
        return _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, block.causal, scale=scale)[:2]
    key, value = (_per_head(x, query) for x in (key, value))
    out, lse, _, _ = _aten._scaled_dot_product_efficient_attention(
        query, key, value, _aligned(block.mask, query, key), True, 0.0, block.causal, scale=scale
    )
    return out, lse[:, :, : query.shape[2]]  # the kernel pads rows


def _attend_backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    block: _Block,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of this block's scores, for the `out` and `lse` of all blocks together."""
    if query.device.type != "cuda":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, query, key, value, out, lse, 0.0, block.causal, attn_mask=block.mask, scale=scale
        )
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
    if _takes_flash(query, block):
        lengths = (query.shape[2], key.shape[2])
        return _aten._scaled_dot_product_flash_attention_backward(
            dout,
            query,
            key,
            value,
            out,
            lse.contiguous(),
            None,
            None,
            *lengths,
            0.0,
            block.causal,
            no_dropout,
            no_dropout,
            scale=scale,
        )
    groups = key.shape[1]
    key, value = (_per_head(x, query) for x in (key, value))
    lse = F.pad(lse, (0, -lse.shape[2] % 32), value=torch.inf)  # rows as the kernel pads them
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
        dout, query, key, value, _aligned(block.mask, query, key), out, lse, no_dropout[0], no_dropout[1], 0.0,
        [True, True, True, False], block.causal, scale=scale,
    )  # fmt: skip
    return dq, *(grad.unflatten(1, (groups, -1)).sum(2) for grad in (dk, dv))


def _takes_flash(query: Tensor, block: _Block) -> bool:
    return block.mask is None and query.dtype in (torch.float16, torch.bfloat16) and query.shape[3] % 8 == 0


def _per_head(x: Tensor, query: Tensor) -> Tensor:
    """A copy of keys or values for every query head."""
    return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)


def _aligned(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """`mask` with the strides that the memory-efficient kernel asks for, at the full shape."""
    if mask is None:
        return None
    padded = F.pad(mask, (0, -mask.shape[-1] % 16))[..., : mask.shape[-1]]
    return padded.expand(*query.shape[:3], key.shape[2])


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
