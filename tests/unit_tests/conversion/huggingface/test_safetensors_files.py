"""Our reader and writer of safetensors compared with the library."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.conversion.huggingface import safetensors_files
from megatron.conversion.huggingface.safetensors_files import SafetensorsWriter, open_safetensors
from megatron.conversion.options import parse_size
from megatron.core.dist_checkpointing.mapping import TensorInfo

TENSORS = {
    "matrix": torch.randn(7, 5),
    "half": torch.randn(4, 3, 2).bfloat16(),
    "long": torch.arange(9),
    "flag": torch.tensor([True, False]),
    "scalar": torch.tensor(3.5, dtype=torch.float16),
    "empty": torch.zeros(0, 4),
    "eight": torch.randn(6).to(torch.float8_e4m3fn),
}


def test_files_of_the_library_are_read(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "a.safetensors")
    stored = open_safetensors(tmp_path / "a.safetensors")
    assert {name: (t.shape, t.dtype) for name, t in stored.items()} == {
        name: (t.shape, t.dtype) for name, t in TENSORS.items()
    }
    for name, tensor in TENSORS.items():
        whole = stored[name].read((0,) * tensor.dim(), tuple(tensor.shape))
        assert whole.dtype == tensor.dtype and torch.equal(whole.float(), tensor.float())


def test_library_reads_our_files(tmp_path: Path) -> None:
    infos = {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in TENSORS.items()}
    with SafetensorsWriter(tmp_path / "b.safetensors", infos) as writer:
        for name, tensor in TENSORS.items():
            writer.write(name, tensor)
    found = load_file(tmp_path / "b.safetensors")
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name].float(), tensor.float()) for name, tensor in TENSORS.items())


def test_rows_are_written_in_any_order(tmp_path: Path) -> None:
    infos = {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in TENSORS.items() if t.dim()}
    with SafetensorsWriter(tmp_path / "c.safetensors", infos) as writer:
        for name in reversed(infos):
            for row in reversed(range(len(TENSORS[name]))):
                writer.write(name, TENSORS[name][row : row + 1], row)
    found = load_file(tmp_path / "c.safetensors")
    assert all(torch.equal(found[name].float(), TENSORS[name].float()) for name in infos)


def test_closing_an_incomplete_file_fails(tmp_path: Path) -> None:
    infos = {"x": TensorInfo((5, 3), torch.float32), "y": TensorInfo((2,), torch.int64)}
    hole = pytest.raises(AssertionError, match=r"36 bytes of .*d\.safetensors were not written")
    with hole, SafetensorsWriter(tmp_path / "d.safetensors", infos) as writer:
        writer.write("x", torch.ones(1, 3))
        writer.write("x", torch.ones(1, 3), 4)
        writer.write("y", torch.arange(2))


def test_rows_of_the_wrong_shape_or_position_are_refused(tmp_path: Path) -> None:
    writer = SafetensorsWriter(tmp_path / "d.safetensors", {"x": TensorInfo((4, 3), torch.float32)})
    for rows, first in ((torch.ones(2, 3), 3), (torch.ones(2, 4), 0), (torch.ones(2, 3).half(), 0)):
        with pytest.raises(AssertionError):
            writer.write("x", rows, first)
    with pytest.raises(ValueError, match="it is truncated or damaged"):
        open_safetensors(tmp_path / "d.safetensors")


@pytest.mark.parametrize("block", [1, 50, 1 << 20])
def test_boxes_equal_slices(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_files, "_MAX_READ", block)
    save_file(TENSORS, tmp_path / "a.safetensors")
    stored = open_safetensors(tmp_path / "a.safetensors")
    assert torch.equal(stored["matrix"].read((2, 1), (4, 3)), TENSORS["matrix"][2:6, 1:4])
    assert torch.equal(stored["matrix"].read((2, 0), (4, 5)), TENSORS["matrix"][2:6])
    assert torch.equal(stored["half"].read((1, 0, 1), (3, 3, 1)), TENSORS["half"][1:4, :, 1:])
    assert torch.equal(stored["long"].read((3,), (2,)), TENSORS["long"][3:5])


def test_parse_size() -> None:
    assert [parse_size(s) for s in ("5GB", "1.5MB", "2 KiB", "77")] == [
        5 * 10**9,
        1_500_000,
        2048,
        77,
    ]
    for bad in ("5 GiGs", "0", "-1MB", "", "MB", "inf", "1e400GB"):
        with pytest.raises(ValueError, match="is not a size"):
            parse_size(bad)
