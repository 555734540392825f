"""Encodings of tensors in GGUF files: the table `ENCODINGS`, and the decoders of their blocks.

A block encodes neighboring elements of a row. A decoder maps blocks [n, bytes] to fp32
[n, elements] with the operations of llama.cpp in its order, so that values are equal bitwise.
Source: the package `gguf`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.encoded_elements import look_up

Decoder = Callable[[Tensor], Tensor]


class BlockEncoding(NamedTuple):
    """The blocks of an encoding."""

    name: str  # in the names of files
    block_size: int  # elements
    block_bytes: int
    dtype: torch.dtype | None = None  # of elements that are stored as they are
    decode: Decoder | None = None


# 4-bit code -> integer, of IQ4_NL and IQ4_XS.
_NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_NONLINEAR_VALUES = torch.tensor(_NONLINEAR).float()
# e2m1, doubled. Zero has no sign.
_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_E2M1_VALUES = torch.tensor(_E2M1_DOUBLED).float()
# e8m0 scales for doubled values.
_E8M0_HALVES = torch.ldexp(torch.ones(256).double(), torch.arange(-128, 128)).float()


def _read_halves(scales: Tensor) -> Tensor:
    """Return an fp16 number of each block, [n, 2] bytes, in fp32: [n, 1]."""
    contiguous = scales.contiguous()
    return contiguous.view(torch.float16).float()


def _unpack(packed: Tensor, bits: int, run: int) -> Tensor:
    """Return integers of `bits` bits: [n, bytes] -> [n, bytes * 8 / bits].

    The lowest bits of `run` bytes are the first `run` integers, the next bits the next ones.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    mask = 2**bits - 1
    # [n, runs, 1, run] -> [n, runs, 8 / bits, run]
    runs = packed.reshape(len(packed), -1, 1, run)
    integers = (runs >> shifts[:, None]) & mask
    return integers.flatten(1)


def _scale(values: Tensor, scales: Tensor) -> Tensor:
    """Return [n, elements] times the scale of each group: [n, groups, elements / groups]."""
    groups = values.reshape(*scales.shape, -1)
    return groups * scales[:, :, None]


def _decode_q4_0(blocks: Tensor) -> Tensor:
    """scale * (integer - 8).

    Fields: scale; 32 integers of 4 bits.
    """
    scale, packed = blocks.split((2, 16), dim=1)
    integers = _unpack(packed, 4, 16).float() - 8
    return integers * _read_halves(scale)


def _decode_q4_1(blocks: Tensor) -> Tensor:
    """scale * integer + minimum.

    Fields: scale; minimum; 32 integers of 4 bits.
    """
    scale, minimum, packed = blocks.split((2, 2, 16), dim=1)
    integers = _unpack(packed, 4, 16).float()
    scaled = integers * _read_halves(scale)
    return scaled + _read_halves(minimum)


def _decode_q5_0(blocks: Tensor) -> Tensor:
    """scale * (integer - 16).

    Fields: scale; the fifth bits of 32 integers; the lower bits.
    """
    scale, high, low = blocks.split((2, 4, 16), dim=1)
    fifth_bits = _unpack(high, 1, 1) << 4
    integers = _unpack(low, 4, 16) | fifth_bits
    centered = integers.float() - 16
    return centered * _read_halves(scale)


def _decode_q5_1(blocks: Tensor) -> Tensor:
    """scale * integer + minimum.

    Fields: scale; minimum; the fifth bits of 32 integers; the lower bits.
    """
    scale, minimum, high, low = blocks.split((2, 2, 4, 16), dim=1)
    fifth_bits = _unpack(high, 1, 1) << 4
    integers = _unpack(low, 4, 16) | fifth_bits
    scaled = integers.float() * _read_halves(scale)
    return scaled + _read_halves(minimum)


def _decode_q8_0(blocks: Tensor) -> Tensor:
    """scale * integer.

    Fields: scale; 32 integers of 8 bits.
    """
    scale, packed = blocks.split((2, 32), dim=1)
    integers = packed.view(torch.int8).float()
    return integers * _read_halves(scale)


