"""Conversion chains: start -> X -> Y -> Hugging Face equals start -> Hugging Face bitwise."""

import json
import os
import tarfile
from pathlib import Path

import pytest

from megatron.conversion.checkpoint_conversion import WRITERS, convert
from megatron.conversion.opening import open_checkpoint
from megatron.conversion.options import WriteOptions
from tests import GOLDEN

MEGATRON = sorted(
    path for path in GOLDEN.glob("megatron_lm/mcore_*/*/*") if (path / "iter_0000005").is_dir()
)
DEEPSPEED = sorted(GOLDEN.glob("deepspeed_universal/*.tar.xz"))
HUGGING_FACE = sorted(path.parent for path in GOLDEN.glob("hf/*/config.json"))
QUICK = ("gpt_blockqkv_fp32_tp2", "llama")


def name_of(path: Path) -> str:
    return "-".join(path.relative_to(GOLDEN).parts[1:]).removesuffix(".tar.xz")


STARTS = [
    pytest.param(path, id=name_of(path), marks=[] if name_of(path) in QUICK else [pytest.mark.slow])
    for path in MEGATRON + DEEPSPEED + HUGGING_FACE
]


@pytest.fixture(autouse=True)
def without_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip fsync: these tests do not crash, and tiny conversions mostly wait for the disk."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def assert_same_export(expected: Path, found: Path) -> None:
    """Compare all files bytewise except the sidecar's arguments and the tokenizer."""
    names = _files(expected)
    assert names == _files(found), found

    for name in names:
        if name.name == "state.json":
            training = [
                json.loads((root / name).read_text())["training"] for root in (expected, found)
            ]
            assert training[0] == training[1], found
        else:
            assert (expected / name).read_bytes() == (found / name).read_bytes(), found / name


def _files(directory: Path) -> list[Path]:
    paths = (path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
    return sorted(
        path for path in paths if not path.name.startswith(("tokenizer", "generation_config"))
    )


@pytest.mark.parametrize("start", STARTS)
def test_chain_equals_direct_conversion(start: Path, tmp_path: Path) -> None:
    if start.suffix == ".xz":
        with tarfile.open(start) as archive:
            archive.extractall(tmp_path, filter="data")
        start = tmp_path / name_of(start)

    options = WriteOptions(
        optim_sidecar=any(key.startswith("optimizer.") for key in open_checkpoint(start).tensors)
    )
    convert(start, tmp_path / "direct", "hf", options=options)

    for first in WRITERS:
        convert(start, tmp_path / first, first, options=options)
        for second in WRITERS:
            chain = tmp_path / f"{first}-{second}"
            convert(tmp_path / first, chain, second, options=options)
            convert(chain, tmp_path / f"{chain.name}-hf", "hf", options=options)
            assert_same_export(tmp_path / "direct", tmp_path / f"{chain.name}-hf")
