"""Matrices of integers of 2 to 8 bits, packed into int32 words, with scales and zero points.

The value of an element is (integer - zero point) * scale, in the dtype of the scales. Sources:
compressed-tensors (`pack-quantized`), AutoAWQ (`gemm`), AutoGPTQ and GPTQModel (`gptq`, `gptq_v2`).
"""

from __future__ import annotations

from functools import partial

import torch

from megatron.conversion.model_space.lazy_tensors import transpose
from megatron.conversion.quantization.encoded_matrix import EncodedMatrix, spread
from megatron.conversion.quantization.fp4_values import decode_mxfp4, decode_nvfp4
from megatron.conversion.quantization.scaled_values import find_block
from megatron.core.dist_checkpointing.mapping import LazyTensor, Shape

_WORD_BITS = 32
# 32 integers fill whole words, whatever their number of bits.
_ROW_STEP = 32
# Position of each of 8 neighboring columns in a word of AWQ.
_AWQ_ORDER = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
_SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def unpack_integers(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the integers in the words of each row, lowest bits first."""
    mask = 2**bits - 1
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        codes = words.contiguous().view(torch.uint8)
        return ((codes[:, :, None] >> shifts) & mask).flatten(1)
    # An integer may be in two words.
    starts = torch.arange(0, words.shape[1] * _WORD_BITS - bits + 1, bits)
    unsigned = torch.nn.functional.pad(words.long() & 0xFFFFFFFF, (0, 1))
    index = starts // _WORD_BITS
    pairs = unsigned[:, index] | (unsigned[:, index + 1] << _WORD_BITS)
    return ((pairs >> (starts % _WORD_BITS)) & mask).to(torch.uint8)


# ---- compressed-tensors ----


def decode_compressed(matrix: EncodedMatrix) -> LazyTensor:
    """Decode `weight_packed`: int32 words of integers, or bytes of two fp4 numbers."""
    if matrix.tensors["values"].dtype == torch.int32:
        return _decode_words(matrix)
    for group in matrix.settings["config_groups"].values():
        weights = group["weights"] or {"num_bits": 0}
        if weights["num_bits"] == 4 and weights.get("type") == "float":
            break
    else:
        matrix.refuse("is stored in bytes, but no config_groups has weights of 4-bit floats")
    return decode_nvfp4(matrix) if "global_scale" in matrix.tensors else decode_mxfp4(matrix)


def _decode_words(matrix: EncodedMatrix) -> LazyTensor:
    matrix.check_dtype("scales", *_SCALE_DTYPES)
    if "shape" not in matrix.tensors:
        matrix.refuse("has no weight_shape")
    matrix.check_shape("shape", (2,))
    rows, columns = matrix.tensors["shape"].read_all().tolist()
    words = matrix.tensors["values"].shape
    bits, width = _find_scheme(matrix, rows, columns)
    if len(words) != 2 or words[0] != rows:
        matrix.refuse(f"of shape {[rows, columns]} has {matrix.names['values']} of {list(words)}")
    shape = (rows, columns)
    block = find_block(matrix, "scales", shape, (1, width))
    has_one_scale = block[0] > 1
    groups = 1 if has_one_scale else -(-columns // block[1])
    matrix = matrix.with_tensor("scales", (1 if has_one_scale else rows, groups))
    if "zero_points" in matrix.tensors:
        if has_one_scale:
            matrix.refuse("has zero points with a scale of the whole matrix")
        matrix.check_dtype("zero_points", torch.int32)
        matrix.check_shape("zero_points", (-(-rows * bits // _WORD_BITS), groups))
    order = None
    if "groups" in matrix.tensors:
        matrix.check_shape("groups", (columns,))
        order = _read_groups(matrix, groups, torch.arange(columns) // block[1])
    decode_rows = partial(_decode_word_rows, matrix, bits, shape, block, order)
    return matrix.decode(shape, decode_rows, _ROW_STEP)


def _find_scheme(matrix: EncodedMatrix, rows: int, columns: int) -> tuple[int, int]:
    """Return bits and group size of the first of `config_groups` that fits the shapes."""
    num_words = matrix.tensors["values"].shape[-1]
    num_scales = matrix.tensors["scales"].shape[-1]
    is_symmetric = "zero_points" not in matrix.tensors
    described = []
    for group in matrix.settings["config_groups"].values():
        weights = group["weights"]
        if weights is None or weights.get("type", "int") != "int":
            continue
        bits = weights["num_bits"]
        size = weights.get("group_size") or 0
        width = size if size > 0 else columns
        described.append(f"{bits} bits in groups of {width}")
        fits = num_words == -(-columns * bits // _WORD_BITS) and columns > 0
        fits = fits and -(-columns // width) == num_scales
        if fits and is_symmetric == weights.get("symmetric", True):
            return bits, width
    matrix.refuse(
        f"of shape {[rows, columns]} has {num_words} words and {num_scales} scales per row"
        f"{'' if is_symmetric else ' and zero points'}, but config_groups has "
        f"{'; '.join(described) or 'no integers'}"
    )


def _read_groups(
    matrix: EncodedMatrix, num_groups: int, default: torch.Tensor
) -> torch.Tensor | None:
    """Return the group of each column, or None if columns are in order. -1 means in order."""
    groups = matrix.tensors["groups"].read_all().long()
    if torch.equal(groups, default) or bool((groups == -1).any()):
        return None
    if bool(((groups < 0) | (groups >= num_groups)).any()):
        matrix.refuse(
            f"has {matrix.names['groups']} from {int(groups.min())} to {int(groups.max())}, but "
            f"{num_groups} groups"
        )
    return groups


def _decode_word_rows(
    matrix: EncodedMatrix,
    bits: int,
    shape: Shape,
    block: tuple[int, int],
    order: torch.Tensor | None,
    lead: Shape,
    first: int,
    count: int,
) -> torch.Tensor:
    """Decode rows; `order` is the group of each column if it is not a range of columns."""
    columns = shape[1]
    words = matrix.read_rows("values", lead, first, count)
    codes = unpack_integers(words, bits)[:, :columns]
    if block[0] > 1:
        scales = matrix.read_scales("scales", lead, 0, 1)
    else:
        scales = matrix.read_scales("scales", lead, first, count)
    factors = spread(scales, block[1], columns) if order is None else scales[:, order]
    # Integers are stored plus 2 ** (bits - 1), zero points, too.
    if "zero_points" not in matrix.tensors:
        return (codes.to(factors.dtype) - 2 ** (bits - 1)) * factors
    word_rows = -(-count * bits // _WORD_BITS)
    packed = matrix.read_rows("zero_points", lead, first * bits // _WORD_BITS, word_rows)
    grid = unpack_integers(packed.t(), bits)[:, :count].t()
    zeros = spread(grid, block[1], columns) if order is None else grid[:, order]
    return (codes.to(factors.dtype) - zeros.to(factors.dtype)) * factors


# ---- AWQ and GPTQ: rows are inputs ----


def decode_awq(matrix: EncodedMatrix) -> LazyTensor:
    """Decode words [inputs, outputs / 8] with scales [groups, outputs] as [outputs, inputs]."""
    bits = 4
    version = matrix.settings.get("version", "gemm").lower()
    if matrix.settings["bits"] != bits or version != "gemm":
        matrix.refuse(
            f"has {matrix.settings['bits']} bits in the layout {version!r}, only 4 bits of 'gemm' "
            "are read"
        )
    inputs = matrix.tensors["values"].shape[0]
    outputs = matrix.tensors["scales"].shape[-1]
    matrix.check_dtype("values", torch.int32)
    matrix.check_shape("values", (inputs, outputs * bits // _WORD_BITS))
    width = _check_groups(matrix, bits, inputs, outputs)
    return transpose(matrix.decode((inputs, outputs), partial(_decode_awq_rows, matrix, width)))


def _decode_awq_rows(
    matrix: EncodedMatrix, width: int, lead: Shape, first: int, count: int
) -> torch.Tensor:
    codes = _unpack_awq(matrix.read_rows("values", lead, first, count))
    groups = torch.arange(first, first + count) // width
    start = int(groups[0])
    num_groups = int(groups[-1]) + 1 - start
    groups -= start
    scales = matrix.read_scales("scales", lead, start, num_groups)
    zeros = _unpack_awq(matrix.read_rows("zero_points", lead, start, num_groups))
    return (codes.to(scales.dtype) - zeros.to(scales.dtype)[groups]) * scales[groups]


def _unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """Return the integers in the order of columns."""
    codes = unpack_integers(words, 4)
    return codes.view(len(codes), -1, 8)[:, :, _AWQ_ORDER].flatten(1)


def decode_gptq(matrix: EncodedMatrix) -> LazyTensor:
    """Decode words [inputs * bits / 32, outputs] with scales [groups, outputs] as
    [outputs, inputs]. Columns may be in groups that are not ranges (act order).
    """
    bits = matrix.settings["bits"]
    matrix.check_dtype("values", torch.int32)
    words, outputs = matrix.tensors["values"].shape
    inputs = words * _WORD_BITS // bits
    width = _check_groups(matrix, bits, inputs, outputs)
    groups = torch.arange(inputs) // width
    if "groups" in matrix.tensors:
        matrix.check_shape("groups", (inputs,))
        num_groups = matrix.tensors["scales"].shape[0]
        order = _read_groups(matrix, num_groups, groups)
        groups = groups if order is None else order
    is_v2 = matrix.settings.get("checkpoint_format") == "gptq_v2"
    decode_rows = partial(_decode_gptq_rows, matrix, bits, 0 if is_v2 else 1, groups)
    return transpose(matrix.decode((inputs, outputs), decode_rows, _ROW_STEP))


def _check_groups(matrix: EncodedMatrix, bits: int, inputs: int, outputs: int) -> int:
    """Return the number of inputs with one scale; check scales and zero points."""
    size = matrix.settings.get("group_size", -1)
    width = size if size > 0 else inputs
    if outputs * bits % _WORD_BITS or inputs == 0:
        matrix.refuse(f"has {outputs} outputs, which do not fill words of {_WORD_BITS // bits}")
    groups = -(-inputs // width)
    matrix.check_dtype("scales", *_SCALE_DTYPES)
    matrix.check_dtype("zero_points", torch.int32)
    matrix.check_shape("scales", (groups, outputs))
    matrix.check_shape("zero_points", (groups, outputs * bits // _WORD_BITS))
    return width


def _decode_gptq_rows(
    matrix: EncodedMatrix,
    bits: int,
    shift: int,
    groups: torch.Tensor,
    lead: Shape,
    first: int,
    count: int,
) -> torch.Tensor:
    """Decode rows; version 1 stores zero points minus `shift`."""
    words = matrix.read_rows("values", lead, first * bits // _WORD_BITS, count * bits // _WORD_BITS)
    codes = unpack_integers(words.t(), bits).t()
    rows = groups[first : first + count]
    num_groups = matrix.tensors["scales"].shape[0]
    scales = matrix.read_scales("scales", lead, 0, num_groups)
    zeros = unpack_integers(matrix.read_rows("zero_points", lead, 0, num_groups), bits)
    zeros = zeros.to(scales.dtype) + shift
    return (codes.to(scales.dtype) - zeros[rows]) * scales[rows]
