"""Token files: round trips, equality with Megatron-LM's files, and rejection of damaged files."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets import IndexedDataset, token_dtype
from megatron.core.datasets.indexed_dataset_builder import IndexedDatasetBuilder
from tests import ROOT

GOLDEN = ROOT / "tests/golden" / "megatron_lm" / "data"


def write(prefix: Path, sequences: list[list[int]], dtype: str = "uint16") -> Path:
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for sequence in sequences:
            builder.add(sequence)
    return prefix


def edit(path: Path, offset: int, data: bytes) -> None:
    contents = bytearray(path.read_bytes())
    contents[offset : offset + len(data)] = data
    path.write_bytes(contents)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
@pytest.mark.parametrize("use_mmap", [True, False])
def test_round_trip(tmp_path, dtype, use_mmap):
    sequences = [[1, 2, 3], [127], [5] * 100, [0, 9]]
    dtype = np.dtype(dtype)
    prefix = write(tmp_path / "d", sequences, dtype)
    dataset = IndexedDataset(prefix, use_mmap)

    assert dataset.dtype == dtype
    assert len(dataset) == 4

    for index, sequence in enumerate(sequences):
        tokens = dataset[index]
        assert tokens.dtype == dtype
        assert tokens.tolist() == sequence

    assert dataset.read(2, 3, 4).tolist() == [5] * 4
    assert dataset.read(0, 1).tolist() == [2, 3]
    assert dataset.read(0, 3).tolist() == []
    assert dataset.documents.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(IndexError, match="sequence 4 .* has 4"):
        dataset[4]


def test_replaced_file_does_not_change_blocks_of_an_open_dataset(tmp_path):
    dataset = IndexedDataset(write(tmp_path / "d", [[1, 2, 3], [4, 5]]))
    blocks = dataset.read_blocks(2)
    write(tmp_path / "longer", [[9] * 100])
    (tmp_path / "longer.bin").rename(tmp_path / "d.bin")
    assert dataset.read_blocks(2) == blocks == np.array([1, 2, 3, 4, 5] * 2, "uint16").tobytes()


def test_documents_of_several_sequences(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "d", np.int32) as builder:
        builder.add([1, 2, 3], [1, 2])
        builder.add([4, 5, 6, 7], [2, 1, 1], [1, 2])
        assert builder.num_documents == 3
        assert builder.num_sequences == 5
        assert builder.num_tokens == 7

    dataset = IndexedDataset(tmp_path / "d")
    sequences = [dataset.read(index).tolist() for index in range(5)]
    assert sequences == [[1], [2, 3], [4, 5], [6], [7]]
    assert dataset.documents.tolist() == [0, 2, 3, 5]


def test_pickled_dataset_opens_its_files(tmp_path):
    for use_mmap in (True, False):
        dataset = IndexedDataset(write(tmp_path / "d", [[1, 2], [3] * 50_000]), use_mmap)
        pickled = pickle.dumps(dataset)
        assert len(pickled) < 1000
        assert np.array_equal(pickle.loads(pickled)[1], dataset[1])


@pytest.mark.parametrize("name", ["pysrc_a_text_document", "pysrc_b_text_document"])
def test_files_equal_megatron_lms(tmp_path, name):
    golden = IndexedDataset(GOLDEN / name)
    assert golden.dtype == np.uint16

    with IndexedDatasetBuilder(tmp_path / name, golden.dtype) as builder:
        for index in range(len(golden)):
            builder.add(golden[index])
    for file in (f"{name}.bin", f"{name}.idx"):
        content = (tmp_path / file).read_bytes()
        assert content == (GOLDEN / file).read_bytes()


def test_token_dtype():
    assert token_dtype(65499) == np.uint16
    assert token_dtype(65500) == np.int32


def test_tokens_out_of_range_are_rejected(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"token 70000 does not fit the uint16 tokens of .*/d.bin \(0..65535\)",
    ):
        write(tmp_path / "d", [[1, 70000]])

    with pytest.raises(ValueError, match="token -1 does not fit"):
        write(tmp_path / "d", [[-1]])
    assert list(tmp_path.iterdir()) == []


def test_interrupted_build_keeps_the_old_dataset(tmp_path):
    with (
        pytest.raises(KeyboardInterrupt),
        IndexedDatasetBuilder(tmp_path / "d", np.uint16) as builder,
    ):
        builder.add([1])
        raise KeyboardInterrupt

    assert list(tmp_path.iterdir()) == []

    write(tmp_path / "d", [[1, 2]])
    killed = IndexedDatasetBuilder(
        tmp_path / "d",
        np.uint16,
    )  # as after SIGKILL: neither committed nor discarded
    killed.add([7] * 10)

    assert IndexedDataset(tmp_path / "d")[0].tolist() == [1, 2]
    assert {path.suffix for path in tmp_path.iterdir()} - {
        ".bin",
        ".idx",
    }  # its temporary file has a name of its own

    killed.commit()
    assert IndexedDataset(tmp_path / "d")[0].tolist() == [7] * 10


def test_missing_files_are_rejected(tmp_path):
    with pytest.raises(ValueError, match=r"no dataset at '.*/none': .*/none.idx does not exist"):
        IndexedDataset(tmp_path / "none")

    write(tmp_path / "d", [[1]])
    with pytest.raises(ValueError, match="pass '.*/d'"):
        IndexedDataset(tmp_path / "d.bin")

    text = tmp_path / "corpus.jsonl"
    text.write_text("{}")
    with pytest.raises(ValueError, match=f"preprocess_data.py --input {text}$"):
        IndexedDataset(text)
    with pytest.raises(ValueError, match="looks like a weight"):
        IndexedDataset("0.3")

    (tmp_path / "d.bin").unlink()
    with pytest.raises(ValueError, match=r"d\.bin does not exist"):
        IndexedDataset(tmp_path / "d")


@pytest.mark.parametrize("name", ["corpus", "korpus_text_document", "corpus_text-document"])
def test_missing_files_suggest_similar_datasets(tmp_path, name):
    write(tmp_path / "corpus_text_document", [[1]])
    write(tmp_path / "other", [[1]])
    with pytest.raises(ValueError, match=r"Did you mean \S*/corpus_text_document\?$"):
        IndexedDataset(tmp_path / name)


BIN_DAMAGE = {
    "empty": (
        lambda data: b"",
        r"d\.bin has 0 bytes, but .*d\.idx describes 6 tokens .* 12: the \.bin is empty",
    ),
    "truncated": (
        lambda data: data[:-1],
        r"d\.bin has 11 bytes, .* 6 tokens in 2 sequences of uint16.* is truncated",
    ),
    "too long": (
        lambda data: data + b"x",
        r"d\.bin has 13 bytes, .* does not belong to this \.idx",
    ),
    "other dtype": (
        lambda data: data * 2,
        r"d\.bin has 24 bytes, .* of uint16, .* appears to have int32 tokens",
    ),
}


@pytest.mark.parametrize("damage", BIN_DAMAGE)
def test_damaged_tokens_file_is_rejected(tmp_path, damage):
    change, message = BIN_DAMAGE[damage]
    prefix = write(tmp_path / "d", [[1, 2], [3, 4, 5, 6]])
    path = prefix.with_suffix(".bin")
    content = path.read_bytes()
    path.write_bytes(change(content))
    with pytest.raises(ValueError, match=message):
        IndexedDataset(tmp_path / "d")


INDEX_DAMAGE = {
    "magic": (0, b"GGUF", r"d\.idx starts with b'GGUF"),
    "version": (9, b"\x02", r"d\.idx has index version 2"),
    "dtype code": (
        17,
        b"\x63",
        r"d\.idx has token dtype code 99; known codes are \[1, 2, 3, 4, 5, 6, 7, 8\]",
    ),
    "sequence count": (
        18,
        b"\x09",
        r"d\.idx has 82 bytes, but its header announces 9 sequences .* take 166",
    ),
    "length": (37, b"\xff", r"d\.idx is damaged: sequence 0 has -\d+ tokens from byte 0"),
    "offset": (
        50,
        b"\x05",
        r"d\.idx is damaged: sequence 1 has 3 tokens from byte 5 on, but the one before ends at "
        r"byte 4",
    ),
    "boundaries": (74, b"\x01", r"d\.idx: its document boundaries do not range from 0 to 2"),
}


@pytest.mark.parametrize("damage", INDEX_DAMAGE)
def test_damaged_index_file_is_rejected(tmp_path, damage):
    offset, data, message = INDEX_DAMAGE[damage]
    write(tmp_path / "d", [[1, 2], [3, 4, 5]])
    edit(tmp_path / "d.idx", offset, data)
    with pytest.raises(ValueError, match=message):
        IndexedDataset(tmp_path / "d")


def test_truncated_or_empty_index_file_is_rejected(tmp_path):
    path = write(tmp_path / "d", [[1, 2], [3, 4, 5]]).with_suffix(".idx")
    whole = path.read_bytes()
    for size, message in [
        (0, "has 0 bytes"),
        (20, "has 20 bytes, less than the 34"),
        (50, "has 50 bytes, but its header"),
    ]:
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=message):
            IndexedDataset(tmp_path / "d")

    IndexedDatasetBuilder(tmp_path / "none", np.uint16).commit()
    with pytest.raises(ValueError, match="holds no sequences"):
        IndexedDataset(tmp_path / "none")
