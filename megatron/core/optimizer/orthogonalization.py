"""Orthogonalization of the matrices of a parameter, which may be split over tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.parallel_state import Axis
from megatron.core.sharding import Sharding
from megatron.core.tensor_parallel.mappings import all_gather_into_tensor

# (a, b, c) of the iteration x <- a x + (b x x^T + c (x x^T)^2) x; with several triples, step i uses
# triple i modulo their number.
COEFFICIENTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}


def orthogonalize(matrix: Tensor, coefficient_type: str = "quintic", num_steps: int = 5) -> Tensor:
    """Return a matrix with the singular vectors of `matrix` and singular values close to 1.

    Newton-Schulz iteration; `matrix` is [rows, columns].
    """
    coefficients = COEFFICIENTS[coefficient_type]
    rows, columns = matrix.shape
    is_tall = rows > columns
    x = matrix
    if is_tall:
        x = x.mT  # the smaller Gram matrix
    # The Frobenius norm bounds the largest singular value.
    # The iteration converges for singular values up to 1.
    x = x / x.norm().clamp(min=1e-7)
    for step in range(num_steps):
        # x <- a x + (b gram + c gram^2) x
        a, b, c = coefficients[step % len(coefficients)]
        gram = x @ x.mT
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    if is_tall:
        x = x.mT
    return x


def compute_scale(rows: int, columns: int, mode: str) -> float:
    """Return the factor of the orthogonalized update of a `rows` x `columns` matrix."""
    if mode == "spectral":
        return float(max(rows, columns)) ** 0.5
    if mode == "unit_rms_norm":
        return (rows / columns) ** 0.5
    assert mode == "shape_scaling", mode
    return max(1.0, rows / columns) ** 0.5


class Orthogonalizer:
    """Orthogonalizes and scales the matrices of parameters, gathering them over TP."""

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config

    def orthogonalize(self, local: Tensor, sharding: Sharding) -> Tensor:
        """Orthogonalize each matrix of a parameter: one, one per expert, or Q, K and V.

        `local` is this rank's part of the values, as is the result. Collective over TP (ETP for
        experts).
        """
        tp = sharding.axis
        split_dim = sharding.split_dim_of_matrix(local.dim())
        if local.dim() == 3:  # [experts, rows, columns]
            experts = [self._orthogonalize_matrix(expert, split_dim, tp) for expert in local]
            return torch.stack(experts)
        row_blocks = sharding.row_blocks
        if not (row_blocks and self._config.muon_split_qkv):
            return self._orthogonalize_matrix(local, split_dim, tp)

        # The rows of queries, keys and values alternate in blocks: collect those of each matrix.
        columns = local.shape[1]
        groups = local.view(-1, sum(row_blocks), columns)  # [groups, rows of a group, columns]
        results = []
        for block in groups.split(row_blocks, dim=1):
            matrix = block.reshape(-1, columns)
            result = self._orthogonalize_matrix(matrix, split_dim, tp)
            results.append(result.view(block.shape))
        # Back to alternating blocks of q, k and v.
        return torch.cat(results, dim=1).view(local.shape)

    def _orthogonalize_matrix(self, local: Tensor, split_dim: int | None, tp: Axis) -> Tensor:
        """Return this rank's part of an orthogonalized and scaled matrix."""
        config = self._config
        matrix = local
        if split_dim is not None:
            # Each rank stacks its part of gate and up, so rows of the gathered matrix may be
            # permuted. That is harmless: orthogonalizing a row-permuted matrix permutes the rows of
            # the result.
            matrix = _gather_matrix(local, split_dim, tp)
        with _set_matmul_precision(config.muon_fp32_matmul_prec, matrix.device):
            result = orthogonalize(matrix, config.muon_coefficient_type, config.muon_num_ns_steps)
        rows, columns = matrix.shape
        scale = compute_scale(rows, columns, config.muon_scale_mode)
        result = result * (config.muon_extra_scale_factor * scale)
        if split_dim is None:
            return result
        # Every rank has computed the whole result and keeps its own part.
        length = local.shape[split_dim]
        return result.narrow(split_dim, tp.rank * length, length)


def _gather_matrix(local: Tensor, dim: int, tp: Axis) -> Tensor:
    """Concatenate the parts of all TP ranks along `dim`."""
    # Gather flat parts first: the collective concatenates only along the first dimension.
    flat = local.new_empty(tp.size * local.numel())
    all_gather_into_tensor(flat, local.reshape(-1), group=tp.group)
    # [tp, rows, columns] of the local parts
    tp_shards = flat.view(tp.size, *local.shape)
    return torch.cat(list(tp_shards), dim=dim)


@contextmanager
def _set_matmul_precision(precision: str, device: torch.device) -> Iterator[None]:
    """Set the precision of fp32 matrix products on a GPU; on a CPU they are always in fp32."""
    if device.type == "cpu":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
