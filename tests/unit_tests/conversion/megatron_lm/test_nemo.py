"""Archives of NeMo, packed and unpacked."""

import gzip
import io
import shutil
import tarfile
from pathlib import Path

import pytest
import torch

from megatron.conversion.opening import open_checkpoint
from megatron.core.run_checkpoint.formats import find_checkpoint
from tests import ROOT
from tests.support.compare import read_all
from tests.support.nemo import check_archive

GOLDEN = ROOT / "tests/golden/nemo"


@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_model_is_that_of_megatron_core(name: str, tmp_path: Path) -> None:
    check_archive(GOLDEN / f"{name}.nemo", tmp_path)
    source = open_checkpoint(GOLDEN / f"{name}.nemo")
    assert source.unused[0].startswith("the tokenizer 0123_tokenizer.model (extract it")


def unpack(name: str, directory: Path) -> Path:
    with tarfile.open(GOLDEN / f"{name}.nemo") as archive:
        archive.extractall(directory, filter="data")
    return directory


def test_unpacked_archive_is_the_same_model(tmp_path: Path) -> None:
    directory = unpack("gpt", tmp_path / "model")
    packed = read_all(open_checkpoint(GOLDEN / "gpt.nemo"))
    unpacked = read_all(open_checkpoint(directory))
    assert packed.keys() == unpacked.keys()
    assert all(torch.equal(packed[key], unpacked[key]) for key in packed)


def test_archive_is_the_checkpoint_of_a_run() -> None:
    checkpoint = find_checkpoint(GOLDEN / "gpt.nemo")
    assert checkpoint is not None and checkpoint.format == "nemo"


def test_other_weights_are_refused(tmp_path: Path) -> None:
    directory = unpack("gpt", tmp_path / "model")
    (directory / "model_weights/.metadata").unlink()
    with pytest.raises(
        ValueError, match=r"only weights in model_weights/ in the format torch_dist"
    ):
        open_checkpoint(directory)
    path = tmp_path / "ranks.nemo"
    with tarfile.open(path, "w:") as archive:
        archive.add(directory / "model_config.yaml", "./model_config.yaml")
        archive.addfile(tarfile.TarInfo("./mp_rank_00/model_weights.ckpt"), io.BytesIO())
    with pytest.raises(ValueError, match=r"not zarr or model_weights.ckpt \(it contains model_con"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("mcore_gpt: false", "was trained with mcore_gpt = False"),
        ("transformer_block_type: normformer", "was trained with transformer_block_type"),
        ("activation: reglu", "activation 'reglu' is not supported: only"),
        ("activation: !!python/name:os.system ''", "tags are not supported"),
    ],
)
def test_other_models_are_refused(line: str, reason: str, tmp_path: Path) -> None:
    directory = unpack("gpt", tmp_path / "model")
    path = directory / "model_config.yaml"
    field, _, _ = line.partition(":")
    lines = [old for old in path.read_text().splitlines() if not old.startswith(f"{field}:")]
    path.write_text("\n".join([*lines, line]))
    with pytest.raises(ValueError, match=reason):
        open_checkpoint(directory)


def test_damaged_archives_are_refused(tmp_path: Path) -> None:
    content = (GOLDEN / "gpt.nemo").read_bytes()
    path = tmp_path / "model.nemo"
    cases = {
        b"": "is not an archive, or damaged: empty file",
        gzip.compress(content): r"is compressed, so its files cannot be read in place: unpack it",
        content[:4096]: "truncated|damaged|no model_config.yaml",
        content.replace(b"ustar", b"ustax"): "is not an archive, or damaged",
    }
    for damaged, reason in cases.items():
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=reason):
            open_checkpoint(path)


def test_links_and_outer_paths_in_archives_are_ignored(tmp_path: Path) -> None:
    directory = unpack("gpt", tmp_path / "model")
    shutil.copy(GOLDEN / "gpt.nemo", tmp_path / "model.nemo")
    (directory / "model_config.yaml").unlink()
    (directory / "model_config.yaml").symlink_to(tmp_path / "secret.yaml")
    path = tmp_path / "linked.nemo"
    with tarfile.open(path, "w:") as archive:
        archive.add(directory, arcname=".")
        archive.add(GOLDEN / "gpt.npz", arcname="../model_config.yaml")
    with pytest.raises(ValueError, match="linked.nemo has no model_config.yaml"):
        open_checkpoint(path)
