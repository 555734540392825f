"""Attention of some queries to some keys, which also returns the log-sum-exp of the scores.

Fused kernels of torch compute it, except for scores with a softcap (`softcap.py`). On a CPU the
fused kernel computes in fp32 for every dtype: in bf16 both passes together take 1.5 to 3.8 times as
long with AVX-512, including the casts. Only with AMX the forward pass computes in bf16, which takes
0.27 to 0.35 of the time. In the backward pass it would take 0.54 to 0.87 of the time, but errors of
the gradients of keys and values would be 2 to 3.5 times as large.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.private_operators import (
    run_cpu_attention,
    run_cpu_attention_backward,
    run_efficient_attention,
    run_efficient_attention_backward,
    run_flash_attention,
    run_flash_attention_backward,
)
from megatron.core.wings import resolve

_SOFTCAP = "megatron.core.transformer.attention.softcap:attend_with_softcap"
_SOFTCAP_BACKWARD = "megatron.core.transformer.attention.softcap:attend_with_softcap_backward"
# With fewer key heads than query heads, the CPU kernel of older versions reads and writes out of
# bounds without an error: seen in 2.6 and 2.7, fixed in 2.13.
_CPU_SUPPORTS_GROUPS = torch.__version__ >= "2.13"
# Whether the processor multiplies bf16 matrices in hardware. The function is private.
_HAS_AMX: bool = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
# Flash attention of older versions returns the log-sum-exp of packed documents in another layout.
_FLASH_PACKS_DOCUMENTS = torch.__version__ >= "2.7"
_MAX_FLASH_HEAD_DIM = 256
# The fused kernels of CUDA require rows of heads that begin at multiples of 16 bytes.
_HEAD_DIM_STEP = 8


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


class Documents(NamedTuple):
    """Documents of a micro-batch, if the rank has whole sequences."""

    slices: tuple[Document, ...]
    offsets: Tensor
    """Starts of all documents in the `b * s` positions and the end of the last, int32, on the
    device.
    """
    max_length: int


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
    documents: Documents | None = None
    """If given, each document attends to itself only."""
    window: int | None = None
    """If given, the last row sees that many columns before the last one, and each row above one
    column more to the left: only for flash attention.
    """
    samples: slice = slice(None)

    def select_document(self, document: Document) -> Block:
        """Return the block of a single document; masks depend on distances only."""
        _, _, positions = document
        length = positions.stop - positions.start
        mask = self.mask
        if mask is not None:
            mask = mask[..., :length, :length]
        return Block(
            rows=slice(None),
            columns=slice(None),
            causal=self.causal,
            mask=mask,
            window=self.window,
        )


def attend(
    query: Tensor,  # [b, heads, rows, d]
    key: Tensor,  # [b, groups, columns, d]
    value: Tensor,  # [b, groups, columns, d]
    block: Block,
    scoring: Scoring,
) -> tuple[Tensor, Tensor]:
    """Return the output `[b, heads, rows, d]` and the log-sum-exp `[b, heads, rows]` of the scores.

    The output has the dtype of the query, and the log-sum-exp is fp32.
    """
    # Cases that are reduced to others, or that no fused kernel computes
    if _needs_padding(query, scoring):
        head_dim = query.shape[3]
        scoring = Scoring(scoring.get_scale(head_dim))
        out, lse = attend(_pad_heads(query), _pad_heads(key), _pad_heads(value), block, scoring)
        return out[..., :head_dim], lse
    if block.documents is not None and not _can_pack_documents(query, block, scoring):
        return _attend_to_documents(query, key, value, block.documents, block, scoring)
    if scoring.softcap is not None:
        result: tuple[Tensor, Tensor] = resolve(_SOFTCAP)(query, key, value, block, scoring)
        return result

    # Fused kernels, via private operators: the public function does not return the log-sum-exp.
    if not _supports_groups(query, block):
        key = _repeat_heads(key, query)
        value = _repeat_heads(value, query)
    scale = scoring.scale
    if query.device.type != "cuda":
        dtype = _select_cpu_dtype(query.dtype)
        out, lse = run_cpu_attention(
            query.to(dtype),
            key.to(dtype),
            value.to(dtype),
            _make_cpu_mask(block),
            block.causal,
            scale,
        )
        return out.to(query.dtype), lse
    if _uses_flash(query, block):
        return _run_flash(query, key, value, block, scale)

    # The memory-efficient kernel, for masks and fp32
    mask = _align_mask(block.mask, query, key)
    out, padded_lse = run_efficient_attention(query, key, value, mask, block.causal, scale)
    num_rows = query.shape[2]
    return out, padded_lse[:, :, :num_rows]  # the kernel pads the rows


def attend_backward(
    dout: Tensor,  # [b, heads, rows, d]
    query: Tensor,  # [b, heads, rows, d]
    key: Tensor,  # [b, groups, columns, d]
    value: Tensor,  # [b, groups, columns, d]
    out: Tensor,  # [b, heads, rows, d]
    lse: Tensor,  # [b, heads, rows]
    block: Block,
    scoring: Scoring,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value from the scores of this block.

    `out` and `lse` are the merged ones of all blocks.
    """
    # Cases that are reduced to others, or that no fused kernel computes
    if _needs_padding(query, scoring):
        head_dim = query.shape[3]
        scoring = Scoring(scoring.get_scale(head_dim))
        dq, dk, dv = attend_backward(
            _pad_heads(dout),
            _pad_heads(query),
            _pad_heads(key),
            _pad_heads(value),
            _pad_heads(out),
            lse,
            block,
            scoring,
        )
        return dq[..., :head_dim], dk[..., :head_dim], dv[..., :head_dim]
    documents = block.documents
    if documents is not None and not _can_pack_documents(query, block, scoring):
        return _attend_to_documents_backward(
            dout, query, key, value, out, lse, documents, block, scoring
        )
    if scoring.softcap is not None:
        grads: tuple[Tensor, Tensor, Tensor] = resolve(_SOFTCAP_BACKWARD)(
            dout, query, key, value, out, lse, block, scoring
        )
        return grads

    # Fused kernels
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


