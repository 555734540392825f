"""Files of implausible sizes, which sparse files have at no cost, are refused before they
are read.
"""

import io
import shutil
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron.conversion.megatron_lm.torch_dist_writer import write_torch_dist
from megatron.core.dist_checkpointing import CheckpointError, load_common, read_metadata
from megatron.core.dist_checkpointing.format.checksums import read_checksums
from megatron.core.dist_checkpointing.verification import verify
from megatron.core.run_checkpoint.formats import find_checkpoint
from megatron.core.safe_files import safe_load
from megatron.core.safe_files.reading import open_file, read_json
from tests.support.limited_process import run_limited
from tests.support.memory_source import LLAMA_ARGS, random_source

MEMORY = 192 << 20
SECONDS = 5


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pristine") / "run"
    write_torch_dist(random_source(LLAMA_ARGS | {"consumed_train_samples": 28}), root)
    checkpoint = find_checkpoint(root)
    assert checkpoint is not None
    return checkpoint.directory


@pytest.fixture
def checkpoint(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "checkpoint"))


def make_sparse(path: Path, size: int, tail: bytes = b"") -> None:
    """Extend a file to `size` bytes without using disk space."""
    with path.open("r+b") as file:
        file.truncate(size)
        file.seek(size - len(tail))
        file.write(tail)


READERS = {
    ".metadata": read_metadata,
    "common.pt": partial(load_common, verify=False),
    "checksums.bin": read_checksums,
}


@pytest.mark.parametrize("size", [3 << 30, 1 << 40])
@pytest.mark.parametrize("name", READERS)
def test_sparse_files_are_refused(name: str, size: int, checkpoint: Path) -> None:
    make_sparse(checkpoint / name, size)

    def read() -> str:
        with pytest.raises(CheckpointError) as caught:
            READERS[name](checkpoint)
        report = verify(checkpoint)
        assert not report.ok
        return str(caught.value)

    result = run_limited(read, MEMORY, SECONDS)
    assert f"{name} has {size} bytes, but at most {64 << 20} are plausible" in result, result
    assert "MEGATRON_MAX_FILE_SIZE" in result


def test_limit_can_be_raised(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data of the checkpoint, or an environment variable, justify a larger file."""
    large = checkpoint / "common.pt"
    make_sparse(large, 65 << 20)
    with open_file(large) as file, pytest.raises(CheckpointError, match="plausible"):
        file.check_size()
    monkeypatch.setenv("MEGATRON_MAX_FILE_SIZE", str(66 << 20))
    with open_file(large) as file:
        file.check_size()
    monkeypatch.delenv("MEGATRON_MAX_FILE_SIZE")
    (checkpoint / "__0_1.distcp").write_bytes(b"x" * (66 << 20))
    with open_file(large) as file:
        file.check_size()


def test_size_of_pickle_inside_a_sparse_archive_is_limited(tmp_path: Path) -> None:
    """The directory of the archive is intact, and describes a pickle of 4 GiB."""
    buffer = io.BytesIO()
    torch.save({"iteration": 1}, buffer)
    content = bytearray(buffer.getvalue())
    with zipfile.ZipFile(buffer) as archive:
        entry = archive.getinfo("archive/data.pkl")
    # Grow the record: the directory follows after a hole.
    path = tmp_path / "model_optim_rng.pt"
    grown = bytes(content).replace(
        entry.file_size.to_bytes(4, "little") * 2, (0xFFFFFFF0).to_bytes(4, "little") * 2
    )
    path.write_bytes(grown)
    end = len(grown) - zipfile.sizeEndCentDir
    tail = grown[content.index(b"PK\1\2") : end]
    footer = bytearray(grown[end:])
    start = (4 << 30) - 100_000
    footer[16:20] = start.to_bytes(4, "little")
    make_sparse(path, start + len(tail) + len(footer), tail + bytes(footer))

    def read() -> str:
        with pytest.raises(CheckpointError) as caught:
            safe_load(path)
        return str(caught.value)

    result = run_limited(read, (4 << 30) + MEMORY, SECONDS)
    assert "record data.pkl has 4294967280 bytes, at most 268435456 are plausible" in result


@pytest.mark.parametrize("name", ["__0_0.distcp", "metadata.json"])
def test_other_sparse_files_are_refused(name: str, checkpoint: Path) -> None:
    make_sparse(checkpoint / name, 1 << 40)
    result = run_limited(lambda: "\n".join(verify(checkpoint).problems), MEMORY, SECONDS)
    assert name in result
    assert "Traceback" not in result


def test_size_and_nesting_of_json_are_limited(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("[" * 200 + "]" * 200)
    read_json(path)
    path.write_text("[" * 201 + "]" * 201)
    with pytest.raises(CheckpointError, match="nested more than 200 deep"):
        read_json(path)
    make_sparse(path, (256 << 20) + 1)

    def read() -> str:
        with pytest.raises(CheckpointError) as caught:
            read_json(path)
        return str(caught.value)

    assert "has 268435457 bytes, more than the 268435456" in run_limited(read, MEMORY, SECONDS)
