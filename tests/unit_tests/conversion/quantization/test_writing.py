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
    matrix = torch.randn(shape, generator=generator) * 10.0 ** (seed % 7 - 3)
    spread = torch.randint(-30, 3, (*shape[:-1], 1), generator=generator)
    matrix = torch.ldexp(matrix, spread)
    matrix[..., :17, 5:40] = 0
    matrix[..., 20, :] = 2.0 ** (seed % 5)
    matrix[..., 21, ::2] = -0.0
    matrix[..., 30:, :] *= torch.rand(shape[-1], generator=generator) ** 9
    return matrix


def encode(matrix: torch.Tensor, target: str) -> dict[str, torch.Tensor]:
    stored = TARGETS[target].encode({"m.weight": view_tensor(matrix)})
    return {name: tensor.read_all() for name, tensor in stored.items()}


def decode(stored: dict[str, torch.Tensor], target: str, dtype: torch.dtype) -> torch.Tensor:
    tensors = {name: view_tensor(value) for name, value in stored.items()}
    settings = TARGETS[target].make_settings([])
    return dequantize(tensors, settings, dtype, Path("model"))["m.weight"].read_all()


@pytest.mark.parametrize("target", TARGETS)
def test_decoded_matrix_is_encoded_to_the_same_bytes(target: str) -> None:
    # Products with an fp32 scale are not exact in bf16; others are.
    is_exact = target in ("mxfp4", "nvfp4")
    for seed in range(40):
        stored = encode(make_matrix(seed, target), target)
        for dtype in (torch.float32, torch.bfloat16) if is_exact else (torch.float32,):
            again = encode(decode(stored, target, dtype), target)
            assert again.keys() == stored.keys()
            for name, value in stored.items():
                assert torch.equal(again[name].view(torch.uint8), value.view(torch.uint8)), (
                    f"seed {seed}, {dtype}: {name}"
                )


@pytest.mark.parametrize("target", ["mxfp4", "nvfp4"])
def test_numbers_are_the_nearest(target: str) -> None:
    """No other e2m1 number times the scale is closer, and scales leave the largest in range."""
    matrix = make_matrix(1, target)
    stored = encode(matrix, target)
    decoded = decode(stored, target, torch.float32)
    size = 16
    if target == "mxfp4":
        size = 32
        matrix = matrix.transpose(1, 2)
        decoded = decoded.transpose(1, 2)
        scales = torch.exp2(stored["m.weight_scales"].double() - 127)
    else:
        scales = stored["m.weight_scale"].double() / stored["m.weight_global_scale"].double()
    groups = matrix.reshape(*scales.shape, size).double()
    candidates = E2M1.double() * scales[..., None, None]
    nearest = (groups[..., None] - candidates).abs().amin(-1)
    errors = (groups - decoded.reshape(groups.shape).double()).abs()
    assert torch.equal(errors, nearest)
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
    tensors = load_file(tmp_path / "a/model.safetensors")
    scales: dict[str, set[float]] = {}
    for name, tensor in tensors.items():
        if name.endswith("_global_scale"):
            layer = name.rpartition("_proj")[0].rpartition(".")[0]
            module = name.removeprefix(f"{layer}.").partition("_proj")[0]
            group = module if module in ("o", "down") else "fused"
            scales.setdefault(f"{layer} {group}", set()).add(tensor.item())
    assert len(scales) == 8, scales
    assert all(len(values) == 1 for values in scales.values()), scales
    write_huggingface(HuggingFaceSource(tmp_path / "a"), tmp_path / "b", options)
    first = (tmp_path / "a/model.safetensors").read_bytes()
    assert first == (tmp_path / "b/model.safetensors").read_bytes()


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
        first = (tmp_path / "a/model.safetensors").read_bytes()
        assert first == (tmp_path / "b/model.safetensors").read_bytes()


def test_experts_of_gpt_oss_are_written_in_mxfp4(gpt_oss: Path, tmp_path: Path) -> None:
    """Published blocks may have another scale for the same values, written ones return."""
    options = WriteOptions(quantization="mxfp4")
    convert(gpt_oss, tmp_path / "a", "hf", options=options)
    convert(tmp_path / "a", tmp_path / "b", "hf", options=options)
    first = (tmp_path / "a/model.safetensors").read_bytes()
    assert first == (tmp_path / "b/model.safetensors").read_bytes()
    states = []
    for directory in (gpt_oss, tmp_path / "a"):
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
        )
        states.append(model.state_dict())
    for name, value in states[0].items():
        assert torch.equal(states[1][name], value), name


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
    with pytest.raises(ValueError, match=reason):
        write_huggingface(
            random_source(args, optimizer=False), tmp_path, WriteOptions(quantization=target)
        )
