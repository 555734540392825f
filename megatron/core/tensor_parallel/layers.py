"""Linear layers and embeddings whose matrices are split over the tensor-parallel axis.

    Column-parallel   rows of W (outputs) are split; each rank computes its part of the output
    Row-parallel      columns of W (inputs) are split; the partial outputs are summed over the axis
    Vocab-parallel    rows (tokens) of the embedding are split; the partial lookups are summed

After Shoeybi et al. 2019. Under sequence parallelism (Korthikanti et al. 2022) the input of a
column-parallel layer is gathered along the sequence, and the output of a row-parallel layer or an
embedding is scattered along it.

Data parallelism may give a parameter a `main_grad`, a view into its gradient buffer (fp32, or bf16
with --grad-reduce-in-bf16). The backward pass of a layer then adds to it and returns None, while
autograd still runs the hooks of the parameter, so a gradient tensor is never allocated. Without
`main_grad` the gradient is returned as usual. A `main_grad` is stale until the first gradient of an
iteration overwrites it: all code that adds to one calls `take_stale_mark` or `open_main_grad`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.arithmetic import round_up
from megatron.core.module import Constant, Init, MegatronModule, ParamInfo, make_parameter
from megatron.core.parallel_state import Axis
from megatron.core.private_operators import (
    HAS_MIXED_ADDMM,
    multiply_by_weight,
    sum_embedding_gradient,
)
from megatron.core.sharding import REPLICATED, Sharding
from megatron.core.tensor_parallel.mappings import (
    Pending,
    reduce_output,
    start_input_gather,
    start_output_sum,
)


def mark_main_grad_as_stale(param: Tensor) -> None:
    """Let the next gradient overwrite `main_grad`, which has that of the previous iteration."""
    param.has_stale_main_grad = True  # type: ignore[attr-defined]


def take_stale_mark(param: Tensor) -> bool:
    """Return whether `main_grad` is stale. If so, the caller must overwrite it."""
    is_stale = getattr(param, "has_stale_main_grad", False)
    if is_stale:
        param.has_stale_main_grad = False  # type: ignore[attr-defined]
    return is_stale


def open_main_grad(param: Tensor) -> Tensor:
    """Return `main_grad`, which the caller adds to: zeros if it was stale."""
    main_grad: Tensor = param.main_grad  # type: ignore[attr-defined]
    if take_stale_mark(param):
        main_grad.zero_()
    return main_grad


def compute_linear_weight_grad(weight: Tensor, dy: Tensor, x: Tensor) -> Tensor | None:
    """Compute `dW = dy^T x` for `dy [n, out]` and `x [n, in]`.

    Returns None if the parameter has `main_grad`, to which it is then added.
    """
    if not hasattr(weight, "main_grad"):
        return dy.t() @ x
    main_grad = weight.main_grad
    is_stale = take_stale_mark(weight)
    # With beta 0 the kernel does not read `main_grad`, whose NaN therefore do not matter.
    beta = 0 if is_stale else 1
    if main_grad.dtype == x.dtype:
        # Product and sum in one kernel, which requires the same dtype.
        main_grad.addmm_(dy.t(), x, beta=beta)
    elif x.is_cuda and HAS_MIXED_ADDMM:
        # The same for an fp32 sum of products of half precision, which are not rounded.
        torch.addmm(main_grad, dy.t(), x, out_dtype=main_grad.dtype, beta=beta, out=main_grad)
    elif is_stale:
        main_grad.copy_(dy.t() @ x)
    else:
        main_grad.add_(dy.t() @ x)
    return None


def compute_embedding_weight_grad(weight: Tensor, rows: Tensor, dy: Tensor) -> Tensor | None:
    """Compute the sum of `dy [n, h]` for each row, given the looked-up `rows [n]`.

    Returns None if the parameter has `main_grad`, to which it is then added.
    """
    if not hasattr(weight, "main_grad"):
        return sum_embedding_gradient(dy, rows, weight.shape[0])
    main_grad = open_main_grad(weight)
    # index_put_ is deterministic on GPUs, index_add_ is not.
    main_grad.index_put_((rows,), dy.to(main_grad.dtype), accumulate=True)
    return None


class LinearLayout(NamedTuple):
    """How the product of a column- or a row-parallel layer is split."""

    tp: Axis
    column: bool
    sequence_parallel: bool


class LinearGradients(NamedTuple):
    """Gradients of a product; None if not required, or added to `main_grad`."""

    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def compute_linear(x: Tensor, weight: Tensor, bias: Tensor | None, layout: LinearLayout) -> Tensor:
    """Return the output of a linear layer. Collective over TP, and not differentiable."""
    tp, column, sequence_parallel = layout
    if column:
        whole = start_input_gather(x, tp, sequence_parallel).wait()  # [s, b, in]
        return multiply_by_weight(whole, weight, bias)
    if tp.size == 1:
        return multiply_by_weight(x, weight, bias)
    y = multiply_by_weight(x, weight)
    y = start_output_sum(y, tp, sequence_parallel).wait()
    if bias is not None:
        y.add_(bias)
    return y


def compute_linear_gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    parameter: Tensor,
    layout: LinearLayout,
    needs_gradient: tuple[bool, bool, bool],
) -> LinearGradients:
    """Return the gradients of `compute_linear` for x, the weight and the bias. Collective over TP.

    `parameter` is the parameter itself, with `main_grad`, and `weight` its value.
    """
    tp, column, sequence_parallel = layout
    needs_dx, needs_dw, needs_db = needs_gradient

    # Phase 1: launch the all-gather
    if column:
        gather_x = start_input_gather(x, tp, sequence_parallel)
    else:
        gather_x = Pending(x, None)
        dy = start_input_gather(dy, tp, sequence_parallel).wait()

    # Phase 2: dx, and launch its sum over TP
    pending_dx = None
    if needs_dx:
        partial_dx = multiply_by_weight(dy, weight.t())
        if column:
            pending_dx = start_output_sum(partial_dx, tp, sequence_parallel)
        else:
            pending_dx = Pending(partial_dx, None)

    # Phase 3: dW and db, while that is in progress
    dy2d = dy.reshape(-1, dy.shape[-1])  # [s * b, out]
    x2d = gather_x.wait().reshape(-1, x.shape[-1])  # [s * b, in]
    dw = None
    db = None
    if needs_dw:
        dw = compute_linear_weight_grad(parameter, dy2d, x2d)
    if needs_db:
        db = dy2d.sum(0)

    # Phase 4: wait for the sum
    dx = None
    if pending_dx is not None:
        dx = pending_dx.wait()
    return LinearGradients(dx, dw, db)


class _Linear(torch.autograd.Function):
    """`y = x W^T + b` between the collectives of a column- or a row-parallel layer.

    Column: all-gather of x (with sequence parallelism); in the backward pass the sum of dx over TP
    runs while dW is computed. Row: sum of y over TP (all-reduce, or reduce-scatter with sequence
    parallelism), after which the bias is added once.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layout: LinearLayout
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        # The parameter itself, for main_grad: recomputation replaces saved tensors by copies.
        ctx.weight = weight
        ctx.layout = layout
        return compute_linear(x, weight, bias, layout)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        needs_gradient = ctx.needs_input_grad[:3]
        gradients = compute_linear_gradients(dy, x, weight, ctx.weight, ctx.layout, needs_gradient)
        return *gradients, None


