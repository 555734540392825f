"""Norm and zeros of flat gradients, and by how much to clip."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_ROW = 1024


def sum_of_squares(grads: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Sum of the squares of flat fp32 tensors, a scalar in fp64.

    Rows are summed in fp32 and the rows' sums in fp64: as fast as one fp32 sum and as precise as an fp64 one. (A plain
    fp32 sum on a CPU is off by 1e-3 for 32 million elements.)
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for grad in grads:
        whole_rows = grad.numel() // _ROW * _ROW
        for rows in (grad[:whole_rows].view(-1, _ROW), grad[whole_rows:].view(1, -1)):
            total += torch.linalg.vector_norm(rows, dim=1).double().square().sum()
    return total


def count_zeros(grads: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Number of zeros, a scalar in fp64."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for grad in grads:
        total += grad.numel() - torch.count_nonzero(grad)
    return total


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What gradients of `norm` are multiplied by; `max_norm` 0 means no clipping."""
    if max_norm == 0:
        return torch.ones_like(norm)
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
