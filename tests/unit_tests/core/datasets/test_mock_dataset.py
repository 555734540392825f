"""--mock-data: equal on all ranks and runs, different per sample and split, and learnable."""

import numpy as np
import pytest

from megatron.core.datasets import GPTDatasetConfig, build_datasets


def build(num_samples=(50, 10, 0), eod=256, vocab_size=257, **options):
    config = GPTDatasetConfig(**({"seq_length": 64, "mock_data": True} | options))
    return build_datasets(config, num_samples, eod, vocab_size)


def test_samples_are_a_function_of_seed_split_and_number():
    train, valid, test = build()
    again, _, _ = build((1000, 0, 0))
    assert (len(train), len(valid), test) == (50, 10, None)
    rows = [tuple(train[i]["tokens"].tolist()) for i in range(50)] + [
        tuple(valid[i]["tokens"].tolist()) for i in range(10)
    ]
    assert len(set(rows)) == 60
    for i in range(50):
        for key, value in train[i].items():
            np.testing.assert_array_equal(value, again[i][key])
    assert tuple(build(seed=7)[0][0]["tokens"].tolist()) != rows[0]
    with pytest.raises(IndexError):
        train[50]


@pytest.mark.parametrize(("vocab_size", "eod"), [(257, 256), (50257, 50256), (32000, 2), (3, 2)])
def test_documents_count_upwards_and_end_with_eod(vocab_size, eod):
    train, _, _ = build(eod=eod, vocab_size=vocab_size)
    words = [token for token in range(129) if token != eod and token < vocab_size][:128]
    follower = dict(zip(words, words[1:] + words[:1], strict=True))
    ends = total = 0
    for i in range(50):
        tokens = train[i]["tokens"]
        labels = train[i]["labels"]
        np.testing.assert_array_equal(tokens[1:], labels[:-1])
        for token, label in zip(tokens.tolist(), labels.tolist(), strict=True):
            assert label == eod or token == eod or label == follower[token]
            ends = ends + (label == eod)
            total = total + 1
    assert 0.01 < ends / total < 0.06


def test_split_without_a_share_does_not_exist():
    train, valid, test = build((5, 5, 5), split="9,0,1")
    assert (len(train), valid, len(test)) == (5, None, 5)


def test_masks_follow_the_options():
    train, _, _ = build(reset_position_ids=True, eod_mask_loss=True, reset_attention_mask=True)
    sample = next(train[i] for i in range(50) if 256 in train[i]["tokens"])
    eods = sample["tokens"] == 256
    np.testing.assert_array_equal(sample["loss_mask"], 1.0 - eods)
    assert (sample["position_ids"][1:][eods[:-1]] == 0).all() and "documents" in sample


def test_invalid_options_are_rejected():
    with pytest.raises(ValueError, match="at least 3 tokens, got 2"):
        build(vocab_size=2, eod=1)
    with pytest.raises(ValueError, match="--mock-data has no end"):
        build((None, 0, 0))
