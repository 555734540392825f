"""Matrices written in 4-bit floating-point numbers (e2m1) with a scale per group of columns.

Scales are chosen so that a decoded matrix is encoded to the same bytes. Those of nvfp4 relate to a
power of two, so that decoded values are exact in bf16, too.
"""

from __future__ import annotations

from functools import partial
from threading import Lock

import torch

from megatron.conversion.quantization.encoded_matrix import split_rows
from megatron.conversion.quantization.fp4_values import E2M1, MXFP4_GROUP, NVFP4_GROUP
from megatron.core.dist_checkpointing.mapping import LazyTensor, Shape, cut_rows

_E2M1_MAX = 6.0
_E2M1_EXPONENT = 2  # of the largest number
_E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max
_E4M3_MIN = 2.0**-9
_E8M0_BIAS = 127
# Between two neighboring magnitudes; ties are rounded to the even code.
_BOUNDS = (E2M1[:7] + E2M1[1:8]) / 2
_BLOCK = 16 << 20  # bytes that are read at once


def _round_to_codes(values: torch.Tensor) -> torch.Tensor:
    """Return the code of the nearest e2m1 number."""
    magnitudes = values.abs()
    codes = torch.bucketize(magnitudes.contiguous(), _BOUNDS)
    is_tie = magnitudes == _BOUNDS[codes.clamp_max(6)]
    codes += is_tie & (codes % 2 == 1)
    return (codes + 8 * torch.signbit(values)).to(torch.uint8)


def _pack_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Return bytes of two codes, the first in the low bits."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _read_groups(matrix: LazyTensor, name: str, first: int, count: int, size: int) -> torch.Tensor:
    """Return rows of a matrix in fp32: [rows, groups, size]."""
    rows = matrix.read((first, 0), (count, matrix.shape[1])).float()
    if not torch.isfinite(rows).all():
        raise ValueError(f"--quantize: {name} has values that are not finite")
    return rows.view(count, -1, size)


def _check_columns(columns: int, name: str, size: int) -> None:
    if columns % size:
        raise ValueError(
            f"--quantize: {name} has {columns} inputs, which are not groups of {size}: give "
            "--quantize fp8-channel"
        )


# ---- nvfp4 of compressed-tensors ----