def add_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Return fp32 output and log-sum-exp with one more score for each query, of value zero.

    `sink` is `[heads]` fp32. It is a block with an output of zero, which only reduces the weight of
    the others.
    """
    total_lse = torch.logaddexp(lse, sink.view(-1, 1))
    share_of_keys = (lse - total_lse).exp_().unsqueeze(-1)  # [b, heads, s, 1]
    return out * share_of_keys, total_lse


def compute_sink_gradient(sink: Tensor, dout: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """Return the gradient of the sinks, `[heads]`.

    The gradient of a softmax is p * (dp - sum(p * dp)). dp of the sink is zero, and the sum over
    the keys equals the sum of `dout * out` over d.
    """
    probability = (sink.view(-1, 1) - lse).exp_()  # [b, heads, s]
    expected = (dout.float() * out).sum(-1)  # [b, heads, s]
    return probability.mul_(expected).sum((0, 2)).neg_()


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
        ctx.block = Block(
            rows=slice(None),
            columns=slice(None),
            causal=mask is None,
            mask=mask,
        )
        ctx.scoring = Scoring(scale)
        out, lse = attend(query, key, value, ctx.block, ctx.scoring)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, out, lse = ctx.saved_tensors
        dquery, dkey, dvalue = attend_backward(
            dout,
            query,
            key,
            value,
            out,
            lse,
            ctx.block,
            ctx.scoring,
        )
        return dquery, dkey, dvalue, None, None


def supports_flash(device_type: str, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether the flash attention kernel of CUDA supports these heads without a mask."""
    is_half = dtype in (torch.float16, torch.bfloat16)
    return device_type == "cuda" and is_half and head_dim <= _MAX_FLASH_HEAD_DIM


def _needs_padding(query: Tensor, scoring: Scoring) -> bool:
    """Return whether heads must be wider for the fused kernels of CUDA."""
    is_misaligned = query.shape[3] % _HEAD_DIM_STEP != 0
    return is_misaligned and query.device.type == "cuda" and scoring.softcap is None


def _pad_heads(x: Tensor) -> Tensor:
    """Append zeros to each head, which do not change the scores."""
    return F.pad(x, (0, -x.shape[-1] % _HEAD_DIM_STEP))


def _uses_flash(query: Tensor, block: Block) -> bool:
    """Return whether flash attention of CUDA computes a block without a softcap."""
    if block.mask is not None:
        return False
    return supports_flash(query.device.type, query.dtype, query.shape[3])


def _can_pack_documents(query: Tensor, block: Block, scoring: Scoring) -> bool:
    """Return whether a single call of a kernel computes all documents."""
    return _FLASH_PACKS_DOCUMENTS and scoring.softcap is None and _uses_flash(query, block)


