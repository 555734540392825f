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
# 32 integers of any number of bits fill whole words.
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


def _divide_up(total: int, size: int) -> int:
    """Return the quotient, rounded up."""
    return -(-total // size)


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
    matrix.check_rank("values", 2)
    matrix.check_rank("scales", 1, 2)
    rows, columns = matrix.tensors["shape"].read_all().tolist()
    bits, width = _find_scheme(matrix, rows, columns)
    num_words = _divide_up(columns * bits, _WORD_BITS)
    matrix.check_shape("values", (rows, num_words))

    # Scales: [rows, groups], or one.
    shape = (rows, columns)
    block = find_block(matrix, "scales", shape, (1, width))
    has_one_scale = block[0] > 1
    groups = _divide_up(columns, block[1])
    scale_rows = 1 if has_one_scale else rows
    matrix = matrix.with_tensor("scales", (scale_rows, groups))

    # Zero points: [words of rows, groups]
    if "zero_points" in matrix.tensors:
        if has_one_scale:
            matrix.refuse("has zero points with a scale of the whole matrix")
        word_rows = _divide_up(rows * bits, _WORD_BITS)
        matrix.check_dtype("zero_points", torch.int32)
        matrix.check_shape("zero_points", (word_rows, groups))

    # Groups that are not ranges of columns (act order)
    order: torch.Tensor | None = None
    if "groups" in matrix.tensors:
        matrix.check_shape("groups", (columns,))
        in_order = torch.arange(columns) // block[1]
        order = _read_groups(matrix, groups, in_order)
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
        if columns <= 0 or is_symmetric != weights.get("symmetric", True):
            continue
        expected = (_divide_up(columns * bits, _WORD_BITS), _divide_up(columns, width))
        if expected == (num_words, num_scales):
            return bits, width
    zeros = "" if is_symmetric else " and zero points"
    schemes = "; ".join(described) or "no integers"
    matrix.refuse(
        f"of shape {[rows, columns]} has {num_words} words and {num_scales} scales per row{zeros}, "
        f"but config_groups has {schemes}"
    )


def _read_groups(
    matrix: EncodedMatrix, num_groups: int, default: torch.Tensor
) -> torch.Tensor | None:
    """Return the group of each column, or None if columns are in order. -1 means in order."""
    groups = matrix.tensors["groups"].read_all().long()
    first = int(groups.min())
    last = int(groups.max())
    if first == -1 or torch.equal(groups, default):
        return None
    if first < 0 or last >= num_groups:
        name = matrix.names["groups"]
        matrix.refuse(f"has {name} from {first} to {last}, but {num_groups} groups")
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

    def expand(grid: torch.Tensor) -> torch.Tensor:
        """Return the entry of the group of each column."""
        return spread(grid, block[1], shape[1]) if order is None else grid[:, order]

    # [rows, columns]
    words = matrix.read_rows("values", lead, first, count)
    codes = unpack_integers(words, bits)[:, : shape[1]]
    # [rows, groups]
    if block[0] > 1:
        scales = matrix.read_scales("scales", lead, 0, 1)
    else:
        scales = matrix.read_scales("scales", lead, first, count)
    factors = expand(scales)
    numbers = codes.to(factors.dtype)

    # Integers are stored plus 2 ** (bits - 1), zero points, too.
    if "zero_points" not in matrix.tensors:
        return (numbers - 2 ** (bits - 1)) * factors
    first_word = first * bits // _WORD_BITS
    num_words = _divide_up(count * bits, _WORD_BITS)
    packed = matrix.read_rows("zero_points", lead, first_word, num_words)
    zeros = unpack_integers(packed.t(), bits)[:, :count].t()
    return (numbers - expand(zeros).to(factors.dtype)) * factors


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
    matrix.check_dtype("values", torch.int32)
    matrix.check_rank("values", 2)
    inputs, words = matrix.tensors["values"].shape
    outputs = words * _WORD_BITS // bits
    width = _check_groups(matrix, bits, inputs, outputs)
    return transpose(matrix.decode((inputs, outputs), partial(_decode_awq_rows, matrix, width)))


def _decode_awq_rows(
    matrix: EncodedMatrix, width: int, lead: Shape, first: int, count: int
) -> torch.Tensor:
    # [inputs, outputs]
    words = matrix.read_rows("values", lead, first, count)
    codes = _unpack_awq(words)
    # The group of each input, relative to the first one
    groups = torch.arange(first, first + count) // width
    start = int(groups[0])
    num_groups = int(groups[-1]) + 1 - start
    groups -= start
    # [groups, outputs]
    scales = matrix.read_scales("scales", lead, start, num_groups)
    packed = matrix.read_rows("zero_points", lead, start, num_groups)
    zeros = _unpack_awq(packed).to(scales.dtype)
    numbers = codes.to(scales.dtype)
    return (numbers - zeros[groups]) * scales[groups]


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
    matrix.check_rank("values", 2)
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
    groups = _divide_up(inputs, width)
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
    first_word = first * bits // _WORD_BITS
    num_words = count * bits // _WORD_BITS
    words = matrix.read_rows("values", lead, first_word, num_words)
    # [inputs, outputs]
    codes = unpack_integers(words.t(), bits).t()
    rows = groups[first : first + count]
    # [groups, outputs]
    num_groups = matrix.tensors["scales"].shape[0]
    scales = matrix.read_scales("scales", lead, 0, num_groups)
    zeros = unpack_integers(matrix.read_rows("zero_points", lead, 0, num_groups), bits)
    zeros = zeros.to(scales.dtype) + shift
    return (codes.to(scales.dtype) - zeros[rows]) * scales[rows]
