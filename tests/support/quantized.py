"""Matrices in the encodings of quantized releases, with the values that their libraries decode."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from megatron.conversion.huggingface.safetensors_files import open_safetensors
from megatron.conversion.quantization.encodings import check_settings, dequantize
from megatron.core.dist_checkpointing.mapping import LazyTensor
from megatron.core.safe_files.reading import read_json


def decode_case(folder: Path, dtype: torch.dtype) -> dict[str, LazyTensor]:
    """Return the decoded tensors of a case that `tests/interop/quantized_write.py` wrote."""
    settings = read_json(folder / "quantization_config.json")
    check_settings(settings)
    return dequantize(open_safetensors(folder / "model.safetensors"), settings, dtype, folder)


def check_case(folder: Path) -> None:
    """Compare decoded tensors, and boxes of them, with those of the library, bitwise."""
    for name, expected in load_file(folder / "expected.safetensors").items():
        tensor = decode_case(folder, expected.dtype)[name]
        assert tensor.shape == tuple(expected.shape), (folder.name, tensor.shape, expected.shape)
        decoded = tensor.read_all()
        assert decoded.dtype == expected.dtype
        differing = int((decoded != expected).sum())
        assert torch.equal(decoded, expected), f"{folder.name}: {differing} elements differ"
        # A box that begins and ends inside of words, groups and blocks.
        offset = tuple(extent // 5 for extent in expected.shape)
        shape = tuple(
            extent - 2 * start for extent, start in zip(expected.shape, offset, strict=True)
        )
        box = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
        assert torch.equal(tensor.read(offset, shape), expected[box]), folder.name
