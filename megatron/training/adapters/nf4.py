"""nf4: blocks of 64 elements with one fp32 scale, and indices into 16 quantiles of N(0, 1).

The bytes and scales of a matrix are those of bitsandbytes without double quantization. Source:
bitsandbytes (`csrc/kernels.cu`), Dettmers et al. 2023, https://arxiv.org/abs/2305.14314.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_SIZE = 64  # elements of a row with one scale
_BLOCK_BYTES = BLOCK_SIZE // 2
_MIN_SCALE = 1e-38
# Blocks that are encoded or decoded at once, which limits temporary memory to about 200 MB
_MAX_BLOCKS = 1 << 18

# Values of the indices; the scale of a block is its largest magnitude.
CODEBOOK = torch.tensor(
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
_MIDPOINTS = (CODEBOOK[1:] + CODEBOOK[:-1]) / 2


def encode(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the packed indices `[..., columns / 2]`, uint8, and the scales `[..., columns / 64]`.

    The first of two indices is in the high bits.
    """
    *lead, columns = values.shape
    device = values.device
    packed = torch.empty(*lead, columns // 2, dtype=torch.uint8, device=device)
    scales = torch.empty(*lead, columns // BLOCK_SIZE, device=device)
    packed_blocks = packed.view(-1, _BLOCK_BYTES)
    flat_scales = scales.view(-1)
    midpoints = _MIDPOINTS.to(device)
    start = 0
    for blocks in values.reshape(-1, BLOCK_SIZE).split(_MAX_BLOCKS):
        stop = start + len(blocks)
        magnitudes = blocks.float().abs().amax(1)
        factors = 1 / magnitudes.clamp(min=_MIN_SCALE)
        normalized = blocks.float() * factors.unsqueeze(1)
        indices = torch.bucketize(normalized, midpoints, out_int32=True).byte()
        # [blocks, 64] -> [blocks, 32]
        packed_blocks[start:stop] = indices[:, ::2] << 4 | indices[:, 1::2]
        flat_scales[start:stop] = magnitudes
        start = stop
    return packed, scales


def decode(packed: Tensor, scales: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values `[..., columns]`: products in fp32, rounded to `dtype`.

    `table` is the result of `make_pair_table` on the device of the tensors.
    """
    *lead, row_bytes = packed.shape
    columns = 2 * row_bytes
    values = torch.empty(*lead, columns, dtype=dtype, device=packed.device)
    # Runs of blocks
    packed_runs = packed.view(-1, _BLOCK_BYTES).split(_MAX_BLOCKS)
    scale_runs = scales.view(-1, 1).split(_MAX_BLOCKS)
    value_runs = values.view(-1, BLOCK_SIZE).split(_MAX_BLOCKS)
    for packed_run, scale_run, value_run in zip(packed_runs, scale_runs, value_runs, strict=True):
        pairs = F.embedding(packed_run.int(), table)  # [blocks, 32, 2]
        torch.mul(pairs.flatten(1), scale_run, out=value_run)
    return values


def make_pair_table() -> Tensor:
    """Return the two values of each byte, `[256, 2]`."""
    return torch.cartesian_prod(CODEBOOK, CODEBOOK)
