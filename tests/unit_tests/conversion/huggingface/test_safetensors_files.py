"""Our reader and writer of safetensors compared with the library."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.conversion.huggingface import safetensors_files
from megatron.conversion.huggingface.safetensors_files import SafetensorsWriter, open_safetensors
from megatron.conversion.options import parse_size
from megatron.core.dist_checkpointing.mapping import TensorInfo
from tests.support.boxes import index_box

TENSORS = {
    "matrix": torch.randn(7, 5),
    "half": torch.randn(4, 3, 2).bfloat16(),
    "long": torch.arange(9),
    "flag": torch.tensor([True, False]),
    "scalar": torch.tensor(3.5, dtype=torch.float16),
    "empty": torch.zeros(0, 4),
    "eight": torch.randn(6).to(torch.float8_e4m3fn),
}
INFOS = {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in TENSORS.items()}


def assert_equal(actual: torch.Tensor, name: str) -> None:
    """Compare with a tensor of TENSORS; torch does not compare elements of fp8."""
    expected = TENSORS[name]
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.float(), expected.float())


def test_files_of_the_library_are_read(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "a.safetensors")
    stored_tensors = open_safetensors(tmp_path / "a.safetensors")
    assert stored_tensors.keys() == TENSORS.keys()

    for name, tensor in stored_tensors.items():
        assert tensor.dtype == INFOS[name].dtype
        assert tensor.shape == INFOS[name].shape
        origin = (0,) * len(tensor.shape)
        whole = tensor.read(origin, tensor.shape)
        assert_equal(whole, name)


def test_library_reads_our_files(tmp_path: Path) -> None:
    with SafetensorsWriter(tmp_path / "b.safetensors", INFOS) as writer:
        for name, tensor in TENSORS.items():
            writer.write(name, tensor)
    loaded = load_file(tmp_path / "b.safetensors")
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in loaded.items():
        assert_equal(tensor, name)


def test_rows_are_written_in_any_order(tmp_path: Path) -> None:
    infos = dict(INFOS)
    del infos["scalar"]

    with SafetensorsWriter(tmp_path / "c.safetensors", infos) as writer:
        for name in reversed(infos):
            rows = TENSORS[name].split(1)
            for index in reversed(range(len(TENSORS[name]))):
                writer.write(name, rows[index], index)

    for name, tensor in load_file(tmp_path / "c.safetensors").items():
        assert_equal(tensor, name)


def test_closing_an_incomplete_file_fails(tmp_path: Path) -> None:
    infos = {"x": TensorInfo((5, 3), torch.float32), "y": TensorInfo((2,), torch.int64)}
    hole = pytest.raises(AssertionError, match=r"36 bytes of .*d\.safetensors were not written")
    with hole, SafetensorsWriter(tmp_path / "d.safetensors", infos) as writer:
        writer.write("x", torch.ones(1, 3))
        writer.write("x", torch.ones(1, 3), 4)
        writer.write("y", torch.arange(2))


def test_rows_of_the_wrong_shape_or_position_are_refused(tmp_path: Path) -> None:
    infos = {"x": TensorInfo((4, 3), torch.float32)}
    writer = SafetensorsWriter(tmp_path / "d.safetensors", infos)
    rows = torch.ones(2, 3)
    too_wide = torch.ones(2, 4)
    wrong_writes = [(rows, 3), (too_wide, 0), (rows.half(), 0)]

    for wrong_rows, first in wrong_writes:
        with pytest.raises(AssertionError):
            writer.write("x", wrong_rows, first)
    with pytest.raises(ValueError, match="it is truncated or damaged"):
        open_safetensors(tmp_path / "d.safetensors")


@pytest.mark.parametrize("block", [1, 50, 1 << 20])
def test_boxes_equal_slices(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_files, "_MAX_READ", block)
    save_file(TENSORS, tmp_path / "a.safetensors")
    stored_tensors = open_safetensors(tmp_path / "a.safetensors")
    boxes = [
        ("matrix", (2, 1), (4, 3)),
        ("matrix", (2, 0), (4, 5)),
        ("half", (1, 0, 1), (3, 3, 1)),
        ("long", (3,), (2,)),
    ]
    for name, offset, shape in boxes:
        actual = stored_tensors[name].read(offset, shape)
        expected = TENSORS[name][index_box(offset, shape)]
        assert torch.equal(actual, expected)


def test_parse_size() -> None:
    sizes = {"5GB": 5 * 10**9, "1.5MB": 1_500_000, "2 KiB": 2048, "77": 77}
    for text, expected in sizes.items():
        assert parse_size(text) == expected
    for bad in ("5 GiGs", "0", "-1MB", "", "MB", "inf", "1e400GB"):
        with pytest.raises(ValueError, match="is not a size"):
            parse_size(bad)
