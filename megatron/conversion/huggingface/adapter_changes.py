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

# Libraries compute the product with a single row in another order than that with several.
_MIN_ROWS = 64
_BLOCK = 32 << 20  # bytes of a product that are computed at once


def replace_rows(base: LazyTensor, rows: Sequence[int], new: LazyTensor) -> LazyTensor:
    """Return the matrix `base` with row `rows[i]` replaced by row i of `new`."""

    def read(offset: Shape, shape: Shape) -> torch.Tensor:
        values = base.read(offset, shape).clone()
        first = offset[0]
        last = first + shape[0]
        for index, row in enumerate(rows):
            if first <= row < last:
                replacement = new.read((index, offset[1]), (1, shape[1]))
                values[row - first] = replacement[0].to(base.dtype)
        return values

    return LazyTensor(base.shape, base.dtype, read)


def add_bias(base: LazyTensor, bias: LazyTensor, scaling: float) -> LazyTensor:
    """Return the bias `base` plus the scaled bias of a low-rank product."""

    def read(offset: Shape, shape: Shape) -> torch.Tensor:
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
        """Return rows of the change of the stored matrix."""
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
        """Return a box of the changed matrix."""
        num_rows = self.base.shape[0]
        first = max(0, min(offset[0], num_rows - _MIN_ROWS))
        last = max(offset[0] + shape[0], min(num_rows, first + _MIN_ROWS))
        rows = self._merge_rows(first, last - first)
        return narrow(rows, (offset[0] - first, *offset[1:]), shape).contiguous()

    def _merge_rows(self, first: int, count: int) -> torch.Tensor:
        """Return whole rows of the changed matrix."""
        weight = self.base.read((first, 0), (count, self.base.shape[1]))
        change = self.change.compute_rows(first, count)
        if self.change.is_rounded:
            change = change.to(weight.dtype)
        total = weight + change
        magnitude = self.change.magnitude
        if magnitude is not None:
            if self.change.transposed:
                factors = self._get_column_factors(magnitude)
            else:
                lengths = torch.linalg.norm(total, dim=1)
                factors = magnitude.read((first,), (count,)).float() / lengths
                factors = factors.view(-1, 1)
            total = factors * total
        return total.to(weight.dtype)

    def _get_column_factors(self, magnitude: LazyTensor) -> torch.Tensor:
        """Return the factor of each column, [1, out]."""
        with self._lock:
            if not self._factors:
                lengths = self._compute_column_lengths()
                self._factors.append((magnitude.read_all().float() / lengths).view(1, -1))
            return self._factors[0]

    def _compute_column_lengths(self) -> torch.Tensor:
        """Return the length of each column of the changed matrix, [out].

        The matrix is read whole, because it is stored by rows.
        """
        num_rows, num_columns = self.base.shape
        rank = self.change.a.shape[0]
        weight = self.base.read_all()
        a = self.change.a.read_all().float()
        step = min(num_columns, max(_MIN_ROWS, _BLOCK // (4 * num_rows)))
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
    alternate.
    """
    num_experts = base.shape[0]
    rank = change.a.shape[0] // num_experts
    changed = []
    for expert in range(num_experts):
        a = view_box(change.a, (expert * rank, 0), (rank, change.a.shape[1]))
        b = _select_columns(change.b, expert, num_experts)
        product = LowRankProduct(
            a, b, change.scaling, transposed=change.transposed, is_rounded=change.is_rounded
        )
        changed.append(add_to_matrix(select(base, expert), product))
    return stack(changed)


def _select_columns(tensor: LazyTensor, first: int, step: int) -> LazyTensor:
    """Return every `step`-th column of a matrix from column `first` on."""
    rows, columns = tensor.shape

    def read(offset: Shape, shape: Shape) -> torch.Tensor:
        whole = tensor.read((offset[0], 0), (shape[0], columns))
        selected = whole[:, first::step]
        return narrow(selected, (0, offset[1]), shape)

    return LazyTensor((rows, columns // step), tensor.dtype, read)
