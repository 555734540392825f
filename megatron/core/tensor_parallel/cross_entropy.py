"""The output layer and the loss in one: the logits exist once, and the gradient takes their place.

The columns of the logits are split over TP (Shoeybi et al. 2019); what the ranks exchange is two numbers per token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel.layers import linear_weight_grad, local_rows
from megatron.core.tensor_parallel.mappings import (
    Pending,
    start_all_reduce,
    start_sequence_all_gather,
    start_sequence_reduce_scatter,
)

# Logits handled at once, by device. Their fp32 copy stays in the cache of a CPU. On a GPU it takes 256 MiB, and kernels
# run much longer than they take to launch: 16 chunks instead of 512 for 8,192 tokens at a vocabulary of 128k.
_CHUNK_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 26}


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    tp: Axis,
    sequence_parallel: bool = False,
    softcap: float | None = None,
) -> Tensor:
    """Loss of every token, `[s, b]` in fp32.

    `hidden` is `[s, b, h]` (`[s/tp, b, h]` with `sequence_parallel`), `weight` this rank's rows `[v/tp, h]` of the
    output matrix, `labels` `[s, b]`. Rows from `vocab_size` on are padding and take no part in the softmax.
    With `softcap` a logit x is softcap * tanh(x / softcap).
    """
    return _LinearCrossEntropy.apply(hidden, weight, labels, vocab_size, tp, sequence_parallel, softcap)


class _LinearCrossEntropy(torch.autograd.Function):
    """Keeps e^(logit - max) in the place of the logits; backward turns it into the gradient in one pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        vocab_size: int,
        tp: Axis,
        sequence_parallel: bool,
        softcap: float | None,
    ) -> Tensor:
        whole = start_sequence_all_gather(hidden, tp).wait() if sequence_parallel else hidden
        logits = whole.reshape(-1, whole.shape[-1]) @ weight.t()  # [n, v/tp]
        if softcap is not None:
            logits.div_(softcap).tanh_().mul_(softcap)
        first = tp.rank * weight.shape[0]
        logits[:, max(0, vocab_size - first) :] = -torch.inf
        columns, elsewhere = local_rows(labels.reshape(-1), first, weight.shape[0])

        largest = logits.amax(-1).float()
        if tp.size > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tp.group)
        total, predicted = _exponentials(logits, largest, columns)
        predicted.masked_fill_(elsewhere, 0.0)  # a rank with nothing but padding has only -inf to offer
        if tp.size > 1:
            sums = torch.stack((total, predicted))
            total, predicted = start_all_reduce(sums, tp).wait().unbind()
        ctx.save_for_backward(hidden, weight, logits, largest, total, columns, elsewhere)
        ctx.weight, ctx.tp, ctx.sequence_parallel, ctx.softcap = weight, tp, sequence_parallel, softcap
        return (total.log() - predicted).view(labels.shape)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, logits, largest, total, columns, elsewhere = ctx.saved_tensors
        tp, sequence_parallel = ctx.tp, ctx.sequence_parallel
        gather = start_sequence_all_gather(hidden, tp) if sequence_parallel else Pending(hidden, None)
        chunks, dloss = _chunks(logits), dloss.reshape(-1).float()
        for start in chunks if ctx.softcap is not None else ():
            part = slice(start, start + chunks.step)
            slope = _slope(logits[part], largest[part], ctx.softcap)
            _gradient(logits[part], total[part], columns[part], elsewhere[part], dloss[part]).mul_(slope)
        dlogits = logits if ctx.softcap is not None else _gradient(logits, total, columns, elsewhere, dloss)
        dx = (dlogits @ weight).view(gather.wait().shape)
        pending = start_sequence_reduce_scatter(dx, tp) if sequence_parallel else start_all_reduce(dx, tp)
        dw = linear_weight_grad(ctx.weight, dlogits, gather.wait().reshape(-1, hidden.shape[-1]))
        return pending.wait(), dw, None, None, None, None, None


def loss_chunk_elements(device_type: str) -> int:
    """The most logits that are held in fp32 at once (but for a row that is longer)."""
    return _CHUNK_ELEMENTS.get(device_type, _CHUNK_ELEMENTS["cuda"])


def _chunks(logits: Tensor) -> range:
    return range(0, logits.shape[0], max(1, loss_chunk_elements(logits.device.type) // max(1, logits.shape[1])))


def _exponentials(logits: Tensor, largest: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Replace every logit x by e^(x - largest); returns their sum and x - largest at `columns`, both fp32 `[n]`."""
    total, predicted = torch.empty_like(largest), torch.empty_like(largest)
    chunks = _chunks(logits)
    for start in chunks:
        part = slice(start, start + chunks.step)
        shifted = logits[part].float() if logits.dtype != torch.float32 else logits[part]
        shifted -= largest[part].unsqueeze(1)
        torch.gather(shifted, 1, columns[part].unsqueeze(1), out=predicted[part].unsqueeze(1))
        torch.sum(shifted.exp_(), -1, out=total[part])
        if shifted.dtype != logits.dtype:
            logits[part] = shifted
    return total, predicted


def _gradient(exponentials: Tensor, total: Tensor, columns: Tensor, elsewhere: Tensor, dloss: Tensor) -> Tensor:
    """`(softmax - onehot) * dloss`, in place of the exponentials."""
    exponentials.mul_((dloss / total).to(exponentials.dtype).unsqueeze(1))
    rows = torch.arange(exponentials.shape[0], device=exponentials.device)
    at_label = exponentials[rows, columns].float() - dloss * ~elsewhere
    exponentials[rows, columns] = at_label.to(exponentials.dtype)  # in place; scatter_add_ would copy the whole matrix
    return exponentials


def _slope(exponentials: Tensor, largest: Tensor, softcap: float) -> Tensor:
    """d y / d x of y = softcap * tanh(x / softcap), from e^(y - largest)."""
    y = exponentials.float().clamp_min(torch.finfo(torch.float32).tiny).log_().add_(largest.unsqueeze(1))
    return y.div_(softcap).square_().neg_().add_(1.0)
