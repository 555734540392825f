"""Matrices of 4-bit indices into a table of values, as bitsandbytes stores nf4 and fp4.

The elements of a matrix in row-major order are cut into blocks. The scale of a block is its largest
magnitude, and the table (codebook) has values from -1 to 1. With double quantization, scales are
8-bit indices into a second table. Source: bitsandbytes (`QuantState`),
https://arxiv.org/abs/2305.14314.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch

from megatron.conversion.quantization.encoded_matrix import (
    EncodedMatrix,
    MatrixElements,
    divide_up,
    unpack_nibbles,
)
from megatron.core.dist_checkpointing.mapping import Shape
from megatron.core.encoded_elements import ElementFormat, Elements
from megatron.core.safe_files import schema
from megatron.core.safe_files.reading import parse_json

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_STATE = schema.record(
    {
        "quant_type": schema.one_of("nf4", "fp4"),
        "blocksize": schema.integer(2, 1 << 20),
        "dtype": schema.one_of(*_DTYPES),
        "shape": schema.sequence(schema.integer(1), 2, least=2),
        "nested_blocksize?": schema.optional(schema.integer(1, 1 << 20)),
        "nested_offset?": schema.optional(schema.number()),
    }
)
_STATE_ROLES = ("nf4", "fp4")
_MAX_STATE = 1 << 16  # bytes


@dataclass(frozen=True)
class _QuantState:
    """The description of a matrix that bitsandbytes stores with it."""

    rows: int  # of the decoded matrix
    columns: int
    dtype: torch.dtype  # of the matrix that was quantized
    block_size: int  # elements with one scale
    nested_block_size: int | None  # scales with one nested scale
    nested_offset: float | None  # added to decoded scales


def read_4bit(matrix: EncodedMatrix) -> MatrixElements:
    """Read bytes of two indices, the first in the high bits.

    Stored tensors: values [bytes, 1], codebook [16] and scales [blocks]; with double quantization
    nested_scales [blocks of scales] and nested_codebook [256].
    """
    state = _read_state(matrix)
    num_elements = state.rows * state.columns
    num_bytes = divide_up(num_elements, 2)
    num_blocks = divide_up(num_elements, state.block_size)

    matrix.check_dtype("values", torch.uint8)
    matrix.check_shape("values", (num_bytes, 1))
    matrix.check_shape("codebook", (16,))
    matrix.check_shape("scales", (num_blocks,))
    if "nested_scales" in matrix.tensors:
        _check_nested_scales(matrix, state, num_blocks)
    else:
        matrix.check_dtype("scales", torch.float32)
    codebook = tuple(matrix.tensors["codebook"].read_all().tolist())
    rows_are_blocks = state.columns % state.block_size == 0
    return MatrixElements(
        matrix,
        (state.rows, state.columns),
        ElementFormat(codebook, torch.float32, torch.float32, roundings=(state.dtype,)),
        partial(_read_rows, matrix, state),
        state.block_size if rows_are_blocks else None,
    )


def _check_nested_scales(matrix: EncodedMatrix, state: _QuantState, num_blocks: int) -> None:
    """Raise ValueError if the tensors of double quantization are incomplete or do not match."""
    matrix.check_dtype("scales", torch.uint8)
    nested_block_size = state.nested_block_size
    has_codebook = "nested_codebook" in matrix.tensors
    if nested_block_size is None or state.nested_offset is None or not has_codebook:
        matrix.refuse("has nested_absmax, but its nested quant_map, block size or offset lack")
    num_nested_blocks = divide_up(num_blocks, nested_block_size)
    matrix.check_shape("nested_scales", (num_nested_blocks,))
    matrix.check_shape("nested_codebook", (256,))


def _read_state(matrix: EncodedMatrix) -> _QuantState:
    """Return the description of the matrix, which is JSON in a tensor of bytes."""
    roles = [role for role in _STATE_ROLES if role in matrix.tensors]
    if not roles:
        matrix.refuse("has no quant_state.bitsandbytes__nf4 or __fp4")
    role = roles[0]
    tensor = matrix.tensors[role]
    name = matrix.names[role]
    matrix.check_dtype(role, torch.uint8)
    num_bytes = math.prod(tensor.shape)
    if num_bytes > _MAX_STATE:
        matrix.refuse(f"has {name} of {num_bytes} bytes")

    location = f"{matrix.directory}: {name}"
    content = bytes(tensor.read_all().flatten().tolist())
    fields = _STATE(parse_json(content, location), location)
    rows, columns = fields["shape"]
    return _QuantState(
        rows=rows,
        columns=columns,
        dtype=_DTYPES[fields["dtype"]],
        block_size=fields["blocksize"],
        nested_block_size=fields.get("nested_blocksize"),
        nested_offset=fields.get("nested_offset"),
    )


def _read_rows(
    matrix: EncodedMatrix, state: _QuantState, lead: Shape, first: int, count: int
) -> Elements:
    """Read rows: [count, columns]."""
    start = first * state.columns
    stop = start + count * state.columns
    codes = _read_codes(matrix, lead, start, stop)
    scales = _read_scales(matrix, state, start, stop)
    shape = (count, state.columns)
    return Elements(codes.view(shape), scales.view(shape))


def _read_codes(matrix: EncodedMatrix, lead: Shape, start: int, stop: int) -> torch.Tensor:
    """Return the indices of elements `start` to `stop` into the codebook.

    The first and the last byte that are read may also contain the index of a neighboring element,
    which is cut off.
    """
    first_byte = start // 2
    end_byte = divide_up(stop, 2)
    # [bytes, 1] -> [bytes, 2] -> [2 * bytes]
    packed = matrix.read_rows("values", lead, first_byte, end_byte - first_byte)
    codes = unpack_nibbles(packed, high_first=True).flatten()
    first_code = start - 2 * first_byte
    return codes[first_code : first_code + stop - start]


def _read_scales(matrix: EncodedMatrix, state: _QuantState, start: int, stop: int) -> torch.Tensor:
    """Return the scale of each of the elements `start` to `stop`."""
    first_block = start // state.block_size
    end_block = divide_up(stop, state.block_size)
    scales = _read_block_scales(matrix, state, first_block, end_block - first_block)
    scales_of_elements = scales.repeat_interleave(state.block_size)
    first = start - first_block * state.block_size
    return scales_of_elements[first : first + stop - start]


def _read_block_scales(
    matrix: EncodedMatrix, state: _QuantState, first: int, count: int
) -> torch.Tensor:
    """Return the scales of blocks.

    With double quantization, a scale is the product of an entry of the nested codebook and the
    scale of its block of scales, plus an offset.
    """
    if "nested_scales" not in matrix.tensors:
        return matrix.read_scales("scales", (), first, count)
    block_size = state.nested_block_size
    offset = state.nested_offset
    assert block_size is not None and offset is not None  # checked by _check_nested_scales

    first_block = first // block_size
    end_block = divide_up(first + count, block_size)
    nested_scales = matrix.read_scales("nested_scales", (), first_block, end_block - first_block)
    blocks = torch.arange(first, first + count) // block_size
    codes = matrix.read_rows("scales", (), first, count)
    codebook = matrix.tensors["nested_codebook"].read_all()
    return codebook[codes.int()] * nested_scales[blocks - first_block] + offset
