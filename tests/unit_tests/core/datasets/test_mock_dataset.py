"""--mock-data: equal on all ranks and runs, different per sample and split, and learnable."""

import numpy as np
import pytest

from megatron.core.datasets import GPTDatasetConfig, build_datasets


def build(num_samples=(50, 10, 0), eod=256, vocab_size=257, **options):
    defaults = {"seq_length": 64, "mock_data": True}
    config = GPTDatasetConfig(**(defaults | options))
    return build_datasets(config, num_samples, eod, vocab_size)


def list_rows(dataset):
    """Return the tokens of all samples."""
    rows = []
    for index in range(len(dataset)):
        tokens = dataset[index]["tokens"]
        rows.append(tuple(tokens.tolist()))
    return rows


def test_samples_are_a_function_of_seed_split_and_number():
    train, valid, test = build()
    again, _, _ = build((1000, 0, 0))
    assert (len(train), len(valid), test) == (50, 10, None)

    rows = list_rows(train) + list_rows(valid)
    assert len(set(rows)) == 60
    for index in range(50):
        for key, value in train[index].items():
            np.testing.assert_array_equal(value, again[index][key])

    other_train, _, _ = build(seed=7)
    assert list_rows(other_train)[0] != rows[0]
    with pytest.raises(IndexError):
        train[50]


@pytest.mark.parametrize(("vocab_size", "eod"), [(257, 256), (50257, 50256), (32000, 2), (3, 2)])
def test_documents_count_upwards_and_end_with_eod(vocab_size, eod):
    train, _, _ = build(eod=eod, vocab_size=vocab_size)
    words = [token for token in range(min(vocab_size, 129)) if token != eod]
    words = words[:128]
    followers = words[1:] + words[:1]
    follower_of = dict(zip(words, followers, strict=True))
    num_ends = 0
    num_tokens = 0
    for index in range(50):
        sample = train[index]
        tokens = sample["tokens"].tolist()
        labels = sample["labels"].tolist()
        assert tokens[1:] == labels[:-1]
        for token, label in zip(tokens, labels, strict=True):
            if eod not in (token, label):
                assert label == follower_of[token]
        num_ends += labels.count(eod)
        num_tokens += len(tokens)

    assert 0.01 < num_ends / num_tokens < 0.06


def test_split_without_a_share_does_not_exist():
    train, valid, test = build((5, 5, 5), split="9,0,1")
    assert (len(train), valid, len(test)) == (5, None, 5)


def test_masks_follow_the_options():
    train, _, _ = build(reset_position_ids=True, eod_mask_loss=True, reset_attention_mask=True)
    samples = [train[index] for index in range(50)]
    sample = next(sample for sample in samples if 256 in sample["tokens"])
    is_eod = sample["tokens"] == 256
    np.testing.assert_array_equal(sample["loss_mask"], 1.0 - is_eod)

    following_positions = sample["position_ids"][1:]
    positions_after_eod = following_positions[is_eod[:-1]]
    assert (positions_after_eod == 0).all()
    assert "documents" in sample


def test_invalid_options_are_rejected():
    with pytest.raises(ValueError, match="at least 3 tokens, got 2"):
        build(vocab_size=2, eod=1)
    with pytest.raises(ValueError, match="--mock-data has no end"):
        build((None, 0, 0))
