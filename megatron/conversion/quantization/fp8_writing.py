"""Matrices written in fp8 with a scale for each block, or for each row.

An element is the product of an fp8 value and the scale of its block. Blocks at the lower and right
edge may be partial.
"""

from __future__ import annotations

import torch

from megatron.conversion.quantization.encoded_matrix import divide_up, split_rows
from megatron.core.dist_checkpointing.mapping import LazyTensor, Shape

BLOCK_SIZE = 128  # rows and columns of a block, as in the files of DeepSeek-V3
_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


def encode_blocks(matrix: LazyTensor, name: str) -> dict[str, LazyTensor]:
    """Return the tensors of a matrix with a scale per block, as DeepSeek-V3 names them.

    The suffix `_scale_inv` is theirs: readers multiply by these scales.
    """
    values, scales = quantize_lazily(matrix, name, BLOCK_SIZE, BLOCK_SIZE)
    return {name: values, f"{name}_scale_inv": scales}


def encode_rows(matrix: LazyTensor, name: str) -> dict[str, LazyTensor]:
    """Return the tensors of a matrix with a scale per row, as compressed-tensors names them.

    A row is a block of one row and all columns.
    """
    values, scales = quantize_lazily(matrix, name, 1, matrix.shape[1])
    return {name: values, f"{name}_scale": scales}


def quantize(
    matrix: torch.Tensor, name: str, height: int, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the matrix in fp8, and the fp32 scales [blocks of rows, blocks of columns].

    The largest element of a block becomes the largest fp8 value. Raises ValueError for values that
    are not finite, which no scale can represent.

    Args:
        matrix: [rows, columns] in any float dtype.
        name: name of the matrix in error messages.
        height: rows of a block.
        width: columns of a block.
    """
    # Pad to whole blocks: [row_blocks, height, column_blocks, width]
    rows, columns = matrix.shape
    row_blocks = divide_up(rows, height)
    column_blocks = divide_up(columns, width)
    bottom = row_blocks * height - rows
    right = column_blocks * width - columns
    padded = torch.nn.functional.pad(matrix.float(), (0, right, 0, bottom))
    blocks = padded.view(row_blocks, height, column_blocks, width)

    # [row_blocks, column_blocks]
    largest = blocks.abs().amax(dim=(1, 3))
    if not torch.isfinite(largest).all():
        raise ValueError(f"--quantize: {name} has values that are not finite")
    scales = _compute_scales(largest)

    scaled = blocks / scales[:, None, :, None]
    values = scaled.clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
    return values.view(padded.shape)[:rows, :columns].contiguous(), scales


def _compute_scales(largest: torch.Tensor) -> torch.Tensor:
    """Return the scales of blocks with the magnitudes `largest`.

    A matrix that was decoded from fp8 gets the scales that it was decoded with: of the quotient and
    its two neighbors in fp32, take one whose product with the largest fp8 value is exact. The scale
    of a block of zeros is 1, and that of denormal values is not rounded to zero.
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

    A read of values computes scales, too: they are kept until they are read, so that a matrix whose
    values are read first is quantized once.
    """
    rows, columns = matrix.shape
    row_blocks = divide_up(rows, height)
    column_blocks = divide_up(columns, width)
    pending_scales: dict[int, torch.Tensor] = {}  # row of blocks -> scales that were not read yet

    def quantize_blocks(first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values and the scales of rows of blocks."""
        first_row = first * height
        num_rows = min(count * height, rows - first_row)
        values = matrix.read((first_row, 0), (num_rows, columns))
        return quantize(values, name, height, width)

    def read_values(offset: Shape, shape: Shape) -> torch.Tensor:
        """Return the fp8 values of rows, and keep the scales of their blocks."""
        first = offset[0] // height
        count = divide_up(shape[0], height)
        values, scales = quantize_blocks(first, count)
        for index, row in enumerate(scales, start=first):
            pending_scales[index] = row
        return values

    def read_scales(offset: Shape, shape: Shape) -> torch.Tensor:
        """Return the scales of rows of blocks."""
        first = offset[0]
        end = first + shape[0]
        indices = range(first, end)
        if all(index in pending_scales for index in indices):
            return torch.stack([pending_scales.pop(index) for index in indices])
        scales = []
        # A row of blocks has the elements of `height` rows.
        for start, stop in split_rows(first, end, columns * height):
            scales.append(quantize_blocks(start, stop - start)[1])
        return torch.cat(scales)

    return (
        LazyTensor(matrix.shape, torch.float8_e4m3fn, read_values, min_rows=height),
        LazyTensor((row_blocks, column_blocks), torch.float32, read_scales),
    )
