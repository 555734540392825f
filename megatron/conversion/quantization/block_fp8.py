"""Matrices written in fp8 with a scale for each block, as in the files of DeepSeek-V3.

The value of an element is that of the fp8 number times the scale of its block, `weight_scale_inv`.
Blocks at the lower and right edge may be partial.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron.core.dist_checkpointing.mapping import LazyTensor, Shape

SCALES = "_scale_inv"
BLOCK_SIZE = 128  # rows and columns of a block that exports have a scale for
_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


def make_quantization_config(unquantized: Sequence[str]) -> dict[str, Any]:
    """Return the `quantization_config` of a model; `unquantized` are names of modules.

    transformers and vLLM expect fp8 in all other linear layers.
    """
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK_SIZE, BLOCK_SIZE],
        "modules_to_not_convert": list(unquantized),
    }


def count_blocks(extent: int) -> int:
    """Return the number of blocks along an axis of a matrix; the last may be partial."""
    return -(-extent // BLOCK_SIZE)  # rounded up


def quantize(matrix: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the matrix in fp8, and the fp32 scales [blocks of rows, blocks of columns].

    The largest element of a block becomes the largest fp8 number. Raises ValueError for values that
    are not finite, which no scale can represent.
    """
    rows, columns = matrix.shape
    row_blocks = count_blocks(rows)
    column_blocks = count_blocks(columns)
    padding = (0, column_blocks * BLOCK_SIZE - columns, 0, row_blocks * BLOCK_SIZE - rows)
    padded = torch.nn.functional.pad(matrix.float(), padding)
    blocks = padded.view(row_blocks, BLOCK_SIZE, column_blocks, BLOCK_SIZE)
    largest = blocks.abs().amax(dim=(1, 3))
    if not torch.isfinite(largest).all():
        raise ValueError(f"--quantize: {name} has values that are not finite")

    # Scales of blocks of zeros are 1, and those of denormal numbers are not rounded to zero.
    scales = (largest / _FP8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    scales = torch.where(largest > 0, scales, torch.ones_like(scales))
    scaled = blocks / scales[:, None, :, None]
    values = scaled.clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
    return values.view(padded.shape)[:rows, :columns].contiguous(), scales


def quantize_blocks(matrix: LazyTensor, name: str) -> tuple[LazyTensor, LazyTensor]:
    """Return a matrix in fp8, and its scales, both computed a few rows at a time.

    Scales of rows that were already quantized are kept until they are read.
    """
    rows, columns = matrix.shape
    ready: dict[int, torch.Tensor] = {}  # row of blocks -> scales

    def compute(block: int) -> tuple[torch.Tensor, torch.Tensor]:
        first = block * BLOCK_SIZE
        count = min(BLOCK_SIZE, rows - first)
        return quantize(matrix.read((first, 0), (count, columns)), name)

    def read_values(offset: Shape, shape: Shape) -> torch.Tensor:
        first = offset[0] // BLOCK_SIZE
        values = []
        for block in range(first, first + count_blocks(shape[0])):
            block_values, ready[block] = compute(block)
            values.append(block_values)
        return torch.cat(values)

    def read_scales(offset: Shape, shape: Shape) -> torch.Tensor:
        scales = []
        for block in range(offset[0], offset[0] + shape[0]):
            block_scales = ready.pop(block, None)
            if block_scales is None:
                block_scales = compute(block)[1]
            scales.append(block_scales)
        return torch.cat(scales)

    scales_shape = (count_blocks(rows), count_blocks(columns))
    return (
        LazyTensor(matrix.shape, torch.float8_e4m3fn, read_values, min_rows=BLOCK_SIZE),
        LazyTensor(scales_shape, torch.float32, read_scales),
    )
