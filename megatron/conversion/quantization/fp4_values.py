"""Matrices of 4-bit floating-point numbers (e2m1), two per byte, with a scale per group of columns.

mxfp4: groups of 32 columns with scales in e8m0 (OCP Microscaling Formats 1.0).
nvfp4: groups of 16 columns with scales in e4m3, and one fp32 scale per matrix. compressed-tensors
divides by the scale of the matrix, the Model Optimizer multiplies by it.

Sources: the files of gpt-oss, compressed-tensors, the Model Optimizer.
"""

from __future__ import annotations

from functools import partial

import torch

from megatron.conversion.quantization.encoded_matrix import (
    E8M0_DTYPES,
    EncodedMatrix,
    MatrixElements,
    unpack_nibbles,
)
from megatron.core.dist_checkpointing.mapping import LazyTensor, Shape
from megatron.core.encoded_elements import (
    E8M0,
    ElementFormat,
    Elements,
    MatrixScale,
    join_scales,
)

_MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
# Code -> value; bit 3 is the sign.
_VALUES = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
E2M1 = torch.tensor(_VALUES)
# Columns with one scale.
MXFP4_GROUP = 32
NVFP4_GROUP = 16
_MXFP4 = ElementFormat(_VALUES, torch.float32, E8M0)
_NVFP4 = ElementFormat(_VALUES, torch.float32, torch.float8_e4m3fn)


def read_experts(matrix: EncodedMatrix) -> MatrixElements:
    """Read mxfp4 of gpt-oss: blocks [experts, out, groups, 16 bytes] as [experts, in, out]."""
    matrix.check_dtype("values", torch.uint8)
    matrix.check_dtype("scales", torch.uint8)
    shape = matrix.tensors["values"].shape
    group_bytes = MXFP4_GROUP // 2
    if len(shape) != 4 or shape[3] != group_bytes:
        matrix.refuse(
            f"has {matrix.names['values']} of shape {list(shape)} instead of "
            f"[experts, out, groups, {group_bytes}]"
        )
    matrix.check_shape("scales", shape[:3])

    num_experts, outputs, groups, _ = shape
    inputs = groups * MXFP4_GROUP
    return MatrixElements(
        matrix,
        (num_experts, outputs, inputs),
        _MXFP4,
        partial(_read_rows, matrix, MXFP4_GROUP, _MXFP4),
        MXFP4_GROUP,
        arrange=_transpose,
    )


def _transpose(stack: LazyTensor) -> LazyTensor:
    """Return a stack of transposed matrices."""
    num_matrices, rows, columns = stack.shape
    read = partial(_read_transposed, stack)
    return LazyTensor((num_matrices, columns, rows), stack.dtype, read)


def _read_transposed(stack: LazyTensor, offset: Shape, shape: Shape) -> torch.Tensor:
    """Return a box of the transposed matrices of a stack."""
    expert, row, column = offset
    num_experts, num_rows, num_columns = shape
    box = stack.read((expert, column, row), (num_experts, num_columns, num_rows))
    return box.transpose(1, 2).contiguous()


def read_mxfp4(matrix: EncodedMatrix) -> MatrixElements:
    """Read a matrix [..., rows, bytes] with scales in e8m0."""
    matrix.check_dtype("scales", *E8M0_DTYPES)
    return _read_grouped(matrix, MXFP4_GROUP, _MXFP4)


def read_nvfp4(matrix: EncodedMatrix) -> MatrixElements:
    """Read a matrix [..., rows, bytes] with scales in e4m3 and a scale of the matrix."""
    matrix.check_dtype("scales", torch.float8_e4m3fn)
    matrix.check_dtype("global_scale", torch.float32)
    matrix.check_shape("global_scale", (), (1,))
    matrix = matrix.with_tensor("global_scale", (1,))
    matrix_scale = MatrixScale.FACTOR
    if matrix.settings["quant_method"] == "compressed-tensors":
        matrix_scale = MatrixScale.DIVISOR
    return _read_grouped(matrix, NVFP4_GROUP, _NVFP4._replace(matrix_scale=matrix_scale))


def _read_grouped(
    matrix: EncodedMatrix, group_size: int, element_format: ElementFormat
) -> MatrixElements:
    """Read values [..., rows, bytes] with scales [..., rows, groups].

    Raises ValueError if dtypes or shapes do not match.
    """
    matrix.check_dtype("values", torch.uint8)
    matrix.check_rank("values", 2, 3)
    shape = matrix.tensors["values"].shape
    columns = shape[-1] * 2
    if columns % group_size:
        matrix.refuse(
            f"has {matrix.names['values']} of shape {list(shape)}, but rows must be groups of "
            f"{group_size // 2} bytes"
        )
    groups = columns // group_size
    matrix.check_shape("scales", (*shape[:-1], groups))
    return MatrixElements(
        matrix,
        (*shape[:-1], columns),
        element_format,
        partial(_read_rows, matrix, group_size, element_format),
        group_size,
    )


def _read_rows(
    matrix: EncodedMatrix,
    group_size: int,
    element_format: ElementFormat,
    lead: Shape,
    first: int,
    count: int,
) -> Elements:
    """Read rows: [count, columns]."""
    # [rows, bytes] -> [rows, groups, columns of a group]
    packed = matrix.read_rows("values", lead, first, count).reshape(count, -1)
    codes = unpack_nibbles(packed).view(count, -1, group_size)
    # [rows, groups]
    scales = matrix.read_scales("scales", lead, first, count)
    matrix_scales = None
    if "global_scale" in matrix.tensors:
        matrix_scales = matrix.read_scales("global_scale", (), 0, 1)
        if not torch.isfinite(join_scales(scales, matrix_scales, element_format)).all():
            matrix.refuse(f"has {matrix.names['global_scale']} = {matrix_scales.item()}")
    return Elements(codes, scales[:, :, None], matrix_scales=matrix_scales)
