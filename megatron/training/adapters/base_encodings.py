"""Encodings of frozen weights that are not encoded yet: 64 columns with one fp32 scale.

    nf4   indices into 16 quantiles of N(0, 1), two in a byte, the first in the high bits
    fp8   e4m3, one in a byte

Bytes and scales of nf4 are those of bitsandbytes without double quantization. Source: bitsandbytes
(`csrc/kernels.cu`), Dettmers et al. 2023, https://arxiv.org/abs/2305.14314.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.mapping import Shape
from megatron.core.encoded_elements import E4M3_VALUES, ElementFormat, Elements
from megatron.training.adapters.encoded_weight import ColumnGroups, EncodedWeight

BLOCK_SIZE = 64
_MIN_SCALE = 1e-38
# Rows of blocks that are encoded at once, which limits temporary memory to about 200 MB
_MAX_BLOCKS = 1 << 18
_FP8 = torch.float8_e4m3fn

# Values of the indices; the scale of a block is its largest magnitude.
NF4_VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_NF4_TENSOR = torch.tensor(NF4_VALUES)
# A value at the middle of two others gets the lower index.
_NF4_MIDPOINTS = (_NF4_TENSOR[1:] + _NF4_TENSOR[:-1]) / 2


class BaseEncoding(NamedTuple):
    """An encoding of the elements of blocks, which are divided by their scale."""

    values: tuple[float, ...]  # of the codes
    largest: float  # magnitude of an element after the division
    round: Callable[[Tensor], Tensor]  # elements -> codes, one in a byte

    def allocate(self, shape: Shape, device: torch.device) -> EncodedWeight:
        """Return a matrix of zeros whose columns are a multiple of 64."""
        element_format = ElementFormat(self.values, torch.float32, torch.float32)
        groups = ColumnGroups.ranges(shape[-1], BLOCK_SIZE)
        return EncodedWeight.allocate(element_format, shape, groups, device)

    def encode(self, values: Tensor) -> EncodedWeight:
        """Return an encoded matrix."""
        weight = self.allocate(tuple(values.shape), values.device)
        self.encode_rows(weight, 0, values.reshape(-1, values.shape[-1]))
        return weight

    def encode_rows(self, weight: EncodedWeight, start: int, values: Tensor) -> None:
        """Encode `values` [rows, columns] as the rows of `weight` from `start` on."""
        num_rows = max(_MAX_BLOCKS * BLOCK_SIZE // values.shape[1], 1)
        for rows in values.split(num_rows):
            blocks = rows.float().unflatten(1, (-1, BLOCK_SIZE))  # [rows, blocks, 64]
            scales = blocks.abs().amax(2, keepdim=True) / self.largest
            factors = 1 / scales.clamp(min=_MIN_SCALE)
            codes = self.round(blocks * factors).flatten(1)
            weight.store_rows(start, Elements(codes, scales.expand_as(blocks).flatten(1)))
            start += len(rows)


def _round_to_nf4(elements: Tensor) -> Tensor:
    midpoints = _NF4_MIDPOINTS.to(elements.device)
    return torch.bucketize(elements, midpoints, out_int32=True).byte()


def _round_to_fp8(elements: Tensor) -> Tensor:
    largest = torch.finfo(_FP8).max
    return elements.clamp(-largest, largest).to(_FP8).view(torch.uint8)


ENCODINGS = {
    "nf4": BaseEncoding(NF4_VALUES, 1.0, _round_to_nf4),
    "fp8": BaseEncoding(E4M3_VALUES, torch.finfo(_FP8).max, _round_to_fp8),
}
