"""The tokenizer's files in every format: carried by each conversion, and found by exports."""

import json
import shutil
from pathlib import Path

import pytest

from megatron.conversion.checkpoint_conversion import convert
from megatron.conversion.opening import open_checkpoint
from megatron.core import object_storage
from megatron.core.object_path import path_of
from megatron.core.run_checkpoint.formats import find_checkpoint
from tests import ROOT
from tests.support.object_server import object_server

MODEL = ROOT / "tests/golden/bridge_0.6.2/llama_fp32/hf"
NAMES = ("tokenizer.json", "tokenizer_config.json")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Hugging Face model with a tokenizer; the tests remove it after the first conversion."""
    directory = tmp_path / "model"
    shutil.copytree(MODEL, directory)
    return directory


def check_files(directory: Path) -> None:
    for name in NAMES:
        assert (directory / name).read_bytes() == (MODEL / name).read_bytes()


def find_directory(root: Path) -> Path:
    checkpoint = find_checkpoint(root)
    assert checkpoint is not None
    return checkpoint.directory


def test_every_conversion_carries_the_tokenizer(model: Path, tmp_path: Path) -> None:
    source = model
    for index, saver in enumerate(["torch_dist", "legacy", "universal", "legacy", "torch_dist"]):
        target = tmp_path / f"{index}_{saver}"
        convert(source, target, saver)
        shutil.rmtree(source)  # the path of the source no longer exists
        source = target
        check_files(find_directory(source) / "tokenizer")
    convert(source, tmp_path / "export", "hf")
    check_files(tmp_path / "export")


def test_object_storage(model: Path, tmp_path: Path) -> None:
    object_storage.open_store.cache_clear()
    with object_server():
        target = path_of("s3://bucket/model")
        convert(model, target, "torch_dist")
        shutil.rmtree(model)
        check_files(find_directory(target) / "tokenizer")
        convert(target, tmp_path / "export", "hf")
        check_files(tmp_path / "export")
        convert(target, tmp_path / "legacy", "legacy")
        check_files(find_directory(tmp_path / "legacy") / "tokenizer")
    object_storage.open_store.cache_clear()


@pytest.mark.parametrize("saver", ["torch_dist", "legacy", "universal"])
def test_files_outside_of_the_checkpoint_are_not_copied(
    model: Path, tmp_path: Path, saver: str
) -> None:
    """A checkpoint may name any file; only those in its own directory are read."""
    secret = tmp_path / "elsewhere"
    secret.mkdir()
    (secret / "tokenizer.json").write_text(json.dumps({"model": {}}))
    convert(model, tmp_path / "run", "torch_dist")
    directory = find_directory(tmp_path / "run")
    for path in (directory / "tokenizer").iterdir():
        path.unlink()
    (directory / "tokenizer" / "tokenizer.json").symlink_to(secret / "tokenizer.json")
    source = open_checkpoint(tmp_path / "run")
    assert source.args["tokenizer_type"] == "HuggingFaceTokenizer"
    try:
        convert(tmp_path / "run", tmp_path / "out", saver)
    except Exception as error:  # links that leave a checkpoint may be refused as a whole
        assert "link" in str(error)
        return
    assert not (find_directory(tmp_path / "out") / "tokenizer" / "tokenizer.json").exists()
