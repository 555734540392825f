"""Deltas between exports against full exports."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.conversion.huggingface.directory_writer import write_huggingface
from megatron.core.dist_checkpointing import CheckpointError
from megatron.transfer.deltas import GRANULARITIES, apply_delta, read_patches, write_delta
from tests.support.memory_source import LLAMA_ARGS, MemorySource, random_source

FC2 = "decoder.layers.1.mlp.linear_fc2.weight"
NORM = "decoder.final_layernorm.weight"
HEAD = "output_layer.weight"
NAMES = {
    FC2: "model.layers.1.mlp.down_proj.weight",
    NORM: "model.norm.weight",
    HEAD: "lm_head.weight",
}
ROWS = LLAMA_ARGS["ffn_hidden_size"]


def export(source: MemorySource, directory: Path) -> Path:
    write_huggingface(source, directory)
    return directory


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    """Return a base, and a model in which one element, two rows and a whole vector differ."""
    source = random_source(LLAMA_ARGS | {"bf16": True}, vocab_size=53, optimizer=False)
    base = export(source, tmp_path / "base")
    source.values[FC2] = source.values[FC2].clone()
    source.values[FC2][3, 5] += 1
    source.values[HEAD] = source.values[HEAD].clone()
    source.values[HEAD][[7, 50]] *= -1
    source.values[NORM] = source.values[NORM] + 1
    return base, export(source, tmp_path / "new")


def read_files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_applied_delta_is_the_full_export(granularity, models, tmp_path):
    base, new = models
    delta = tmp_path / "delta"
    report = write_delta(base, new, delta, granularity=granularity, iteration=8)
    apply_delta(base, delta, tmp_path / "applied")
    assert read_files(tmp_path / "applied") == read_files(new)
    assert (report.changed_tensors, report.changed_elements) == (3, 1 + 2 * 32 + 32)
    model = load_file(new / "model.safetensors")
    assert report.model_bytes == sum(tensor.nbytes for tensor in model.values())
    expected_bytes = {
        "tensor": 2 * (32 * ROWS + 53 * 32 + 32),
        "row": (4 + 2 * ROWS) + 2 * (4 + 2 * 32) + 32 * (4 + 2),
        "element": (1 + 2 * 32 + 32) * (4 + 2),
        "smallest": (4 + 2) + 2 * (4 + 2 * 32) + 32 * 2,
    }
    assert report.delta_bytes == expected_bytes[granularity]


def test_granularity_of_tensors_is_an_ordinary_file(models, tmp_path):
    base, new = models
    write_delta(base, new, tmp_path / "delta", granularity="tensor")
    tensors = load_file(tmp_path / "delta" / "model.safetensors")
    model = load_file(new / "model.safetensors")
    assert tensors.keys() == set(NAMES.values())
    assert all(torch.equal(tensors[name], model[name]) for name in tensors)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_patches_update_the_tensors_of_an_engine(granularity, models, tmp_path):
    base, new = models
    write_delta(base, new, tmp_path / "delta", granularity=granularity)
    tensors = load_file(base / "model.safetensors")
    for patch in read_patches(tensors, tmp_path / "delta"):
        flat = tensors[patch.name].view(-1)
        indices = slice(None) if patch.indices is None else patch.indices
        flat[indices] = patch.values
    for name, tensor in load_file(new / "model.safetensors").items():
        assert torch.equal(tensors[name], tensor), name


def test_signs_of_zeros_and_nans_are_changes(tmp_path):
    base = {"w": torch.tensor([0.0, 1.0, torch.nan]), "v": torch.zeros(2)}
    new = {"w": torch.tensor([-0.0, 1.0, torch.nan]), "v": torch.zeros(2)}
    report = write_delta(base, new, tmp_path / "delta")
    assert (report.changed_tensors, report.changed_elements) == (1, 1)
    (patch,) = read_patches(base, tmp_path / "delta")
    assert patch.values.signbit().all()


def test_wrong_base_is_refused(models, tmp_path):
    base, new = models
    write_delta(base, new, tmp_path / "delta")
    with pytest.raises(ValueError, match="was made from a model with .* start from the right base"):
        apply_delta(new, tmp_path / "delta", tmp_path / "applied")
    assert not (tmp_path / "applied").exists()


def test_damaged_delta_is_refused(models, tmp_path):
    base, new = models
    write_delta(base, new, tmp_path / "delta", granularity="tensor")
    path = tmp_path / "delta" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="model.norm.weight has another digest"):
        apply_delta(base, tmp_path / "delta", tmp_path / "applied")
    (tmp_path / "delta" / "delta.json").unlink()
    with pytest.raises(ValueError, match="not a complete delta"):
        apply_delta(base, tmp_path / "delta", tmp_path / "applied")


def test_other_shapes_are_refused(tmp_path):
    base = {"w": torch.zeros(3), "v": torch.zeros(2)}
    with pytest.raises(ValueError) as error:
        write_delta(base, {"w": torch.zeros(4)}, tmp_path / "delta")
    assert "w: (3,) float32 in the base, (4,) float32 in the new model" in str(error.value)
    assert "v: (2,) float32 in the base, absent in the new model" in str(error.value)
