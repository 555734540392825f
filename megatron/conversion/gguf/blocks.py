"""Encodings of tensors in GGUF files: the table `ENCODINGS`, and the decoders of their blocks.

A block encodes neighboring elements of a row. A decoder maps blocks [n, bytes] to fp32
[n, elements] with the operations of llama.cpp in its order, so that values are equal bitwise.
Source: the package `gguf`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

Decoder = Callable[[torch.Tensor], torch.Tensor]


class Encoding(NamedTuple):
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


def _read_halves(blocks: torch.Tensor, first: int) -> torch.Tensor:
    """Return the fp16 number at byte `first` of each block: [n, 1]."""
    return blocks[:, first : first + 2].contiguous().view(torch.float16).float()


def _unpack(packed: torch.Tensor, bits: int, run: int) -> torch.Tensor:
    """Return integers of `bits` bits: [n, bytes] -> [n, bytes * 8 / bits].

    The lowest bits of `run` bytes are the first `run` integers, the next bits the next ones.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    runs = packed.reshape(len(packed), -1, 1, run)
    return ((runs >> shifts[:, None]) & (2**bits - 1)).flatten(1)


def _scale(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return [n, elements] times the scale of each group: [n, groups, elements / groups]."""
    groups = values.reshape(*scales.shape, -1)
    return groups * scales[:, :, None]


def _decode_q4_0(blocks: torch.Tensor) -> torch.Tensor:
    """Scale; 32 integers of 4 bits."""
    integers = _unpack(blocks[:, 2:], 4, 16)
    return (integers.float() - 8) * _read_halves(blocks, 0)


def _decode_q4_1(blocks: torch.Tensor) -> torch.Tensor:
    """Scale; minimum; 32 integers of 4 bits."""
    integers = _unpack(blocks[:, 4:], 4, 16)
    return integers.float() * _read_halves(blocks, 0) + _read_halves(blocks, 2)


def _decode_q5_0(blocks: torch.Tensor) -> torch.Tensor:
    """Scale; the fifth bits of 32 integers; the lower bits."""
    high = _unpack(blocks[:, 2:6], 1, 1)
    integers = _unpack(blocks[:, 6:], 4, 16) | (high << 4)
    return (integers.float() - 16) * _read_halves(blocks, 0)


def _decode_q5_1(blocks: torch.Tensor) -> torch.Tensor:
    """Scale; minimum; the fifth bits of 32 integers; the lower bits."""
    high = _unpack(blocks[:, 4:8], 1, 1)
    integers = _unpack(blocks[:, 8:], 4, 16) | (high << 4)
    return integers.float() * _read_halves(blocks, 0) + _read_halves(blocks, 2)


def _decode_q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """Scale; 32 integers of 8 bits."""
    integers = blocks[:, 2:].view(torch.int8)
    return integers.float() * _read_halves(blocks, 0)


def _decode_q2_k(blocks: torch.Tensor) -> torch.Tensor:
    """Scales and minima of 16 groups, 4 bits each; 256 integers of 2 bits; scales of both."""
    packed_scales = blocks[:, :16]
    integers = _unpack(blocks[:, 16:80], 2, 32)
    scales = _read_halves(blocks, 80) * (packed_scales & 15).float()
    minima = _read_halves(blocks, 82) * (packed_scales >> 4).float()
    return _scale(integers.float(), scales) - minima[:, :, None]


def _decode_q3_k(blocks: torch.Tensor) -> torch.Tensor:
    """Third bits of 256 integers; the lower bits; scales of 16 groups, 6 bits each; their scale."""
    high = _unpack(blocks[:, :32], 1, 32)
    low = _unpack(blocks[:, 32:96], 2, 32)
    low_scales = _unpack(blocks[:, 96:104], 4, 8)
    high_scales = _unpack(blocks[:, 104:108], 2, 4)
    group_scales = (low_scales | (high_scales << 4)).float() - 32
    # An integer is lower by 4 if its third bit is not set.
    integers = (low | (high << 2)).float() - 4
    return _scale(integers, _read_halves(blocks, 108) * group_scales)


def _read_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and minima of 8 groups, [n, 8] each.

    Two scales; 12 bytes: 6 bits of the first four scales and minima, then 4 bits of the last ones,
    whose highest bits are those of the first bytes.
    """
    scales, minima, last = blocks[:, 4:16].split(4, dim=1)
    last_scales = (last & 15) | ((scales >> 2) & 0x30)
    last_minima = (last >> 4) | ((minima >> 2) & 0x30)
    all_scales = torch.cat([scales & 0x3F, last_scales], dim=1).float()
    all_minima = torch.cat([minima & 0x3F, last_minima], dim=1).float()
    return _read_halves(blocks, 0) * all_scales, _read_halves(blocks, 2) * all_minima


def _decode_q4_k(blocks: torch.Tensor) -> torch.Tensor:
    """Scales; 256 integers of 4 bits."""
    scales, minima = _read_scales(blocks)
    integers = _unpack(blocks[:, 16:], 4, 32)
    return _scale(integers.float(), scales) - minima[:, :, None]


def _decode_q5_k(blocks: torch.Tensor) -> torch.Tensor:
    """Scales; fifth bits of 256 integers; the lower bits."""
    scales, minima = _read_scales(blocks)
    high = _unpack(blocks[:, 16:48], 1, 32)
    integers = _unpack(blocks[:, 48:], 4, 32) | (high << 4)
    return _scale(integers.float(), scales) - minima[:, :, None]


def _decode_q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """Lower bits of 256 integers of 6 bits; upper bits; scales of 16 groups; their scale."""
    low = _unpack(blocks[:, :128], 4, 64)
    high = _unpack(blocks[:, 128:192], 2, 32)
    group_scales = blocks[:, 192:208].view(torch.int8).float()
    integers = (low | (high << 4)).float() - 32
    return _scale(integers, _read_halves(blocks, 208) * group_scales)


def _decode_iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    """Scale; 32 codes of 4 bits."""
    codes = _unpack(blocks[:, 2:], 4, 16)
    return _NONLINEAR_VALUES[codes.int()] * _read_halves(blocks, 0)


def _decode_iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    """Scale; scales of 8 groups, 2 upper bits and 4 lower bits; 256 codes of 4 bits."""
    high_scales = _unpack(blocks[:, 2:4], 2, 1)
    low_scales = _unpack(blocks[:, 4:8], 4, 1)
    group_scales = (low_scales | (high_scales << 4)).float() - 32
    codes = _unpack(blocks[:, 8:], 4, 16)
    return _scale(_NONLINEAR_VALUES[codes.int()], _read_halves(blocks, 0) * group_scales)


def _decode_mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    """Scale in e8m0; 32 codes of e2m1."""
    codes = _unpack(blocks[:, 1:], 4, 16)
    return _E2M1_VALUES[codes.int()] * _E8M0_HALVES[blocks[:, :1].int()]


# Number of the type in files -> encoding.
ENCODINGS = {
    0: Encoding("F32", 1, 4, dtype=torch.float32),
    1: Encoding("F16", 1, 2, dtype=torch.float16),
    30: Encoding("BF16", 1, 2, dtype=torch.bfloat16),
    2: Encoding("Q4_0", 32, 18, decode=_decode_q4_0),
    3: Encoding("Q4_1", 32, 20, decode=_decode_q4_1),
    6: Encoding("Q5_0", 32, 22, decode=_decode_q5_0),
    7: Encoding("Q5_1", 32, 24, decode=_decode_q5_1),
    8: Encoding("Q8_0", 32, 34, decode=_decode_q8_0),
    10: Encoding("Q2_K", 256, 84, decode=_decode_q2_k),
    11: Encoding("Q3_K", 256, 110, decode=_decode_q3_k),
    12: Encoding("Q4_K", 256, 144, decode=_decode_q4_k),
    13: Encoding("Q5_K", 256, 176, decode=_decode_q5_k),
    14: Encoding("Q6_K", 256, 210, decode=_decode_q6_k),
    20: Encoding("IQ4_NL", 32, 18, decode=_decode_iq4_nl),
    23: Encoding("IQ4_XS", 256, 136, decode=_decode_iq4_xs),
    39: Encoding("MXFP4", 32, 17, decode=_decode_mxfp4),
}
