"""Matrices of integers of 2 to 8 bits, packed into int32 words, with scales and zero points.

An element is decoded as (integer - zero point) * scale, in the dtype of the scales. Sources:
compressed-tensors (`pack-quantized`), AutoAWQ (`gemm`), AutoGPTQ and GPTQModel (`gptq`, `gptq_v2`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import torch

from megatron.conversion.model_space.lazy_tensors import transpose
from megatron.conversion.quantization.encoded_matrix import (
    EncodedMatrix,
    MatrixElements,
    divide_up,
    repeat_columns,
    unpack_nibbles,
)
from megatron.conversion.quantization.fp4_values import read_mxfp4, read_nvfp4
from megatron.conversion.quantization.scaled_values import find_block
from megatron.core.dist_checkpointing.mapping import Shape
from megatron.core.encoded_elements import ElementFormat, Elements

_WORD_BITS = 32
# Rows that are decoded together: 32 integers of any width fill whole words.
_ROW_STEP = 32
_AWQ_BITS = 4
_SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def unpack_integers(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the integers in the words of each row, lowest bits first."""
    if bits == 4:
        return unpack_nibbles(words.contiguous().view(torch.uint8))
    if 8 % bits == 0:
        mask = 2**bits - 1
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        packed = words.contiguous().view(torch.uint8)
        return ((packed[:, :, None] >> shifts) & mask).flatten(1)

    # Words along the last axis, in periods that are filled: [rows, periods, words]
    num_integers = words.shape[1] * _WORD_BITS // bits
    padding = -words.shape[1] % bits
    periods = torch.nn.functional.pad(words, (0, padding)).view(len(words), -1, bits)
    integers = _unpack_period(periods.unbind(2), bits)
    return torch.stack(integers, dim=2).flatten(1)[:, :num_integers]


