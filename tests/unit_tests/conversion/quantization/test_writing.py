"""Matrices that exports quantize: decoded and encoded again, compared with the nearest numbers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Mxfp4Config

from megatron.conversion.checkpoint_conversion import convert
from megatron.conversion.huggingface.directory import HuggingFaceSource
from megatron.conversion.huggingface.directory_writer import write_huggingface
from megatron.conversion.model_space.lazy_tensors import view_tensor
from megatron.conversion.options import WriteOptions
from megatron.conversion.quantization.encodings import dequantize
from megatron.conversion.quantization.export_encodings import TARGETS
from megatron.conversion.quantization.fp4_values import E2M1
from tests.support.compare import read_whole
from tests.support.memory_source import LLAMA_ARGS, random_source

ARGS = LLAMA_ARGS | {"bf16": True, "hidden_size": 64, "kv_channels": 16, "ffn_hidden_size": 96}


def make_matrix(seed: int, target: str) -> torch.Tensor:
    """Return values of magnitudes that no single scale represents, with zeros and powers of two."""
    generator = torch.Generator().manual_seed(seed)
    shape = (3, 64, 48) if TARGETS[target].of_packed_experts else (48, 192)
    magnitude = 10.0 ** (seed % 7 - 3)
    matrix = torch.randn(shape, generator=generator) * magnitude
    row_exponents = torch.randint(-30, 3, (*shape[:-1], 1), generator=generator)
    matrix = torch.ldexp(matrix, row_exponents)
    column_factors = torch.rand(shape[-1], generator=generator) ** 9
    matrix[..., 30:, :] *= column_factors
    matrix[..., :17, 5:40] = 0
    matrix[..., 20, :] = 2.0 ** (seed % 5)
    matrix[..., 21, ::2] = -0.0
    return matrix


def encode(matrix: torch.Tensor, target: str) -> dict[str, torch.Tensor]:
    encoded = TARGETS[target].encode({"m.weight": view_tensor(matrix)})
    return {name: tensor.read_all() for name, tensor in encoded.items()}


def decode(encoded: dict[str, torch.Tensor], target: str, dtype: torch.dtype) -> torch.Tensor:
    tensors = {name: view_tensor(value) for name, value in encoded.items()}
    settings = TARGETS[target].make_settings([])
    decoded = dequantize(tensors, settings, dtype, Path("model"))
    return decoded["m.weight"].read_all()


def assert_same_files(directory: Path, expected: Path) -> None:
    content = (directory / "model.safetensors").read_bytes()
    assert content == (expected / "model.safetensors").read_bytes()


@pytest.mark.parametrize("target", TARGETS)
def test_decoded_matrix_is_encoded_to_the_same_bytes(target: str) -> None:
    dtypes = [torch.float32]
    if target in ("mxfp4", "nvfp4"):
        # Products with an fp32 scale, which other encodings have, are not exact in bf16.
        dtypes.append(torch.bfloat16)

    for seed in range(40):
        encoded = encode(make_matrix(seed, target), target)
        for dtype in dtypes:
            decoded = decode(encoded, target, dtype)
            encoded_again = encode(decoded, target)
            assert encoded_again.keys() == encoded.keys()
            for name, value in encoded.items():
                actual = encoded_again[name].view(torch.uint8)
                expected = value.view(torch.uint8)
                assert torch.equal(actual, expected), f"seed {seed}, {dtype}: {name}"


@pytest.mark.parametrize("target", ["mxfp4", "nvfp4"])
def test_numbers_are_the_nearest(target: str) -> None:
    """No other e2m1 number times the scale is closer, and scales leave the largest in range."""
    matrix = make_matrix(1, target)
    encoded = encode(matrix, target)
    decoded = decode(encoded, target, torch.float32)
    if target == "mxfp4":
        group_size = 32
        matrix = matrix.transpose(1, 2)
        decoded = decoded.transpose(1, 2)
        exponents = encoded["m.weight_scales"].double() - 127
        scales = torch.exp2(exponents)
    else:
        group_size = 16
        global_scale = encoded["m.weight_global_scale"].double()
        scales = encoded["m.weight_scale"].double() / global_scale

    groups = matrix.reshape(*scales.shape, group_size).double()
    decoded_groups = decoded.reshape(groups.shape).double()
    candidates = E2M1.double() * scales[..., None, None]
    smallest_errors = (groups[..., None] - candidates).abs().amin(-1)
    errors = (groups - decoded_groups).abs()
    assert torch.equal(errors, smallest_errors)

    largest = groups.abs().amax(-1) / scales
    is_small = scales <= scales.min() * 2  # where scales of nvfp4 are rounded coarsely
    assert ((largest < 8) | is_small).all()


def test_fused_matrices_share_the_scale_of_nvfp4(tmp_path: Path) -> None:
    """vLLM decodes q, k and v, and gate and up, with the largest of their scales."""
    source = random_source(ARGS, optimizer=False)
    for key, value in source.values.items():
        if "linear_qkv.weight" in key or "linear_fc1.weight" in key:
            value *= torch.logspace(-2, 2, len(value))[:, None]
    options = WriteOptions(quantization="nvfp4")
    write_huggingface(source, tmp_path / "a", options)

    scales: dict[str, set[float]] = {}
    for name, tensor in load_file(tmp_path / "a/model.safetensors").items():
        if name.endswith("_proj.weight_global_scale"):
            module, _, projection = name.removesuffix("_proj.weight_global_scale").rpartition(".")
            group = projection if projection in ("o", "down") else "fused"
            scales.setdefault(f"{module} {group}", set()).add(tensor.item())

    assert len(scales) == 8, scales
    for group, values in scales.items():
        assert len(values) == 1, group

    write_huggingface(HuggingFaceSource(tmp_path / "a"), tmp_path / "b", options)
    assert_same_files(tmp_path / "b", tmp_path / "a")


@pytest.mark.parametrize("target", TARGETS)
def test_values_that_are_not_finite_are_refused(target: str) -> None:
    matrix = make_matrix(2, target)
    matrix[..., 40, 7] = torch.nan
    with pytest.raises(ValueError, match=r"--quantize: m\.weight has values that are not finite"):
        encode(matrix, target)


@pytest.mark.parametrize("target", ["fp8-channel", "nvfp4"])
def test_export_is_read_back(target: str, tmp_path: Path) -> None:
    source = random_source(ARGS, optimizer=False)
    write_huggingface(source, tmp_path / "a", WriteOptions(quantization=target))
    settings = json.loads((tmp_path / "a/config.json").read_text())["quantization_config"]
    assert settings["ignore"] == ["lm_head", "model.embed_tokens"]

    read = HuggingFaceSource(tmp_path / "a")
    assert read.unused == []

    bound = 2.0**-4 if target == "fp8-channel" else 2.0**-2
    for key in read.tensors:
        original = read_whole(source, key).float()
        errors = (read_whole(read, key).float() - original).abs()
        assert errors.max() <= bound * original.abs().max(), key

    if target == "nvfp4":  # whose values are exact in bf16
        write_huggingface(read, tmp_path / "b", WriteOptions(quantization=target))
        assert_same_files(tmp_path / "b", tmp_path / "a")


def test_experts_of_gpt_oss_are_written_in_mxfp4(gpt_oss: Path, tmp_path: Path) -> None:
    """Published blocks may have another scale for the same values, written ones return."""
    options = WriteOptions(quantization="mxfp4")
    convert(gpt_oss, tmp_path / "a", "hf", options=options)
    convert(tmp_path / "a", tmp_path / "b", "hf", options=options)
    assert_same_files(tmp_path / "b", tmp_path / "a")

    expected = load_with_transformers(gpt_oss)
    actual = load_with_transformers(tmp_path / "a")
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def load_with_transformers(directory: Path) -> dict[str, torch.Tensor]:
    """Return the decoded state dict."""
    model = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=torch.bfloat16,
        quantization_config=Mxfp4Config(dequantize=True),
    )
    return model.state_dict()


@pytest.mark.parametrize(
    ("target", "args", "reason"),
    [
        ("mxfp4", ARGS, "is the encoding of gpt_oss's experts, which this model does not have"),
        ("nvfp4", ARGS | {"ffn_hidden_size": 40}, "has 40 inputs, which are not groups of 16"),
    ],
)
def test_other_matrices_are_refused(
    target: str, args: dict[str, object], reason: str, tmp_path: Path
) -> None:
    source = random_source(args, optimizer=False)
    with pytest.raises(ValueError, match=reason):
        write_huggingface(source, tmp_path, WriteOptions(quantization=target))
