"""Matrices written in 4-bit floating-point numbers (e2m1) with a scale per group of columns.

Scales are chosen so that a matrix that was decoded is encoded to the same bytes. The scale of an
nvfp4 matrix is a power of two, so that decoded values are exact in bf16, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from threading import Lock

import torch

from megatron.conversion.quantization.encoded_matrix import split_rows
from megatron.conversion.quantization.fp4_values import E2M1, MXFP4_GROUP, NVFP4_GROUP
from megatron.core.dist_checkpointing.mapping import LazyTensor, Shape, cut_rows

_E2M1_MAX = 6.0
_E2M1_EXPONENT = 2  # of _E2M1_MAX
_E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max
_E4M3_MIN = 2.0**-9
_E8M0_BIAS = 127
# Between two neighboring magnitudes; ties are rounded to the even code.
_BOUNDS = ((E2M1[:7] + E2M1[1:8]) / 2).tolist()
_MAX_READ = 16 << 20  # bytes in fp32 that are read at once


def _round_to_codes(values: torch.Tensor) -> torch.Tensor:
    """Return the code of the nearest e2m1 value; magnitudes above 6 become 6."""
    magnitudes = values.abs()
    codes = torch.zeros(values.shape, dtype=torch.uint8)
    # In the middle of two values, the one with an even code is the nearest.
    for index, bound in enumerate(_BOUNDS):
        is_above = magnitudes >= bound if index % 2 == 1 else magnitudes > bound
        codes += is_above.view(torch.uint8)
    # Bit 3 is the sign.
    codes += torch.signbit(values).view(torch.uint8) << 3
    return codes


def _pack_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Return bytes of two codes of neighboring columns, the first in the low bits.

    The last dimension is half as long.
    """
    low = codes[..., 0::2]
    high = codes[..., 1::2]
    return low | (high << 4)


def _check_finite(values: torch.Tensor, name: str) -> None:
    """Raise ValueError for values that no scale can represent."""
    if not torch.isfinite(values).all():
        raise ValueError(f"--quantize: {name} has values that are not finite")


def _check_columns(columns: int, name: str, group_size: int) -> None:
    """Raise ValueError if rows are not whole groups of columns."""
    if columns % group_size:
        raise ValueError(
            f"--quantize: {name} has {columns} inputs, which are not groups of {group_size}: give "
            "--quantize fp8-channel"
        )


# ---- nvfp4 of compressed-tensors ----


class _SharedFactor:
    """The scale of one or several matrices; threads may share it."""

    def __init__(self, matrices: Mapping[str, LazyTensor]) -> None:
        self._matrices = matrices
        self._factor: float | None = None
        self._lock = Lock()

    def read(self) -> float:
        """Return the power of two by which scales are multiplied before they are rounded.

        The largest rounded scale is in the upper half of the values of e4m3. The first call reads
        the whole matrices.
        """
        with self._lock:
            if self._factor is None:
                largest = max(map(self._find_largest, self._matrices))
                self._factor = _choose_factor(largest)
            return self._factor

    def _find_largest(self, name: str) -> float:
        """Return the largest magnitude of a matrix, which is read a few rows at a time."""
        matrix = self._matrices[name]
        largest = 0.0
        for offset, shape in cut_rows(matrix.shape, 4, _MAX_READ):
            rows = matrix.read(offset, shape).float()
            _check_finite(rows, name)
            largest = max(largest, float(rows.abs().amax()))
        return largest