def unpack_rows(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the integers in the words of each column, lowest bits first.

    [words, columns] -> [integers, columns]
    """
    # Words along the first axis, in periods that are filled: [periods, words, columns]
    num_words, num_columns = words.shape
    num_integers = num_words * _WORD_BITS // bits
    period = 1 if _WORD_BITS % bits == 0 else bits
    padding = -num_words % period
    periods = torch.nn.functional.pad(words, (0, 0, 0, padding)).view(-1, period, num_columns)
    integers = _unpack_period(periods.unbind(1), bits)
    return torch.stack(integers, dim=1).flatten(0, 1)[:num_integers]


def _unpack_period(words: Sequence[torch.Tensor], bits: int) -> list[torch.Tensor]:
    """Return the integers that consecutive words contain.

    An integer may be in two words. The last one ends at the end of the last word.
    """
    mask = 2**bits - 1
    integers = []
    for position in range(0, _WORD_BITS * len(words), bits):
        index, shift = divmod(position, _WORD_BITS)
        # Shifts of int32 copy the sign; masks remove the copies.
        values = words[index] >> shift
        num_low_bits = _WORD_BITS - shift
        if num_low_bits < bits:
            low_bits = values & (2**num_low_bits - 1)
            values = low_bits | (words[index + 1] << num_low_bits)
        integers.append((values & mask).to(torch.uint8))
    return integers


def _count_words(num_integers: int, bits: int) -> int:
    """Return the number of words that contain some integers."""
    return divide_up(num_integers * bits, _WORD_BITS)


def _describe_integers(matrix: EncodedMatrix, bits: int, zero: int) -> ElementFormat:
    """Return the format of integers, of which `zero` is subtracted next to the zero points."""
    scale_dtype = matrix.tensors["scales"].dtype
    zero_point_dtype = torch.uint8 if "zero_points" in matrix.tensors else None
    return ElementFormat(_list_integers(bits, zero), scale_dtype, scale_dtype, zero_point_dtype)


@cache
def _list_integers(bits: int, zero: int) -> tuple[float, ...]:
    """Return the values of codes; all matrices share them."""
    return tuple(float(integer - zero) for integer in range(2**bits))


# ---- compressed-tensors ----


def read_compressed(matrix: EncodedMatrix) -> MatrixElements:
    """Read `weight_packed`: int32 words of integers, or bytes of two fp4 values."""
    if matrix.tensors["values"].dtype == torch.int32:
        return _read_words(matrix)
    if not _has_fp4_group(matrix):
        matrix.refuse("is stored in bytes, but no config_groups has weights of 4-bit floats")
    if "global_scale" in matrix.tensors:
        return read_nvfp4(matrix)
    return read_mxfp4(matrix)


def _has_fp4_group(matrix: EncodedMatrix) -> bool:
    """Return whether one of `config_groups` describes weights in fp4."""
    for group in matrix.settings["config_groups"].values():
        weights = group["weights"]
        if weights and weights["num_bits"] == 4 and weights.get("type") == "float":
            return True
    return False


def _read_words(matrix: EncodedMatrix) -> MatrixElements:
    """Read words [rows, columns * bits / 32].

    Words of zero points are along the rows: [rows * bits / 32, groups].
    """
    matrix.check_dtype("scales", *_SCALE_DTYPES)
    if "shape" not in matrix.tensors:
        matrix.refuse("has no weight_shape")
    matrix.check_shape("shape", (2,))
    matrix.check_rank("values", 2)
    matrix.check_rank("scales", 1, 2)
    rows, columns = matrix.tensors["shape"].read_all().tolist()
    bits, group_size = _find_scheme(matrix, rows, columns)
    num_words = _count_words(columns, bits)
    matrix.check_shape("values", (rows, num_words))

    # Scales: [rows, groups], or one.
    shape = (rows, columns)
    block = find_block(matrix, "scales", shape, (1, group_size))
    has_one_scale = block[0] > 1
    num_groups = divide_up(columns, block[1])
    scale_rows = 1 if has_one_scale else rows
    matrix = matrix.with_tensor("scales", (scale_rows, num_groups))

    # Zero points: [words of rows, groups]
    if "zero_points" in matrix.tensors:
        if has_one_scale:
            matrix.refuse("has zero points with a scale of the whole matrix")
        word_rows = _count_words(rows, bits)
        matrix.check_dtype("zero_points", torch.int32)
        matrix.check_shape("zero_points", (word_rows, num_groups))

    # Groups that are not ranges of columns (act order)
    column_groups: torch.Tensor | None = None
    if "groups" in matrix.tensors:
        matrix.check_shape("groups", (columns,))
        default_groups = torch.arange(columns) // block[1]
        column_groups = _read_groups(matrix, num_groups, default_groups)

    # Integers and zero points are stored plus 2 ** (bits - 1).
    zero = 0 if "zero_points" in matrix.tensors else 2 ** (bits - 1)
    return MatrixElements(
        matrix,
        shape,
        _describe_integers(matrix, bits, zero),
        partial(_read_word_rows, matrix, bits, shape, block, column_groups),
        block[1] if column_groups is None else column_groups,
        row_step=_ROW_STEP,
    )


def _find_scheme(matrix: EncodedMatrix, rows: int, columns: int) -> tuple[int, int]:
    """Return bits and group size of the first of `config_groups` that matches the shapes.

    Raises ValueError if none does.
    """
    # Stored words and scales of a row
    num_words = matrix.tensors["values"].shape[-1]
    num_scales = matrix.tensors["scales"].shape[-1]
    is_symmetric = "zero_points" not in matrix.tensors

    descriptions = []  # of schemes of another shape
    for group in matrix.settings["config_groups"].values():
        weights = group["weights"]
        if weights is None or weights.get("type", "int") != "int":
            continue
        bits = weights["num_bits"]
        group_size = weights.get("group_size") or 0
        if group_size <= 0:
            group_size = columns
        descriptions.append(f"{bits} bits in groups of {group_size}")
        if columns <= 0 or is_symmetric != weights.get("symmetric", True):
            continue
        expected_words = _count_words(columns, bits)
        expected_scales = divide_up(columns, group_size)
        if (num_words, num_scales) == (expected_words, expected_scales):
            return bits, group_size

    zero_points = "" if is_symmetric else " and zero points"
    schemes = "; ".join(descriptions) or "no integers"
    matrix.refuse(
        f"of shape {[rows, columns]} has {num_words} words and {num_scales} scales per row"
        f"{zero_points}, but config_groups has {schemes}"
    )


def _read_groups(
    matrix: EncodedMatrix, num_groups: int, default: torch.Tensor
) -> torch.Tensor | None:
    """Return the group of each column, or None if groups are ranges of columns.

    `default` has the groups that are ranges. Files may store -1 instead of them.
    """
    groups = matrix.tensors["groups"].read_all().long()
    first = int(groups.min())
    last = int(groups.max())
    if first == -1 or torch.equal(groups, default):
        return None
    if first < 0 or last >= num_groups:
        name = matrix.names["groups"]
        matrix.refuse(f"has {name} from {first} to {last}, but {num_groups} groups")
    return groups


def _read_word_rows(
    matrix: EncodedMatrix,
    bits: int,
    shape: Shape,
    block: tuple[int, int],
    column_groups: torch.Tensor | None,
    lead: Shape,
    first: int,
    count: int,
) -> Elements:
    """Read rows [count, columns].

    Args:
        matrix: words, scales and optional zero points.
        bits: bits of an integer.
        shape: rows and columns of the decoded matrix.
        block: rows and columns with one scale.
        column_groups: group of each column if groups are not ranges of columns.
        lead: (), since words are not stored in stacks.
        first: first row.
        count: number of rows.
    """
    columns = shape[1]
    height, width = block

    def expand_groups(grid: torch.Tensor) -> torch.Tensor:
        """Return the entry of the group of each column."""
        if column_groups is None:
            return repeat_columns(grid, width, columns)
        return grid.index_select(1, column_groups)

    # Scales: [rows, groups] -> [rows, columns]; one scale of the matrix is broadcast.
    if height > 1:
        scales = matrix.read_scales("scales", lead, 0, 1)
    else:
        scales = matrix.read_scales("scales", lead, first, count)
    factors = expand_groups(scales)

    # Integers: [rows, columns]
    words = matrix.read_rows("values", lead, first, count)
    integers = unpack_integers(words, bits)[:, :columns]

    if "zero_points" not in matrix.tensors:
        return Elements(integers, factors)
    first_word = first * bits // _WORD_BITS
    num_words = _count_words(count, bits)
    packed = matrix.read_rows("zero_points", lead, first_word, num_words)
    zero_points = unpack_rows(packed, bits)[:count]
    return Elements(integers, factors, expand_groups(zero_points))


# ---- AWQ and GPTQ: rows are inputs ----


def read_awq(matrix: EncodedMatrix) -> MatrixElements:
    """Read words [inputs, outputs / 8] with scales [groups, outputs] as [outputs, inputs].

    Zero points are packed like values: [groups, outputs / 8].
    """
    bits = matrix.settings["bits"]
    version = matrix.settings.get("version", "gemm").lower()
    if bits != _AWQ_BITS or version != "gemm":
        matrix.refuse(
            f"has {bits} bits in the layout {version!r}, only {_AWQ_BITS} bits of 'gemm' are read"
        )
    matrix.check_dtype("values", torch.int32)
    matrix.check_rank("values", 2)
    inputs, num_words = matrix.tensors["values"].shape
    outputs = num_words * _WORD_BITS // bits
    group_size = _check_groups(matrix, bits, inputs, outputs)
    return MatrixElements(
        matrix,
        (inputs, outputs),
        _describe_integers(matrix, bits, 0),
        partial(_read_awq_rows, matrix, group_size),
        column_groups=1,
        row_groups=group_size,
        arrange=transpose,
    )


def _read_awq_rows(
    matrix: EncodedMatrix, group_size: int, lead: Shape, first: int, count: int
) -> Elements:
    """Read rows: [count of inputs, outputs]."""
    # Read the groups that contain these inputs: [groups, outputs].
    groups = torch.arange(first, first + count) // group_size
    start = int(groups[0])
    num_groups = int(groups[-1]) + 1 - start
    groups -= start
    scales = matrix.read_scales("scales", lead, start, num_groups)
    packed = matrix.read_rows("zero_points", lead, start, num_groups)
    zero_points = _unpack_awq(packed)

    # [inputs, outputs]
    words = matrix.read_rows("values", lead, first, count)
    integers = _unpack_awq(words)
    # [groups, outputs] -> [inputs, outputs]
    scales = scales.index_select(0, groups)
    zero_points = zero_points.index_select(0, groups)
    return Elements(integers, scales, zero_points)


def _unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """Return the integers in the words of each row, in the order of columns."""
    # A word has columns 0, 2, 4, 6 in its low half and 1, 3, 5, 7 in its high half.
    pairs = [(words >> shift) & 0x000F000F for shift in range(0, 16, _AWQ_BITS)]
    # [rows, words, 4] -> [rows, words, 8] -> [rows, columns]
    halves = torch.stack(pairs, dim=2).view(torch.int16)
    return halves.flatten(1).to(torch.uint8)


def read_gptq(matrix: EncodedMatrix) -> MatrixElements:
    """Read words [inputs * bits / 32, outputs] with scales [groups, outputs].

    The result is [outputs, inputs]. Groups of inputs need not be ranges (act order).
    """
    bits = matrix.settings["bits"]
    matrix.check_dtype("values", torch.int32)
    matrix.check_rank("values", 2)
    num_words, outputs = matrix.tensors["values"].shape
    inputs = num_words * _WORD_BITS // bits
    group_size = _check_groups(matrix, bits, inputs, outputs)

    input_groups = torch.arange(inputs) // group_size
    if "groups" in matrix.tensors:
        matrix.check_shape("groups", (inputs,))
        num_groups = matrix.tensors["scales"].shape[0]
        stored_groups = _read_groups(matrix, num_groups, input_groups)
        if stored_groups is not None:
            input_groups = stored_groups
    is_v2 = matrix.settings.get("checkpoint_format") == "gptq_v2"
    zero = 0 if is_v2 else 1  # version 1 stores zero points minus 1
    return MatrixElements(
        matrix,
        (inputs, outputs),
        _describe_integers(matrix, bits, zero),
        partial(_read_gptq_rows, matrix, bits, input_groups),
        column_groups=1,
        row_groups=input_groups,
        row_step=_ROW_STEP,
        arrange=transpose,
    )


def _check_groups(matrix: EncodedMatrix, bits: int, inputs: int, outputs: int) -> int:
    """Return the number of inputs with one scale.

    Raises ValueError for scales or zero points of another dtype or shape.
    """
    group_size = matrix.settings.get("group_size", -1)
    if group_size <= 0:
        group_size = inputs
    if outputs * bits % _WORD_BITS or inputs == 0:
        matrix.refuse(f"has {outputs} outputs, which do not fill words of {_WORD_BITS // bits}")
    num_groups = divide_up(inputs, group_size)
    num_words = _count_words(outputs, bits)
    matrix.check_dtype("scales", *_SCALE_DTYPES)
    matrix.check_dtype("zero_points", torch.int32)
    matrix.check_shape("scales", (num_groups, outputs))
    matrix.check_shape("zero_points", (num_groups, num_words))
    return group_size


def _read_gptq_rows(
    matrix: EncodedMatrix,
    bits: int,
    input_groups: torch.Tensor,
    lead: Shape,
    first: int,
    count: int,
) -> Elements:
    """Read rows: [count of inputs, outputs].

    Args:
        matrix: words, scales and zero points.
        bits: bits of an integer.
        input_groups: group of each input.
        lead: (), since words are not stored in stacks.
        first: first input.
        count: number of inputs.
    """
    # From the first to the last group of these inputs: [groups, outputs]
    groups = input_groups[first : first + count]
    start = int(groups.min())
    num_groups = int(groups.max()) + 1 - start
    groups = groups - start
    scales = matrix.read_scales("scales", lead, start, num_groups)
    packed = matrix.read_rows("zero_points", lead, start, num_groups)
    zero_points = unpack_integers(packed, bits)

    # Words are along the inputs: [words, outputs] -> [inputs, outputs]
    first_word = first * bits // _WORD_BITS
    num_words = count * bits // _WORD_BITS
    words = matrix.read_rows("values", lead, first_word, num_words)
    integers = unpack_rows(words, bits)
    # [groups, outputs] -> [inputs, outputs]
    scales = scales.index_select(0, groups)
    zero_points = zero_points.index_select(0, groups)
    return Elements(integers, scales, zero_points)
