"""Matrices in the encodings of quantized releases, with the values that their libraries decode."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from megatron.conversion.huggingface.safetensors_files import open_safetensors
from megatron.conversion.quantization.components import COMPONENTS, ModelComponents, view_matrices
from megatron.conversion.quantization.encodings import check_settings, dequantize
from megatron.core.dist_checkpointing.mapping import LazyTensor
from megatron.core.encoded_elements import ElementFormat
from megatron.core.safe_files.reading import read_json
from tests import ROOT
from tests.support.boxes import index_box

GOLDEN = ROOT / "tests/golden/quantized"


def list_cases() -> list[str]:
    """Return the golden cases whose dtypes this torch has: e8m0 since 2.7."""
    names = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
    has_e8m0 = hasattr(torch, "float8_e8m0fnu")
    return [name for name in names if has_e8m0 or name != "fp8_block_e8m0"]


def decode_case(folder: Path, dtype: torch.dtype) -> dict[str, LazyTensor]:
    """Return the decoded tensors of a case that `tests/interop/quantized_write.py` wrote."""
    settings = read_json(folder / "quantization_config.json")
    check_settings(settings)
    return dequantize(open_safetensors(folder / "model.safetensors"), settings, dtype, folder)


def open_case_components(folder: Path) -> ModelComponents:
    """Return the components of the matrices of a case."""
    settings = read_json(folder / "quantization_config.json")
    check_settings(settings)
    formats: list[ElementFormat] = []
    tensors = {}
    for component in COMPONENTS:
        stored = open_safetensors(folder / "model.safetensors")
        tensors[component] = view_matrices(
            component, formats, stored, settings, torch.float32, folder
        )
    return ModelComponents(formats, tensors)


def check_case(folder: Path) -> None:
    """Compare decoded tensors, and boxes of them, with those of the library, bitwise."""
    for name, expected in load_file(folder / "expected.safetensors").items():
        tensor = decode_case(folder, expected.dtype)[name]
        whole_shape = tuple(expected.shape)
        assert tensor.shape == whole_shape, (folder.name, tensor.shape, whole_shape)

        decoded = tensor.read_all()
        assert decoded.dtype == expected.dtype

        num_different = int((decoded != expected).sum())
        assert torch.equal(decoded, expected), f"{folder.name}: {num_different} elements differ"

        # A box that begins and ends inside of words, groups and blocks.
        margins = [extent // 5 for extent in whole_shape]
        offset = tuple(margins)
        shape = tuple(extent - 2 * (extent // 5) for extent in whole_shape)
        box = index_box(offset, shape)
        assert torch.equal(tensor.read(offset, shape), expected[box]), folder.name
