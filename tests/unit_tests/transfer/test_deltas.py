"""Deltas between exports against full exports."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
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


def test_patches_read_no_tensor_of_the_engine(models, tmp_path):
    base, new = models
    write_delta(base, new, tmp_path / "delta")
    tensors = load_file(base / "model.safetensors")
    without_values = {name: tensor.to("meta") for name, tensor in tensors.items()}
    patches = read_patches(without_values, tmp_path / "delta")
    assert {patch.name for patch in patches} == set(NAMES.values())


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bool, torch.uint8, torch.float64])
def test_deltas_of_any_dtype_and_shape(dtype, granularity, tmp_path):
    base = {
        "matrix": torch.zeros(5, 3, dtype=dtype),
        "scalar": torch.zeros((), dtype=dtype),
        "empty": torch.zeros(0, 3, dtype=dtype),
        "unchanged": torch.zeros(2, 0, 3, dtype=dtype),
    }
    new = {name: tensor.clone() for name, tensor in base.items()}
    new["matrix"][3, 1:] = torch.ones(2).to(dtype)
    new["scalar"].fill_(1)
    for name, tensors in (("base", base), ("new", new)):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    report = write_delta(base, new, tmp_path / "delta", granularity=granularity)
    assert (report.changed_tensors, report.changed_elements) == (2, 3)

    apply_delta(tmp_path / "base", tmp_path / "delta", tmp_path / "applied")
    applied = load_file(tmp_path / "applied" / "model.safetensors")
    assert applied.keys() == new.keys()
    for name, tensor in new.items():
        assert torch.equal(applied[name].double(), tensor.double()), name


def test_delta_without_changes(models, tmp_path):
    base, _ = models
    report = write_delta(base, base, tmp_path / "delta")
    assert (report.changed_tensors, report.delta_bytes) == (0, 0)
    assert not list(read_patches(base, tmp_path / "delta"))
    apply_delta(base, tmp_path / "delta", tmp_path / "applied")
    assert read_files(tmp_path / "applied") == read_files(base)


# ---- Failures ----


@contextmanager
def limited_file_size(num_bytes: int) -> Iterator[None]:
    """Let writes fail, as those to a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_failed_writes_leave_nothing(models, tmp_path):
    base, new = models
    names = {path.name for path in tmp_path.iterdir()}
    with limited_file_size(100), pytest.raises(OSError, match="too large"):
        write_delta(base, new, tmp_path / "delta")
    assert {path.name for path in tmp_path.iterdir()} == names

    write_delta(base, new, tmp_path / "delta")
    with limited_file_size(100), pytest.raises(OSError, match="too large"):
        apply_delta(base, tmp_path / "delta", tmp_path / "applied")
    assert {path.name for path in tmp_path.iterdir()} == names | {"delta"}


def test_directory_with_content_is_refused(models, tmp_path):
    base, new = models
    files = read_files(base)
    with pytest.raises(ValueError, match="base is not empty"):
        write_delta(base, new, base)

    write_delta(base, new, tmp_path / "delta")
    with pytest.raises(ValueError, match="base is not empty"):
        apply_delta(base, tmp_path / "delta", base)
    assert read_files(base) == files


def test_url_is_refused(models, tmp_path):
    base, new = models
    with pytest.raises(ValueError, match="s3://bucket/delta: .* not in object storage"):
        write_delta(base, new, "s3://bucket/delta")


def test_other_weights_of_the_base_are_left_out(models, tmp_path):
    base, new = models
    write_delta(base, new, tmp_path / "delta")
    names = {path.name for path in base.iterdir()}
    for name in ("consolidated.00.pth", "model.gguf", "__0_0.distcp", ".metadata"):
        (base / name).write_bytes(b"old weights")
    (base / "tokenizer.model").write_bytes(b"tokens")
    apply_delta(base, tmp_path / "delta", tmp_path / "applied")
    assert read_files(tmp_path / "applied").keys() == names | {"tokenizer.model"}


