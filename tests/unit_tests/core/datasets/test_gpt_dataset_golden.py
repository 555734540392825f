"""Indices and samples written by Megatron-LM are reproduced: values, types, order."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets import GPTDataset, GPTDatasetConfig, build_datasets
from megatron.core.datasets.blend import BlendedDataset
from megatron.core.datasets.config import SPLITS
from tests import ROOT

GOLDEN = ROOT / "tests/golden" / "megatron_lm"
CASES = sorted(path.parent.name for path in GOLDEN.glob("gpt_index/*/case.json"))
EOD, VOCAB_SIZE = 256, 257
PLAIN_FIELDS = {
    "seq": "seq_length",
    "seed": "seed",
    "split": "split",
    "blend": "data_path",
    "mid_level_dataset_surplus": "mid_level_dataset_surplus",
    "reset_position_ids": "reset_position_ids",
    "reset_attention_mask": "reset_attention_mask",
    "eod_mask_loss": "eod_mask_loss",
    "create_attention_mask": "create_attention_mask_in_dataloader",
    "add_extra_token_to_sequence": "add_extra_token_to_sequence",
    "drop_last_partial_validation_sequence": "drop_last_partial_validation_sequence",
}


def build(case, cache, monkeypatch):
    monkeypatch.chdir(GOLDEN)  # the cases name their data relative to it
    options = {PLAIN_FIELDS[key]: value for key, value in case["config"].items() if key != "sizes"}
    config = GPTDatasetConfig(**options, data_cache_path=str(cache))
    return build_datasets(config, case["config"]["sizes"], EOD, VOCAB_SIZE)


def assert_same_array(actual, path):
    expected = np.load(path)
    assert actual.dtype == expected.dtype, path
    np.testing.assert_array_equal(actual, expected, err_msg=str(path))


def check_gpt_index(dataset: GPTDataset, directory: Path, name: str):
    for array in ("document_index", "sample_index", "shuffle_index"):
        assert_same_array(getattr(dataset, array), directory / f"{name}-{array}.npy")


def check_indices(dataset, expected, split, directory):
    if expected["class"] == "GPTDataset":
        check_gpt_index(dataset, directory, f"{expected['hash']}-GPTDataset-{split}")
        return
    assert isinstance(dataset, BlendedDataset)

    for array in ("dataset_index", "dataset_sample_index"):
        assert_same_array(
            getattr(dataset, array),
            directory / f"{expected['hash']}-BlendedDataset-{split}-{array}.npy",
        )

    for member, expected_member in zip(dataset.members, expected["members"], strict=True):
        check_gpt_index(member, directory, f"{expected_member['hash']}-GPTDataset-{split}")


def check_samples(dataset, expected, path):
    digest = hashlib.sha256()
    for i in range(len(dataset)):
        sample = dataset[i]
        digest.update(
            sample["tokens"].astype("<i4").tobytes() + sample["labels"].astype("<i4").tobytes()
        )

    assert digest.hexdigest() == expected["sha256_tokens_labels_all"]

    first = np.load(path)
    for i in range(expected["first_samples"]):
        sample = dataset[i]
        if "documents" in sample:  # Megatron's mask is True where a position must not be seen
            same = sample["documents"][:, None] == sample["documents"]
            sample["attention_mask"] = ~np.tril(same)[None]
            del sample["documents"]

        assert set(sample) == set(first.files) - {"dataset_id"}

        for key, value in sample.items():
            np.testing.assert_array_equal(
                value,
                first[key][i],
                err_msg=f"{path}: {key} of sample {i}",
            )

        if "dataset_id" in first.files:
            assert dataset.dataset_index[i] == first["dataset_id"][i]


def test_golden_cases_exist():
    assert len(CASES) == 11


@pytest.mark.parametrize("name", CASES)
def test_indices_and_samples_equal_megatron_lms(name, tmp_path, monkeypatch):
    directory = GOLDEN / "gpt_index" / name
    case = json.loads((directory / "case.json").read_text())
    for datasets in (
        build(case, tmp_path, monkeypatch),
        build(case, tmp_path, monkeypatch),
    ):  # built, then from the cache
        for split, dataset in zip(SPLITS, datasets, strict=True):
            expected = case["splits"][split]
            if expected is None:
                assert dataset is None
                continue
            assert len(dataset) == expected["len"]
            check_indices(dataset, expected, split, directory / "cache")
            check_samples(dataset, expected, directory / f"{split}_first_samples.npz")


def test_index_of_a_training_run(tmp_path):
    data = str(GOLDEN / "data" / "pysrc_a_text_document")
    config = GPTDatasetConfig(
        seq_length=64,
        seed=1234,
        data_path=[data],
        split="100,0,0",
        data_cache_path=str(tmp_path),
    )
    train, valid, test = build_datasets(config, (80, 0, 0), EOD, VOCAB_SIZE)

    assert valid is None
    assert test is None

    directory = GOLDEN / "gpt_index" / "pretrain_run_seed1234_seq64_80samples"
    check_gpt_index(train, directory, "a0f413891ae6cb2d0a9a3bb2ee89d1b9-GPTDataset-train")