class _Nvfp4Matrix:
    """A matrix whose groups are encoded when they are read; threads may share it."""

    def __init__(self, matrix: LazyTensor, name: str) -> None:
        self._matrix = matrix
        self._name = name
        self._factor: float | None = None
        self._lock = Lock()

    def read_factor(self) -> float:
        """Return the power of two by which scales are multiplied before they are rounded.

        The largest rounded scale is in the upper half of the numbers of e4m3.
        """
        with self._lock:
            if self._factor is None:
                largest = self._find_largest()
                self._factor = _choose_factor(largest)
            return self._factor

    def _find_largest(self) -> float:
        largest = 0.0
        for offset, shape in cut_rows(self._matrix.shape, 4, _BLOCK):
            rows = self._matrix.read(offset, shape).float()
            largest = max(largest, float(rows.abs().amax()))
            if not torch.isfinite(rows).all():
                raise ValueError(f"--quantize: {self._name} has values that are not finite")
        return largest

    def encode(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes [rows, groups, 16] and the scales [rows, groups] of rows."""
        groups = _read_groups(self._matrix, self._name, first, count, NVFP4_GROUP)
        scaled = groups * self.read_factor()
        largest = scaled.abs().amax(dim=2)
        scales = _round_scales(largest)
        codes = _round_to_codes(scaled / scales.float()[:, :, None])
        # The largest number of a group stays the largest: else another scale would follow from it.
        is_zero = (codes & 7).amax(dim=2) == 0
        return codes, torch.where(is_zero, torch.ones_like(scales), scales)

    def read_codes(self, offset: Shape, shape: Shape) -> torch.Tensor:
        codes, _ = self.encode(offset[0], shape[0])
        return _pack_pairs(codes.flatten(1))

    def read_scales(self, offset: Shape, shape: Shape) -> torch.Tensor:
        runs = split_rows(offset[0], offset[0] + shape[0], self._matrix.shape[1])
        return torch.cat([self.encode(first, end - first)[1] for first, end in runs])

    def read_global_scale(self, offset: Shape, shape: Shape) -> torch.Tensor:
        return torch.tensor([self.read_factor()])


def _choose_factor(largest: float) -> float:
    """Return the power of two for a matrix with this largest magnitude."""
    if largest == 0:
        return 1.0
    ratio = torch.tensor(_E4M3_MAX * _E2M1_MAX / largest, dtype=torch.float64)
    factor = 2.0 ** min(int(torch.floor(torch.log2(ratio))), 126)
    rounded = torch.tensor(largest * factor / _E2M1_MAX).to(torch.float8_e4m3fn)
    return factor * 2 if float(rounded) <= _E4M3_MAX / 2 else factor


def _round_scales(largest: torch.Tensor) -> torch.Tensor:
    """Return the scales in e4m3 with which the largest magnitudes become the largest number."""
    scales = (largest / _E2M1_MAX).clamp(_E4M3_MIN, _E4M3_MAX).to(torch.float8_e4m3fn)
    # Small scales are rounded coarsely: take the one below if the largest would not be 6.
    limit = (E2M1[6] + E2M1[7]) / 2
    is_too_large = (largest / scales.float() <= limit) & (scales.float() > _E4M3_MIN)
    return (scales.view(torch.uint8) - is_too_large.to(torch.uint8)).view(torch.float8_e4m3fn)


def encode_nvfp4(matrix: LazyTensor, name: str) -> dict[str, LazyTensor]:
    """Return the tensors of a matrix as compressed-tensors names them."""
    rows, columns = matrix.shape
    _check_columns(columns, name, NVFP4_GROUP)
    encoded = _Nvfp4Matrix(matrix, name)
    scales_shape = (rows, columns // NVFP4_GROUP)
    return {
        f"{name}_packed": LazyTensor((rows, columns // 2), torch.uint8, encoded.read_codes),
        f"{name}_scale": LazyTensor(scales_shape, torch.float8_e4m3fn, encoded.read_scales),
        f"{name}_global_scale": LazyTensor((1,), torch.float32, encoded.read_global_scale),
    }


# ---- mxfp4 of gpt-oss ----


def encode_experts(stack: LazyTensor, name: str) -> dict[str, LazyTensor]:
    """Return the tensors of experts [experts, in, out] as gpt-oss names them."""
    experts, columns, rows = stack.shape
    _check_columns(columns, name, MXFP4_GROUP)
    shape = (experts, rows, columns // MXFP4_GROUP)
    read_blocks = partial(_read_blocks, stack, name)
    read_scales = partial(_read_exponents, stack, name)
    return {
        f"{name}_blocks": LazyTensor((*shape, MXFP4_GROUP // 2), torch.uint8, read_blocks),
        f"{name}_scales": LazyTensor(shape, torch.uint8, read_scales),
    }


def _read_blocks(stack: LazyTensor, name: str, offset: Shape, shape: Shape) -> torch.Tensor:
    groups, exponents = _scale_experts(stack, name, offset, shape)
    scaled = torch.ldexp(groups, (_E8M0_BIAS - exponents)[..., None])
    return _pack_pairs(_round_to_codes(scaled))


def _read_exponents(stack: LazyTensor, name: str, offset: Shape, shape: Shape) -> torch.Tensor:
    experts = []
    for expert in range(offset[0], offset[0] + shape[0]):
        box = ((expert, *offset[1:]), (1, *shape[1:]))
        experts.append(_scale_experts(stack, name, *box)[1].to(torch.uint8))
    return torch.cat(experts)


def _scale_experts(
    stack: LazyTensor, name: str, offset: Shape, shape: Shape
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whole rows of groups in fp32, and the biased exponents of their scales."""
    expert, row = offset[:2]
    experts, rows = shape[:2]
    values = stack.read((expert, 0, row), (experts, stack.shape[1], rows)).float()
    if not torch.isfinite(values).all():
        raise ValueError(f"--quantize: {name} has values that are not finite")
    groups = values.transpose(1, 2).reshape(experts, rows, -1, MXFP4_GROUP)
    _, exponents = torch.frexp(groups.abs().amax(dim=3))  # of magnitudes in [0.5, 1)
    biased = exponents - 1 - _E2M1_EXPONENT + _E8M0_BIAS
    return groups, biased.clamp(0, 254)
