"""Samples against the plain definition: concatenated documents in index order, cut every
seq_length tokens.
"""

import numpy as np
import pytest

from megatron.core.datasets import GPTDataset, GPTDatasetConfig, IndexedDataset
from megatron.core.datasets.gpt_dataset import finish_sample, plan_epochs
from megatron.core.datasets.indexed_dataset_builder import IndexedDatasetBuilder

EOD = 99


@pytest.fixture
def corpus(tmp_path):
    """Return the path of 60 documents of 1 to 80 tokens, each terminated by EOD."""
    random = np.random.RandomState(0)
    with IndexedDatasetBuilder(tmp_path / "corpus", np.uint16) as builder:
        for length in random.randint(1, 80, size=60):
            words = random.randint(0, 99, size=length - 1)
            builder.add(np.append(words, EOD))
    return tmp_path / "corpus"


def make_config(corpus, **options):
    defaults = {"seq_length": 32, "data_path": [str(corpus)]}
    return GPTDatasetConfig(**(defaults | options))


def dataset_for(corpus, num_samples, sequences=(0, 60), split="train", vocab_size=100, **options):
    config = make_config(corpus, **options)
    indexed = IndexedDataset(corpus, config.mmap_bin_files)
    return GPTDataset(indexed, sequences, split, num_samples, config, EOD, vocab_size)


@pytest.mark.parametrize("mmap_bin_files", [True, False])
@pytest.mark.parametrize("num_samples", [None, 10, 170, 200])
@pytest.mark.parametrize("extra", [True, False])
def test_samples_are_cut_from_the_shuffled_documents(corpus, num_samples, extra, mmap_bin_files):
    dataset = dataset_for(
        corpus,
        num_samples,
        (3, 57),
        add_extra_token_to_sequence=extra,
        mmap_bin_files=mmap_bin_files,
    )
    documents = dataset.document_index.tolist()
    stream = np.concatenate([dataset.indexed[document] for document in documents])

    # Every epoch contains every document, and the samples all but the end of the stream.
    num_epochs = len(documents) // 54
    assert sorted(documents) == sorted(list(range(3, 57)) * num_epochs)
    assert len(dataset) >= (num_samples or 1)
    assert len(dataset) == (len(stream) - extra) // 32
    assert sorted(dataset.shuffle_index.tolist()) == list(range(len(dataset)))

    for i in range(len(dataset)):
        sample = dataset[i]
        start = int(dataset.shuffle_index[i]) * 32
        labels = stream[start + 1 : start + 33]
        if not extra:
            labels = np.append(stream[start + 1 : start + 32], 0)
        np.testing.assert_array_equal(sample["tokens"], stream[start : start + 32])
        np.testing.assert_array_equal(sample["labels"], labels)
        assert sample["loss_mask"].tolist() == [1.0] * 31 + [float(extra)]
        for name in ("tokens", "labels", "position_ids"):
            assert sample[name].dtype == np.int64


def test_partial_validation_sample_can_be_kept(corpus):
    dataset = dataset_for(corpus, None, split="valid", drop_last_partial_validation_sequence=False)
    num_labels = sum(int(dataset[i]["loss_mask"].sum()) for i in range(len(dataset)))
    # Every token but the first is predicted once.
    assert num_labels == int(dataset.indexed.lengths.sum()) - 1

    (padded_index,) = np.flatnonzero(dataset.shuffle_index == len(dataset) - 1)
    padded = dataset[int(padded_index)]
    num_valid = num_labels % 32
    num_padded = 32 - num_valid

    assert 0 < num_valid < 32
    assert padded["loss_mask"].tolist() == [1.0] * num_valid + [0.0] * num_padded
    assert padded["labels"][num_valid:].tolist() == [0] * num_padded


@pytest.mark.parametrize("tokens_per_epoch", [1, 7, 64, 1000])
def test_number_of_epochs_is_minimal(tokens_per_epoch):
    for num_samples in (1, 5, 63, 400):
        for extra in (0, 1):
            num_epochs, _ = plan_epochs(tokens_per_epoch, num_samples, 16, extra)
            samples = (num_epochs * tokens_per_epoch - extra) // 16
            samples_of_fewer = ((num_epochs - 1) * tokens_per_epoch - extra) // 16
            assert samples >= num_samples
            assert num_epochs == 1 or samples_of_fewer < num_samples