def test_links_out_of_the_base_are_refused(models, tmp_path):
    base, new = models
    write_delta(base, new, tmp_path / "delta")
    (tmp_path / "secret").write_text("password")
    (base / "notes.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="outside of the checkpoint"):
        apply_delta(base, tmp_path / "delta", tmp_path / "applied")
    assert not (tmp_path / "applied").exists()


def test_wrong_base_is_refused(models, tmp_path):
    base, new = models
    write_delta(base, new, tmp_path / "delta")
    with pytest.raises(ValueError, match="was made from a model with .* start from the right base"):
        apply_delta(new, tmp_path / "delta", tmp_path / "applied")
    assert not (tmp_path / "applied").exists()


def test_delta_without_metadata_is_refused(models, tmp_path):
    base, new = models
    write_delta(base, new, tmp_path / "delta")
    (tmp_path / "delta" / "delta.json").unlink()
    with pytest.raises(ValueError, match="not a complete delta"):
        apply_delta(base, tmp_path / "delta", tmp_path / "applied")


def test_changed_values_are_refused(models, tmp_path):
    base, new = models
    write_delta(base, new, tmp_path / "delta", granularity="tensor")
    path = tmp_path / "delta" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, path)

    with pytest.raises(CheckpointError, match="model.norm.weight has another digest"):
        apply_delta(base, tmp_path / "delta", tmp_path / "applied")


def change_metadata(delta: Path, name: str, unit: int | None, is_listed: bool) -> None:
    path = delta / "delta.json"
    metadata = json.loads(path.read_text())
    entry = metadata["tensors"].pop(name, {"digest": ""})
    if is_listed:
        metadata["tensors"][name] = {**entry, "unit": unit}
    path.write_text(json.dumps(metadata))


@pytest.mark.parametrize(
    ("name", "unit", "is_listed"),
    [(NAMES[HEAD], 32, False), ("absent", 1, True)],
    ids=["missing tensor", "additional tensor"],
)
def test_other_lists_of_tensors_are_refused(name, unit, is_listed, models, tmp_path):
    base, new = models
    write_delta(base, new, tmp_path / "delta")
    change_metadata(tmp_path / "delta", name, unit, is_listed)
    with pytest.raises(CheckpointError, match="the changed tensors are not those of the new model"):
        apply_delta(base, tmp_path / "delta", tmp_path / "applied")


@pytest.mark.parametrize("unit", [2**53 - 1, 2, 1, None])
def test_wrong_units_are_refused(unit, models, tmp_path):
    base, new = models
    write_delta(base, new, tmp_path / "delta", granularity="row")
    change_metadata(tmp_path / "delta", NAMES[HEAD], unit, is_listed=True)
    check_refused(base, tmp_path)


DAMAGED_INDICES = {
    "twice": [7, 7],
    "unsorted": [50, 7],
    "negative": [-1, 50],
    "too large": [7, 53],
    "too many": [7, 8, 50],
    "dtype": [7.0, 50.0],
    "dimensions": [[7], [50]],
}


@pytest.mark.parametrize("case", DAMAGED_INDICES)
def test_wrong_positions_are_refused(case, models, tmp_path):
    base, new = models
    write_delta(base, new, tmp_path / "delta", granularity="row")
    path = tmp_path / "delta" / "model.safetensors"
    tensors = load_file(path)
    index = torch.tensor(DAMAGED_INDICES[case])
    if index.dtype == torch.int64:
        index = index.int()
    tensors[NAMES[HEAD] + ".delta_index"] = index
    save_file(tensors, path)
    check_refused(base, tmp_path)


def check_refused(base: Path, directory: Path) -> None:
    """Assert that a delta is refused by all readers."""
    message = "the values of lm_head.weight do not fit|lacks lm_head.weight"
    with pytest.raises(CheckpointError, match=message):
        list(read_patches(base, directory / "delta"))
    with pytest.raises(CheckpointError, match=message):
        apply_delta(base, directory / "delta", directory / "applied")
    assert not (directory / "applied").exists()


def test_other_shapes_are_refused(tmp_path):
    base = {"w": torch.zeros(3), "v": torch.zeros(2)}
    with pytest.raises(ValueError) as error:
        write_delta(base, {"w": torch.zeros(4)}, tmp_path / "delta")
    assert "w: (3,) float32 in the base, (4,) float32 in the new model" in str(error.value)
    assert "v: (2,) float32 in the base, absent in the new model" in str(error.value)
