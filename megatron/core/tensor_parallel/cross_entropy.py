"""Output layer and cross entropy in one operation, with the vocabulary split over TP.

The logits exist once, and the gradient overwrites them. Their columns are split over TP; the ranks
exchange two numbers per token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.fused_kernels import find_kernel
from megatron.core.parallel_state import Axis
from megatron.core.private_operators import multiply_by_weight
from megatron.core.tensor_parallel.layers import compute_linear_weight_grad, find_local_rows
from megatron.core.tensor_parallel.mappings import (
    start_all_reduce,
    start_input_gather,
    start_output_sum,
)

# Logits that are converted to fp32 at once, by device. On a CPU the copy stays in the cache. On a
# GPU it takes 256 MiB, and kernels run much longer than their launch takes: 16 chunks instead of
# 512 for 8,192 tokens with a vocabulary of 128k.
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
    bias: Tensor | None = None,
) -> Tensor:
    """Return the loss of each token, `[s, b]` fp32. Collective over TP.

    `hidden` is `[s, b, h]` (`[s/tp, b, h]` with `sequence_parallel`), `weight` `[v/tp, h]` contains
    this rank's rows of the output matrix, `labels` are `[s, b]`. Rows from `vocab_size` on are
    padding and not part of the softmax. With `softcap` a logit x is softcap * tanh(x / softcap).
    `bias` `[v/tp]` is added to the logits before that.
    """
    return _LinearCrossEntropy.apply(
        hidden, weight, bias, labels, vocab_size, tp, sequence_parallel, softcap
    )


class _LinearCrossEntropy(torch.autograd.Function):
    """Overwrites the logits with their gradient; without a kernel with e^(logit - max) before."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        vocab_size: int,
        tp: Axis,
        sequence_parallel: bool,
        softcap: float | None,
    ) -> Tensor:
        # Logits of this rank's rows, [n, v/tp] for n = s * b tokens
        whole = start_input_gather(hidden, tp, sequence_parallel).wait()
        logits = multiply_by_weight(whole.reshape(-1, whole.shape[-1]), weight)
        if bias is not None:
            logits.add_(bias)
        if softcap is not None:
            logits.div_(softcap).tanh_().mul_(softcap)
        num_rows = weight.shape[0]
        first_row = tp.rank * num_rows
        padding_start = max(0, vocab_size - first_row)
        num_columns = min(num_rows, padding_start)  # without padding
        columns, is_elsewhere = find_local_rows(labels.reshape(-1), first_row, num_rows)

        # Maximum, sum of exponentials, and logit of the label, [n] each, the last one minus the
        # maximum
        softmax = find_kernel("softmax", logits)
        if softmax is not None:
            columns.masked_fill_(is_elsewhere, -1)
            local_largest, total, predicted = softmax(logits, columns, num_columns)
            largest = _reduce_maximum(local_largest, tp)
            if tp.size > 1:
                total *= (local_largest - largest).exp()
            predicted -= largest
        else:
            logits[:, padding_start:] = -torch.inf
            largest = _reduce_maximum(logits.amax(-1).float(), tp)
            total, predicted = _compute_exponentials(logits, largest, columns)
        # Labels of other ranks; a rank with padding only would contribute -inf.
        predicted.masked_fill_(is_elsewhere, 0.0)
        if tp.size > 1:
            sums = torch.stack((total, predicted))
            total, predicted = start_all_reduce(sums, tp).wait().unbind()

        # The logits, or their exponentials without a kernel
        ctx.save_for_backward(hidden, weight, logits, largest, total, columns, is_elsewhere)
        ctx.num_columns = num_columns
        ctx.is_fused = softmax is not None
        # The parameter itself, for main_grad: recomputation replaces saved tensors by copies.
        ctx.weight = weight
        ctx.has_bias = bias is not None
        ctx.tp = tp
        ctx.sequence_parallel = sequence_parallel
        ctx.softcap = softcap
        return (total.log() - predicted).view(labels.shape)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, dlogits, largest, total, columns, is_elsewhere = ctx.saved_tensors
        tp = ctx.tp
        sequence_parallel = ctx.sequence_parallel

        # Phase 1: launch the all-gather
        gather = start_input_gather(hidden, tp, sequence_parallel)

        # Phase 2: the gradient of the logits overwrites them
        token_shape = dloss.shape  # [s, b]
        dloss = dloss.reshape(-1).float().contiguous()
        if ctx.is_fused:
            write_gradient = find_kernel("softmax_gradient", dlogits)
            assert write_gradient is not None
            write_gradient(dlogits, columns, largest, total, dloss, ctx.num_columns, ctx.softcap)
        else:
            _overwrite_exponentials(
                dlogits, largest, total, columns, is_elsewhere, dloss, ctx.softcap
            )

        # Phase 3: dx, and launch its sum over TP
        dx = multiply_by_weight(dlogits, weight.t()).view(*token_shape, -1)
        reduced = start_output_sum(dx, tp, sequence_parallel)

        # Phase 4: dW and db, while that is in progress
        x = gather.wait().reshape(-1, hidden.shape[-1])
        dw = None
        if ctx.needs_input_grad[1]:
            dw = compute_linear_weight_grad(ctx.weight, dlogits, x)
        db = dlogits.sum(0) if ctx.has_bias else None
        return reduced.wait(), dw, db, None, None, None, None, None


