"""Matrices of 4-bit floating-point numbers (e2m1), two per byte, with a scale per group of columns.

mxfp4: groups of 32 columns with scales in e8m0 (OCP Microscaling Formats 1.0).
nvfp4: groups of 16 columns with scales in e4m3, and one fp32 scale per matrix. compressed-tensors
divides by the scale of the matrix, the Model Optimizer multiplies by it.

Sources: the files of gpt-oss, compressed-tensors, the Model Optimizer.
"""

from __future__ import annotations

from functools import partial

import torch

from megatron.conversion.quantization.encoded_matrix import E8M0_DTYPES, EncodedMatrix
from megatron.core.dist_checkpointing.mapping import LazyTensor, Shape

_MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
# Code -> value; bit 3 is the sign.
E2M1 = torch.tensor(_MAGNITUDES + [-value for value in _MAGNITUDES])
# Byte -> its two values, the one in the low bits first: [256, 2].
_PAIRS = torch.stack([E2M1.repeat(16), E2M1.repeat_interleave(16)], dim=1)
# Columns with one scale.
MXFP4_GROUP = 32
NVFP4_GROUP = 16


def decode_experts(matrix: EncodedMatrix) -> LazyTensor:
    """Decode mxfp4 of gpt-oss: blocks [experts, out, groups, 16 bytes] as [experts, in, out]."""
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
    decode_rows = partial(_decode_rows, matrix, MXFP4_GROUP)
    decoded = matrix.decode((num_experts, outputs, inputs), decode_rows)
    read = partial(_read_transposed, decoded)
    return LazyTensor((num_experts, inputs, outputs), decoded.dtype, read)


def _read_transposed(stack: LazyTensor, offset: Shape, shape: Shape) -> torch.Tensor:
    """Return a box of the transposed matrices of a stack."""
    expert, row, column = offset
    num_experts, num_rows, num_columns = shape
    box = stack.read((expert, column, row), (num_experts, num_columns, num_rows))
    return box.transpose(1, 2).contiguous()


def decode_mxfp4(matrix: EncodedMatrix) -> LazyTensor:
    """Decode a matrix [..., rows, bytes] with scales in e8m0."""
    matrix.check_dtype("scales", *E8M0_DTYPES)
    return _decode_grouped(matrix, MXFP4_GROUP)


def decode_nvfp4(matrix: EncodedMatrix) -> LazyTensor:
    """Decode a matrix [..., rows, bytes] with scales in e4m3 and a scale of the matrix."""
    matrix.check_dtype("scales", torch.float8_e4m3fn)
    matrix.check_dtype("global_scale", torch.float32)
    matrix.check_shape("global_scale", (), (1,))
    matrix = matrix.with_tensor("global_scale", (1,))
    return _decode_grouped(matrix, NVFP4_GROUP)


def _decode_grouped(matrix: EncodedMatrix, group_size: int) -> LazyTensor:
    """Decode values [..., rows, bytes] with scales [..., rows, groups].

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
    decode_rows = partial(_decode_rows, matrix, group_size)
    return matrix.decode((*shape[:-1], columns), decode_rows)


def _decode_rows(
    matrix: EncodedMatrix, group_size: int, lead: Shape, first: int, count: int
) -> torch.Tensor:
    """Decode rows: [count, columns]."""
    # [rows, bytes] -> [rows, bytes, 2] -> [rows, columns]
    packed = matrix.read_rows("values", lead, first, count).reshape(count, -1)
    values = _PAIRS[packed.int()].flatten(1)
    # [rows, groups]
    scales = matrix.read_scales("scales", lead, first, count).float()
    if "global_scale" in matrix.tensors:
        scales = _apply_global_scale(matrix, scales)
    groups = values.view(count, -1, group_size)
    return groups.mul_(scales[:, :, None]).view(count, -1)


def _apply_global_scale(matrix: EncodedMatrix, scales: torch.Tensor) -> torch.Tensor:
    """Return scales of groups that include the scale of the matrix.

    Raises ValueError if one of them is not finite.
    """
    global_scale = matrix.read_scales("global_scale", (), 0, 1)
    if matrix.settings["quant_method"] == "compressed-tensors":
        scales = scales / global_scale
    else:
        scales = scales * global_scale
    if not torch.isfinite(scales).all():
        matrix.refuse(f"has {matrix.names['global_scale']} = {global_scale.item()}")
    return scales
