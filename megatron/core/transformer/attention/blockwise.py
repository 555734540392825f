"""Attention over a sequence that is split over ranks: to the keys of one rank at a time.

Every block gives its output and the log-sum-exp of its scores, by which blocks are merged into
exact attention (Liu et al. 2023, "Ring Attention with Blockwise Transformers"; Dao et al. 2022).
Own keys come first, those of the other ranks are on their way meanwhile: `p2p` passes them around a
ring, `all_gather` fetches all at once. Nothing of other ranks is kept for the backward pass: keys
and values are exchanged again, and their gradients return in the same manner.

What a query may see is an `AttentionMask`: causal order, a sliding window, documents, and ALiBi's
distances.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.arithmetic import even_range
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel.mappings import (
    start_sequence_all_gather,
    start_sequence_reduce_scatter,
)
from megatron.core.transformer.attention.kernels import (
    Block,
    Document,
    Scoring,
    attend,
    attend_backward,
)
from megatron.core.transformer.placement import compute_local_positions
from megatron.core.transformer.transformer_config import TransformerConfig


def alibi_slopes(num_heads: int) -> Tensor:
    """Slope of every head (Press et al. 2022): powers of 2^(-8/n), with every other of 2n's when n
    is no power of 2.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = 2.0 ** (-8.0 / power * torch.arange(1, power + 1, dtype=torch.float64))
    extra = 2.0 ** (
        -4.0 / power * torch.arange(1, 2 * (num_heads - power) + 1, 2, dtype=torch.float64)
    )
    return torch.cat((slopes, extra)).float()


