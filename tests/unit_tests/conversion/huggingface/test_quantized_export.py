"""Exports in fp8 with a scale per block of 128 x 128, dequantized by numpy and by transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from megatron.conversion.huggingface.directory import HuggingFaceSource
from megatron.conversion.huggingface.directory_writer import write_huggingface
from megatron.conversion.model_space.optimizer_states import full_precision_key
from megatron.conversion.options import WriteOptions
from tests.support.compare import read_whole
from tests.support.memory_source import GPT_ARGS, LLAMA_ARGS, MemorySource, random_source
from tests.unit_tests.conversion.convert_tool import run_convert

SIZES = {"hidden_size": 256, "ffn_hidden_size": 384, "kv_channels": 64, "bf16": True}
DENSE = LLAMA_ARGS | SIZES | {"params_dtype": torch.bfloat16}
EXPERTS = DENSE | {"num_experts": 2, "moe_ffn_hidden_size": 384, "moe_router_topk": 2}
TIED = DENSE | {"untie_embeddings_and_output_weights": False}
QUANTIZE = WriteOptions(quantization="fp8-block")


def export(args: dict[str, Any], directory: Path) -> MemorySource:
    """Write a random model quantized to `directory`/fp8 and as it is to `directory`/plain."""
    source = random_source(args)
    write_huggingface(source, directory / "fp8", QUANTIZE)
    write_huggingface(source, directory / "plain", WriteOptions(dtype="fp32"))
    return source


def dequantize(values: torch.Tensor, scales: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the matrix and the scale of each element in float64."""
    rows, columns = values.shape
    block = np.ones((128, 128))
    scale_of_elements = np.kron(scales.double().numpy(), block)[:rows, :columns]
    return values.double().numpy() * scale_of_elements, scale_of_elements


@pytest.mark.parametrize("args", [DENSE, EXPERTS, TIED, DENSE | {"hidden_size": 192}])
def test_errors_are_those_of_rounding_to_fp8(args: dict[str, Any], tmp_path: Path) -> None:
    """Half a unit in the last place: 2^-4 of the value, or 2^-10 of the scale where it is tiny."""
    export(args, tmp_path)
    quantized = load_file(tmp_path / "fp8" / "model.safetensors")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    assert plain.keys() == {name for name in quantized if not name.endswith("_scale_inv")}

    for name, original in plain.items():
        values = quantized[name]
        if "_proj." not in name and ".experts." not in name:
            assert torch.equal(values, original.bfloat16()), name
            continue

        scales = quantized[f"{name}_scale_inv"]
        assert values.dtype == torch.float8_e4m3fn
        assert scales.dtype == torch.float32
        assert scales.shape == tuple(-(-size // 128) for size in original.shape)

        decoded, scale_of_elements = dequantize(values, scales)
        expected = original.double().numpy()
        errors = np.abs(decoded - expected)
        bound = np.maximum(np.abs(expected) * 2.0**-4, scale_of_elements * 2.0**-10)
        assert np.all(errors <= bound * (1 + 1e-6)), name


@pytest.mark.parametrize("args", [DENSE, EXPERTS, TIED])
def test_transformers_reads_the_numbers(args: dict[str, Any], tmp_path: Path) -> None:
    """Dequantized by transformers to bf16, the model has the values that numpy dequantizes."""
    export(args, tmp_path)
    quantized = load_file(tmp_path / "fp8" / "model.safetensors")
    decoded = {}
    for name, values in quantized.items():
        if name.endswith("_scale_inv"):
            continue
        if f"{name}_scale_inv" in quantized:
            matrix, _ = dequantize(values, quantized[f"{name}_scale_inv"])
            decoded[name] = torch.from_numpy(matrix).float()
        else:
            decoded[name] = values.float()

    save_file(decoded, tmp_path / "plain" / "model.safetensors", {"format": "pt"})

    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "fp8",
        dtype=torch.float32,
        quantization_config=FineGrainedFP8Config(dequantize=True),
    )
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    actual = model.state_dict()
    expected = reference.state_dict()

    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name].float(), value, rtol=2.0**-8, atol=0)


def test_modules_without_scales_are_listed(tmp_path: Path) -> None:
    export(EXPERTS, tmp_path)
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    gates = [f"model.layers.{layer}.block_sparse_moe.gate" for layer in range(2)]
    assert config["quantization_config"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.embed_tokens", *gates],
    }


@pytest.mark.parametrize("args", [DENSE | {"hidden_size": 192}, EXPERTS])
def test_export_is_read_back(args: dict[str, Any], tmp_path: Path) -> None:
    source = export(args, tmp_path)
    exported = HuggingFaceSource(tmp_path / "fp8")
    assert exported.unused == []
    for key in exported.tensors:
        expected = read_whole(source, full_precision_key(key, source.tensors))
        actual = read_whole(exported, key).float()
        torch.testing.assert_close(actual, expected, rtol=0.07, atol=1e-3)


def test_blocks_of_zeros_and_of_denormal_numbers(tmp_path: Path) -> None:
    source = random_source(DENSE, optimizer=False)
    matrix = source.values["decoder.layers.0.self_attention.linear_proj.weight"]
    matrix[:128, :128] = 0
    matrix[128:, :128] = 1e-39
    write_huggingface(source, tmp_path / "fp8", QUANTIZE)
    quantized = load_file(tmp_path / "fp8" / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    decoded, _ = dequantize(quantized[name], quantized[f"{name}_scale_inv"])

    assert np.all(decoded[:128, :128] == 0)
    np.testing.assert_allclose(decoded[128:, :128], 1e-39, rtol=0.07)


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    source = random_source(DENSE, optimizer=False)
    source.values["decoder.layers.1.mlp.linear_fc2.weight"][3, 5] = torch.inf
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj\.weight has values that are"):
        write_huggingface(source, tmp_path / "fp8", QUANTIZE)


def test_transposed_matrices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="stored transposed"):
        write_huggingface(random_source(GPT_ARGS), tmp_path / "fp8", QUANTIZE)


def test_convert_notes_partial_blocks_and_refuses_verification(tmp_path: Path) -> None:
    write_huggingface(random_source(LLAMA_ARGS, optimizer=False), tmp_path / "model")
    flags = ("--saver", "hf", "--load-dir", tmp_path / "model", "--quantize", "fp8-block")
    refused = run_convert(*flags, "--save-dir", tmp_path / "a", "--verify-target")
    assert "--quantize fp8-block rounds the weights" in refused.stderr
    done = run_convert(*flags, "--save-dir", tmp_path / "b")
    assert "14 matrices, e.g. model.layers.0." in done.stdout
    assert "have partial blocks" in done.stdout