def test_small_last_epoch_is_shuffled_separately(corpus):
    tokens = int(IndexedDataset(corpus).lengths.sum())
    per_epoch = (tokens - 1) // 32
    dataset = dataset_for(corpus, per_epoch + 3)

    assert dataset.plan.num_epochs == 2
    assert dataset.plan.separate_last_epoch
    assert set(dataset.shuffle_index[:per_epoch].tolist()) == set(range(per_epoch))

    shared = dataset_for(corpus, 2 * per_epoch - 1)
    assert shared.plan.num_epochs == 2
    assert not shared.plan.separate_last_epoch


def test_document_masks_and_positions(corpus):
    tokens = [5, 6, EOD, 7, 8, 9, EOD, EOD, 1]
    text = np.array(tokens + [2])
    config = make_config(
        corpus,
        seq_length=9,
        reset_position_ids=True,
        reset_attention_mask=True,
        eod_mask_loss=True,
    )
    sample = finish_sample(text, config, EOD)

    assert sample["tokens"].tolist() == tokens
    assert sample["position_ids"].tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 0]
    assert sample["loss_mask"].tolist() == [1, 1, 0, 1, 1, 1, 0, 0, 1]
    assert sample["documents"].tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 3]

    plain = finish_sample(text, make_config(corpus, seq_length=9), EOD)
    assert "documents" not in plain
    assert plain["position_ids"].tolist() == list(range(9))
    assert plain["loss_mask"].tolist() == [1.0] * 9


def test_token_outside_the_vocabulary_is_an_error(corpus):
    dataset = dataset_for(corpus, 5, vocab_size=99)
    message = "corpus.bin holds token 99, but the tokenizer has 99 tokens"
    with pytest.raises(ValueError, match=message):
        for i in range(len(dataset)):
            dataset[i]


def test_split_without_tokens_is_an_error(corpus):
    message = r"valid split of .*corpus \(sequences 60 to 60 of 60\) holds no tokens, but 3 "
    with pytest.raises(ValueError, match=message):
        dataset_for(corpus, 3, (60, 60), split="valid")
    with pytest.raises(ValueError, match="less than one sample of --seq-length 100000"):
        dataset_for(corpus, None, seq_length=100000)


def test_small_corpus_is_repeated(corpus):
    dataset = dataset_for(corpus, 4, (0, 1), seq_length=128)
    length = int(dataset.indexed.lengths[0])
    assert dataset.plan.num_epochs == -(-(4 * 128 + 1) // length)
    stream = np.resize(dataset.indexed[0], 10000)
    start = dataset.shuffle_index[0] * 128
    np.testing.assert_array_equal(dataset[0]["tokens"], stream[start : start + 128])


def test_token_digest_covers_the_content_of_the_file(corpus):
    """Blocks of a file without gaps between them cover every byte; fewer cover both ends."""
    base = dataset_for(corpus, 10)
    digests = {num_blocks: base.digest_tokens(num_blocks) for num_blocks in (1, 2, 3)}
    other_samples = dataset_for(corpus, 200, seed=1, mmap_bin_files=False)
    assert other_samples.digest_tokens(3) == digests[3]

    path = corpus.with_suffix(".bin")
    original = path.read_bytes()
    size = len(original)
    assert size < 2 * 4096

    for offset, expected in ((0, [1, 2, 3]), (4096, [2, 3]), (size - 1, [2, 3])):
        content = bytearray(original)
        content[offset] ^= 1
        path.write_bytes(content)
        changed = dataset_for(corpus, 10)
        assert changed.fingerprint == base.fingerprint
        notice_change = [n for n in digests if changed.digest_tokens(n) != digests[n]]
        assert notice_change == expected


def test_fingerprint_identifies_the_order_of_samples(corpus):
    base = dataset_for(corpus, 10).fingerprint
    # 20 samples are one epoch, too: the same samples in the same order.
    assert base == dataset_for(corpus, 20).fingerprint
    assert base == dataset_for(corpus, 10, mmap_bin_files=False).fingerprint

    others = [
        dataset_for(corpus, 200),
        dataset_for(corpus, 10, seed=1),
        dataset_for(corpus, 10, seq_length=16),
        dataset_for(corpus, 10, (0, 50)),
        dataset_for(corpus, 10, add_extra_token_to_sequence=False),
    ]
    fingerprints = {other.fingerprint for other in others}
    assert len(fingerprints | {base}) == 6
