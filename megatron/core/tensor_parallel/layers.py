"""Linear layers, embeddings and the loss, whose matrices are split over the tensor-parallel axis.

    Column-parallel   rows of W (outputs) split; a replicated input gives the own part of the output
    Row-parallel      columns of W (inputs) split; the partial outputs are summed over the axis
    Vocab-parallel    rows (tokens) of the embedding split; the partial lookups are summed

After Shoeybi et al. 2019; under sequence parallelism (Korthikanti et al. 2022) the input of a
column-parallel layer is gathered along the sequence and the output of a row-parallel layer or an
embedding is scattered along it.

Data parallelism may give a parameter `main_grad`, a view into its gradient buffer (fp32, or bf16
with
--grad-reduce-in-bf16). The backward pass of a layer then adds into it and returns None, and autograd still runs the
hooks of the parameter: no gradient tensor is ever allocated. Without `main_grad` the ordinary
gradient is returned.

Output layer and loss are one: the logits exist once, and the gradient takes their place. Their
columns are split over TP; what the ranks exchange is two numbers per token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.core.arithmetic import round_up
from megatron.core.module import Constant, Init, MegatronModule, ParamInfo, make_parameter
from megatron.core.parallel_state import Axis
from megatron.core.sharding import REPLICATED, Sharding
from megatron.core.tensor_parallel.mappings import (
    Pending,
    reduce_from_tensor_parallel,
    reduce_scatter_to_sequence,
    start_all_reduce,
    start_sequence_all_gather,
    start_sequence_reduce_scatter,
)


def linear_weight_grad(weight: Tensor, dy: Tensor, x: Tensor) -> Tensor | None:
    """`dW = dy^T x` for `dy [n, out]`, `x [n, in]`."""
    if not hasattr(weight, "main_grad"):
        return dy.t() @ x
    main_grad = weight.main_grad
    if main_grad.dtype == x.dtype:
        main_grad.addmm_(dy.t(), x)
    else:
        main_grad.add_(dy.t() @ x)
    return None


def embedding_weight_grad(weight: Tensor, rows: Tensor, dy: Tensor) -> Tensor | None:
    """Sum of `dy [n, h]` over the places where each of the `rows [n]` was looked up."""
    if not hasattr(weight, "main_grad"):
        return torch.ops.aten.embedding_dense_backward(dy, rows, weight.shape[0], -1, False)
    # index_put_ is deterministic on GPUs, index_add_ is not
    weight.main_grad.index_put_((rows,), dy.to(weight.main_grad.dtype), accumulate=True)
    return None


class _Linear(torch.autograd.Function):
    """`y = x W^T + b` between the collectives of a column- or a row-parallel layer.

    Column: all-gather of x (sequence parallel); in backward the sum of dx over TP runs while dW is
    computed. Row: sum of y over TP (all-reduce, or reduce-scatter when sequence parallel); the bias
    is added after it, once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tp: Axis,
        column: bool,
        sequence_parallel: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        # the parameter itself (main_grad): recomputation replaces saved tensors by copies
        ctx.weight = weight
        ctx.tp = tp
        ctx.column = column
        ctx.sequence_parallel = sequence_parallel
        ctx.has_bias = bias is not None
        if column:
            whole = start_sequence_all_gather(x, tp).wait() if sequence_parallel else x
            return F.linear(whole, weight, bias)
        if tp.size == 1:
            return F.linear(x, weight, bias)
        y = F.linear(x, weight)
        reduce = start_sequence_reduce_scatter if sequence_parallel else start_all_reduce
        y = reduce(y, tp).wait()
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        tp = ctx.tp
        sequence_parallel = ctx.sequence_parallel
        # Phase 1: launch the gathers
        gather_x = Pending(x, None)
        if sequence_parallel and ctx.column:
            gather_x = start_sequence_all_gather(x, tp)
        elif sequence_parallel:
            dy = start_sequence_all_gather(dy, tp).wait()
        # Phase 2: dx, and launch its sum over TP
        dx = None
        if ctx.needs_input_grad[0]:
            dx = Pending(torch.matmul(dy, weight), None)
            if ctx.column:
                reduce = start_sequence_reduce_scatter if sequence_parallel else start_all_reduce
                dx = reduce(dx.wait(), tp)
        # Phase 3: dW and db meanwhile
        dy2d = dy.reshape(-1, dy.shape[-1])
        x2d = gather_x.wait().reshape(-1, x.shape[-1])
        dw = linear_weight_grad(ctx.weight, dy2d, x2d) if ctx.needs_input_grad[1] else None
        db = dy2d.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return dx.wait() if dx is not None else None, dw, db, None, None, None


def apply_column_parallel(
    x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, sequence_parallel: bool
) -> Tensor:
    """The product of a column-parallel layer, with its collectives."""
    return _Linear.apply(x, weight, bias, tp, True, sequence_parallel)


