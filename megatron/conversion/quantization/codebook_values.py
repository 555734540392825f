"""Matrices of 4-bit indices into a table of values, as bitsandbytes stores nf4 and fp4.

Row-major elements are cut into blocks, each with its largest magnitude, which double quantization
stores in 8 bits. Source: bitsandbytes (`QuantState`), https://arxiv.org/abs/2305.14314.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from megatron.conversion.quantization.encoded_matrix import EncodedMatrix
from megatron.core.dist_checkpointing.mapping import LazyTensor, Shape
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
_MAX_STATE = 1 << 16  # bytes


def decode_4bit(matrix: EncodedMatrix) -> LazyTensor:
    """Decode bytes of two indices, the one in the high bits first."""
    state = _read_state(matrix)
    shape = tuple(state["shape"])
    count = math.prod(shape)
    num_blocks = -(-count // state["blocksize"])
    matrix.check_dtype("values", torch.uint8)
    matrix.check_shape("values", ((count + 1) // 2, 1))
    matrix.check_shape("codebook", (16,))
    matrix.check_shape("scales", (num_blocks,))
    is_nested = "nested_scales" in matrix.tensors
    matrix.check_dtype("scales", torch.uint8 if is_nested else torch.float32)
    if is_nested:
        size = state.get("nested_blocksize")
        if (
            size is None
            or state.get("nested_offset") is None
            or "nested_codebook" not in (matrix.tensors)
        ):
            matrix.refuse("has nested_absmax, but its nested quant_map, block size or offset lack")
        matrix.check_shape("nested_scales", (-(-num_blocks // size),))
        matrix.check_shape("nested_codebook", (256,))
    return matrix.decode(shape, partial(_decode_rows, matrix, state))


def _read_state(matrix: EncodedMatrix) -> dict[str, Any]:
    """Return the description of the matrix, which is JSON in a tensor of bytes."""
    role = next((role for role in ("nf4", "fp4") if role in matrix.tensors), None)
    if role is None:
        matrix.refuse("has no quant_state.bitsandbytes__nf4 or __fp4")
    matrix.check_dtype(role, torch.uint8)
    size = math.prod(matrix.tensors[role].shape)
    if size > _MAX_STATE:
        matrix.refuse(f"has {matrix.names[role]} of {size} bytes")
    location = f"{matrix.directory}: {matrix.names[role]}"
    content = bytes(matrix.tensors[role].read_all().flatten().tolist())
    state: dict[str, Any] = _STATE(parse_json(content, location), location)
    return state


def _decode_rows(
    matrix: EncodedMatrix, state: dict[str, Any], lead: Shape, first: int, count: int
) -> torch.Tensor:
    columns = state["shape"][1]
    size = state["blocksize"]
    # Elements, in whole bytes, and the blocks that contain them.
    start = first * columns
    stop = start + count * columns
    first_byte = start // 2
    first_block = start // size
    packed = matrix.read_rows("values", lead, first_byte, -(-stop // 2) - first_byte)
    scales = _read_block_scales(matrix, state, first_block, -(-stop // size) - first_block)
    codes = torch.cat([packed >> 4, packed & 15], dim=1).flatten()
    skipped = start - 2 * first_byte
    codes = codes[skipped : skipped + stop - start]
    blocks = torch.arange(start, stop) // size - first_block
    values = matrix.tensors["codebook"].read_all()[codes.int()] * scales[blocks]
    return values.view(count, columns).to(_DTYPES[state["dtype"]])


def _read_block_scales(
    matrix: EncodedMatrix, state: dict[str, Any], first: int, count: int
) -> torch.Tensor:
    """Return the largest magnitudes of blocks, decoded if they are quantized, too."""
    if "nested_scales" not in matrix.tensors:
        return matrix.read_scales("scales", (), first, count)
    size = state["nested_blocksize"]
    codes = matrix.read_rows("scales", (), first, count)
    start = first // size
    stop = -(-(first + count) // size)
    outer = matrix.read_scales("nested_scales", (), start, stop - start)
    blocks = torch.arange(first, first + count) // size - start
    codebook = matrix.tensors["nested_codebook"].read_all()
    return codebook[codes.int()] * outer[blocks] + state["nested_offset"]
