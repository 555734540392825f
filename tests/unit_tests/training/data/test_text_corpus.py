"""Text as --data-path: the tokens and samples of token files, the cache, and errors."""

import gzip
import json
import os
import shutil

import numpy as np
import pytest

from megatron.core.datasets import GPTDatasetConfig, IndexedDataset, build_datasets
from megatron.training.data import text_corpus, token_cache
from megatron.training.data.text_corpus import compute_tokenizer_digest, tokenize_data_paths
from megatron.training.data.tokenizer import TokenizerConfig, build_tokenizer
from tests import ROOT
from tools.preprocess_data import main as preprocess_data

GOLDEN = ROOT / "tests/golden/megatron_lm/data"
NUMBERS = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=256)
RECORDS = [json.loads(line) for line in (GOLDEN / "pysrc_a.jsonl").read_text().splitlines()]


@pytest.fixture
def tokenize(tmp_path):
    """Return a function from a data path to the prefix of its token files."""

    def tokenize_path(path, tokenizer=NUMBERS, **options):
        options = {"seq_length": 16, "data_cache_path": str(tmp_path / "cache")} | options
        config = GPTDatasetConfig(data_path=[str(path)], **options)
        prefixes = tokenize_data_paths(config, build_tokenizer(tokenizer))
        return prefixes[str(path)]

    return tokenize_path


@pytest.fixture
def forbid_tokenizing(monkeypatch):
    """Return a function after which text must be in the cache."""
    return lambda: monkeypatch.setattr(text_corpus, "encode_chunks", None)


def assert_tokens_are_megatrons(prefix, name="pysrc_a"):
    for suffix in ("bin", "idx"):
        expected = (GOLDEN / f"{name}_text_document.{suffix}").read_bytes()
        with open(f"{prefix}.{suffix}", "rb") as file:
            assert file.read() == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_tokens_are_those_of_megatron_lm(tokenize, workers, monkeypatch):
    if workers:
        monkeypatch.setattr(text_corpus, "SMALL_BYTES", 0)
    assert_tokens_are_megatrons(
        tokenize(GOLDEN / "pysrc_a.jsonl", tokenization_workers=workers or None)
    )