class AttentionMask:
    """The `attn_mask` of scaled_dot_product_attention; None means plain causal order, which needs
    no mask at all.
    """

    def __init__(
        self, config: TransformerConfig, heads_over: tuple[int, int], window: tuple[int, int] | None
    ) -> None:
        """`heads_over`: which part of the heads is here, and of how many; `window`: the layer's."""
        self.window = window
        self.slopes = None
        if config.position_embedding_type == "alibi":
            start, stop = even_range(config.num_attention_heads, *heads_over)
            self.slopes = alibi_slopes(config.num_attention_heads)[start:stop]
        self._kept: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}
        self._parts: tuple[Tensor, tuple[Document, ...]] | None = None
        self._kept_blocks: dict[tuple[int, int, torch.dtype, torch.device], Tensor | None] = {}

    @property
    def is_causal(self) -> bool:
        """Whether plain causal order is all that does not depend on the data."""
        return self.window is None and self.slopes is None

    def parts(self, documents: Tensor) -> tuple[Document, ...]:
        """Where the documents of `[b, s]` lie. The layers of a micro-batch ask one after the other,
        for one answer.
        """
        if self._parts is None or self._parts[0] is not documents:
            found = []
            for sample, row in enumerate(
                documents.cpu()
            ):  # no copy of what is on the host, as a run has it
                stop = 0
                for length in torch.unique_consecutive(row, return_counts=True)[1].tolist():
                    start = stop
                    stop = stop + length
                    found.append((slice(sample, sample + 1), slice(None), slice(start, stop)))
            self._parts = documents, tuple(found)
        return self._parts[1]

    def __call__(
        self, length: int, documents: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> Tensor | None:
        """`documents` `[b, s]`, if any: a token sees those of the same number.

        Returns a bool mask (True: visible) or an additive one in `dtype`, broadcastable to `[b,
        heads, s, s]`.
        """
        if documents is None and self.is_causal:
            return None
        key = (length, dtype, device)
        if key not in self._kept:
            positions = torch.arange(length)
            self._kept[key] = self._fixed(positions, positions, dtype).to(device)
        fixed = self._kept[key]
        if documents is None:
            return fixed
        documents = documents.to(device, non_blocking=True)
        others = _others(documents, documents)
        return (
            fixed & ~others if fixed.dtype == torch.bool else fixed.masked_fill(others, -torch.inf)
        )

    def block(
        self,
        length: int,
        cp: Axis,
        source: int,
        documents: Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor | None:
        """Additive mask in `dtype` of this rank's queries and the keys of rank `source`, of
        sequences of `length`.

        `documents` are of whole sequences. None if no query sees any of the keys. What is forbidden is finite: a
        query that sees nothing of a block then has a log-sum-exp there, which weighs nothing
        against any other.
        """
        forbidden = torch.finfo(dtype).min / 2
        rows, columns = (
            compute_local_positions(length, rank, cp.size) for rank in (cp.rank, source)
        )
        key = (length, source, dtype, device)
        if key not in self._kept_blocks:
            fixed = self._fixed(rows, columns, dtype)
            if fixed.dtype == torch.bool:
                seen = fixed.any()
                fixed = torch.zeros(1, 1, *fixed.shape, dtype=dtype).masked_fill(~fixed, forbidden)
            else:
                seen = fixed.isfinite().any()
                fixed = fixed.clamp(min=forbidden)
            self._kept_blocks[key] = fixed.to(device) if seen else None
        kept = self._kept_blocks[key]
        if documents is None or kept is None:
            return kept
        parts = (documents[:, positions.to(documents.device)] for positions in (rows, columns))
        return kept.masked_fill(
            _others(*(part.to(device, non_blocking=True) for part in parts)), forbidden
        )

    def _fixed(self, queries: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
        """The part that does not depend on the data, for queries and keys at these positions."""
        distance = queries.unsqueeze(1) - keys
        visible = distance >= 0
        if self.window is not None:
            visible &= distance <= self.window[0]
        if self.slopes is None:
            return visible
        # [1, heads/tp, s, s]: with fewer dimensions attention falls back to a kernel that keeps all
        # probabilities
        bias = self.slopes.view(1, -1, 1, 1) * -distance.float()
        return bias.masked_fill(~visible, -torch.inf).to(dtype)


def _others(queries: Tensor, keys: Tensor) -> Tensor:
    """Where the documents of queries and keys are not the same: `[b, 1, queries, keys]`."""
    return (queries.unsqueeze(2) != keys.unsqueeze(1)).unsqueeze(1)


def blockwise_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    documents: Tensor | None,
    cp: Axis,
    comm_type: str,
    scoring: Scoring,
    sink: Tensor | None = None,
) -> Tensor:
    """Causal attention of the local queries `[b, heads, s/cp, d]` to the keys `[b, groups, s/cp,
    d]` of all ranks.

    With `documents` `[b, s]`, of whole sequences, a token sees those of the same number. `sink`
    `[heads]` fp32: one more score of every query, with a value of zero. Returns the shape of
    `query`.
    """
    exchange = _EXCHANGES[
        comm_type if cp.size > 1 else "all_gather"
    ]  # which does nothing with one rank
    mine = torch.stack((key, value))
    context: Tensor = _BlockwiseAttention.apply(
        query, mine, sink, mask, documents, cp, exchange, scoring
    )
    return context


class _BlockwiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        mine: Tensor,
        sink: Tensor | None,
        mask: AttentionMask,
        documents: Tensor | None,
        cp: Axis,
        make_exchange: Callable[[Axis], _Exchange],
        scoring: Scoring,
    ) -> Tensor:
        out = lse = query.new_empty(0)
        for source, (key, value) in make_exchange(cp).fetch(mine):
            block = _block(query, source, mask, documents, cp)
            if block is None:
                continue
            rows = block.rows
            columns = block.columns
            part, part_lse = attend(
                query[:, :, rows], key[:, :, columns], value[:, :, columns], block, scoring
            )
            if source == cp.rank:  # the first block, in which every query sees at least itself
                out = part.float()
                lse = part_lse
                continue
            out[:, :, rows].lerp_(
                part.float(), torch.sigmoid(part_lse - lse[:, :, rows]).unsqueeze(-1)
            )
            lse[:, :, rows] = torch.logaddexp(lse[:, :, rows], part_lse)
        if sink is not None:  # a block of its own, whose output is zero: the others weigh less
            of_keys = lse
            lse = torch.logaddexp(lse, sink.view(-1, 1))
            out = out * (of_keys - lse).exp_().unsqueeze(-1)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, mine, sink, out, lse)
        ctx.documents = documents
        ctx.mask = mask
        ctx.cp = cp
        ctx.make_exchange = make_exchange
        ctx.scoring = scoring
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, mine, sink, out, lse = ctx.saved_tensors
        dquery = torch.zeros_like(query, dtype=torch.float32)
        exchange = ctx.make_exchange(ctx.cp)
        for source, (key, value) in exchange.fetch(mine):
            gradient = torch.zeros_like(mine)
            block = _block(query, source, ctx.mask, ctx.documents, ctx.cp)
            if block is not None:
                rows = block.rows
                columns = block.columns
                q, do, o, logs = (x[:, :, rows] for x in (query, dout, out, lse))
                k, v = (x[:, :, columns] for x in (key, value))
                dq, dk, dv = attend_backward(do, q, k, v, o, logs, block, ctx.scoring)
                dquery[:, :, rows] += dq
                gradient[0, :, :, columns] = dk
                gradient[1, :, :, columns] = dv
            exchange.add(source, gradient)
        dsink = None if sink is None else _sink_gradient(sink, dout, out, lse)
        return dquery.to(query.dtype), exchange.finish(), dsink, None, None, None, None, None