def _reduce_maximum(largest: Tensor, tp: Axis) -> Tensor:
    """Return the maximum over TP of each element."""
    if tp.size == 1:
        return largest
    reduced = largest.clone()
    dist.all_reduce(reduced, op=dist.ReduceOp.MAX, group=tp.group)
    return reduced


def get_loss_chunk_elements(device_type: str) -> int:
    """Return the maximum number of logits in fp32 at a time (except for a longer row)."""
    return _CHUNK_ELEMENTS.get(device_type, _CHUNK_ELEMENTS["cuda"])


def _split_into_chunks(logits: Tensor) -> range:
    """Return the first rows of the chunks of `logits`; the step is the number of rows."""
    rows, columns = logits.shape
    chunk_elements = get_loss_chunk_elements(logits.device.type)
    rows_per_chunk = max(1, chunk_elements // max(1, columns))
    return range(0, rows, rows_per_chunk)


def _compute_exponentials(
    logits: Tensor, largest: Tensor, columns: Tensor
) -> tuple[Tensor, Tensor]:
    """Overwrite each logit x with e^(x - largest).

    Returns their sum and x - largest at `columns`, both `[n]` fp32.
    """
    total = torch.empty_like(largest)
    predicted = torch.empty_like(largest)
    chunks = _split_into_chunks(logits)
    for start in chunks:
        chunk_rows = slice(start, start + chunks.step)
        label_columns = columns[chunk_rows].unsqueeze(1)  # [rows, 1]
        shifted = logits[chunk_rows].float()  # a view if the logits are fp32
        shifted -= largest[chunk_rows].unsqueeze(1)
        torch.gather(shifted, 1, label_columns, out=predicted[chunk_rows].unsqueeze(1))
        torch.sum(shifted.exp_(), -1, out=total[chunk_rows])
        if shifted.dtype != logits.dtype:
            logits[chunk_rows] = shifted
    return total, predicted


def _compute_logit_grad(
    exponentials: Tensor, total: Tensor, columns: Tensor, is_elsewhere: Tensor, dloss: Tensor
) -> Tensor:
    """Overwrite the exponentials with `(softmax - onehot) * dloss`."""
    # softmax * dloss = exponentials * (dloss / total)
    factor = dloss / total  # [n]
    exponentials.mul_(factor.to(exponentials.dtype).unsqueeze(1))
    # Subtract dloss at the label, on the rank that has its column.
    rows = torch.arange(exponentials.shape[0], device=exponentials.device)
    at_label = exponentials[rows, columns].float() - dloss * ~is_elsewhere
    # Indexed assignment is in place; scatter_add_ would copy the whole matrix.
    exponentials[rows, columns] = at_label.to(exponentials.dtype)
    return exponentials


def _overwrite_exponentials(
    exponentials: Tensor,
    largest: Tensor,
    total: Tensor,
    columns: Tensor,
    is_elsewhere: Tensor,
    dloss: Tensor,
    softcap: float | None,
) -> None:
    """Overwrite exponentials with the gradient of the logits before the softcap, if any."""
    if softcap is None:
        _compute_logit_grad(exponentials, total, columns, is_elsewhere, dloss)
        return
    chunks = _split_into_chunks(exponentials)
    for start in chunks:
        chunk_rows = slice(start, start + chunks.step)
        # From the exponentials, before they are overwritten
        slope = _compute_softcap_slope(exponentials[chunk_rows], largest[chunk_rows], softcap)
        dlogits = _compute_logit_grad(
            exponentials[chunk_rows],
            total[chunk_rows],
            columns[chunk_rows],
            is_elsewhere[chunk_rows],
            dloss[chunk_rows],
        )
        dlogits.mul_(slope)


def _compute_softcap_slope(exponentials: Tensor, largest: Tensor, softcap: float) -> Tensor:
    """Return the derivative of the softcap from e^(y - largest).

    For y = softcap * tanh(x / softcap) it is dy/dx = 1 - (y / softcap)^2.
    """
    tiny = torch.finfo(torch.float32).tiny
    # y from its exponential, where one that has underflowed gets a finite logarithm
    y = exponentials.float().clamp_min(tiny).log_().add_(largest.unsqueeze(1))
    return y.div_(softcap).square_().neg_().add_(1.0)
