"""Tensors that the model does not have are copied byte for byte (`--keep-foreign`), or reported."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.conversion.convert import open_checkpoint
from megatron.conversion.formats import require_checkpoint
from megatron.conversion.huggingface.directory import write_huggingface
from megatron.conversion.huggingface.weight_files import (
    OutgoingForeign,
    check_weight_files,
    write_weight_files,
)
from megatron.conversion.model_space.source import no_progress
from megatron.conversion.options import ReadOptions, WriteOptions
from tests.support.memory_source import LLAMA_ARGS, random_source
from tests.unit_tests.conversion.convert_tool import run_convert

# A vision tower, a sparse indexer of a layer, quantized data, a scalar and an empty tensor.
FOREIGN = {
    "model.visual.patch_embed.weight": torch.randn(6, 3, 2, 2),
    "model.layers.1.self_attn.indexer.wk.weight": torch.randn(8, 32).bfloat16(),
    "model.layers.0.linear_attn.A_log": torch.tensor([float("nan"), -0.0, 1e-45]),
    "model.layers.0.packed": torch.arange(12, dtype=torch.int8).view(3, 4),
    "model.layers.0.packed_scale": torch.randn(2, 4).to(torch.float8_e4m3fn),
    "model.num_batches": torch.tensor(7),
    "model.empty": torch.zeros(0, 4),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a Llama model with more tensors than it uses, and a field of config.json."""
    directory = tmp_path / "model"
    write_huggingface(random_source(LLAMA_ARGS | {"bf16": True}, optimizer=False), directory)
    weights = directory / "model.safetensors"
    save_file(load_file(weights) | FOREIGN, weights, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["vision_config"] = {"depth": 2}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def convert(saver: str, source: Path, target: Path, *flags: object) -> str:
    done = run_convert("--saver", saver, "--load-dir", source, "--save-dir", target, *flags)
    assert done.returncode == 0, done.stderr
    return done.stdout


def read_bytes(directory: Path) -> dict[str, tuple[object, ...]]:
    """Return shape, dtype and bytes of every tensor of a Hugging Face directory."""
    contents: dict[str, tuple[object, ...]] = {}
    for path in directory.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            flat = tensor.reshape(-1).view(torch.uint8)
            contents[name] = (tensor.shape, tensor.dtype, flat.tolist())
    return contents


@pytest.mark.parametrize("layout", [(), ("--target-tensor-parallel-size", 2)])
def test_foreign_tensors_return_bitwise(
    model: Path, tmp_path: Path, layout: tuple[object, ...]
) -> None:
    keep = ("--keep-foreign", "--verify-target")
    ignore = ("--hf-ignore-fields", "vision_config")
    said = convert("torch_dist", model, tmp_path / "dist", *keep, *ignore)
    for name in FOREIGN:
        assert f"foreign, copied as it is: {name}" in said
    convert("legacy", tmp_path / "dist", tmp_path / "legacy", *keep, *layout)
    convert("hf", tmp_path / "legacy", tmp_path / "result", *keep, "--max-shard-size", "20KB")
    assert len(list((tmp_path / "result").glob("*.safetensors"))) > 1
    assert read_bytes(tmp_path / "result") == read_bytes(model)
    result = json.loads((tmp_path / "result" / "config.json").read_text())
    assert result["vision_config"] == {"depth": 2}


def test_foreign_tensors_return_from_universal(model: Path, tmp_path: Path) -> None:
    """DeepSpeed's directories of parameters are unchanged; foreign tensors have their own file."""
    keep = ("--keep-foreign", "--verify-target")
    ignore = ("--hf-ignore-fields", "vision_config")
    convert("universal", model, tmp_path / "plain", *ignore)
    said = convert("universal", model, tmp_path / "universal", *keep, *ignore)
    for name in FOREIGN:
        assert f"foreign, copied as it is: {name}" in said
    (kept,) = (tmp_path / "universal").glob("*/zero")
    (plain,) = (tmp_path / "plain").glob("*/zero")
    assert sorted(path.name for path in kept.iterdir()) == sorted(p.name for p in plain.iterdir())
    stored = torch.load(kept.parent / "foreign.pt", weights_only=True)
    assert stored.keys() == FOREIGN.keys()
    assert stored["model.layers.0.packed"].equal(FOREIGN["model.layers.0.packed"])

    convert("hf", tmp_path / "universal", tmp_path / "result", *keep)
    assert read_bytes(tmp_path / "result") == read_bytes(model)
    result = json.loads((tmp_path / "result" / "config.json").read_text())
    assert result["vision_config"] == {"depth": 2}


def test_unknown_parameters_of_deepspeed_are_refused_by_name(model: Path, tmp_path: Path) -> None:
    ignore = ("--hf-ignore-fields", "vision_config")
    convert("universal", model, tmp_path / "universal", *ignore)
    (zero,) = (tmp_path / "universal").glob("*/zero")
    folder = next(path for path in zero.iterdir() if path.is_dir())
    shutil.copytree(folder, zero / "visual.patch_embed.weight")
    flags = ("--load-dir", tmp_path / "universal", "--keep-foreign", "--saver", "hf")
    done = run_convert(*flags, "--save-dir", tmp_path / "out")
    assert "visual.patch_embed.weight are not parameters of a GPT" in done.stderr


def test_other_dtype_leaves_foreign_tensors(model: Path, tmp_path: Path) -> None:
    flags = ("--keep-foreign", "--hf-ignore-fields", "vision_config", "--dtype", "fp32")
    convert("hf", model, tmp_path / "result", *flags)
    result = read_bytes(tmp_path / "result")
    assert result["model.embed_tokens.weight"][1] == torch.float32
    original = read_bytes(model)
    assert {name: result[name] for name in FOREIGN} == {name: original[name] for name in FOREIGN}


@pytest.mark.parametrize("middle", ["torch_dist", "legacy", "universal"])
def test_foreign_tensors_are_reported_without_the_flag(
    model: Path, tmp_path: Path, middle: str
) -> None:
    ignore = ("--hf-ignore-fields", "vision_config")
    convert(middle, model, tmp_path / "kept", "--keep-foreign", *ignore)
    for source, flags in ((model, ignore), (tmp_path / "kept", ())):
        said = convert("hf", source, tmp_path / f"to_hf_{source.name}", *flags)
        for name in FOREIGN:
            assert f"not carried: unused in the source: {name}" in said
        assert "unused tensors are copied with --keep-foreign" in said
        assert not FOREIGN.keys() & read_bytes(tmp_path / f"to_hf_{source.name}").keys()


def test_foreign_tensors_of_a_rank_file(tmp_path: Path) -> None:
    """Tensors in the model of Megatron-LM's files can be copied if there is a single rank."""
    source = random_source(LLAMA_ARGS, optimizer=False)
    write_huggingface(source, tmp_path / "model")
    for tp in (1, 2):
        legacy = tmp_path / f"tp{tp}"
        convert("legacy", tmp_path / "model", legacy, "--target-tensor-parallel-size", tp)
        path = require_checkpoint(legacy).directory / "mp_rank_00" / "model_optim_rng.pt"
        content = torch.load(path, weights_only=False)
        content["model"]["vision_model.weight"] = torch.arange(6.0).view(2, 3)
        torch.save(content, path)
    convert("torch_dist", tmp_path / "tp1", tmp_path / "dist", "--keep-foreign")
    found = open_checkpoint(tmp_path / "dist", read_options=ReadOptions(keep_foreign=True))
    value = found.read("foreign.vision_model.weight", (0, 0), (2, 3))
    assert torch.equal(value, torch.arange(6.0).view(2, 3))

    flags = ("--saver", "hf", "--save-dir", tmp_path / "out", "--load-dir", tmp_path / "tp2")
    refused = run_convert(*flags, "--keep-foreign")
    assert "how 2 ranks share it is not known" in refused.stderr
    assert "unused in the source: mp_rank_00: vision_model.weight" in run_convert(*flags).stdout


def test_selected_layers_with_foreign_tensors_are_refused(model: Path, tmp_path: Path) -> None:
    flags = ("--load-dir", model, "--keep-foreign", "--hf-ignore-fields", "vision_config")
    target = ("--save-dir", tmp_path / "out")
    layers = run_convert(*flags, *target, "--saver", "hf", "--layers", "0")
    assert "--layers and --keep-foreign are mutually exclusive" in layers.stderr
    assert not (tmp_path / "out").exists()


def test_foreign_name_of_another_part_is_refused(model: Path, tmp_path: Path) -> None:
    weights = model / "model.safetensors"
    name = "optimizer.state.exp_avg.output_layer.weight"
    save_file(load_file(weights) | {name: torch.zeros(2)}, weights)
    flags = ("--load-dir", model, "--keep-foreign", "--hf-ignore-fields", "vision_config")
    done = run_convert(*flags, "--saver", "torch_dist", "--save-dir", tmp_path / "out")
    assert f"torch_dist checkpoints store another tensor as {name}" in done.stderr


def test_export_is_compared_with_the_plan(tmp_path: Path) -> None:
    source = random_source(LLAMA_ARGS, optimizer=False)
    source.values["foreign.a"] = torch.zeros(2, 2)
    source.values["foreign.b"] = torch.zeros(3)
    planned = [OutgoingForeign(source, "foreign.a"), OutgoingForeign(source, "foreign.b")]
    write_weight_files(tmp_path, "model", planned, 10**9, 1, no_progress)
    check_weight_files(tmp_path, planned)
    with pytest.raises(ValueError, match="2 tensors were written, 1 were expected; b differs"):
        check_weight_files(tmp_path, planned[:1])


def test_index_and_shards_must_list_the_same_tensors(tmp_path: Path) -> None:
    source = random_source(LLAMA_ARGS, optimizer=False)
    write_huggingface(source, tmp_path / "model", WriteOptions(max_shard_size=20_000))
    index_path = tmp_path / "model" / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    shards = sorted(set(index["weight_map"].values()))
    weight_map = {name: file for name, file in index["weight_map"].items() if file != shards[-1]}
    index_path.write_text(json.dumps(index | {"weight_map": weight_map}))
    with pytest.raises(ValueError, match=f"does not list 1 of {len(shards)} shards: {shards[-1]}"):
        open_checkpoint(tmp_path / "model")
