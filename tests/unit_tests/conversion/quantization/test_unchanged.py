"""Exports in which unchanged matrices have the bytes of the quantized model that they come from."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.conversion.checkpoint_conversion import convert
from megatron.conversion.huggingface.directory_writer import write_huggingface
from megatron.conversion.options import WriteOptions
from tests.support.memory_source import LLAMA_ARGS, random_source
from tests.unit_tests.conversion.convert_tool import run_convert

ARGS = LLAMA_ARGS | {"bf16": True, "hidden_size": 64, "kv_channels": 16, "ffn_hidden_size": 96}
Tensors = dict[str, torch.Tensor]


def write_scaled(directory: Path, quantization: str, scale: str) -> None:
    """Write a model in one of our encodings, with scales that another program has chosen."""
    options = WriteOptions(quantization=quantization)
    write_huggingface(random_source(ARGS, optimizer=False), directory, options)
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(scale):
            tensor *= 1.3
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def write_gptq(directory: Path) -> None:
    """Write a model in GPTQ, which this project only reads."""
    write_huggingface(random_source(ARGS, optimizer=False), directory)
    tensors: Tensors = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        module = name.removesuffix("weight")
        outputs, inputs = tensor.shape
        words = torch.randint(-(2**31), 2**31 - 1, (inputs // 8, outputs)).int()
        zeros = torch.randint(-(2**31), 2**31 - 1, (inputs // 32, outputs // 8)).int()
        scales = torch.rand(inputs // 32, outputs).half() / 50
        tensors |= {f"{module}qweight": words, f"{module}qzeros": zeros, f"{module}scales": scales}

    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    (directory / "config.json").write_text(json.dumps(config))


WRITERS = {
    "fp8": lambda directory: write_scaled(directory, "fp8-block", "_scale_inv"),
    "nvfp4": lambda directory: write_scaled(directory, "nvfp4", "_global_scale"),
    "gptq": write_gptq,
}


def read_settings(directory: Path) -> object:
    return json.loads((directory / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("encoding", WRITERS)
@pytest.mark.parametrize("through", ["torch_dist", "legacy", None])
def test_unchanged_matrices_keep_their_bytes(
    encoding: str, through: str | None, tmp_path: Path
) -> None:
    original = tmp_path / "original"
    WRITERS[encoding](original)
    source = original
    if through is not None:
        source = tmp_path / "run"
        convert(original, source, through)
    result = run_convert(
        *("--saver", "hf", "--load-dir", source, "--save-dir", tmp_path / "hf"),
        *("--keep-quantization", original, "--verify-target"),
    )
    assert result.returncode == 0, result.stderr

    expected = load_file(original / "model.safetensors")
    written = load_file(tmp_path / "hf/model.safetensors")
    assert written.keys() == expected.keys()
    for name, tensor in written.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8)), name
    assert read_settings(tmp_path / "hf") == read_settings(original)


def change_matrix(directory: Path, copy: Path, name: str) -> Path:
    """Copy a quantized model with other values in one tensor."""
    shutil.copytree(directory, copy)
    tensors = load_file(copy / "model.safetensors")
    tensors[name] = torch.roll(tensors[name], 1, dims=-1)
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    return copy


def test_changed_matrices_are_not_quantized(tmp_path: Path) -> None:
    WRITERS["nvfp4"](tmp_path / "a")
    module = "model.layers.1.mlp.up_proj"
    other = change_matrix(tmp_path / "a", tmp_path / "b", f"{module}.weight_packed")
    result = run_convert(
        *("--saver", "hf", "--load-dir", tmp_path / "a", "--save-dir", tmp_path / "hf"),
        *("--keep-quantization", other, "--verify-target"),
    )

    assert result.returncode == 0, result.stderr
    assert f"1 matrices, e.g. {module}.weight, have changed" in result.stdout

    written = load_file(tmp_path / "hf/model.safetensors")
    assert written[f"{module}.weight"].dtype == torch.bfloat16
    assert module in read_settings(tmp_path / "hf")["ignore"]


def test_methods_without_a_list_of_modules_are_refused(tmp_path: Path) -> None:
    WRITERS["gptq"](tmp_path / "a")
    other = change_matrix(tmp_path / "a", tmp_path / "b", "model.layers.1.mlp.up_proj.qweight")
    options = WriteOptions(quantized_original=other)
    with pytest.raises(ValueError, match="1 matrices, e.g. model.layers.1.mlp.up_proj, have ch"):
        convert(tmp_path / "a", tmp_path / "hf", "hf", options=options)
    assert not (tmp_path / "hf").exists()


def test_original_is_not_replaced(tmp_path: Path) -> None:
    WRITERS["fp8"](tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    options = WriteOptions(quantized_original=tmp_path / "b")
    with pytest.raises(ValueError, match="is or contains the source .*/b, which would be lost"):
        convert(tmp_path / "a", tmp_path / "b", "hf", options=options, overwrite=True)


def test_another_model_is_refused(tmp_path: Path) -> None:
    source = random_source(ARGS, optimizer=False)
    write_huggingface(source, tmp_path / "plain")
    WRITERS["fp8"](tmp_path / "quantized")
    small = random_source(ARGS | {"num_layers": 1}, optimizer=False)
    for original, reason in (("plain", "is not quantized"), ("quantized", "has no model.layers.1")):
        options = WriteOptions(quantized_original=tmp_path / original)
        with pytest.raises(ValueError, match=f"--keep-quantization .*{reason}"):
            write_huggingface(small, tmp_path / "hf", options)
