"""Weights in fp8 with a scale for each block, read as the matrices that models compute with.

The value of an element is that of the fp8 number times the scale of its block. Blocks at the lower
and right edge may be partial. Source: the files of DeepSeek-V3, whose scales are called
`weight_scale_inv`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing.mapping import LazyTensor, Shape
from megatron.core.safe_files import schema

SCALES = "_scale_inv"
BLOCK_SIZE = 128  # rows and columns of a block that exports have a scale for
_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
_QUANTIZATION = schema.record(
    {
        "quant_method": schema.text(256),
        "weight_block_size?": schema.optional(schema.sequence(schema.integer(1), 2, least=2)),
    }
)
# Method -> how transformers removes the quantization; no other method has a way.
_REMOVALS = {
    "fp8": "FineGrainedFP8Config(dequantize=True) as quantization_config",
    "mxfp4": "Mxfp4Config(dequantize=True) as quantization_config",
    "compressed-tensors": "CompressedTensorsConfig(dequantize=True) as quantization_config",
    "bitsandbytes": "model.dequantize() after loading",
}
# Files that describe the quantization if config.json does not -> program that wrote them.
_OTHER_CONFIGS = {
    "hf_quant_config.json": "NVIDIA's Model Optimizer",
    "quantize_config.json": "AutoGPTQ or AutoAWQ",
}
_WITHOUT_QUANTIZATION = "if no weight is quantized, give --hf-ignore-fields quantization_config"


def read_block_size(quantization: Any) -> Sequence[int]:
    """Return rows and columns of a block with a scale. Raises ValueError for other quantization.

    `quantization` is the `quantization_config` of a config.json.
    """
    _QUANTIZATION(quantization, "config.json: quantization_config")
    method = quantization["quant_method"]
    block: Sequence[int] | None = quantization.get("weight_block_size")
    if method == "fp8" and block is not None:
        return block
    cause = f"quantization_config of {schema.format_value(method)}"
    if method == "fp8":
        cause = "fp8 with one scale per matrix (no weight_block_size)"
    fix = "convert the unquantized original of the model"
    if method in _REMOVALS:
        fix = f"load the model in transformers with {_REMOVALS[method]}, save and convert that"
    raise ValueError(
        f"config.json: {cause} is not supported, only fp8 with weight_block_size is: {fix}; or, "
        f"{_WITHOUT_QUANTIZATION}"
    )


def refuse_other_quantization(directory: Path) -> None:
    """Raise ValueError if a file next to config.json describes quantized weights."""
    for name, program in _OTHER_CONFIGS.items():
        if (directory / name).exists():
            raise ValueError(
                f"{directory} has {name}: its weights were quantized by {program}, which is not "
                "supported: convert the unquantized original of the model; or, "
                f"{_WITHOUT_QUANTIZATION}"
            )


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


def dequantize(
    tensors: Mapping[str, LazyTensor], block: Sequence[int], dtype: torch.dtype, directory: Path
) -> dict[str, LazyTensor]:
    """Return `tensors` with matrices in `dtype` instead of 8-bit matrices and their scales.

    Raises ValueError for scales without a matrix, or of the wrong shape. A read raises it for
    scales that are not finite or negative; `directory` is named in that error.
    """
    result = {name: tensor for name, tensor in tensors.items() if not name.endswith(SCALES)}
    for name, scales in tensors.items():
        if not name.endswith(SCALES):
            continue
        matrix = name.removesuffix(SCALES)
        if matrix not in result:
            raise ValueError(f"the weights have scales {name}, but not their matrix {matrix}")
        checked = _check_scales(f"{directory}: {name}", scales)
        result[matrix] = _scale_blocks(matrix, tensors[matrix], checked, block, dtype)
    return result


def _check_scales(description: str, scales: LazyTensor) -> LazyTensor:
    """Return scales whose reads raise ValueError for values that cannot be scales.

    A block of zeros may have the scale 0.
    """
    return replace(scales, read=partial(_read_checked, description, scales))


def _read_checked(
    description: str, scales: LazyTensor, offset: Shape, shape: Shape
) -> torch.Tensor:
    values = scales.read(offset, shape)
    is_valid = torch.isfinite(values) & (values >= 0)
    if not is_valid.all():
        first = (~is_valid).nonzero()[0]
        index = (first + torch.tensor(offset)).tolist()
        raise ValueError(
            f"{description}{index} is {values[tuple(first)].item()}, but scales are finite and "
            "not negative: the weights of this block would be wrong. The file is damaged, or "
            "was written from weights that had diverged: download the file that contains it "
            "again, or convert the unquantized original of the model"
        )
    return values


def _scale_blocks(
    name: str, tensor: LazyTensor, scales: LazyTensor, block: Sequence[int], dtype: torch.dtype
) -> LazyTensor:
    """Return a matrix of 8-bit floats, multiplied by the scale of each of its blocks."""
    # [blocks of rows, blocks of columns]; the last blocks may be partial.
    num_blocks = []
    for extent, size in zip(tensor.shape, block, strict=False):
        num_blocks.append(-(-extent // size))  # rounded up
    expected = tuple(num_blocks)
    if tensor.dtype != torch.float8_e4m3fn:
        raise ValueError(
            f"{name} has scales {name}{SCALES} and dtype {tensor.dtype}, but matrices in blocks "
            "must be torch.float8_e4m3fn: convert the unquantized original of the model"
        )
    is_number = scales.dtype in (torch.float32, torch.bfloat16)
    if len(tensor.shape) != 2 or scales.shape != expected or not is_number:
        raise ValueError(
            f"{name} of shape {list(tensor.shape)} has scales in {scales.dtype} of shape "
            f"{list(scales.shape)}, but blocks of {list(block)} need floating-point numbers of "
            f"shape {list(expected)}"
        )

    read = partial(_read_scaled, tensor, scales, block, dtype)
    return LazyTensor(tensor.shape, dtype, read)


def _read_scaled(
    tensor: LazyTensor,
    scales: LazyTensor,
    block: Sequence[int],
    dtype: torch.dtype,
    offset: Shape,
    shape: Shape,
) -> torch.Tensor:
    factors = scales.read_all().float()
    # The block of each row and of each column.
    rows = torch.arange(offset[0], offset[0] + shape[0]) // block[0]
    columns = torch.arange(offset[1], offset[1] + shape[1]) // block[1]
    values = tensor.read(offset, shape).float() * factors[rows][:, columns]
    return values.to(dtype)
