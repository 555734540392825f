"""Matrices of fp8 or int8 values with a scale per tensor, row, group of columns or block.

An element is decoded as (value - zero point) * scale. Blocks at the lower and right edge may be
partial. Sources: the files of DeepSeek-V3 and Mistral 3, compressed-tensors, NVIDIA's Model
Optimizer and bitsandbytes (https://arxiv.org/abs/2208.07339).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from megatron.conversion.quantization.encoded_matrix import (
    E8M0_DTYPES,
    EncodedMatrix,
    MatrixElements,
    divide_up,
    repeat_columns,
)
from megatron.core.dist_checkpointing.mapping import Shape
from megatron.core.encoded_elements import E4M3_VALUES, E8M0, ElementFormat, Elements

Block = tuple[int, int]  # rows and columns with one scale

# Values of the bits of an element
_INT8_VALUES = tuple(torch.arange(256, dtype=torch.uint8).view(torch.int8).float().tolist())
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_INT8_FORMAT = 0  # "row"; others are orders of elements for one GPU architecture
_INVERSE_OF_127 = 7.874015718698502e-3  # as bitsandbytes rounds it


def read_fp8(matrix: EncodedMatrix) -> MatrixElements:
    """Read fp8 of transformers, whose products are computed in fp32."""
    return _read(matrix, matrix.settings.get("weight_block_size"), torch.float32)


def read_modelopt(matrix: EncodedMatrix) -> MatrixElements:
    """Read fp8 of the Model Optimizer: a scale per tensor or row, or per block of 128 x 128."""
    scales_shape = matrix.tensors["scales"].shape
    if len(scales_shape) == 4:  # [blocks of rows, 1, blocks of columns, 1]
        matrix = matrix.with_tensor("scales", (scales_shape[0], scales_shape[2]))
    return _read(matrix, (128, 128), torch.float32)


def read_compressed(matrix: EncodedMatrix) -> MatrixElements:
    """Read fp8 or int8 of compressed-tensors, which computes in the dtype of the scales."""
    matrix.check_rank("values", 2, 3)
    columns = matrix.tensors["values"].shape[-1]
    num_scales = matrix.tensors["scales"].shape[-1:]
    block: Sequence[int] | None = None
    for group in matrix.settings["config_groups"].values():
        weights = group["weights"] or {}
        group_size = weights.get("group_size") or 0
        has_whole_groups = group_size > 0 and columns % group_size == 0
        if has_whole_groups and num_scales == (columns // group_size,):
            block = (1, group_size)
        block = block or weights.get("block_structure")
    return _read(matrix, block, None)


def read_int8(matrix: EncodedMatrix) -> MatrixElements:
    """Read int8 of bitsandbytes: a scale per row, which is the largest magnitude."""
    matrix.check_dtype("values", torch.int8)
    matrix.check_rank("values", 2)
    matrix.check_dtype("scales", torch.float32)
    shape = matrix.tensors["values"].shape
    matrix.check_shape("scales", shape[:1])
    if "format" in matrix.tensors:
        _check_int8_format(matrix)
    matrix = matrix.with_tensor("scales", (shape[0], 1))
    return MatrixElements(
        matrix,
        shape,
        ElementFormat(_INT8_VALUES, torch.float32, torch.float32, factor=_INVERSE_OF_127),
        partial(_read_rows, matrix, (1, shape[1])),
        column_groups=shape[1],
    )


def _check_int8_format(matrix: EncodedMatrix) -> None:
    """Raise ValueError if elements are in the order of a GPU architecture."""
    element_order = matrix.tensors["format"].read_all().flatten().tolist()
    if element_order not in ([], [_INT8_FORMAT]):
        name = matrix.names["format"]
        matrix.refuse(f"has {name} = {element_order}, only [{_INT8_FORMAT}] is read")


def _read(
    matrix: EncodedMatrix, block: Sequence[int] | None, dtype: torch.dtype | None
) -> MatrixElements:
    """Read a matrix, or a stack of matrices, with scales of one of the supported shapes.

    Args:
        matrix: values, scales and optional zero points, which have the shape of the scales.
        block: rows and columns of a block according to config.json, if it specifies them.
        dtype: dtype in which products are computed; None for that of the scales.
    """
    matrix.check_dtype("values", *_list_value_dtypes(matrix))
    matrix.check_dtype("scales", *_SCALE_DTYPES, *E8M0_DTYPES)
    matrix.check_rank("values", 2, 3)
    shape = matrix.tensors["values"].shape
    block_shape = find_block(matrix, "scales", shape, block)
    matrix = _reshape_grid(matrix, "scales", shape, block_shape)
    if "zero_points" in matrix.tensors:
        matrix.check_dtype("zero_points", torch.int8)
        find_block(matrix, "zero_points", shape, block)
        matrix = _reshape_grid(matrix, "zero_points", shape, block_shape)
    height, width = block_shape
    return MatrixElements(
        matrix,
        shape,
        _describe(matrix, dtype),
        partial(_read_rows, matrix, block_shape),
        column_groups=width,
        row_groups=height,
    )


def _describe(matrix: EncodedMatrix, dtype: torch.dtype | None) -> ElementFormat:
    """Return the format of the elements; `dtype` is that of `_read`."""
    is_fp8 = matrix.tensors["values"].dtype == torch.float8_e4m3fn
    scale_dtype = matrix.tensors["scales"].dtype
    if scale_dtype in E8M0_DTYPES:
        scale_dtype = E8M0
    scales_are_fp32 = scale_dtype == E8M0
    return ElementFormat(
        values=E4M3_VALUES if is_fp8 else _INT8_VALUES,
        dtype=dtype or (torch.float32 if scales_are_fp32 else scale_dtype),
        scale_dtype=scale_dtype,
        zero_point_dtype=torch.int8 if "zero_points" in matrix.tensors else None,
    )


def _list_value_dtypes(matrix: EncodedMatrix) -> list[torch.dtype]:
    """Return the dtypes of values that the method supports."""
    if matrix.settings["quant_method"] == "compressed-tensors":
        return [torch.float8_e4m3fn, torch.int8]
    return [torch.float8_e4m3fn]


def _read_rows(
    matrix: EncodedMatrix, block: Block, lead: Shape, first: int, count: int
) -> Elements:
    """Read rows: [count, columns]."""
    height, width = block
    values = matrix.read_rows("values", lead, first, count)
    columns = values.shape[1]

    # Read the rows of blocks that contain these rows: [rows of blocks, blocks of columns].
    block_rows = torch.arange(first, first + count) // height
    start = int(block_rows[0])
    num_block_rows = int(block_rows[-1]) + 1 - start
    block_rows -= start
    scales = matrix.read_scales("scales", lead, start, num_block_rows)
    scales = repeat_columns(scales[block_rows], width, columns)

    if "zero_points" not in matrix.tensors:
        return Elements(values, scales)
    zero_points = matrix.read_rows("zero_points", lead, start, num_block_rows)
    return Elements(values, scales, repeat_columns(zero_points[block_rows], width, columns))


def find_block(
    matrix: EncodedMatrix, role: str, shape: Shape, block: Sequence[int] | None
) -> Block:
    """Return rows and columns of a block with one scale, from the shape of the scales.

    Raises ValueError for scales of an unsupported shape.

    Args:
        matrix: the stored tensors.
        role: role of the scales or zero points.
        shape: shape of the decoded tensor, [..., rows, columns].
        block: rows and columns of a block according to config.json, if it specifies them.
    """
    *lead, rows, columns = shape
    grid = matrix.tensors[role].shape

    # One scale per matrix
    if not lead and grid in ((1,), (1, 1)):
        return (rows, columns)
    if grid in (tuple(lead), (*lead, 1), (*lead, 1, 1)):
        return (rows, columns)

    # One scale per row
    if grid in ((*lead, rows), (*lead, rows, 1)):
        return (1, columns)

    # One scale per block
    supported_shapes = [(*lead, 1, 1), (*lead, rows, 1)]
    if block is not None:
        height, width = block
        block_grid = (*lead, divide_up(rows, height), divide_up(columns, width))
        if grid == block_grid:
            return (height, width)
        supported_shapes.append(block_grid)
    matrix.check_shape(role, *supported_shapes)
    raise AssertionError(grid)


def _reshape_grid(matrix: EncodedMatrix, role: str, shape: Shape, block: Block) -> EncodedMatrix:
    """Return the matrix with scales of shape [..., blocks of rows, blocks of columns]."""
    *lead, rows, columns = shape
    height, width = block
    grid = (*lead, divide_up(rows, height), divide_up(columns, width))
    if matrix.tensors[role].shape == grid:
        return matrix
    return matrix.with_tensor(role, grid)