def encode_q8_0(blocks: Tensor) -> Tensor:
    """Return the bytes of fp32 blocks [n, 32]: [n, 34].

    They are those of llama.cpp, except that integers are zero if the scale, in fp16, is: a decoded
    block is encoded to the same bytes. Raises ValueError for values without a finite scale.
    """
    scales = blocks.abs().amax(dim=1, keepdim=True) / 127
    halves = scales.half()
    if not torch.isfinite(halves).all():
        raise ValueError(
            "--quantize q8_0: values are not finite, or larger than 8,000,000: leave it out"
        )
    inverses = torch.where(halves == 0, 0, 1 / scales)
    scaled = blocks * inverses

    # Round to the nearest integer, ties away from zero.
    magnitudes = scaled.abs()
    floors = magnitudes.floor()
    rounded = floors + (magnitudes - floors >= 0.5)
    integers = torch.copysign(rounded, scaled).to(torch.int8)
    fields = [halves.view(torch.uint8), integers.view(torch.uint8)]
    return torch.cat(fields, dim=1)


def _decode_q2_k(blocks: Tensor) -> Tensor:
    """scale * group_scale * integer - minimum * group_minimum.

    Fields: scales and minima of 16 groups, 4 bits each; 256 integers of 2 bits; scales of both.
    """
    group_bytes, packed, scale, minimum = blocks.split((16, 64, 2, 2), dim=1)
    group_scales = (group_bytes & 15).float()
    group_minima = (group_bytes >> 4).float()
    scales = _read_halves(scale) * group_scales
    minima = _read_halves(minimum) * group_minima
    integers = _unpack(packed, 2, 32).float()
    return _scale(integers, scales) - minima[:, :, None]


def _decode_q3_k(blocks: Tensor) -> Tensor:
    """scale * (group_scale - 32) * (integer - 4).

    Fields: third bits of 256 integers; the lower bits; scales of 16 groups, 6 bits each; their
    scale.
    """
    high, low, low_scales, high_scales, scale = blocks.split((32, 64, 8, 4, 2), dim=1)
    upper_bits = _unpack(high_scales, 2, 4) << 4
    group_scales = _unpack(low_scales, 4, 8) | upper_bits
    scales = _read_halves(scale) * (group_scales.float() - 32)

    # An integer is lower by 4 if its third bit is not set.
    third_bits = _unpack(high, 1, 32) << 2
    integers = _unpack(low, 2, 32) | third_bits
    return _scale(integers.float() - 4, scales)