def apply_linear(x: Tensor, weight: Tensor, bias: Tensor | None, layout: LinearLayout) -> Tensor:
    """Return the product of a column- or a row-parallel layer. Collective over TP."""
    return _Linear.apply(x, weight, bias, layout)


class ColumnParallelLinear(MegatronModule):
    """`Y = X W^T + b`: the rows of W (outputs) and b are split over TP.

    The input is whole, the output is this rank's part: `Y_r = X W_r^T + b_r` on rank r. With
    `sequence_parallel` the input is `[s/tp, b, in]`, otherwise `[s, b, in]`; the output is
    `[s, b, out/tp]`.

    If the layer is `replicated`, every rank has all rows and applies them to its own input: `[s, b,
    in]` to `[s, b, out]`, or `[s/tp, b, in]` to `[s/tp, b, out]` with `sequence_parallel`. This
    does not need collectives.
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
            # Each rank projects its own part of the sequence.
            partial_grad = sequence_parallel
            tp = Axis()
            sequence_parallel = False
        else:
            sharding = Sharding(dim=0, axis=tp, blocks=num_blocks, row_blocks=row_blocks)
            partial_grad = False
        self.tp = tp
        self.sequence_parallel = sequence_parallel
        weight_info = ParamInfo(init, sharding, partial_grad=partial_grad)
        self.weight = make_parameter((output_size, input_size), dtype, device, weight_info)
        self.bias = None
        if bias:
            # Its elements are split like the rows of the weight.
            bias_info = ParamInfo(Constant(0.0), sharding, partial_grad=partial_grad)
            self.bias = make_parameter((output_size,), dtype, device, bias_info)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x)

    def project(self, x: Tensor) -> Tensor:
        """Return the product. Collective over TP; graphs of --compile contain it as an operator."""
        return _Linear.apply(x, self.weight, self.bias, self.layout)

    @property
    def layout(self) -> LinearLayout:
        return LinearLayout(self.tp, True, self.sequence_parallel)


class RowParallelLinear(MegatronModule):
    """`Y = sum_r X_r W_r^T + b`: the columns of W (inputs) are split over TP, b is replicated.

    Partial outputs of the ranks r are summed, then the whole bias is added. The input is
    `[s, b, in/tp]`, the output `[s, b, out]`, or `[s/tp, b, out]` with `sequence_parallel`. The
    layer includes the norm of its output, if any, as in checkpoints.
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
        if self.post_layernorm is None:
            return y
        return self.post_layernorm(y)

    def project(self, x: Tensor) -> Tensor:
        """Return the product. Collective over TP; graphs of --compile contain it as an operator."""
        return _Linear.apply(x, self.weight, self.bias, self.layout)

    @property
    def layout(self) -> LinearLayout:
        return LinearLayout(self.tp, False, self.sequence_parallel)


