"""Matrices written in fp8 with a scale for each block, or for each row.

The value of an element is that of the fp8 number times the scale of its block. Blocks at the lower
and right edge may be partial.
"""

from __future__ import annotations

import torch

from megatron.conversion.quantization.encoded_matrix import split_rows
from megatron.core.dist_checkpointing.mapping import LazyTensor, Shape

BLOCK_SIZE = 128  # rows and columns of a block, as in the files of DeepSeek-V3
_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


def encode_blocks(matrix: LazyTensor, name: str) -> dict[str, LazyTensor]:
    """Return the tensors of a matrix with a scale per block, as DeepSeek-V3 names them."""
    values, scales = quantize_lazily(matrix, name, BLOCK_SIZE, BLOCK_SIZE)
    return {name: values, f"{name}_scale_inv": scales}


def encode_rows(matrix: LazyTensor, name: str) -> dict[str, LazyTensor]:
    """Return the tensors of a matrix with a scale per row, as compressed-tensors names them."""
    values, scales = quantize_lazily(matrix, name, 1, matrix.shape[1])
    return {name: values, f"{name}_scale": scales}


def quantize(
    matrix: torch.Tensor, name: str, height: int, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the matrix in fp8, and the fp32 scales [blocks of rows, blocks of columns].

    The largest element of a block becomes the largest fp8 number. Raises ValueError for values that
    are not finite, which no scale can represent.
    """
    rows, columns = matrix.shape
    row_blocks = -(-rows // height)  # rounded up
    column_blocks = -(-columns // width)
    padding = (0, column_blocks * width - columns, 0, row_blocks * height - rows)
    padded = torch.nn.functional.pad(matrix.float(), padding)
    blocks = padded.view(row_blocks, height, column_blocks, width)
    largest = blocks.abs().amax(dim=(1, 3))
    if not torch.isfinite(largest).all():
        raise ValueError(f"--quantize: {name} has values that are not finite")

    scales = _compute_scales(largest)
    scaled = blocks / scales[:, None, :, None]
    values = scaled.clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
    return values.view(padded.shape)[:rows, :columns].contiguous(), scales


def _compute_scales(largest: torch.Tensor) -> torch.Tensor:
    """Return the scales of blocks with these largest magnitudes.

    Decoded matrices get the scales that they were decoded with: among neighboring numbers, take one
    whose product with the largest fp8 number is exact. Scales of blocks of zeros are 1, and those
    of denormal numbers are not rounded to zero.
    """
    scales = (largest / _FP8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    below = torch.nextafter(scales, torch.zeros_like(scales))
    above = torch.nextafter(scales, torch.full_like(scales, torch.inf))
    exact = scales
    for neighbor in (below, above, scales):
        exact = torch.where(neighbor * _FP8_MAX == largest, neighbor, exact)
    return torch.where(largest > 0, exact, torch.ones_like(scales))


def quantize_lazily(
    matrix: LazyTensor, name: str, height: int, width: int
) -> tuple[LazyTensor, LazyTensor]:
    """Return a matrix in fp8, and its scales, both computed a few rows at a time.

    Scales of rows that were already quantized are kept until they are read.
    """
    rows, columns = matrix.shape
    ready: dict[int, torch.Tensor] = {}  # row of blocks -> scales

    def compute(first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = first * height
        num_rows = min(count * height, rows - start)
        return quantize(matrix.read((start, 0), (num_rows, columns)), name, height, width)

    def read_values(offset: Shape, shape: Shape) -> torch.Tensor:
        first = offset[0] // height
        values, scales = compute(first, -(-shape[0] // height))
        for index, row in enumerate(scales):
            ready[first + index] = row
        return values

    def read_scales(offset: Shape, shape: Shape) -> torch.Tensor:
        indices = range(offset[0], offset[0] + shape[0])
        if all(index in ready for index in indices):
            return torch.stack([ready.pop(index) for index in indices])
        # Blocks of rows have the elements of `height` rows.
        runs = split_rows(offset[0], offset[0] + shape[0], columns * height)
        return torch.cat([compute(first, end - first)[1] for first, end in runs])

    scales_shape = (-(-rows // height), -(-columns // width))
    return (
        LazyTensor(matrix.shape, torch.float8_e4m3fn, read_values, min_rows=height),
        LazyTensor(scales_shape, torch.float32, read_scales),
    )
