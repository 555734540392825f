"""Matrices of 4-bit floating-point numbers (e2m1), two per byte, with a scale per group of columns.

mxfp4 has groups of 32 with scales in e8m0 (OCP Microscaling Formats 1.0), nvfp4 groups of 16 with
scales in e4m3 and one fp32 scale per matrix, by which compressed-tensors divides and the Model
Optimizer multiplies. Sources: the files of gpt-oss, compressed-tensors, the Model Optimizer.
"""

from __future__ import annotations

from functools import partial

import torch

from megatron.conversion.quantization.encoded_matrix import EncodedMatrix
from megatron.core.dist_checkpointing.mapping import LazyTensor, Shape

_MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
# Code -> value; bit 3 is the sign.
E2M1 = torch.tensor(_MAGNITUDES + [-value for value in _MAGNITUDES])
# Byte -> its two values, the one in the low bits first.
_PAIRS = torch.stack([E2M1.repeat(16), E2M1.repeat_interleave(16)], dim=1)
MXFP4_GROUP = 32
NVFP4_GROUP = 16


def decode_experts(matrix: EncodedMatrix) -> LazyTensor:
    """Decode mxfp4 of gpt-oss: blocks [experts, out, groups, 16 bytes] as [experts, in, out]."""
    matrix.check_dtype("values", torch.uint8)
    matrix.check_dtype("scales", torch.uint8)
    shape = matrix.tensors["values"].shape
    if len(shape) != 4 or shape[3] != MXFP4_GROUP // 2:
        matrix.refuse(
            f"has {matrix.names['values']} of shape {list(shape)} instead of "
            f"[experts, out, groups, {MXFP4_GROUP // 2}]"
        )
    matrix.check_shape("scales", shape[:3])
    experts, rows, groups, _ = shape
    decoded = matrix.decode(
        (experts, rows, groups * MXFP4_GROUP), partial(_decode_rows, matrix, MXFP4_GROUP)
    )
    return LazyTensor(
        (experts, groups * MXFP4_GROUP, rows), decoded.dtype, partial(_read_transposed, decoded)
    )


def _read_transposed(stack: LazyTensor, offset: Shape, shape: Shape) -> torch.Tensor:
    expert, row, column = offset
    experts, rows, columns = shape
    return stack.read((expert, column, row), (experts, columns, rows)).transpose(1, 2).contiguous()


def decode_mxfp4(matrix: EncodedMatrix) -> LazyTensor:
    """Decode a matrix with scales in e8m0."""
    matrix.check_dtype("scales", torch.uint8, getattr(torch, "float8_e8m0fnu", torch.uint8))
    return _decode_grouped(matrix, MXFP4_GROUP)


def decode_nvfp4(matrix: EncodedMatrix) -> LazyTensor:
    """Decode a matrix with scales in e4m3 and a scale of the matrix."""
    matrix.check_dtype("scales", torch.float8_e4m3fn)
    matrix.check_dtype("global_scale", torch.float32)
    matrix.check_shape("global_scale", (), (1,))
    return _decode_grouped(matrix.with_tensor("global_scale", (1,)), NVFP4_GROUP)


def _decode_grouped(matrix: EncodedMatrix, group: int) -> LazyTensor:
    matrix.check_dtype("values", torch.uint8)
    matrix.check_rank("values", 2, 3)
    shape = matrix.tensors["values"].shape
    if shape[-1] * 2 % group:
        matrix.refuse(
            f"has {matrix.names['values']} of shape {list(shape)}, but rows must be groups of "
            f"{group // 2} bytes"
        )
    matrix.check_shape("scales", (*shape[:-1], shape[-1] * 2 // group))
    return matrix.decode((*shape[:-1], shape[-1] * 2), partial(_decode_rows, matrix, group))


def _decode_rows(
    matrix: EncodedMatrix, group: int, lead: Shape, first: int, count: int
) -> torch.Tensor:
    codes = matrix.read_rows("values", lead, first, count).reshape(count, -1)
    values = _PAIRS[codes.int()].flatten(1)
    scales = matrix.read_scales("scales", lead, first, count).float()
    if "global_scale" in matrix.tensors:
        whole = matrix.read_scales("global_scale", (), 0, 1)
        if matrix.settings["quant_method"] == "compressed-tensors":
            scales = scales / whole
        else:
            scales = scales * whole
        if not torch.isfinite(scales).all():
            matrix.refuse(f"has {matrix.names['global_scale']} = {whole.item()}")
    return values.view(count, -1, group).mul_(scales[:, :, None]).view(count, -1)