def _read_scales(fields: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and minima of 8 groups, [n, 8] each.

    Two scales; 12 bytes: 6 bits of the first four scales and minima, then 4 bits of the last ones,
    whose highest bits are those of the first bytes.
    """
    scale, minimum, scales, minima, last = fields.split((2, 2, 4, 4, 4), dim=1)
    # The first four groups: [n, 4]
    first_scales = scales & 0x3F
    first_minima = minima & 0x3F

    # The last four groups: [n, 4]
    last_scales = (last & 15) | ((scales >> 2) & 0x30)
    last_minima = (last >> 4) | ((minima >> 2) & 0x30)

    # All groups: [n, 8]
    group_scales = torch.cat([first_scales, last_scales], dim=1)
    group_minima = torch.cat([first_minima, last_minima], dim=1)
    all_scales = _read_halves(scale) * group_scales.float()
    all_minima = _read_halves(minimum) * group_minima.float()
    return all_scales, all_minima


def _decode_q4_k(blocks: Tensor) -> Tensor:
    """scale * integer - minimum, of 8 groups.

    Fields: scales; 256 integers of 4 bits.
    """
    fields, packed = blocks.split((16, 128), dim=1)
    scales, minima = _read_scales(fields)
    integers = _unpack(packed, 4, 32).float()
    return _scale(integers, scales) - minima[:, :, None]


def _decode_q5_k(blocks: Tensor) -> Tensor:
    """scale * integer - minimum, of 8 groups.

    Fields: scales; fifth bits of 256 integers; the lower bits.
    """
    fields, high, low = blocks.split((16, 32, 128), dim=1)
    scales, minima = _read_scales(fields)
    fifth_bits = _unpack(high, 1, 32) << 4
    integers = _unpack(low, 4, 32) | fifth_bits
    return _scale(integers.float(), scales) - minima[:, :, None]


def _decode_q6_k(blocks: Tensor) -> Tensor:
    """scale * group_scale * (integer - 32).

    Fields: lower bits of 256 integers of 6 bits; upper bits; scales of 16 groups; their scale.
    """
    low, high, group_bytes, scale = blocks.split((128, 64, 16, 2), dim=1)
    upper_bits = _unpack(high, 2, 32) << 4
    integers = _unpack(low, 4, 64) | upper_bits
    group_scales = group_bytes.view(torch.int8).float()
    scales = _read_halves(scale) * group_scales
    return _scale(integers.float() - 32, scales)


def _decode_iq4_nl(blocks: Tensor) -> Tensor:
    """scale * _NONLINEAR[code].

    Fields: scale; 32 codes of 4 bits.
    """
    scale, packed = blocks.split((2, 16), dim=1)
    codes = _unpack(packed, 4, 16)
    return look_up(_NONLINEAR_VALUES, codes) * _read_halves(scale)


def _decode_iq4_xs(blocks: Tensor) -> Tensor:
    """scale * (group_scale - 32) * _NONLINEAR[code].

    Fields: scale; scales of 8 groups, 2 upper bits and 4 lower bits; 256 codes of 4 bits.
    """
    scale, high_scales, low_scales, packed = blocks.split((2, 2, 4, 128), dim=1)
    upper_bits = _unpack(high_scales, 2, 1) << 4
    group_scales = _unpack(low_scales, 4, 1) | upper_bits
    scales = _read_halves(scale) * (group_scales.float() - 32)
    codes = _unpack(packed, 4, 16)
    return _scale(look_up(_NONLINEAR_VALUES, codes), scales)


def _decode_mxfp4(blocks: Tensor) -> Tensor:
    """scale / 2 * _E2M1_DOUBLED[code].

    Fields: scale in e8m0; 32 codes of e2m1.
    """
    exponent, packed = blocks.split((1, 16), dim=1)
    scales = _E8M0_HALVES[exponent.int()]
    codes = _unpack(packed, 4, 16)
    return look_up(_E2M1_VALUES, codes) * scales


# Number of the type in files -> encoding.
ENCODINGS = {
    0: BlockEncoding("F32", 1, 4, dtype=torch.float32),
    1: BlockEncoding("F16", 1, 2, dtype=torch.float16),
    30: BlockEncoding("BF16", 1, 2, dtype=torch.bfloat16),
    2: BlockEncoding("Q4_0", 32, 18, decode=_decode_q4_0),
    3: BlockEncoding("Q4_1", 32, 20, decode=_decode_q4_1),
    6: BlockEncoding("Q5_0", 32, 22, decode=_decode_q5_0),
    7: BlockEncoding("Q5_1", 32, 24, decode=_decode_q5_1),
    8: BlockEncoding("Q8_0", 32, 34, decode=_decode_q8_0),
    10: BlockEncoding("Q2_K", 256, 84, decode=_decode_q2_k),
    11: BlockEncoding("Q3_K", 256, 110, decode=_decode_q3_k),
    12: BlockEncoding("Q4_K", 256, 144, decode=_decode_q4_k),
    13: BlockEncoding("Q5_K", 256, 176, decode=_decode_q5_k),
    14: BlockEncoding("Q6_K", 256, 210, decode=_decode_q6_k),
    20: BlockEncoding("IQ4_NL", 32, 18, decode=_decode_iq4_nl),
    23: BlockEncoding("IQ4_XS", 256, 136, decode=_decode_iq4_xs),
    39: BlockEncoding("MXFP4", 32, 17, decode=_decode_mxfp4),
}
