"""Archives of NeMo, packed and unpacked."""

import dataclasses
import gzip
import io
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from megatron.conversion.checkpoint_conversion import convert
from megatron.conversion.opening import open_checkpoint
from megatron.core.run_checkpoint.formats import find_checkpoint
from megatron.core.run_checkpoint.tokenizer_files import read_tokenizer_files
from megatron.training.data.text_corpus import compute_tokenizer_digest
from megatron.training.data.tokenizer import Tokenizer, TokenizerConfig
from megatron.training.data.tokenizer_libraries import build_gpt2, build_sentencepiece
from tests import ROOT
from tests.support.compare import read_all
from tests.support.nemo import check_nemo

GOLDEN = ROOT / "tests/golden/nemo"
# Files in checkpoints -> files in the archive
TOKENIZERS = {
    "llama": {"tokenizer/tokenizer.model": "0123_tokenizer.model"},
    "gpt": {"tokenizer/vocab.json": "4567_vocab.json", "tokenizer/merges.txt": "89ab_merges.txt"},
}


@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_model_is_that_of_megatron_core(name: str, tmp_path: Path) -> None:
    check_nemo(GOLDEN / f"{name}.nemo", tmp_path)


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize(("name", "build"), [("llama", build_sentencepiece), ("gpt", build_gpt2)])
def test_tokenizer_is_that_of_runs_and_exports(
    name: str, build: Callable[[TokenizerConfig], Tokenizer], is_packed: bool, tmp_path: Path
) -> None:
    directory = unpack(name, tmp_path / "model")
    archive = GOLDEN / f"{name}.nemo" if is_packed else directory
    source = open_checkpoint(archive)
    fields = dataclasses.fields(TokenizerConfig)
    names = {field.name for field in fields}
    tokenizer = build(TokenizerConfig(**{k: v for k, v in source.args.items() if k in names}))
    assert compute_tokenizer_digest(tokenizer)

    # Exports have its files.
    convert(archive, tmp_path / "hf", "hf")
    exported = AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "def main() -> None:"

    assert exported.encode(text, add_special_tokens=False) == tokenizer.tokenize(text)
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text

    # Checkpoints of runs and of convert.py have them, too.
    files = read_tokenizer_files(source.args)
    convert(archive, tmp_path / "run", "torch_dist")
    assert len(files) == len(TOKENIZERS[name])
    for file, original in TOKENIZERS[name].items():
        assert files[file] == (directory / original).read_bytes()
        assert (tmp_path / "run/release" / file).read_bytes() == files[file]


def test_tokenizers_with_added_tokens_are_reported(tmp_path: Path) -> None:
    directory = unpack("llama", tmp_path / "model")
    path = directory / "model_config.yaml"
    content = path.read_text()
    path.write_text(content.replace("tokenizer:\n", "tokenizer:\n  special_tokens: {a: <a>}\n"))
    (note,) = [note for note in open_checkpoint(directory).unused if "tokenizer" in note]
    assert "0123_tokenizer.model with special_tokens (extract it from the archive" in note

    path.write_text(content.replace("nemo:0123", "nemo:../0123"))
    with pytest.raises(ValueError, match="must be the name of a file, without a path"):
        open_checkpoint(directory)


def test_null_fields_are_defaults(tmp_path: Path) -> None:
    directory = unpack("gpt", tmp_path / "model")
    assert "kv_channels: null" in (directory / "model_config.yaml").read_text()
    assert "kv_channels" not in open_checkpoint(directory).args


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
    assert checkpoint is not None
    assert checkpoint.format == "nemo"


def test_other_weights_are_refused(tmp_path: Path) -> None:
    directory = unpack("gpt", tmp_path / "model")
    (directory / "model_weights/.metadata").unlink()

    with pytest.raises(
        ValueError,
        match=r"only weights in model_weights/ in the format torch_dist",
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