def _sink_gradient(sink: Tensor, dout: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """Softmax's gradient p (dp - sum of p dp), where dp is zero and the sum over the keys is that
    of `dout * out`.
    """
    probability = (sink.view(-1, 1) - lse).exp_()  # [b, heads, s]
    return probability.mul_((dout.float() * out).sum(-1)).sum((0, 2)).neg_()


def _block(
    query: Tensor, source: int, mask: AttentionMask, documents: Tensor | None, cp: Axis
) -> Block | None:
    """The queries of this rank and the keys of rank `source`; None where no query sees any of them.

    In causal order the chunks r and 2 CP - 1 - r of a rank see, of another rank with chunks j and 2
    CP - 1 - j: for j < r both the first, for j > r the second chunk both.
    """
    length = query.shape[2]
    everything = slice(None)
    if (
        cp.size == 1 and documents is not None
    ):  # each by itself: no mask of `[s, s]` for every sample
        added = (
            None
            if mask.is_causal
            else mask.block(length, cp, source, None, query.dtype, query.device)
        )
        return Block(everything, everything, added is None, added, mask.parts(documents))
    if documents is not None or not mask.is_causal:
        added = mask.block(length * cp.size, cp, source, documents, query.dtype, query.device)
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


class _Exchange(Protocol):
    """How keys and values get to other ranks, and their gradients back; made for one pass."""

    def fetch(self, mine: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(rank, its tensor) of all ranks, `mine` first; the next is under way while one is used."""

    def add(self, source: int, gradient: Tensor) -> None:
        """This rank's contribution to the gradient of `source`; in the order of `fetch`."""

    def finish(self) -> Tensor:
        """The sum of all contributions to this rank's gradient."""


class _Ring:
    """The tensors go around a ring, and gradients one step behind them."""

    def __init__(self, cp: Axis) -> None:
        self._cp = cp
        self._gradient: _Shift | None = None

    def fetch(self, mine: Tensor) -> Iterator[tuple[int, Tensor]]:
        cp = self._cp
        held = mine
        for step in range(cp.size - 1):
            shift = _Shift(held, cp)
            yield (cp.rank - step) % cp.size, held
            held = shift.wait()
        yield (cp.rank + 1) % cp.size, held

    def add(self, source: int, gradient: Tensor) -> None:
        # The sum for `source` has arrived from the rank before, which has added its part and all
        # those before it.
        if self._gradient is not None:
            gradient += self._gradient.wait()
        self._gradient = _Shift(gradient, self._cp)

    def finish(self) -> Tensor:
        assert self._gradient is not None
        return self._gradient.wait()


class _AllGather:
    """All tensors are gathered at once, and all gradients scattered."""

    def __init__(self, cp: Axis) -> None:
        self._cp = cp
        self._gradients: dict[int, Tensor] = {}

    def fetch(self, mine: Tensor) -> Iterator[tuple[int, Tensor]]:
        cp = self._cp
        gathering = start_sequence_all_gather(mine, cp)
        yield cp.rank, mine
        parts = gathering.wait().chunk(cp.size)
        for source in (*range(cp.rank), *range(cp.rank + 1, cp.size)):
            yield source, parts[source]

    def add(self, source: int, gradient: Tensor) -> None:
        self._gradients[source] = gradient

    def finish(self) -> Tensor:
        whole = torch.cat([self._gradients[source] for source in range(self._cp.size)])
        return start_sequence_reduce_scatter(whole, self._cp).wait()


_EXCHANGES: dict[str, Callable[[Axis], _Exchange]] = {"p2p": _Ring, "all_gather": _AllGather}