def _run_flash(
    query: Tensor, key: Tensor, value: Tensor, block: Block, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Compute `attend` by flash attention, all documents in one call."""
    arguments = _FlashArguments.of(query, key, block)
    out, lse = run_flash_attention(
        arguments.pack(query),
        arguments.pack(key),
        arguments.pack(value),
        arguments.offsets,
        arguments.max_rows,
        arguments.max_columns,
        block.causal,
        scale,
        block.window,
    )
    if block.documents is not None:
        # [heads, b * s] -> [b, heads, s]
        lse = lse.unflatten(1, (query.shape[0], -1)).transpose(0, 1)
    return arguments.unpack(out), lse


def _run_flash_backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    block: Block,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `attend_backward` by flash attention."""
    arguments = _FlashArguments.of(query, key, block)
    if block.documents is not None:
        lse = lse.transpose(0, 1).flatten(1)  # [heads, b * s]
    dq, dk, dv = run_flash_attention_backward(
        arguments.pack(dout),
        arguments.pack(query),
        arguments.pack(key),
        arguments.pack(value),
        arguments.pack(out),
        lse.contiguous(),  # that of a block is a view of all rows
        arguments.offsets,
        arguments.max_rows,
        arguments.max_columns,
        block.causal,
        scale,
        block.window,
    )
    return arguments.unpack(dq), arguments.unpack(dk), arguments.unpack(dv)


class _FlashArguments(NamedTuple):
    """Arguments of flash attention that the forward and the backward pass have in common."""

    batch: int
    offsets: Tensor | None
    """Starts of the documents; the kernel then expects tensors without a batch dimension."""
    max_rows: int
    max_columns: int

    @classmethod
    def of(cls, query: Tensor, key: Tensor, block: Block) -> _FlashArguments:
        """Return the arguments for `[b, heads, s, d]` queries and keys."""
        batch, _, num_rows, _ = query.shape
        documents = block.documents
        if documents is None:
            return cls(batch, None, num_rows, key.shape[2])
        # With a maximum of one row the kernel returns the log-sum-exp in another layout.
        max_length = max(2, documents.max_length)
        return cls(batch, documents.offsets, max_length, max_length)

    def pack(self, x: Tensor) -> Tensor:
        """Return `[b, heads, s, d]` as `[b, s, heads, d]`, or `[b * s, heads, d]` of documents."""
        by_position = x.transpose(1, 2)
        if self.offsets is None:
            return by_position
        return by_position.flatten(0, 1)

    def unpack(self, x: Tensor) -> Tensor:
        """Return the inverse of `pack`."""
        if self.offsets is not None:
            x = x.unflatten(0, (self.batch, -1))
        return x.transpose(1, 2)


def _attend_to_documents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    block: Block,
    scoring: Scoring,
) -> tuple[Tensor, Tensor]:
    """Compute `attend` for each document on its own."""
    out = torch.empty_like(query)
    lse_shape = query.shape[:3]  # [b, heads, rows]
    lse = query.new_empty(lse_shape, dtype=torch.float32)
    for document in documents.slices:
        own_block = block.select_document(document)
        out[document], lse[document] = attend(
            query[document],
            key[document],
            value[document],
            own_block,
            scoring,
        )
    return out, lse


def _attend_to_documents_backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    documents: Documents,
    block: Block,
    scoring: Scoring,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `attend_backward` for each document on its own."""
    dquery = torch.empty_like(query)
    dkey = torch.empty_like(key)
    dvalue = torch.empty_like(value)
    for document in documents.slices:
        own_block = block.select_document(document)
        dquery[document], dkey[document], dvalue[document] = attend_backward(
            dout[document],
            query[document],
            key[document],
            value[document],
            out[document],
            lse[document],
            own_block,
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
        dq, dk, dv = run_cpu_attention_backward(
            dout.float(),
            query.float(),
            key.float(),
            value.float(),
            out.float(),
            lse,
            _make_cpu_mask(block),
            block.causal,
            scale,
        )
        dtype = query.dtype
        return dq.to(dtype), dk.to(dtype), dv.to(dtype)
    if _uses_flash(query, block):
        return _run_flash_backward(dout, query, key, value, out, lse, block, scale)

    # The memory-efficient kernel, for masks and fp32. In the forward pass it has padded the rows to
    # a multiple of 32.
    num_rows = query.shape[2]
    padding = -num_rows % 32
    padded_lse = F.pad(lse, (0, padding), value=torch.inf)
    # It reads rows of `out` at a fixed distance. This copies nothing if `out` is its own output.
    row_major_out = out.transpose(1, 2).contiguous().transpose(1, 2)
    mask = _align_mask(block.mask, query, key)
    return run_efficient_attention_backward(
        dout, query, key, value, mask, row_major_out, padded_lse, block.causal, scale
    )


def _select_cpu_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the CPU kernel computes the forward pass for tensors of `dtype`."""
    if dtype == torch.bfloat16 and _HAS_AMX:
        return dtype
    return torch.float32


def _make_cpu_mask(block: Block) -> Tensor | None:
    """Return the additive fp32 mask that the CPU kernel requires."""
    mask = block.mask
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        visible_scores = torch.zeros(mask.shape)
        return visible_scores.masked_fill_(~mask, -torch.inf)
    return mask.float()


def _supports_groups(query: Tensor, block: Block) -> bool:
    """Return whether the kernel accepts fewer key heads than query heads."""
    if query.device.type == "cuda":
        return _uses_flash(query, block)
    return _CPU_SUPPORTS_GROUPS


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
    num_columns = mask.shape[-1]
    padding = -num_columns % 16
    padded = F.pad(mask, (0, padding))
    aligned = padded[..., :num_columns]
    batch, heads, num_rows, _ = query.shape
    num_keys = key.shape[2]
    return aligned.expand(batch, heads, num_rows, num_keys)
