"""Datasets from --data-path and related flags: parsing, splits, blends, invalid options."""

import json
import os

import numpy as np
import pytest

from megatron.core.datasets import GPTDataset, GPTDatasetConfig, build_datasets
from megatron.core.datasets.blend import BlendedDataset
from megatron.core.datasets.config import Blend, compute_sequence_range, parse_blend, parse_split
from megatron.core.datasets.indexed_dataset_builder import IndexedDatasetBuilder

EOD = 0
VOCAB_SIZE = 100


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Datasets a, b, c of 50, 20 and 10 documents; every token of one is 1, 2 or 3."""
    for token, (name, count) in enumerate({"a": 50, "b": 20, "c": 10}.items(), start=1):
        with IndexedDatasetBuilder(tmp_path / name, np.uint16) as builder:
            for _ in range(count):
                builder.add([token] * 20)
    monkeypatch.chdir(tmp_path)


def build(num_samples=(100, 10, 10), **options):
    config = GPTDatasetConfig(**({"seq_length": 8, "data_cache_path": "cache"} | options))
    return build_datasets(config, num_samples, EOD, VOCAB_SIZE)


def source_counts(dataset, size):
    return np.bincount([dataset[i]["tokens"][0] for i in range(size)], minlength=4)[1:].tolist()


def test_parse_blend():
    assert parse_blend(["a"], "--data-path") == Blend(("a",))
    assert parse_blend(["a", "b"], "--data-path") == Blend(("a", "b"))
    assert parse_blend(["a", "b", "c"], "--data-path") == Blend(("a", "b", "c"))
    assert parse_blend(["1", "a", "3", "b"], "--data-path") == Blend(("a", "b"), (0.25, 0.75))
    assert parse_blend(["0.3", "a"], "--data-path") == Blend(("a",), (1.0,))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "--data-path is empty"),
        (["1", "a", "b", "c"], "--data-path: 'b' in '1 a b c' must be a weight"),
        (["1", "a", "0", "b"], "weight 0 of '1 a 0 b' must be positive"),
        (["1", "a", "-2", "b"], "weight -2"),
        (["nan", "a"], "weight nan"),
    ],
)
def test_malformed_blends_are_rejected(values, message):
    with pytest.raises(ValueError, match=message):
        parse_blend(values, "--data-path")


def test_parse_split():
    assert parse_split("80,10,10") == ((0.0, 0.8), (0.8, 0.9), (0.9, 1.0))
    assert parse_split("100") == ((0.0, 1.0), None, None)
    assert parse_split("1,0,1") == ((0.0, 0.5), None, (0.5, 1.0))
    for text in ("a,b", "1,2,3,4", "-1,2", "0,0,0", "", "nan"):
        with pytest.raises(ValueError, match="--split"):
            parse_split(text)


def test_split_intervals_partition_the_sequences():
    for num_sequences in (1, 2, 10, 999, 12345):
        intervals = parse_split("969,30,1")
        ranges = [compute_sequence_range(interval, num_sequences) for interval in intervals]
        assert ranges[0][0] == 0
        assert ranges[2][1] == num_sequences
        assert ranges[0][1] == ranges[1][0]
        assert ranges[1][1] == ranges[2][0]


def test_one_dataset_is_divided_by_split(data):
    train, valid, test = build(data_path=["a"], split="80,20,0")
    assert isinstance(train, GPTDataset)
    assert len(train) >= 100
    assert len(valid) >= 10
    assert test is None
    assert set(train.document_index.tolist()) == set(range(40))
    assert set(valid.document_index.tolist()) == set(range(40, 50))


def test_default_split(data):
    train, valid, test = build((10, 10, 0), data_path=["a"])
    assert (train.plan.last_sequence, valid.plan.last_sequence) == (48, 50)
    assert test is None


def test_separate_data_per_split(data, tmp_path):
    options = {"train_data_path": ["a"], "valid_data_path": ["1", "b", "1", "c"]}
    train, valid, test = build(**options)
    assert source_counts(train, 100) == [100, 0, 0]
    assert source_counts(valid, 10) == [0, 5, 5]
    assert test is None

    (tmp_path / "paths.json").write_text(json.dumps({"train": ["a"], "valid": [1, "b", 1, "c"]}))
    from_file = build(per_split_data_args_path="paths.json")
    assert (from_file[0].fingerprint, from_file[1].fingerprint) == (
        train.fingerprint,
        valid.fingerprint,
    )


def test_data_args_path(data, tmp_path):
    (tmp_path / "blend.txt").write_text("30 a\n70 b\n")
    from_file = build((100, 0, 0), data_args_path="blend.txt", split="1")[0]
    assert (
        from_file.fingerprint
        == build((100, 0, 0), data_path=["30", "a", "70", "b"], split="1")[0].fingerprint
    )


def test_blend_shares_hold_at_any_length(data):
    train, _, _ = build((400, 0, 0), data_path=["50", "a", "30", "b", "20", "c"], split="1")
    assert isinstance(train, BlendedDataset)
    for size in (10, 37, 100, 400):
        shares = np.array(source_counts(train, size)) / size
        np.testing.assert_allclose(shares, [0.5, 0.3, 0.2], atol=1.01 / size)


def test_blend_without_weights_is_read_once(data):
    train, _, _ = build((None, 0, 0), data_path=["a", "b", "c"], split="1")
    size = len(train)
    lengths = [len(member) for member in train.members]

    assert size == sum(lengths)
    assert source_counts(train, size) == lengths

    members = train.dataset_index.tolist()
    samples = train.dataset_sample_index.tolist()
    drawn = set(zip(members, samples, strict=True))
    assert len(drawn) == size

    everything, _, _ = build((size, 0, 0), data_path=["a", "b", "c"], split="1")
    np.testing.assert_array_equal(everything.dataset_index, train.dataset_index)

    message = r"201 samples are requested of a blend without weights, .* holds 197 \(124 \+"
    with pytest.raises(ValueError, match=message):
        build((201, 0, 0), data_path=["a", "b", "c"], split="1")


def test_number_of_threads_does_not_change_samples(data):
    options = {"data_path": ["5", "a", "3", "b", "2", "c"], "split": "8,1,1"}
    alone = build(**options, data_cache_path="one")
    together = build(**options, data_cache_path="two", num_dataset_builder_threads=4)
    for dataset, other in zip(alone, together, strict=True):
        assert dataset.fingerprint == other.fingerprint
        for i in range(len(dataset)):
            np.testing.assert_array_equal(dataset[i]["tokens"], other[i]["tokens"])


def test_blend_fingerprint_covers_members_and_weights(data):
    prints = [
        build((num_samples, 0, 0), data_path=path, split="1", seed=seed)[0].fingerprint
        for num_samples, path, seed in [
            (50, ["1", "a", "1", "b"], 1),
            (50, ["1", "a", "1", "b"], 2),
            (50, ["1", "a", "1", "c"], 1),
            (50, ["1", "a", "2", "b"], 1),
            (500, ["1", "a", "1", "b"], 1),  # other numbers of epochs of the members
        ]
    ]
    assert len(set(prints)) == 5


def test_token_digest_of_a_blend_reads_at_most_as_many_blocks_as_requested(data, monkeypatch):
    blend, _, _ = build((50, 0, 0), data_path=["1", "a", "1", "b", "1", "c"], split="1")
    reads = []
    real_pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *args: reads.append(args) or real_pread(*args))
    counts = []
    for num_blocks in (1, 2, 3, 7):
        reads.clear()
        blend.digest_tokens(num_blocks)
        counts.append(len(reads))

    assert counts == [1, 2, 3, 6]
    assert len({member.digest_tokens(2) for member in blend.members}) == 3


def test_longer_blend_begins_with_the_same_samples(data):
    path = ["1", "a", "1", "b"]
    short, _, _ = build((50, 0, 0), data_path=path, split="1")
    long, _, _ = build((60, 0, 0), data_path=path, split="1")

    assert len(short) < len(long)
    assert short.fingerprint == long.fingerprint

    for index in range(len(short)):
        tokens = short[index]["tokens"]
        np.testing.assert_array_equal(tokens, long[index]["tokens"])


def test_member_too_small_for_its_weight_is_an_error(data):
    with pytest.raises(ValueError, match="raise --mid-level-dataset-surplus"):
        BlendedDataset(
            build((10, 0, 0), data_path=["a", "b"], split="1")[0].members,
            [0.1, 0.9],
            1000,
            None,
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no data: give --data-path"),
        (
            {"data_path": ["a"], "mock_data": True},
            "--mock-data and --data-path are mutually exclusive",
        ),
        (
            {"data_path": ["a"], "train_data_path": ["b"]},
            "--data-path and --train-data-path are mutually exclusive",
        ),
        (
            {"data_path": ["a"], "data_args_path": "f"},
            "--data-path and --data-args-path are mutually exclusive",
        ),
        (
            {"train_data_path": ["a"], "split": "9,1"},
            "--split 9,1 requires --data-path; --train-data-path already",
        ),
        ({"data_path": ["a"], "seq_length": 0}, "--seq-length must be given"),
        ({"data_path": ["a"], "seed": -1}, "--seed must be at least 0, got -1"),
        ({"data_path": ["a"], "split": "x"}, "--split 'x'"),
        (
            {"data_path": ["a"], "num_dataset_builder_threads": 0},
            "--num-dataset-builder-threads must be positive, got 0",
        ),
        (
            {"data_path": ["a"], "mid_level_dataset_surplus": -0.1},
            "--mid-level-dataset-surplus must be at least 0",
        ),
        ({"data_args_path": "nowhere"}, "--data-args-path nowhere: no such file"),
        (
            {"per_split_data_args_path": "nowhere"},
            "--per-split-data-args-path nowhere: no such file",
        ),
        (
            {
                "data_path": ["a"],
                "reset_attention_mask": True,
                "create_attention_mask_in_dataloader": False,
            },
            "--reset-attention-mask and --no-create-attention-mask-in-dataloader are mutually",
        ),
        ({"data_path": ["none"]}, "none.idx does not exist"),
        ({"data_path": ["a", "30", "b"]}, "30.idx does not exist. It looks like a weight"),
        ({"valid_data_path": ["a"]}, "there is no training data"),
        (
            {"data_path": ["a"], "split": "0,1"},
            "there is no training data: --split gives it no share",
        ),
        (
            {"data_path": ["c"], "split": "999,1"},
            r"valid split of c \(sequences 10 to 10 of 10\) holds no tokens",
        ),
    ],
)
def test_invalid_options_are_rejected(data, options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


def test_malformed_per_split_file_is_rejected(data, tmp_path):
    for text, message in [
        ("[1", "not JSON"),
        ('{"training": ["a"]}', "expected"),
        ('{"train": "a"}', "expected"),
    ]:
        (tmp_path / "paths.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            build(per_split_data_args_path="paths.json")


def test_weighted_blend_requires_a_number_of_samples(data):
    with pytest.raises(ValueError, match="blend with weights, which has no end"):
        build((None, 0, 0), data_path=["1", "a", "1", "b"], split="1")
