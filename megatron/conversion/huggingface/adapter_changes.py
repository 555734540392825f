"""Changes that an adapter of PEFT makes to a stored tensor, computed a few rows at a time.

Operations, dtypes and their order are those of `merge_and_unload()`: the matrices of the adapter
are cast to fp32, and a sum is rounded once, to the dtype of the tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from megatron.conversion.model_space.lazy_tensors import select, stack, view_box
from megatron.core.dist_checkpointing.mapping import LazyTensor, Shape, narrow

# Libraries add up products with a single row in another order than products with several rows.
_MIN_ROWS = 64
_MAX_PRODUCT = 32 << 20  # bytes of a product that are computed at once


def replace_rows(base: LazyTensor, rows: Sequence[int], new: LazyTensor) -> LazyTensor:
    """Return the matrix `base` with row `rows[i]` replaced by row i of `new`."""

    def read(offset: Shape, shape: Shape) -> torch.Tensor:
        """Return a box of the matrix; only the new rows in it are read."""
        values = base.read(offset, shape).clone()
        first_row, first_column = offset
        num_rows, num_columns = shape
        for index, row in enumerate(rows):
            position = row - first_row
            if 0 <= position < num_rows:
                new_row = new.read((index, first_column), (1, num_columns))
                values[position] = new_row[0].to(base.dtype)
        return values

    return LazyTensor(base.shape, base.dtype, read)


def add_bias(base: LazyTensor, bias: LazyTensor, scaling: float) -> LazyTensor:
    """Return the bias `base` plus the scaled bias of a low-rank product."""

    def read(offset: Shape, shape: Shape) -> torch.Tensor:
        """Return a range of the sum, which is computed in fp32."""
        change = bias.read(offset, shape).float() * scaling
        return (base.read(offset, shape) + change).to(base.dtype)

    return LazyTensor(base.shape, base.dtype, read)


@dataclass(frozen=True)
class LowRankProduct:
    """A scaled product of two matrices that is added to a stored matrix.

    With a magnitude (DoRA), the rows of the sum are also scaled to the length that it specifies.
    """

    a: LazyTensor  # [rank, in]
    b: LazyTensor  # [out, rank]
    scaling: float
    magnitude: LazyTensor | None = None  # [out]
    transposed: bool = False  # the stored matrix is [in, out]: embeddings, and Conv1D of GPT-2
    # Round the product to the dtype of the stored matrix before adding it, as PEFT does for
    # embeddings, and for parameters that are not the weight of a linear layer.
    is_rounded: bool = False

    def compute_rows(self, first: int, count: int) -> torch.Tensor:
        """Return rows of the change of the stored matrix in fp32."""
        rank = self.a.shape[0]
        if self.transposed:
            # Rows of the stored matrix are columns of the product.
            a = self.a.read((0, first), (rank, count)).float()
            b = self.b.read_all().float()
            return (b @ a).T.mul_(self.scaling)
        a = self.a.read_all().float()
        b = self.b.read((first, 0), (count, rank)).float()
        return (b @ a).mul_(self.scaling)


def add_to_matrix(base: LazyTensor, change: LowRankProduct) -> LazyTensor:
    """Return the matrix `base` with the change."""
    return LazyTensor(base.shape, base.dtype, _ChangedMatrix(base, change).read)


@dataclass(frozen=True)
class _ChangedMatrix:
    """A stored matrix and the product that is added to it."""

    base: LazyTensor
    change: LowRankProduct
    # Factors of DoRA for a transposed matrix, which depend on all of its rows: computed once.
    _factors: list[torch.Tensor] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, offset: Shape, shape: Shape) -> torch.Tensor:
        """Return a box of the changed matrix.

        At least `_MIN_ROWS` rows are computed, so that values do not depend on the box.
        """
        total_rows = self.base.shape[0]
        first_row, first_column = offset
        num_rows = shape[0]
        first = max(0, min(first_row, total_rows - _MIN_ROWS))
        end = max(first_row + num_rows, min(total_rows, first + _MIN_ROWS))
        rows = self._merge_rows(first, end - first)
        return narrow(rows, (first_row - first, first_column), shape).contiguous()

    def _merge_rows(self, first: int, count: int) -> torch.Tensor:
        """Return whole rows of the changed matrix."""
        weight = self.base.read((first, 0), (count, self.base.shape[1]))
        change = self.change.compute_rows(first, count)
        if self.change.is_rounded:
            change = change.to(weight.dtype)
        total = weight + change
        magnitude = self.change.magnitude
        if magnitude is not None:
            # DoRA: [count, 1], or [1, out] if the stored matrix is transposed
            if self.change.transposed:
                factors = self._get_column_factors(magnitude)
            else:
                lengths = torch.linalg.norm(total, dim=1)
                row_factors = magnitude.read((first,), (count,)).float() / lengths
                factors = row_factors.view(-1, 1)
            total = factors * total
        return total.to(weight.dtype)

    def _get_column_factors(self, magnitude: LazyTensor) -> torch.Tensor:
        """Return the factor of each column, [1, out]."""
        with self._lock:
            if not self._factors:
                lengths = self._compute_column_lengths()
                factors = magnitude.read_all().float() / lengths
                self._factors.append(factors.view(1, -1))
            return self._factors[0]

    def _compute_column_lengths(self) -> torch.Tensor:
        """Return the length of each column of the changed matrix, [out].

        The matrix is read whole, because it is stored by rows.
        """
        num_rows, num_columns = self.base.shape
        rank = self.change.a.shape[0]
        weight = self.base.read_all()
        a = self.change.a.read_all().float()
        column_size = 4 * num_rows  # bytes in fp32
        step = min(num_columns, max(_MIN_ROWS, _MAX_PRODUCT // column_size))
        lengths = torch.empty(num_columns)
        for start in range(0, num_columns, step):
            # The last columns are computed together with some that precede them.
            first = min(start, num_columns - step)
            b = self.change.b.read((first, 0), (step, rank)).float()
            change = (b @ a).mul_(self.change.scaling)
            total = weight[:, first : first + step].T + change
            lengths[first : first + step] = torch.linalg.norm(total, dim=1)
        return lengths


def add_to_experts(base: LazyTensor, change: LowRankProduct) -> LazyTensor:
    """Return the matrices `base` of all experts of a layer, each with its own change.

    Matrix A contains the ranks of expert 0, then those of expert 1, ...; in matrix B the experts
    alternate. Experts have no magnitudes.

    Args:
        base: [experts, rows, columns].
        change: the matrices A and B of all experts: [experts * rank, in], [out, rank * experts].
    """
    num_experts = base.shape[0]
    total_rank, in_size = change.a.shape
    rank = total_rank // num_experts
    changed_experts = []
    for expert in range(num_experts):
        product = LowRankProduct(
            a=view_box(change.a, (expert * rank, 0), (rank, in_size)),
            b=_select_columns(change.b, expert, num_experts),
            scaling=change.scaling,
            transposed=change.transposed,
            is_rounded=change.is_rounded,
        )
        changed = add_to_matrix(select(base, expert), product)
        changed_experts.append(changed)
    return stack(changed_experts)


def _select_columns(tensor: LazyTensor, first: int, step: int) -> LazyTensor:
    """Return every `step`-th column of a matrix, beginning with column `first`.

    A read of some of these columns reads whole rows of the matrix.
    """
    rows, columns = tensor.shape

    def read(offset: Shape, shape: Shape) -> torch.Tensor:
        """Return a box of the selected columns, from whole rows."""
        first_row, first_column = offset
        all_columns = tensor.read((first_row, 0), (shape[0], columns))
        selected = all_columns[:, first::step]
        return narrow(selected, (0, first_column), shape)

    return LazyTensor((rows, columns // step), tensor.dtype, read)
