"""Matrices of fp8 or int8 numbers with a scale per tensor, row, group of columns or block.

The value of an element is (number - zero point) * scale. Blocks at the lower and right edge may be
partial. Sources: the files of DeepSeek-V3 and Mistral 3, compressed-tensors, NVIDIA's Model
Optimizer and bitsandbytes (https://arxiv.org/abs/2208.07339).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch

from megatron.conversion.quantization.encoded_matrix import EncodedMatrix, spread
from megatron.core.dist_checkpointing.mapping import LazyTensor, Shape

Block = tuple[int, int]  # rows and columns with one scale

_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_E8M0_DTYPES = (torch.uint8, getattr(torch, "float8_e8m0fnu", torch.uint8))
_INT8_FORMAT = 0  # "row"; others are orders of elements for one GPU architecture
_INVERSE_OF_127 = 7.874015718698502e-3  # as bitsandbytes rounds it


def decode_fp8(matrix: EncodedMatrix) -> LazyTensor:
    """Decode fp8 of transformers, whose products are computed in fp32."""
    return _decode(matrix, matrix.settings.get("weight_block_size"), torch.float32)


def decode_modelopt(matrix: EncodedMatrix) -> LazyTensor:
    """Decode fp8 of the Model Optimizer: a scale per tensor or row, or per block of 128 x 128."""
    scales = matrix.tensors["scales"]
    if len(scales.shape) == 4:  # [blocks of rows, 1, blocks of columns, 1]
        matrix = matrix.with_tensor("scales", (scales.shape[0], scales.shape[2]))
    return _decode(matrix, (128, 128), torch.float32)


def decode_compressed(matrix: EncodedMatrix) -> LazyTensor:
    """Decode fp8 or int8 of compressed-tensors, which computes in the dtype of the scales."""
    matrix.check_rank("values", 2, 3)
    block: Sequence[int] | None = None
    columns = matrix.tensors["values"].shape[-1]
    for group in matrix.settings["config_groups"].values():
        weights = group["weights"] or {}
        size = weights.get("group_size") or 0
        if size > 0 and columns % size == 0:
            groups = columns // size
            if matrix.tensors["scales"].shape[-1:] == (groups,):
                block = (1, size)
        block = block or weights.get("block_structure")
    return _decode(matrix, block, None)


def decode_int8(matrix: EncodedMatrix) -> LazyTensor:
    """Decode int8 of bitsandbytes: a scale per row, which is the largest magnitude."""
    matrix.check_dtype("values", torch.int8)
    matrix.check_rank("values", 2)
    matrix.check_dtype("scales", torch.float32)
    shape = matrix.tensors["values"].shape
    matrix.check_shape("scales", shape[:1])
    if "format" in matrix.tensors:
        order = matrix.tensors["format"].read_all().flatten().tolist()
        if order not in ([], [_INT8_FORMAT]):
            matrix.refuse(f"has {matrix.names['format']} = {order}, only [{_INT8_FORMAT}] is read")
    return matrix.decode(shape, partial(_decode_int8_rows, matrix))


def _decode_int8_rows(matrix: EncodedMatrix, lead: Shape, first: int, count: int) -> torch.Tensor:
    values = matrix.read_rows("values", lead, first, count)
    scales = matrix.read_scales("scales", lead, first, count)
    return values * scales[:, None] * _INVERSE_OF_127


def _decode(
    matrix: EncodedMatrix, block: Sequence[int] | None, dtype: torch.dtype | None
) -> LazyTensor:
    """Decode a matrix whose scales have any of the shapes; products are computed in `dtype`, or in
    that of the scales.
    """
    matrix.check_dtype("values", *_list_value_dtypes(matrix))
    matrix.check_dtype("scales", *_SCALE_DTYPES, *_E8M0_DTYPES)
    matrix.check_rank("values", 2, 3)
    shape = matrix.tensors["values"].shape
    size = find_block(matrix, "scales", shape, block)
    matrix = _shape_grid(matrix, "scales", shape, size)
    if "zero_points" in matrix.tensors:
        matrix.check_dtype("zero_points", torch.int8)
        find_block(matrix, "zero_points", shape, block)
        matrix = _shape_grid(matrix, "zero_points", shape, size)
    return matrix.decode(shape, partial(_decode_rows, matrix, size, dtype))


def _list_value_dtypes(matrix: EncodedMatrix) -> Iterable[torch.dtype]:
    yield torch.float8_e4m3fn
    if matrix.settings["quant_method"] == "compressed-tensors":
        yield torch.int8


def _decode_rows(
    matrix: EncodedMatrix,
    block: Block,
    dtype: torch.dtype | None,
    lead: Shape,
    first: int,
    count: int,
) -> torch.Tensor:
    values = matrix.read_rows("values", lead, first, count)
    # Rows of the grid that the rows are in.
    rows = torch.arange(first, first + count) // block[0]
    start = int(rows[0])
    grid_rows = int(rows[-1]) + 1 - start
    rows -= start
    columns = values.shape[1]
    scales = matrix.read_scales("scales", lead, start, grid_rows)
    factors = spread(scales[rows], block[1], columns)
    factors = factors.to(dtype or factors.dtype)
    numbers = values.to(factors.dtype)
    if "zero_points" in matrix.tensors:
        zeros = matrix.read_rows("zero_points", lead, start, grid_rows)
        numbers = numbers - spread(zeros[rows], block[1], columns).to(factors.dtype)
    return numbers * factors


def find_block(
    matrix: EncodedMatrix, role: str, shape: Shape, block: Sequence[int] | None
) -> Block:
    """Return rows and columns of a block with one scale, from the shape of the scales.

    `block` is the size in config.json, if it states one. Raises ValueError for other shapes.
    """
    *lead, rows, columns = shape
    grid = matrix.tensors[role].shape
    is_one = grid in ((1,), (1, 1)) and not lead
    if is_one or grid in (tuple(lead), (*lead, 1), (*lead, 1, 1)):
        return (rows, columns)
    if grid in ((*lead, rows), (*lead, rows, 1)):
        return (1, columns)
    expected = [(*lead, 1, 1), (*lead, rows, 1)]
    if block is not None:
        height, width = block
        expected.append((*lead, -(-rows // height), -(-columns // width)))
        if grid == expected[-1]:
            return (height, width)
    matrix.check_shape(role, *expected)
    raise AssertionError(grid)


def _shape_grid(matrix: EncodedMatrix, role: str, shape: Shape, block: Block) -> EncodedMatrix:
    """Return the matrix with scales of shape [..., blocks of rows, blocks of columns]."""
    *lead, rows, columns = shape
    grid = (*lead, -(-rows // block[0]), -(-columns // block[1]))
    if matrix.tensors[role].shape == grid:
        return matrix
    return matrix.with_tensor(role, grid)
