"""Elements of quantized matrices before they are multiplied: codes, scales and zero points.

`megatron/conversion/quantization` reads them from files, and frozen weights of adapters can stay
encoded in memory. Training a dense model does not import this module.

An element is decoded as (values[code] - zero point) * scale, where the scale may have a factor for
the whole matrix. `ElementFormat` has what differs between encodings.
"""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

# Values of the bits of an element in fp8
E4M3_VALUES = tuple(torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).tolist())
# dtype of scales in e8m0: eight bits of exponent, without sign and mantissa.
E8M0 = torch.uint8
# Byte of an e8m0 scale -> 2 ** (byte - 127). Byte 255 is NaN.
_E8M0_EXPONENTS = torch.arange(-127, 129)
_E8M0_VALUES = torch.ldexp(torch.ones(256, dtype=torch.float64), _E8M0_EXPONENTS).float()
_E8M0_VALUES[-1] = torch.nan
_E8M0_BIAS = 126  # of the exponents of `frexp`, whose mantissas are below 1


class MatrixScale(Enum):
    """How the scale of a matrix, which is fp32, applies to the scales of its groups."""

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
    if elements.codes.dtype == torch.uint8:
        # On a CPU, 5 times as fast as an index of two dimensions.
        codes = elements.codes.int().flatten()
        table = make_values(element_format.values).to(dtype)
        values = table.index_select(0, codes).view(elements.codes.shape)
    else:
        values = elements.codes.to(dtype)
    if elements.zero_points is not None:
        values -= elements.zero_points.to(dtype)
    scales = join_scales(elements.scales, elements.matrix_scales, element_format)
    values *= scales.to(dtype)
    if element_format.factor is not None:
        values *= element_format.factor
    for rounded_dtype in element_format.roundings:
        values = values.to(rounded_dtype)
    return values


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