def test_compressed_files_and_folders(tokenize, tmp_path):
    """Files of a folder are sorted, and those of other splits are left out."""
    folder = tmp_path / "corpus/data"
    folder.mkdir(parents=True)
    lines = (GOLDEN / "pysrc_a.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "train-1.jsonl").write_bytes(b"".join(lines[5:]))
    (folder / "train-0.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[:5])))
    (folder / "test-0.jsonl").write_bytes(b"not read")
    (folder.parent / "dataset_info.json").write_text("{}")

    assert_tokens_are_megatrons(tokenize(folder.parent))
    assert_tokens_are_megatrons(tokenize(folder / "train-*.jsonl*"))


def test_zstandard_files_of_several_frames(tokenize, tmp_path):
    zstandard = pytest.importorskip("zstandard")
    content = (GOLDEN / "pysrc_a.jsonl").read_bytes()
    compressed = zstandard.compress(content[:30000]) + zstandard.compress(content[30000:])
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(compressed)
    assert_tokens_are_megatrons(tokenize(path))

    path.write_bytes(compressed[:-10])
    with pytest.raises(ValueError, match=r"a\.jsonl\.zst: cannot be read: .*is truncated"):
        tokenize(path)


def test_tables(tokenize, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist([{**record, "blob": b"\xff"} for record in RECORDS])
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    assert_tokens_are_megatrons(tokenize(tmp_path / "a.parquet"))
    with pytest.raises(ValueError, match=r"a\.parquet: the columns are .*'blob', none of them 'b'"):
        tokenize(tmp_path / "a.parquet", json_keys="b")

    parquet.write_table(pyarrow.table({"text": ["1", None]}), tmp_path / "null.parquet")
    with pytest.raises(ValueError, match=r"null\.parquet:2: field 'text' is None, expected a str"):
        tokenize(tmp_path / "null.parquet")


def test_packages_of_files_are_named(tokenize, tmp_path, monkeypatch):
    for package, name in [("pyarrow", "a.parquet"), ("zstandard", "a.jsonl.zst")]:
        monkeypatch.setitem(__import__("sys").modules, package, None)
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(ValueError, match=f"{name}: this file needs .*pip install {package}"):
            tokenize(tmp_path / name)


def test_samples_are_those_of_preprocessed_files(tmp_path):
    """A blend of text has the batches of the same blend of token files."""
    shutil.copytree(GOLDEN, tmp_path / "data")
    arguments = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "256", "--workers", "1"]
    for name in ("pysrc_a", "pysrc_b"):
        preprocess_data(
            ["--input", str(tmp_path / f"data/{name}.jsonl"), "--append-eod", *arguments]
            + ["--output-prefix", str(tmp_path / name)]
        )

    def build(blend):
        config = GPTDatasetConfig(
            seq_length=64,
            data_path=blend,
            split="7,3",
            data_cache_path=str(tmp_path / "cache"),
        )
        tokenizer = build_tokenizer(NUMBERS)
        token_files = tokenize_data_paths(config, tokenizer)
        return build_datasets(config, (200, 4, 0), tokenizer.eod, 257, None, token_files)

    text = build(["30", f"{tmp_path}/data/pysrc_a.jsonl", "70", f"{tmp_path}/data/pysrc_b.jsonl"])
    files = build(
        ["30", f"{tmp_path}/pysrc_a_text_document"] + ["70"] + [f"{tmp_path}/pysrc_b_text_document"]
    )
    for split, expected in zip(text[:2], files[:2], strict=True):
        assert len(split) == len(expected) > 0
        for index in range(len(split)):
            for key, values in expected[index].items():
                assert np.array_equal(split[index][key], values)


def test_text_is_tokenized_once(tokenize, tmp_path, forbid_tokenizing):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "1 2", "title": "3"}\n')
    prefix = tokenize(path)
    others = {tokenize(path, append_eod=False), tokenize(path, json_keys="title")}
    os.utime(path, (1, 1))
    forbid_tokenizing()

    assert tokenize(path) == prefix
    assert prefix not in others
    assert len(others) == 2

    shutil.copy(path, tmp_path / "copy.jsonl")
    assert tokenize(tmp_path / "copy.jsonl") == prefix

    path.write_text('{"text": "1 3", "title": "3"}\n')
    with pytest.raises(TypeError):  # tokenizes again
        tokenize(path)


def test_the_digest_of_an_unchanged_file_is_stored(tokenize, tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "1 2"}\n')
    os.utime(path, (1, 1))
    prefix = tokenize(path)
    with monkeypatch.context() as patch:
        patch.setattr(token_cache, "_hash_content", None)
        assert tokenize(path) == prefix
    path.write_text('{"text": "1 3"}\n')
    os.utime(path, (2, 2))
    assert tokenize(path) != prefix


def test_the_cache_is_next_to_the_data_by_default(tokenize, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "1 2"}\n')
    prefix = tokenize(path, data_cache_path=None)
    assert prefix.startswith(f"{tmp_path}/cache/GPTDataset_indices/")
    config = GPTDatasetConfig(seq_length=2, data_path=[str(path)], split="1")
    build_datasets(config, (1, 0, 0), 256, 257, None, {str(path): prefix})
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == ["GPTDataset_indices"]


def test_an_interrupted_run_leaves_nothing(tokenize, tmp_path, monkeypatch):
    """Temporary files of a run that was killed are removed later."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "1 2"}\n{"text": "a"}\n')

    with pytest.raises(ValueError, match=r"a\.jsonl:2: NullTokenizer reads decimal ids"):
        tokenize(path)
    assert not list((tmp_path / "cache").glob("*-text*"))

    prefix = tokenize(path, skip_bad_lines=1)
    for suffix in ("bin", "idx"):
        os.rename(f"{prefix}.{suffix}", f"{prefix}.{suffix}.tmp-node-1-00")
    os.utime(f"{prefix}.bin.tmp-node-1-00", (1, 1))
    assert tokenize(path, skip_bad_lines=1) == prefix

    left = sorted(os.path.basename(name) for name in (tmp_path / "cache").glob("*-text*"))
    assert [name.partition("-text.")[2] for name in left] == ["bin", "idx", "idx.tmp-node-1-00"]
    assert IndexedDataset(prefix)[0].tolist() == [1, 2, 256]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "", "no document of 1 files has a token of the field 'text'"),
        ("a.jsonl", '{"body": "1"}\n', r"a\.jsonl:1: no field 'text', only 'body': see --json-k"),
        ("a.jsonl", '{"text": "1"}\n{', r"a\.jsonl:2: not JSON"),
        ("a.jsonl.gz", "no gzip", r"a\.jsonl\.gz: cannot be read"),
    ],
)
def test_errors_name_file_line_and_fix(tokenize, tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        tokenize(tmp_path / name)


def test_other_paths_are_errors_with_the_fix(tokenize, tmp_path):
    with pytest.raises(ValueError, match=r"absent\.jsonl: no such file or folder"):
        tokenize(tmp_path / "absent.jsonl")

    (tmp_path / "file").touch()
    (tmp_path / "a.jsonl").write_text('{"text": "1"}\n')
    with pytest.raises(ValueError, match="cannot be stored in .*--data-cache-path"):
        tokenize(tmp_path / "a.jsonl", data_cache_path=str(tmp_path / "file/cache"))

    config = GPTDatasetConfig(seq_length=2, data_path=[str(tmp_path / "misspelled")])
    assert tokenize_data_paths(config, build_tokenizer(NUMBERS)) == {}


def test_the_digest_of_a_tokenizer_covers_its_files(tmp_path):
    shutil.copytree(ROOT / "tests/golden/hf/llama", tmp_path / "llama")
    digests = set()
    for name in ("llama", "llama/tokenizer.json"):
        config = TokenizerConfig(
            tokenizer_type="HuggingFaceTokenizer",
            tokenizer_model=str(tmp_path / name),
        )
        for _ in range(2):
            tokenizer = build_tokenizer(config)
            digests.add(compute_tokenizer_digest(tokenizer))
        path = tmp_path / "llama/tokenizer_config.json"
        settings = json.loads(path.read_text())
        path.write_text(json.dumps({**settings, "note": name}))
        digests.add(compute_tokenizer_digest(tokenizer))

    assert len(digests) == 4