class ColumnParallelLinear(MegatronModule):
    """Output rows are split over TP; the input is whole, the output is this rank's part.

    With `sequence_parallel` the input is `[s/tp, b, in]`, otherwise `[s, b, in]`; the output is
    `[s, b, out/tp]`.

    If the layer is `replicated`, every rank has all rows and applies them to its own input: `[s, b,
    in]` to `[s, b, out]`, or `[s/tp, b, in]` to `[s/tp, b, out]` with `sequence_parallel`. There
    are no collectives then.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        init: Init,
        tp: Axis,
        sequence_parallel: bool = False,
        bias: bool = True,
        num_blocks: int = 1,
        row_blocks: tuple[int, ...] = (),
        replicated: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        """`num_blocks` and `row_blocks` describe the rows of the weight; see `Sharding`."""
        super().__init__()
        if replicated:
            sharding = REPLICATED
            bias_sharding = REPLICATED
            # Each rank projects its own part of the sequence.
            partial_grad = sequence_parallel
            tp = Axis()
            sequence_parallel = False
        else:
            sharding = Sharding(dim=0, axis=tp, blocks=num_blocks, row_blocks=row_blocks)
            bias_sharding = Sharding(dim=0, axis=tp, blocks=num_blocks)
            partial_grad = False
        self.tp = tp
        self.sequence_parallel = sequence_parallel
        weight_info = ParamInfo(init, sharding, partial_grad=partial_grad)
        self.weight = make_parameter((output_size, input_size), dtype, device, weight_info)
        self.bias = None
        if bias:
            bias_info = ParamInfo(Constant(0.0), bias_sharding, partial_grad=partial_grad)
            self.bias = make_parameter((output_size,), dtype, device, bias_info)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x)

    def project(self, x: Tensor) -> Tensor:
        """The product and its collectives, which are no part of compiled regions."""
        return apply_column_parallel(x, self.weight, self.bias, self.tp, self.sequence_parallel)


class RowParallelLinear(MegatronModule):
    """Input columns are split over TP; the partial outputs are summed, then the replicated bias is
    added.

    The input is `[s, b, in/tp]`, the output `[s, b, out]`, or `[s/tp, b, out]` with
    `sequence_parallel`. A norm of the output belongs to the layer, as on disk.
    """

    adds_bias_to_own_sequence = False
    """Whether each rank adds the bias to its part of the sequence only; if not, the gradient of the
    bias is taken from the gathered output gradient and is complete on every rank.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        init: Init,
        tp: Axis,
        sequence_parallel: bool = False,
        bias: bool = True,
        output_norm: MegatronModule | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.sequence_parallel = sequence_parallel
        weight_info = ParamInfo(init, Sharding(dim=1, axis=tp))
        self.weight = make_parameter((output_size, input_size), dtype, device, weight_info)
        self.bias = None
        if bias:
            partial_grad = self.adds_bias_to_own_sequence and sequence_parallel
            bias_info = ParamInfo(Constant(0.0), partial_grad=partial_grad)
            self.bias = make_parameter((output_size,), dtype, device, bias_info)
        self.post_layernorm = output_norm

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(x)
        return y if self.post_layernorm is None else self.post_layernorm(y)

    def project(self, x: Tensor) -> Tensor:
        """The product and its collectives, which are no part of compiled regions."""
        return _Linear.apply(x, self.weight, self.bias, self.tp, False, self.sequence_parallel)


def compute_padded_vocab_size(
    vocab_size: int, make_vocab_size_divisible_by: int, tp_size: int
) -> int:
    """Rows of the embedding over all ranks: `vocab_size` rounded up so that every rank has equally
    many.
    """
    if make_vocab_size_divisible_by < 1:
        raise ValueError(
            f"--make-vocab-size-divisible-by must be positive, got {make_vocab_size_divisible_by}"
        )
    return round_up(vocab_size, make_vocab_size_divisible_by * tp_size)


class _Embedding(torch.autograd.Function):
    """Rows of `weight` at `tokens`, zero where a token is not one of its rows."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, first_row: int, split: bool) -> Tensor:
        ctx.weight = weight
        ctx.first_row = first_row
        ctx.split = split
        ctx.save_for_backward(tokens)
        if not split:
            return F.embedding(tokens, weight)
        rows, elsewhere = local_rows(tokens, first_row, weight.shape[0])
        return F.embedding(rows, weight).masked_fill_(elsewhere.unsqueeze(-1), 0.0)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None, None, None]:  # type: ignore[override]
        (tokens,) = ctx.saved_tensors
        rows = tokens.reshape(-1)
        dy2d = dy.reshape(-1, dy.shape[-1])
        if ctx.split:
            rows, elsewhere = local_rows(rows, ctx.first_row, ctx.weight.shape[0])
            dy2d = dy2d.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return None, embedding_weight_grad(ctx.weight, rows, dy2d), None, None


def local_rows(tokens: Tensor, first_row: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Index into the rows of a rank, from `first_row` on (0 for tokens of other ranks), and which
    tokens those are.
    """
    rows = tokens - first_row
    elsewhere = (rows < 0) | (rows >= num_rows)
    return rows.masked_fill_(elsewhere, 0), elsewhere


