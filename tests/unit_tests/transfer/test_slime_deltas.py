"""Deltas in slime's files. `tests/interop/slime_check.py` compares them with slime's own code."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron.core.dist_checkpointing import CheckpointError
from megatron.transfer.deltas import apply_delta
from megatron.transfer.slime_deltas import ENCODINGS, write_slime_delta
from tests.unit_tests.transfer.test_deltas import HEAD, NAMES, models, read_files

zstandard = pytest.importorskip("zstandard")
__all__ = ["models"]  # fixture


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("max_shard_size", [1 << 30, 200])
def test_applied_delta_is_the_full_export(encoding, max_shard_size, models, tmp_path):
    base, new = models
    delta = tmp_path / "weight_v000003"
    report = write_slime_delta(
        base, new, delta, version=3, encoding=encoding, max_shard_size=max_shard_size
    )
    apply_delta(base, delta, tmp_path / "applied")
    assert read_files(tmp_path / "applied") == read_files(new)
    assert (report.changed_tensors, report.changed_elements) == (3, 1 + 2 * 32 + 32)
    assert report.delta_bytes < report.model_bytes / 20


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_files_have_the_format_of_slime(encoding, models, tmp_path):
    base, new = models
    delta = tmp_path / "delta"
    write_slime_delta(base, new, delta, version=3, encoding=encoding)
    index = json.loads((delta / "model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {
            "version": "000003",
            "base_version": "000002",
            "delta_encoding": encoding,
            "compression_format": "zstd",
            "checksum_format": "xxh3-128",
        },
        "weight_map": dict.fromkeys(NAMES.values(), "model-00000.safetensors"),
    }
    name = NAMES[HEAD]
    with safe_open(delta / "model-00000.safetensors", "pt") as file:
        stored = file.get_tensor(name).numpy().tobytes()
        checksum = file.metadata()[name]
    old, changed = (
        load_file(path / "model.safetensors")[name].view(torch.uint8).reshape(-1).numpy()
        for path in (base, new)
    )
    assert checksum == xxhash.xxh3_128(changed).hexdigest()
    # One shot, which needs the size in the frame
    content = np.frombuffer(zstandard.ZstdDecompressor().decompress(stored), dtype=np.uint8)
    if encoding == "xor":
        assert np.array_equal(content, old ^ changed)
    else:
        positions = np.flatnonzero(old != changed)
        assert np.array_equal(content[:4].view("<u4"), [len(positions)])
        assert np.array_equal(content[4 : 4 + 4 * len(positions)].view("<u4"), positions)
        assert np.array_equal(content[4 + 4 * len(positions) :], changed[positions])


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bool, torch.float64])
def test_deltas_of_any_dtype_and_shape(dtype, encoding, tmp_path):
    base = {
        "matrix": torch.zeros(5, 3, dtype=dtype),
        "scalar": torch.zeros((), dtype=dtype),
        "empty": torch.zeros(0, 3, dtype=dtype),
    }
    new = {name: tensor.clone() for name, tensor in base.items()}
    new["matrix"][3, 1:] = torch.ones(2).to(dtype)
    new["scalar"].fill_(1)
    (tmp_path / "base").mkdir()
    save_file(base, tmp_path / "base" / "model.safetensors")
    report = write_slime_delta(base, new, tmp_path / "delta", version=1, encoding=encoding)
    assert (report.changed_tensors, report.changed_elements) == (2, 3)
    apply_delta(tmp_path / "base", tmp_path / "delta", tmp_path / "applied")
    applied = load_file(tmp_path / "applied" / "model.safetensors")
    for name, tensor in new.items():
        assert torch.equal(applied[name].double(), tensor.double()), name


def test_delta_without_changes(models, tmp_path):
    base, _ = models
    report = write_slime_delta(base, base, tmp_path / "delta", version=1)
    assert (report.changed_tensors, report.delta_bytes) == (0, 0)
    apply_delta(base, tmp_path / "delta", tmp_path / "applied")
    assert read_files(tmp_path / "applied") == read_files(base)


def test_overwriting_twice_is_the_same(models, tmp_path):
    base, new = models
    write_slime_delta(base, new, tmp_path / "delta", version=1, encoding="overwrite")
    apply_delta(new, tmp_path / "delta", tmp_path / "applied")
    assert read_files(tmp_path / "applied") == read_files(new)


def test_xor_of_another_base_is_refused(models, tmp_path):
    base, new = models
    write_slime_delta(base, new, tmp_path / "delta", version=1)
    with pytest.raises(
        CheckpointError, match="has another checksum .* start from the right version"
    ):
        apply_delta(new, tmp_path / "delta", tmp_path / "applied")
    assert not (tmp_path / "applied").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"version": 0}, "version 0 must be at least 1"),
        ({"version": 1, "encoding": "deltas"}, "encoding 'deltas' is none of xor, overwrite"),
    ],
)
def test_wrong_options_are_refused(options, message, models, tmp_path):
    base, new = models
    with pytest.raises(ValueError, match=message):
        write_slime_delta(base, new, tmp_path / "delta", **options)
    assert not (tmp_path / "delta").exists()


def compress(*numbers: int) -> bytes:
    content = np.array(numbers[:-1], dtype="<u4").tobytes() + bytes(numbers[-1:])
    return zstandard.ZstdCompressor().compress(content)


ZEROS = bytes(1 << 24)
DAMAGED = {
    "not compressed": ("xor", b"no frame", "is damaged"),
    "bomb": ("xor", zstandard.ZstdCompressor().compress(ZEROS), "has another checksum"),
    "bomb of positions": ("overwrite", zstandard.ZstdCompressor().compress(ZEROS), "checksum"),
    "empty": ("overwrite", zstandard.ZstdCompressor().compress(b""), "has another checksum"),
    "too many": ("overwrite", compress(2, 0, 1), "has another checksum"),
    "outside": ("overwrite", compress(1, 2 * 53 * 32, 1), "has another checksum"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_refused(case, models, tmp_path):
    encoding, content, message = DAMAGED[case]
    base, new = models
    write_slime_delta(base, new, tmp_path / "delta", version=1, encoding=encoding)
    path = tmp_path / "delta" / "model-00000.safetensors"
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors[NAMES[HEAD]] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    save_file(tensors, path, metadata)
    check_refused(base, tmp_path, message)


def check_refused(base: Path, directory: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        apply_delta(base, directory / "delta", directory / "applied")
    assert not (directory / "applied").exists()


def test_unknown_names_are_refused(models, tmp_path):
    base, new = models
    write_slime_delta(
        {"other": torch.zeros(2)}, {"other": torch.ones(2)}, tmp_path / "delta", version=1
    )
    check_refused(base, tmp_path, "changes other: it is not in the base")
