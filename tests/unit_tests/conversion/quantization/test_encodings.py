"""Quantized matrices as their libraries decode them, and a whole model as transformers loads it."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config

from megatron.conversion.checkpoint_conversion import convert
from megatron.conversion.huggingface.directory import HuggingFaceSource
from megatron.conversion.huggingface.directory_writer import write_huggingface
from megatron.conversion.quantization.encodings import METHODS
from tests.support.compare import read_whole
from tests.support.memory_source import LLAMA_ARGS, random_source
from tests.support.quantized import GOLDEN, check_case, decode_case, list_cases

CASES = list_cases()


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_library(name: str) -> None:
    check_case(GOLDEN / name)


def test_every_method_has_a_golden_file() -> None:
    methods = set()
    for name in CASES:
        settings = json.loads((GOLDEN / name / "quantization_config.json").read_text())
        methods.add(settings["quant_method"])
    assert methods == METHODS.keys() - {"fbgemm_fp8"}  # which needs a GPU; as fp8 of modelopt


def test_decoded_matrix_is_read_as_a_pickle() -> None:
    tensor = decode_case(GOLDEN / "gptq_4_act_order", torch.float16)["matrix.weight"]
    restored = pickle.loads(pickle.dumps(tensor))
    assert torch.equal(restored.read_all(), tensor.read_all())


def damage(name: str, directory: Path, **tensors: torch.Tensor | None) -> Path:
    """Copy a golden case with other tensors of `matrix`; None removes one."""
    changed = load_file(GOLDEN / name / "model.safetensors")
    for suffix, tensor in tensors.items():
        changed.pop(f"matrix.{suffix}", None)
        if tensor is not None:
            changed[f"matrix.{suffix}"] = tensor

    save_file(changed, directory / "model.safetensors")
    settings = (GOLDEN / name / "quantization_config.json").read_text()
    (directory / "quantization_config.json").write_text(settings)
    return directory


@pytest.mark.parametrize(
    ("name", "tensors", "reason"),
    [
        ("compressed_int4_group", {"weight_scale": None}, "lack matrix.weight_scale, which"),
        ("compressed_int4_group", {"weight_packed": None}, "lack matrix.weight, which is"),
        ("compressed_int4_group", {"weight_shape": torch.tensor([32, 96])}, "8 words and 2 scales"),
        ("compressed_int4_zeros", {"weight_zero_point": None}, "8 words and 2 scales per row, but"),
        ("compressed_nvfp4", {"weight_scale": torch.ones(32, 4)}, "in torch.float32, which must"),
        (
            "compressed_nvfp4",
            {"weight_global_scale": torch.zeros(1)},
            r"weight_global_scale = 0\.0",
        ),
        ("compressed_mxfp4", {"weight_scale": torch.full((32, 2), 255).byte()}, "is nan, but"),
        ("compressed_fp8_channel", {"weight_scale": -torch.ones(32, 1)}, r"\[0, 0\] is -1.0, but"),
        ("awq", {"qzeros": None}, "lack matrix.qzeros"),
        ("awq", {"qweight": None}, "lack the other tensors of this"),
        ("awq", {"scales": torch.ones(4, 32).half()}, r"\[4, 32\], which must be \[2, 32\]"),
        ("awq", {"qweight": torch.tensor(3).int()}, r"of shape \[\], which must have 2 dimensions"),
        ("gptq_4", {"scales": torch.tensor(3).half()}, r"of shape \[\], which must be \[2, 32\]"),
        ("compressed_int4_group", {"weight_scale": torch.tensor(1.0)}, "have 1 or 2 dimensions"),
        ("compressed_int8_channel", {"weight_scale": torch.ones(3)}, r"\[3\], which must be \["),
        (
            "bitsandbytes_int8",
            {"weight": torch.ones(0, 4).char(), "SCB": torch.ones(0)},
            r"has shape \[0, 4\]",
        ),
        ("bitsandbytes_int8", {"weight": torch.ones(4).char()}, "which must have 2 dimensions"),
        ("gptq_4", {"g_idx": torch.full((64,), 2).int()}, "from 2 to 2, but 2 groups"),
        ("bitsandbytes_nf4", {"weight.absmax": torch.ones(31)}, r"\[31\], which must be \[32\]"),
        ("bitsandbytes_int8", {"weight_format": torch.tensor(2).byte()}, r"= \[2\], only \[0\]"),
        ("modelopt_fp8", {"pre_quant_scale": torch.ones(64)}, "scales inputs of a quantized"),
    ],
)
def test_wrong_tensors_are_named(
    name: str, tensors: dict[str, torch.Tensor | None], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=reason) as error:
        decode_case(damage(name, tmp_path, **tensors), torch.float32)["matrix.weight"].read_all()
    assert "matrix." in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("transform_config", {"config_groups": {"r1": {}}}),
        ("sparsity_config", {"format": "sparse"}),
    ],
)
def test_changed_weights_are_refused(field: str, value: Any, tmp_path: Path) -> None:
    directory = damage("compressed_int4_group", tmp_path)
    path = directory / "quantization_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(ValueError, match=f"{field} = .* is not supported"):
        decode_case(directory, torch.float32)


def test_gpt_oss_in_mxfp4_has_the_logits_of_transformers(gpt_oss: Path, tmp_path: Path) -> None:
    convert(gpt_oss, tmp_path / "hf", "hf")
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16)
    original = AutoModelForCausalLM.from_pretrained(
        gpt_oss,
        dtype=torch.bfloat16,
        quantization_config=Mxfp4Config(dequantize=True),
    )

    for name, value in original.state_dict().items():
        assert torch.equal(converted.state_dict()[name], value), name

    tokens = torch.arange(48).view(2, 24)
    with torch.no_grad():
        assert torch.equal(converted(tokens).logits, original(tokens).logits)


def test_columns_of_experts_are_read(gpt_oss: Path) -> None:
    source = HuggingFaceSource(gpt_oss)
    assert source.unused == []
    for key in ("linear_fc1", "linear_fc2"):
        key = f"decoder.layers.1.mlp.experts.experts.{key}.weight"
        box = source.tensors[key].read((1, 5, 33), (2, 40, 17))
        assert torch.equal(box, read_whole(source, key)[1:3, 5:45, 33:50])


def test_layers_that_are_not_quantized_are_unchanged(tmp_path: Path) -> None:
    """Layers in `ignore` are stored as they are; scales of activations are not weights."""
    write_huggingface(random_source(LLAMA_ARGS | {"bf16": True}, optimizer=False), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    codes = torch.randint(-128, 128, tensors[name].shape).to(torch.int8)
    scales = torch.rand(len(codes), 1).bfloat16() / 100
    expected = tensors | {name: codes * scales}
    tensors |= {name: codes, f"{name}_scale": scales}
    tensors["model.layers.1.mlp.down_proj.input_scale"] = torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    fields = json.loads((tmp_path / "config.json").read_text())
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    fields["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
        "ignore": ["lm_head", "re:.*layers.0.*", "re:.*(qkvo|gate|up)_proj"],
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    convert(tmp_path, tmp_path / "hf", "hf")
    converted = load_file(tmp_path / "hf" / "model.safetensors")

    assert converted.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(converted[name], value), name
