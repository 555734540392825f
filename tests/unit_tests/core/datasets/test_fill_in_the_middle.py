"""Fill in the middle, with a GPT-2 tokenizer."""

import dataclasses
import itertools
import json
import pickle

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from megatron.core.datasets import GPTDataset, GPTDatasetConfig, IndexedDataset, build_datasets
from megatron.core.datasets.fill_in_the_middle import FillInTheMiddle
from megatron.core.datasets.gpt_dataset import make_generator
from megatron.core.datasets.indexed_dataset_builder import IndexedDatasetBuilder
from megatron.training.data.tokenizer import TokenizerConfig, build_tokenizer

TEXTS = [
    "def f(x):\n    return x + 1\n",
    "größer als früher",
    "a",
    "x" * 40,
    "one file<SPLIT>two files<SPLIT>three",
]
NAMES = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<SPLIT>")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A tokenizer with GPT-2's bytes, one merge, EOD and --tokenizer-special-tokens."""
    directory = tmp_path_factory.mktemp("tokenizer")
    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    (directory / "vocab.json").write_text(json.dumps(vocab | {"re": 256, "<|endoftext|>": 257}))
    (directory / "merges.txt").write_text("#version: 0.2\nr e\n")
    files = {
        "vocab_file": str(directory / "vocab.json"),
        "merge_file": str(directory / "merges.txt"),
    }
    return build_tokenizer(TokenizerConfig("GPT2BPETokenizer", special_tokens=list(NAMES), **files))


def config_for(**options):
    return GPTDatasetConfig(**({"seq_length": 64, "mock_data": True, "fim_data": True} | options))


def row_of(tokenizer, texts=TEXTS):
    """Return documents separated by EOD; the last one is truncated."""
    return np.array(
        list(itertools.chain(*([*tokenizer.tokenize(text), tokenizer.eod] for text in texts)))[:-1]
    )


def reordered(tokenizer, text, random, rate, spm_rate):
    """Return the tokens of one document or fragment according to the definition on text."""
    if not random.binomial(1, rate):
        return tokenizer.tokenize(text)
    first, second = sorted(random.randint(0, len(text) + 1, 2))
    prefix, middle, suffix = (
        tokenizer.tokenize(section) for section in (text[:first], text[first:second], text[second:])
    )
    p, m, s = (tokenizer.token_id(name) for name in NAMES[:3])
    if random.binomial(1, spm_rate):
        return [p, s, *suffix, m, *prefix, *middle]
    return [p, *prefix, s, *suffix, m, *middle]


@pytest.mark.parametrize(("rate", "spm_rate"), [(1.0, 0.0), (1.0, 1.0), (0.5, 0.5)])
def test_documents_match_the_definition(tokenizer, rate, spm_rate):
    texts = TEXTS[:4]
    row = row_of(tokenizer, texts)
    fim = FillInTheMiddle(config_for(fim_rate=rate, fim_spm_rate=spm_rate), tokenizer)
    for seed in range(20):
        random = np.random.RandomState(seed)
        expected = []
        for text in texts:
            expected += [*reordered(tokenizer, text, random, rate, spm_rate), tokenizer.eod]
        pad = tokenizer.token_id("<fim_pad>")
        expected = (expected[:-1] + [pad] * len(row))[: len(row)]
        assert fim(row, np.random.RandomState(seed)).tolist() == expected


def test_reordered_parts_form_the_document(tokenizer):
    """Prefix + middle + suffix of a reordered document is its text, in either order."""
    p, m, s = (tokenizer.token_id(name) for name in NAMES[:3])
    text = TEXTS[0]
    ids = tokenizer.tokenize(text)
    room = np.array([*ids, *([tokenizer.eod] * 30)])  # empty documents vanish and leave room
    seen = set()
    for seed in range(30):
        told = FillInTheMiddle(config_for(fim_rate=1), tokenizer)(
            room,
            np.random.RandomState(seed),
        ).tolist()
        told = told[: told.index(tokenizer.eod)]
        spm = told[1] == s
        seen.add(spm)

        if spm:
            suffix = told[2 : told.index(m)]
            rest = told[told.index(m) + 1 :]
            assert tokenizer.detokenize(rest) + tokenizer.detokenize(suffix) == text
            assert told[0] == p
        else:
            prefix = told[1 : told.index(s)]
            suffix = told[told.index(s) + 1 : told.index(m)]
            middle = told[told.index(m) + 1 :]
            assert "".join(map(tokenizer.detokenize, (prefix, middle, suffix))) == text

    assert seen == {True, False}


def test_can_be_pickled_for_worker_processes(tokenizer):
    row = row_of(tokenizer)
    fim = FillInTheMiddle(config_for(fim_rate=1), tokenizer)
    there = pickle.loads(pickle.dumps(fim))
    assert np.array_equal(there(row, np.random.RandomState(1)), fim(row, np.random.RandomState(1)))


def test_rate_0_keeps_the_documents(tokenizer):
    row = row_of(tokenizer)
    assert np.array_equal(
        FillInTheMiddle(config_for(fim_rate=0), tokenizer)(row, np.random.RandomState(1)),
        row,
    )


