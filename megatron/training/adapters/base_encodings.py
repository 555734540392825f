"""Encodings of frozen weights in memory: blocks of 64 elements of a row with one fp32 scale.

    nf4   indices into 16 quantiles of N(0, 1), two in a byte, the first in the high bits
    fp8   e4m3, one in a byte

Bytes and scales of nf4 are those of bitsandbytes without double quantization. Source: bitsandbytes
(`csrc/kernels.cu`), Dettmers et al. 2023, https://arxiv.org/abs/2305.14314.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_SIZE = 64
_MIN_SCALE = 1e-38
# Blocks that are encoded or decoded at once, which limits temporary memory to about 200 MB
_MAX_BLOCKS = 1 << 18
_FP8 = torch.float8_e4m3fn

# Values of the indices; the scale of a block is its largest magnitude.
NF4_VALUES = torch.tensor(
    [
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
    ]
)
# A value at the middle of two others gets the lower index.
_NF4_MIDPOINTS = (NF4_VALUES[1:] + NF4_VALUES[:-1]) / 2


class BaseEncoding(NamedTuple):
    """An encoding of the elements of blocks, which are divided by their scale."""

    largest: float  # magnitude of an element after the division
    round: Callable[[Tensor], Tensor]  # elements -> codes, one in a byte
    codes_per_byte: int
    values: Tensor  # of all codes
    read_codes: Callable[[Tensor], Tensor]  # unscaled elements of a checkpoint -> codes

    def pack(self, codes: Tensor) -> Tensor:
        """Return codes `[..., columns]` as bytes `[..., columns / codes_per_byte]`."""
        if self.codes_per_byte == 1:
            return codes
        return codes[..., ::2] << 4 | codes[..., 1::2]

    def make_table(self) -> Tensor:
        """Return the values of each byte, `[256, codes_per_byte]`."""
        if self.codes_per_byte == 1:
            return self.values.unsqueeze(1)
        return torch.cartesian_prod(self.values, self.values)

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return bytes `[..., columns / codes_per_byte]` and scales `[..., columns / 64]`."""
        *lead, columns = values.shape
        device = values.device
        num_bytes = columns // self.codes_per_byte
        packed = torch.empty(*lead, num_bytes, dtype=torch.uint8, device=device)
        scales = torch.empty(*lead, columns // BLOCK_SIZE, device=device)
        packed_blocks = packed.view(-1, BLOCK_SIZE // self.codes_per_byte)
        flat_scales = scales.view(-1)
        start = 0
        for blocks in values.reshape(-1, BLOCK_SIZE).split(_MAX_BLOCKS):
            stop = start + len(blocks)
            scales_of_run = blocks.float().abs().amax(1) / self.largest
            factors = 1 / scales_of_run.clamp(min=_MIN_SCALE)
            normalized = blocks.float() * factors.unsqueeze(1)
            packed_blocks[start:stop] = self.pack(self.round(normalized))
            flat_scales[start:stop] = scales_of_run
            start = stop
        return packed, scales


def decode(packed: Tensor, scales: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values `[..., columns]`: products in fp32, rounded to `dtype`.

    `table` is that of the encoding, on the device of the tensors.
    """
    *lead, row_bytes = packed.shape
    codes_per_byte = table.shape[1]
    columns = row_bytes * codes_per_byte
    values = torch.empty(*lead, columns, dtype=dtype, device=packed.device)
    # Runs of blocks
    packed_runs = packed.view(-1, BLOCK_SIZE // codes_per_byte).split(_MAX_BLOCKS)
    scale_runs = scales.view(-1, 1).split(_MAX_BLOCKS)
    value_runs = values.view(-1, BLOCK_SIZE).split(_MAX_BLOCKS)
    for packed_run, scale_run, value_run in zip(packed_runs, scale_runs, value_runs, strict=True):
        elements = F.embedding(packed_run.int(), table)  # [blocks, bytes, codes_per_byte]
        torch.mul(elements.flatten(1), scale_run, out=value_run)
    return values


def _round_to_nf4(elements: Tensor) -> Tensor:
    midpoints = _NF4_MIDPOINTS.to(elements.device)
    return torch.bucketize(elements, midpoints, out_int32=True).byte()


def _round_to_fp8(elements: Tensor) -> Tensor:
    largest = torch.finfo(_FP8).max
    return elements.clamp(-largest, largest).to(_FP8).view(torch.uint8)


ENCODINGS = {
    "nf4": BaseEncoding(1.0, _round_to_nf4, 2, NF4_VALUES, Tensor.byte),
    "fp8": BaseEncoding(
        torch.finfo(_FP8).max,
        _round_to_fp8,
        1,
        torch.arange(256, dtype=torch.uint8).view(_FP8).float(),
        _round_to_fp8,
    ),
}