def compute_padded_vocab_size(
    vocab_size: int, make_vocab_size_divisible_by: int, tp_size: int
) -> int:
    """Return `vocab_size` rounded up so that all TP ranks have the same number of rows."""
    if make_vocab_size_divisible_by < 1:
        raise ValueError(
            f"--make-vocab-size-divisible-by must be positive, got {make_vocab_size_divisible_by}"
        )
    return round_up(vocab_size, make_vocab_size_divisible_by * tp_size)


class _Embedding(torch.autograd.Function):
    """Rows of `weight` at `tokens`; zero for tokens of other ranks."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, first_row: int, split: bool) -> Tensor:
        ctx.weight = weight
        ctx.first_row = first_row
        ctx.split = split
        ctx.save_for_backward(tokens)
        if not split:
            return F.embedding(tokens, weight)
        num_rows = weight.shape[0]
        rows, is_elsewhere = find_local_rows(tokens, first_row, num_rows)
        # Zero for tokens of other ranks, so that the sum over TP is the embedding.
        return F.embedding(rows, weight).masked_fill_(is_elsewhere.unsqueeze(-1), 0.0)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None, None, None]:  # type: ignore[override]
        (tokens,) = ctx.saved_tensors
        rows = tokens.reshape(-1)  # [s * b]
        dy2d = dy.reshape(-1, dy.shape[-1])  # [s * b, h]
        if ctx.split:
            num_rows = ctx.weight.shape[0]
            rows, is_elsewhere = find_local_rows(rows, ctx.first_row, num_rows)
            dy2d = dy2d.masked_fill(is_elsewhere.unsqueeze(-1), 0.0)
        dw = compute_embedding_weight_grad(ctx.weight, rows, dy2d)
        return None, dw, None, None


def find_local_rows(tokens: Tensor, first_row: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the local row of each token, and whether the token is on another rank.

    The local rows are those from `first_row` on. Tokens of other ranks get row 0.
    """
    rows = tokens - first_row
    is_elsewhere = (rows < 0) | (rows >= num_rows)
    return rows.masked_fill_(is_elsewhere, 0), is_elsewhere


class VocabParallelEmbedding(MegatronModule):
    """`Y = W[tokens]`: the rows of W (tokens) are split over TP, and partial outputs are summed.

    `num_rows` of all ranks include the padded vocabulary. `[s, b]` tokens give `[s, b, h]`, or
    `[s/tp, b, h]` with `sequence_parallel`.
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
        is_copy: bool = False,
        sequence_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        """If the embedding is `shared`, the first and the last pipeline stage have one each.

        The one of the last stage `is_copy`.
        """
        super().__init__()
        self.tp = tp
        self.sequence_parallel = sequence_parallel
        sharding = Sharding(dim=0, axis=tp, num_rows=vocab_size)
        info = ParamInfo(init, sharding, shared_embedding=shared, counted=not is_copy)
        self.weight = make_parameter((num_rows, hidden_size), dtype, device, info)

    def forward(self, tokens: Tensor) -> Tensor:
        num_rows = self.weight.shape[0]
        first_row = self.tp.rank * num_rows
        is_split = self.tp.size > 1
        partial = _Embedding.apply(tokens, self.weight, first_row, is_split)
        return reduce_output(partial, self.tp, self.sequence_parallel)