def test_fragments_are_reordered_separately(tokenizer):
    options = {
        "fim_rate": 1,
        "fim_fragment_rate": 1,
        "fim_spm_rate": 0,
        "fim_split_sample": "<SPLIT>",
    }
    row = np.array([*tokenizer.tokenize(TEXTS[4]), *([tokenizer.eod] * 12)])
    end = tokenizer.token_id("<SPLIT>")
    assert (row == end).sum() == 2

    told = FillInTheMiddle(config_for(**options), tokenizer)(row, np.random.RandomState(3))
    random = np.random.RandomState(3)
    random.binomial(1, 1)  # for the document
    expected = []
    for text in TEXTS[4].split("<SPLIT>"):
        expected += [*reordered(tokenizer, text, random, 1, 0), end]
    expected[-1] = tokenizer.eod
    assert told[: len(expected)].tolist() == expected


def test_documents_with_the_excluded_prefix_are_kept(tokenizer):
    fim = FillInTheMiddle(config_for(fim_rate=1, fim_no_prefix="def"), tokenizer)
    row = row_of(tokenizer, TEXTS[:2])
    length = len(tokenizer.tokenize(TEXTS[0]))
    result = fim(row, np.random.RandomState(0))
    assert np.array_equal(result[: length + 1], row[: length + 1])
    assert result[length + 1] == tokenizer.token_id(NAMES[0])


def test_sample_depends_only_on_its_number(tokenizer, tmp_path):
    """A resumed run reads the same samples in any order, process and layout."""
    with IndexedDatasetBuilder(tmp_path / "corpus", np.uint16) as builder:
        for index in range(60):
            text = TEXTS[index % 4] * (1 + index % 3)
            builder.add(np.array([*tokenizer.tokenize(text), tokenizer.eod]))

    config = config_for(
        mock_data=False,
        data_path=[str(tmp_path / "corpus")],
        split="80,20,0",
        seq_length=32,
    )
    fim = FillInTheMiddle(config, tokenizer)

    def datasets(config, fim):
        return build_datasets(config, (20, 5, 0), tokenizer.eod, tokenizer.vocab_size, fim)

    train, valid, _ = datasets(config, fim)
    plain, _, _ = datasets(GPTDatasetConfig(**vars(config) | {"fim_data": False}), None)
    again, _, _ = datasets(config, fim)

    assert isinstance(train, GPTDataset)
    assert valid is not None

    num_changed = 0
    for i in reversed(range(len(train))):
        sample = train[i]
        np.testing.assert_equal(sample, again[i])
        text = plain._read(int(plain.shuffle_index[i]))
        expected = fim(text, make_generator(config.seed, "train", i))
        assert np.array_equal(sample["tokens"], expected[:-1])
        assert np.array_equal(sample["labels"], expected[1:])
        num_changed += not np.array_equal(sample["tokens"], plain[i]["tokens"])

    assert num_changed > len(train) / 2
    assert train.fingerprint != plain.fingerprint
    assert train.fingerprint == again.fingerprint


def test_partial_row_keeps_its_padding(tokenizer, tmp_path):
    with IndexedDatasetBuilder(tmp_path / "corpus", np.uint16) as builder:
        builder.add(np.array([*tokenizer.tokenize(TEXTS[0]), tokenizer.eod]))
    config = config_for(
        data_path=[str(tmp_path / "corpus")],
        mock_data=False,
        split="0,1,0",
        fim_rate=1,
        drop_last_partial_validation_sequence=False,
    )
    indexed = IndexedDataset(tmp_path / "corpus", True)
    fim = FillInTheMiddle(config, tokenizer)
    dataset = GPTDataset(
        indexed,
        (0, 1),
        "valid",
        None,
        config,
        tokenizer.eod,
        tokenizer.vocab_size,
        fim,
    )
    length = len(indexed[0])
    assert dataset[0]["loss_mask"].tolist() == [1.0] * (length - 1) + [0.0] * (64 - length + 1)


def test_leading_tokens_are_not_repeated(tokenizer):
    with_bos = dataclasses.replace(
        tokenizer,
        tokenize=lambda text: [1000, *tokenizer.tokenize(text)],
    )
    told = FillInTheMiddle(config_for(fim_rate=1), with_bos)(
        row_of(tokenizer),
        np.random.RandomState(0),
    )
    assert 1000 not in told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fim_rate": 1.5}, "--fim-rate must be at most 1, got 1.5"),
        ({"fim_fragment_rate": -1.0}, "--fim-fragment-rate must be at least 0, got -1"),
        (
            {"fim_split_sample": "<SPLIT>"},
            "--fim-split-sample <SPLIT> requires --fim-fragment-rate",
        ),
    ],
)
def test_inconsistent_options_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        config_for(**options)


def test_unknown_token_is_an_error(tokenizer):
    with pytest.raises(
        ValueError,
        match="--fim-middle-token <M>: the tokenizer has no such token; .*special-tokens",
    ):
        FillInTheMiddle(config_for(fim_middle_token="<M>"), tokenizer)
