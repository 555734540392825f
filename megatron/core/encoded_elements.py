"""Elements of quantized matrices before they are multiplied: codes, scales and zero points.

`megatron/conversion/quantization` reads them from files, and frozen weights of adapters can stay
encoded in memory. Training a dense model does not import this module.

An element is decoded as (values[code] - zero point) * scale, where the scale may have a factor for
the whole matrix. `ElementFormat` contains the differences between encodings.
"""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Values of the bits of an element in fp8
E4M3_VALUES = tuple(torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).tolist())
# dtype of scales in e8m0: eight bits of exponent, without sign and mantissa.
E8M0 = torch.uint8
# Byte of an e8m0 scale -> 2 ** (byte - 127). Byte 255 is NaN.
_E8M0_EXPONENTS = torch.arange(-127, 129)
_E8M0_VALUES = torch.ldexp(torch.ones(256, dtype=torch.float64), _E8M0_EXPONENTS).float()
_E8M0_VALUES[-1] = torch.nan
# Maximum number of values whose pairs fit into the L1 cache.
_MAX_PAIR_VALUES = 16
_E8M0_BIAS = 126  # of the exponents of `frexp`, whose mantissas are below 1


class MatrixScale(Enum):
    """Operation that applies the scale of a matrix, which is fp32, to the scales of its groups."""

    FACTOR = "factor"
    DIVISOR = "divisor"


class ElementFormat(NamedTuple):
    """Codes and scales of elements, and the arithmetic that decodes them."""

    values: tuple[float, ...]  # of the codes 0, 1, ...
    dtype: torch.dtype  # in which zero points are subtracted and scales multiplied
    scale_dtype: torch.dtype  # of stored scales; uint8 is e8m0
    zero_point_dtype: torch.dtype | None = None
    matrix_scale: MatrixScale | None = None
    factor: float | None = None  # of all products
    roundings: tuple[torch.dtype, ...] = ()  # of products, before they get the dtype of the model


class Elements(NamedTuple):
    """Components of a block of elements, which are broadcast to each other."""

    codes: Tensor  # uint8; or fp8 or int8, whose codes are their bits
    scales: Tensor
    zero_points: Tensor | None = None
    matrix_scales: Tensor | None = None  # fp32


def decode_elements(elements: Elements, element_format: ElementFormat) -> Tensor:
    """Return the values of elements, rounded as the format specifies."""
    dtype = element_format.dtype
    if elements.codes.dtype == torch.int8:
        values = elements.codes.to(dtype)
    else:
        values = _look_up_values(elements.codes.view(torch.uint8), element_format.values, dtype)
    if elements.zero_points is not None:
        values -= elements.zero_points.to(dtype)
    scales = join_scales(elements.scales, elements.matrix_scales, element_format)
    values *= scales.to(dtype)
    if element_format.factor is not None:
        values *= element_format.factor
    for rounded_dtype in element_format.roundings:
        values = values.to(rounded_dtype)
    return values


def look_up(table: Tensor, codes: Tensor) -> Tensor:
    """Return the entry of a vector for each code.

    On a CPU, this is 5 times as fast as an index of two dimensions.
    """
    return table.index_select(0, codes.reshape(-1).int()).view(codes.shape)


def _look_up_values(codes: Tensor, values: tuple[float, ...], dtype: torch.dtype) -> Tensor:
    """Return the values of codes, of which two are looked up at once if there are few values."""
    codes = codes.contiguous()
    has_pairs = codes.numel() % 2 == 0 and codes.storage_offset() % 2 == 0
    if len(values) > _MAX_PAIR_VALUES or not has_pairs:
        return look_up(make_values(values).to(dtype), codes)
    pairs = codes.flatten().view(torch.int16)
    return look_up(_make_pairs(values, dtype), pairs).view(dtype).view(codes.shape)


def join_scales(
    scales: Tensor, matrix_scales: Tensor | None, element_format: ElementFormat
) -> Tensor:
    """Return the scales of groups with those of the matrix."""
    if matrix_scales is None:
        return scales
    if element_format.matrix_scale == MatrixScale.DIVISOR:
        return scales.float() / matrix_scales
    return scales.float() * matrix_scales


@cache
def make_values(values: tuple[float, ...]) -> Tensor:
    """Return the values of the codes, fp32."""
    return torch.tensor(values)


@cache
def _make_pairs(values: tuple[float, ...], dtype: torch.dtype) -> Tensor:
    """Return the values of two codes, one per byte of the index, as a word.

    The first code is in the low byte: [number of values << 8].
    """
    table = F.pad(make_values(values), (0, 256 - len(values))).to(dtype)
    first = table.repeat(len(values))
    second = table[: len(values)].repeat_interleave(256)
    word_dtype = torch.int64 if dtype.itemsize == 4 else torch.int32
    return torch.stack([first, second], dim=1).view(word_dtype).flatten()


def unpack_scales(scales: Tensor) -> Tensor:
    """Return stored scales as values; those in e8m0 and fp8 are converted to fp32."""
    if scales.dtype.itemsize > 1:
        return scales
    if scales.dtype == torch.float8_e4m3fn:
        return scales.float()
    exponents = scales.view(torch.uint8)
    return _E8M0_VALUES.to(scales.device)[exponents.int()]


def pack_scales(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return scales, which are fp32, in their stored dtype."""
    if dtype != E8M0:
        return values.to(dtype)
    exponents = torch.frexp(values).exponent
    return (exponents + _E8M0_BIAS).to(torch.uint8)
