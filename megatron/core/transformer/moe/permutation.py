"""Rows of tokens in the order of their experts, and back: index operations alone, deterministic in both directions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Permutation:
    """Copies of rows, sorted by key: the tokens of one expert are neighbours, in the order of the tokens.

    Made from the keys `[n, c]` of c copies of each of n rows; copies with the key `num_keys` are left out (none where
    `complete`). `gather` and `combine` are transposed to each other, so each is the other's backward; neither adds into
    memory by index, which has no fixed order on a GPU.
    """

    def __init__(self, keys: Tensor, num_keys: int, complete: bool = True) -> None:
        flat = keys.reshape(-1)
        ones = torch.ones_like(flat)
        counts = torch.zeros(num_keys + 1, dtype=flat.dtype, device=flat.device).scatter_add_(0, flat, ones)
        self.counts = counts[:num_keys]  # rows of each key
        self.complete = complete
        order = torch.argsort(flat, stable=True)
        self._order = order if complete else order[: int(self.counts.sum())]
        self._place = torch.full_like(flat, len(self._order))  # of each copy; this is none of them
        self._place[self._order] = torch.arange(len(self._order), device=flat.device)

    def gather(self, rows: Tensor) -> Tensor:
        """The sorted copies `[m, h]` of rows `[n, h]`; of `[n * c, h]`, one for each copy, the sorted rows."""
        return _Gather.apply(rows, self, len(rows))

    def combine(self, copies: Tensor, num_rows: int) -> Tensor:
        """The sum over the copies of each of `num_rows` rows: `[m, h]` to `[n, h]`."""
        return _Combine.apply(copies, self, num_rows)

    def _gathered(self, rows: Tensor) -> Tensor:
        return rows[self._order // (len(self._place) // len(rows))]

    def _summed(self, copies: Tensor, num_rows: int) -> Tensor:
        if not self.complete:
            copies = torch.cat([copies, copies.new_zeros(1, copies.shape[1])])
        together = copies[self._place].view(num_rows, -1, copies.shape[1])
        return together.squeeze(1) if together.shape[1] == 1 else together.sum(1)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, permutation: Permutation, num_rows: int) -> Tensor:
        ctx.permutation, ctx.num_rows = permutation, num_rows
        return permutation._gathered(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.permutation._summed(grad, ctx.num_rows), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, copies: Tensor, permutation: Permutation, num_rows: int) -> Tensor:
        ctx.permutation = permutation
        return permutation._summed(copies, num_rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.permutation._gathered(grad), None, None