class VocabParallelEmbedding(MegatronModule):
    """Rows (tokens) are split over TP; `num_rows` of all ranks include the padded vocabulary.

    `[s, b]` tokens give `[s, b, h]`, or `[s/tp, b, h]` with `sequence_parallel`.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        num_rows: int,
        init: Init,
        tp: Axis,
        shared: bool = False,
        sequence_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        """If the embedding is `shared`, the last pipeline stage has a copy for the output layer."""
        super().__init__()
        self.tp = tp
        self.sequence_parallel = sequence_parallel
        sharding = Sharding(dim=0, axis=tp, num_rows=vocab_size)
        info = ParamInfo(init, sharding, shared_embedding=shared)
        self.weight = make_parameter((num_rows, hidden_size), dtype, device, info)

    def forward(self, tokens: Tensor) -> Tensor:
        first_row = self.tp.rank * self.weight.shape[0]
        partial = _Embedding.apply(tokens, self.weight, first_row, self.tp.size > 1)
        reduce = (
            reduce_scatter_to_sequence if self.sequence_parallel else reduce_from_tensor_parallel
        )
        return reduce(partial, self.tp)


# Logits handled at once, by device. Their fp32 copy stays in the cache of a CPU. On a GPU it takes
# 256 MiB, and kernels run much longer than they take to launch: 16 chunks instead of 512 for 8,192
# tokens at a vocabulary of 128k.
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
    output matrix, `labels` `[s, b]`. Rows from `vocab_size` on are padding and take no part in the
    softmax. With `softcap` a logit x is softcap * tanh(x / softcap).
    """
    return _LinearCrossEntropy.apply(
        hidden, weight, labels, vocab_size, tp, sequence_parallel, softcap
    )


class _LinearCrossEntropy(torch.autograd.Function):
    """Keeps e^(logit - max) in the place of the logits; backward turns it into the gradient in one
    pass.
    """

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
        predicted.masked_fill_(
            elsewhere, 0.0
        )  # a rank with nothing but padding has only -inf to offer
        if tp.size > 1:
            sums = torch.stack((total, predicted))
            total, predicted = start_all_reduce(sums, tp).wait().unbind()
        ctx.save_for_backward(hidden, weight, logits, largest, total, columns, elsewhere)
        ctx.weight = weight
        ctx.tp = tp
        ctx.sequence_parallel = sequence_parallel
        ctx.softcap = softcap
        return (total.log() - predicted).view(labels.shape)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, logits, largest, total, columns, elsewhere = ctx.saved_tensors
        tp = ctx.tp
        sequence_parallel = ctx.sequence_parallel
        gather = (
            start_sequence_all_gather(hidden, tp) if sequence_parallel else Pending(hidden, None)
        )
        chunks = _chunks(logits)
        dloss = dloss.reshape(-1).float()
        for start in chunks if ctx.softcap is not None else ():
            part = slice(start, start + chunks.step)
            slope = _slope(logits[part], largest[part], ctx.softcap)
            _gradient(logits[part], total[part], columns[part], elsewhere[part], dloss[part]).mul_(
                slope
            )
        dlogits = (
            logits
            if ctx.softcap is not None
            else _gradient(logits, total, columns, elsewhere, dloss)
        )
        dx = (dlogits @ weight).view(gather.wait().shape)
        pending = (
            start_sequence_reduce_scatter(dx, tp) if sequence_parallel else start_all_reduce(dx, tp)
        )
        dw = linear_weight_grad(ctx.weight, dlogits, gather.wait().reshape(-1, hidden.shape[-1]))
        return pending.wait(), dw, None, None, None, None, None


def get_loss_chunk_elements(device_type: str) -> int:
    """The most logits that are held in fp32 at once (but for a row that is longer)."""
    return _CHUNK_ELEMENTS.get(device_type, _CHUNK_ELEMENTS["cuda"])


def _chunks(logits: Tensor) -> range:
    return range(
        0,
        logits.shape[0],
        max(1, get_loss_chunk_elements(logits.device.type) // max(1, logits.shape[1])),
    )


def _exponentials(logits: Tensor, largest: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Replace every logit x by e^(x - largest); returns their sum and x - largest at `columns`,
    both fp32 `[n]`.
    """
    total = torch.empty_like(largest)
    predicted = torch.empty_like(largest)
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


def _gradient(
    exponentials: Tensor, total: Tensor, columns: Tensor, elsewhere: Tensor, dloss: Tensor
) -> Tensor:
    """`(softmax - onehot) * dloss`, in place of the exponentials."""
    exponentials.mul_((dloss / total).to(exponentials.dtype).unsqueeze(1))
    rows = torch.arange(exponentials.shape[0], device=exponentials.device)
    at_label = exponentials[rows, columns].float() - dloss * ~elsewhere
    exponentials[rows, columns] = at_label.to(
        exponentials.dtype
    )  # in place; scatter_add_ would copy the whole matrix
    return exponentials


def _slope(exponentials: Tensor, largest: Tensor, softcap: float) -> Tensor:
    """d y / d x of y = softcap * tanh(x / softcap), from e^(y - largest)."""
    y = (
        exponentials.float()
        .clamp_min(torch.finfo(torch.float32).tiny)
        .log_()
        .add_(largest.unsqueeze(1))
    )
    return y.div_(softcap).square_().neg_().add_(1.0)