class _Nvfp4Matrix:
    """A matrix whose groups are encoded when they are read; threads may share it."""

    def __init__(self, matrix: LazyTensor, name: str, factor: _SharedFactor) -> None:
        self._matrix = matrix  # [rows, columns]
        self._name = name  # in error messages
        self._factor = factor

    def encode(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes [rows, groups, 16] and the scales [rows, groups] of rows."""
        columns = self._matrix.shape[1]
        rows = self._matrix.read((first, 0), (count, columns)).float()
        _check_finite(rows, self._name)
        groups = rows.view(count, -1, NVFP4_GROUP)
        scaled = groups * self._factor.read()

        largest = scaled.abs().amax(dim=2)
        scales = _round_scales(largest)
        codes = _round_to_codes(scaled / scales.float()[:, :, None])
        # A group whose codes are all zero gets the scale 1, as a group of zeros does: encoding the
        # decoded group returns the same scale.
        is_zero = (codes & 7).amax(dim=2) == 0
        # In fp32, because torch 2.6 does not select elements in fp8
        scales = torch.where(is_zero, 1.0, scales.float()).to(scales.dtype)
        return codes, scales

    def read_codes(self, offset: Shape, shape: Shape) -> torch.Tensor:
        """Return rows of bytes of two codes."""
        codes, _ = self.encode(offset[0], shape[0])
        return _pack_pairs(codes.flatten(1))

    def read_scales(self, offset: Shape, shape: Shape) -> torch.Tensor:
        """Return rows of scales, computed from a few rows of the matrix at a time."""
        first = offset[0]
        end = first + shape[0]
        scales = []
        for start, stop in split_rows(first, end, self._matrix.shape[1]):
            scales.append(self.encode(start, stop - start)[1])
        return torch.cat(scales)

    def read_global_scale(self, offset: Shape, shape: Shape) -> torch.Tensor:
        """Return the scale of the matrix, by which readers divide: [1]."""
        return torch.tensor([self._factor.read()])


def _choose_factor(largest: float) -> float:
    """Return the power of two for a matrix with the largest magnitude `largest`.

    Multiplied by it, the scale of the group with this magnitude is at most 448, the maximum of
    e4m3, and more than half of it.
    """
    if largest == 0:
        return 1.0
    ratio = torch.tensor(_E4M3_MAX * _E2M1_MAX / largest, dtype=torch.float64)
    exponent = int(torch.floor(torch.log2(ratio)))
    factor = 2.0 ** min(exponent, 126)
    # A scale slightly above half of the maximum is rounded to the half: it can be doubled.
    rounded = torch.tensor(largest * factor / _E2M1_MAX).to(torch.float8_e4m3fn)
    if float(rounded) <= _E4M3_MAX / 2:
        factor *= 2
    return factor


def _round_scales(largest: torch.Tensor) -> torch.Tensor:
    """Return the scales in e4m3 that map the magnitudes `largest` to the largest e2m1 value."""
    quotients = (largest / _E2M1_MAX).clamp(_E4M3_MIN, _E4M3_MAX)
    scales = quotients.to(torch.float8_e4m3fn)
    # Small scales are rounded coarsely: take the next smaller one if the largest magnitude would
    # be rounded to a value below 6.
    limit = (E2M1[6] + E2M1[7]) / 2
    rounded = scales.float()
    is_too_large = (largest / rounded <= limit) & (rounded > _E4M3_MIN)
    # The bytes of positive e4m3 values are ordered as the values are.
    lowered = scales.view(torch.uint8) - is_too_large.to(torch.uint8)
    return lowered.view(torch.float8_e4m3fn)


def encode_nvfp4(matrices: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return the tensors of matrices with one scale for all, as compressed-tensors names them.

    Raises ValueError if rows are not whole groups of 16 columns.
    """
    factor = _SharedFactor(matrices)
    tensors = {}
    for name, matrix in matrices.items():
        rows, columns = matrix.shape
        _check_columns(columns, name, NVFP4_GROUP)
        encoded = _Nvfp4Matrix(matrix, name, factor)

        # Codes: [rows, columns / 2]
        codes_shape = (rows, columns // 2)
        codes = LazyTensor(codes_shape, torch.uint8, encoded.read_codes)
        tensors[f"{name}_packed"] = codes

        # Scales: [rows, groups], and [1]
        scales_shape = (rows, columns // NVFP4_GROUP)
        scales = LazyTensor(scales_shape, torch.float8_e4m3fn, encoded.read_scales)
        tensors[f"{name}_scale"] = scales
        global_scale = LazyTensor((1,), torch.float32, encoded.read_global_scale)
        tensors[f"{name}_global_scale"] = global_scale
    return tensors


# ---- mxfp4 of gpt-oss ----


def encode_experts(stack: LazyTensor, name: str) -> dict[str, LazyTensor]:
    """Return the tensors of experts [experts, in, out] as gpt-oss names them.

    Raises ValueError if the inputs of an expert are not whole groups of 32.
    """
    num_experts, inputs, outputs = stack.shape
    _check_columns(inputs, name, MXFP4_GROUP)
    scales_shape = (num_experts, outputs, inputs // MXFP4_GROUP)
    blocks_shape = (*scales_shape, MXFP4_GROUP // 2)
    read_blocks = partial(_read_blocks, stack, name)
    read_scales = partial(_read_exponents, stack, name)
    return {
        f"{name}_blocks": LazyTensor(blocks_shape, torch.uint8, read_blocks),
        f"{name}_scales": LazyTensor(scales_shape, torch.uint8, read_scales),
    }


def _read_blocks(stack: LazyTensor, name: str, offset: Shape, shape: Shape) -> torch.Tensor:
    """Return bytes of two codes of experts: [experts, out, groups, 16].

    Values are divided by powers of two, which is exact.
    """
    groups, exponents = _scale_experts(stack, name, offset, shape)
    shifts = _E8M0_BIAS - exponents
    scaled = torch.ldexp(groups, shifts[..., None])
    return _pack_pairs(_round_to_codes(scaled))


def _read_exponents(stack: LazyTensor, name: str, offset: Shape, shape: Shape) -> torch.Tensor:
    """Return scales of experts, computed one expert at a time: [experts, out, groups]."""
    first = offset[0]
    exponents = []
    for expert in range(first, first + shape[0]):
        expert_offset = (expert, *offset[1:])
        expert_shape = (1, *shape[1:])
        biased = _scale_experts(stack, name, expert_offset, expert_shape)[1]
        exponents.append(biased.to(torch.uint8))
    return torch.cat(exponents)


def _scale_experts(
    stack: LazyTensor, name: str, offset: Shape, shape: Shape
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return groups [experts, out, groups, 32] in fp32, and the biased exponents of their scales.

    `offset` and `shape` begin with experts and outputs; all groups of an output are read.
    """
    expert, output = offset[:2]
    num_experts, num_outputs = shape[:2]
    inputs = stack.shape[1]
    values = stack.read((expert, 0, output), (num_experts, inputs, num_outputs)).float()
    _check_finite(values, name)
    groups = values.transpose(1, 2).reshape(num_experts, num_outputs, -1, MXFP4_GROUP)

    # frexp returns mantissas in [0.5, 1), e2m1 has mantissas in [1, 2).
    largest = groups.abs().amax(dim=3)
    _, exponents = torch.frexp(largest)
    biased = exponents - 1 - _E2M1_EXPONENT + _E8M0_BIAS
    return groups, biased.clamp(0, 254)
