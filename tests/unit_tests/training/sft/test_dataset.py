"""Samples of fine-tuning: rows, masks, epochs, splits, caches and the policies for long examples."""

import json
import shlex
import shutil

import numpy as np
import pytest
import torch

from megatron.core.dist_checkpointing import CheckpointError
from megatron.training.config.parsing import parse_args
from megatron.training.data import documents
from megatron.training.data.tokenizer import build_tokenizer
from megatron.training.sft import corpus as corpus_module
from megatron.training.sft.dataset import build_sft_datasets, shuffle_rows
from megatron.training.sft.preferences import check_margins
from tests.support.sft_runs import (
    GOLDEN,
    PACKED,
    PREFERENCES,
    SEQ_LENGTH,
    make_flags,
    write_tokenizer,
)

EXAMPLES = json.loads((GOLDEN / "trl.json").read_text())["conversations"]["examples"]


@pytest.fixture(scope="module")
def tokenizer_directory(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def build(tmp_path, tokenizer_directory):
    """Return a function that builds the datasets of a command line."""

    def build_datasets(flags="", packing=PACKED, num_samples=(12, 0, 0), data=None):
        data = data or "conversations.jsonl"
        argv = shlex.split(make_flags(tokenizer_directory, tmp_path, data, packing) + flags)
        config = parse_args(argv, 1)
        return build_sft_datasets(config, num_samples, build_tokenizer(config.tokenizer))

    return build_datasets


def list_rows(dataset):
    return [tuple(dataset.get_examples(row)) for row in range(dataset.num_rows)]


def read_documents(sample):
    """Return the tokens and labels (-100: not trained on) of each document of a packed sample."""
    labels = np.where(sample["loss_mask"] > 0, sample["labels"], -100)
    documents = []
    for document in range(sample["documents"].max() + 1):
        is_inside = sample["documents"] == document
        tokens = sample["tokens"][is_inside]
        assert sample["position_ids"][is_inside].tolist() == list(range(len(tokens)))
        documents.append((tokens.tolist(), labels[is_inside].tolist()))
    return documents


def test_documents_are_the_examples_of_trl(build):
    dataset, _, _ = build()
    expected = {}
    for index, example in enumerate(EXAMPLES):
        tokens = example["input_ids"]
        expected[index] = (tokens[:-1], example["labels"][1:])
    seen = []
    for row in range(dataset.num_rows):
        sample = dataset[row]
        assert all(values.shape == (SEQ_LENGTH,) for values in sample.values())
        order = shuffle_rows(1234, 0, dataset.num_rows)
        examples = dataset.get_examples(int(order[row]))
        documents = read_documents(sample)
        assert documents[: len(examples)] == [expected[example] for example in examples]
        assert all(label == -100 for _, labels in documents[len(examples) :] for label in labels)
        seen += examples

    assert sorted(seen) == list(range(12))
    assert dataset.num_rows < 12


def test_padding_has_one_example_per_sample(build):
    dataset, _, _ = build(packing="")
    assert list_rows(dataset) == [(example,) for example in range(12)]
    sample = dataset[0]
    assert sample.keys() == {"tokens", "labels", "loss_mask", "position_ids"}
    assert sample["position_ids"].tolist() == list(range(SEQ_LENGTH))


def test_each_epoch_has_every_row_once_in_another_order(build):
    dataset, _, _ = build(packing="", num_samples=(36, 0, 0))
    epochs = []
    for epoch in range(3):
        rows = [dataset[epoch * 12 + position]["tokens"].tobytes() for position in range(12)]
        epochs.append(rows)

    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]

    shorter, _, _ = build(packing="", num_samples=(5, 0, 0))
    assert shorter.fingerprint == dataset.fingerprint
    assert [shorter[index]["tokens"].tobytes() for index in range(5)] == epochs[0][:5]


def test_splits_divide_examples(build):
    train, valid, test = build("--split 9,2,1", packing="", num_samples=(9, 2, 0))
    assert test is None
    assert [*list_rows(train), *list_rows(valid)] == [(example,) for example in range(11)]


def test_several_files_are_one_data_set_and_weights_make_a_blend(build, caplog):
    data = GOLDEN / "conversations.jsonl"
    pairs = GOLDEN / "pairs.jsonl"
    both, _, _ = build(f"--data-path {data} {pairs}", packing="", num_samples=(40, 0, 0))
    assert both.num_rows == 20

    with caplog.at_level("INFO"):
        blend, _, _ = build(f"--data-path 3 {data} 1 {pairs}", packing="", num_samples=(40, 0, 0))
    assert "30 samples are 2.50 epochs" in caplog.text
    assert "10 samples are 1.25 epochs" in caplog.text
    assert np.bincount(blend.dataset_index).tolist() == [30, 10]
    assert blend[0].keys() == both[0].keys()


def test_examples_that_are_too_long(build):
    truncated, _, _ = build(packing="")
    assert "12 examples (2 truncated, 0 dropped)" in truncated.describe(12)
    assert truncated[[e for (e,) in list_rows(truncated)].index(6)]["tokens"].shape == (SEQ_LENGTH,)

    dropped, _, _ = build("--sft-too-long drop", packing="")
    assert "10 examples (0 truncated, 2 dropped)" in dropped.describe(10)

    # Examples 6 and 9 have 192 and 103 tokens.
    expected = [example for example in range(12) if example not in (6, 9)]
    assert list_rows(dropped) == [(example,) for example in expected]

    message = r"conversations\.jsonl:7: the example has 192 tokens.*1 others.*truncate or drop"
    with pytest.raises(ValueError, match=message):
        build("--sft-too-long error", packing="")


def test_truncated_examples_without_trained_tokens_are_dropped(build):
    dataset, _, _ = build("--seq-length 40 --max-position-embeddings 40", packing="")
    kept = [example for (example,) in list_rows(dataset)]
    first_trained = [
        next(i for i, label in enumerate(example["labels"]) if label != -100)
        for example in EXAMPLES
    ]

    assert kept == [example for example in range(12) if first_trained[example] <= 40]
    assert all(dataset[index]["loss_mask"].any() for index in range(dataset.num_rows))
    with pytest.raises(ValueError, match=r"no examples \(of 12, 12 are longer than --seq-length 8"):
        build("--seq-length 8 --max-position-embeddings 8")


def test_a_split_without_examples_is_an_error(build):
    with pytest.raises(ValueError, match="the valid split of .* has no examples"):
        build("--split 999,1,0", num_samples=(1, 1, 0))


def test_tokens_are_cached_until_the_data_changes(build, tmp_path, monkeypatch):
    data = tmp_path / "data.jsonl"
    shutil.copy(GOLDEN / "conversations.jsonl", data)
    calls = []
    tokenize = corpus_module.SFTCorpus._tokenize
    monkeypatch.setattr(
        corpus_module.SFTCorpus,
        "_tokenize",
        lambda *args: (calls.append(args), tokenize(*args)),
    )
    first, _, _ = build(data=data)
    second, _, _ = build(data=data)

    assert len(calls) == 1
    assert first.fingerprint == second.fingerprint

    data.write_text(data.read_text().replace("fine", "good"))
    third, _, _ = build(data=data)
    build("--sft-train-on all", data=data)

    assert len(calls) == 3
    assert third.fingerprint != first.fingerprint


def test_workers_write_the_tokens_that_one_process_writes(build, tmp_path, monkeypatch):
    data = tmp_path / "data.jsonl"
    data.write_text((GOLDEN / "conversations.jsonl").read_text() * 3)
    monkeypatch.setattr(documents, "CHUNK_BYTES", 1000)  # several chunks of text
    alone, _, _ = build(data=data)
    expected = [alone.corpus.read(example)[0].tolist() for example in range(36)]
    monkeypatch.setattr(corpus_module, "SMALL_BYTES", 0)
    shutil.rmtree(tmp_path / "cache")
    with_workers, _, _ = build(data=data)
    assert [with_workers.corpus.read(example)[0].tolist() for example in range(36)] == expected


def test_errors_name_the_line_and_leave_no_cache(build, tmp_path):
    data = tmp_path / "data.jsonl"
    good = (GOLDEN / "conversations.jsonl").read_text()
    data.write_text(good + "\n" + '{"messages": [{"role": "bot", "content": "a"}]}')

    with pytest.raises(ValueError, match=r"data\.jsonl:14: messages\[0\] has the role 'bot'"):
        build(data=data)
    assert not list((tmp_path / "cache").glob("*SFTCorpus*"))

    data.write_text("\n")
    with pytest.raises(ValueError, match=r"data\.jsonl has no examples: the files are empty"):
        build(data=data)


def test_the_preview_marks_trained_text(build, caplog):
    with caplog.at_level("INFO"):
        build(packing="", data="pairs.jsonl", num_samples=(16, 0, 0))
    assert (
        "pairs.jsonl: 8 examples (0 truncated, 0 dropped) in 8 sequences of 96 tokens"
        in caplog.text
    )
    assert "16 samples are 2.00 epochs" in caplog.text

    preview = next(message for message in caplog.messages if "trained on the text" in message)
    assert "</s>" in preview
    assert preview.count("[[") == preview.count("]]") == 2


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--tokenizer-type NullTokenizer --vocab-size 60", "--sft requires --tokenizer-type"),
        ("--fim-data", "--sft"),
        ("--eod-mask-loss", "--sft"),
    ],
)
def test_flags_that_fine_tuning_excludes(build, flags, message):
    with pytest.raises(ValueError, match=message):
        build(flags)


def test_switches_of_fine_tuning_require_it(tokenizer_directory, tmp_path):
    flags = make_flags(tokenizer_directory, tmp_path, "pairs.jsonl").replace("--sft ", "")
    with pytest.raises(ValueError, match="--sft-too-long drop requires --sft"):
        parse_args(shlex.split(f"{flags} --sft-too-long drop"), 1)


@pytest.fixture
def build_pairs(build):
    return lambda flags="": build(flags, PREFERENCES, data="preferences.jsonl")[0]


def test_pairs_are_those_of_trl(build_pairs):
    """A row has the chosen and the rejected completion, whose mask is 1 and -1."""
    dataset = build_pairs()
    assert list_rows(dataset) == [(2 * pair, 2 * pair + 1) for pair in range(8)]

    pairs = json.loads((GOLDEN / "trl.json").read_text())["preferences"]["examples"]
    for row, pair in enumerate(pairs):
        sample = dataset.read_row(row)
        for document, name in enumerate(("chosen_ids", "rejected_ids")):
            tokens = (pair["prompt_ids"] + pair[name])[: SEQ_LENGTH // 2 + 1]
            is_inside = sample["documents"] == document
            assert sample["tokens"][is_inside].tolist() == tokens[:-1]
            assert sample["position_ids"][is_inside].tolist() == list(range(len(tokens) - 1))
            num_context = len(pair["prompt_ids"]) - 1
            sign = 1 - 2 * document
            expected = [0] * num_context + [sign] * (len(tokens) - 1 - num_context)
            assert sample["loss_mask"][is_inside].tolist() == expected
            assert (
                sample["labels"][sample["loss_mask"] == sign].tolist() == tokens[num_context + 1 :]
            )

        assert not sample["loss_mask"][sample["documents"] == 2].any()


def test_pairs_that_are_too_long(build_pairs):
    assert list_rows(build_pairs("--sft-too-long drop")) == [
        (2 * pair, 2 * pair + 1) for pair in (0, 1, 2, 3, 6, 7)
    ]

    with pytest.raises(
        ValueError,
        match=r"preferences.jsonl:5: the pair has 160 tokens.* 1 others",
    ):
        build_pairs("--sft-too-long error")

    # Half of 64 tokens is less than the prompt of three pairs.
    assert len(list_rows(build_pairs("--seq-length 64"))) == 6


def test_splits_divide_pairs(build):
    train, valid, _ = build("--split 5,3,0", PREFERENCES, (5, 3, 0), "preferences.jsonl")
    assert [*list_rows(train), *list_rows(valid)] == [(2 * pair, 2 * pair + 1) for pair in range(8)]
    assert train.num_rows == 5


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--sft-train-on all", "--dpo .*--sft-train-on all"),
        ("--mtp-num-layers 1", "--dpo .*--mtp-num-layers"),
        ("--dpo-beta 0", "--dpo-beta must be positive"),
    ],
)
def test_flags_that_preferences_exclude(build_pairs, flags, message):
    with pytest.raises(ValueError, match=message):
        build_pairs(flags)


def test_preferences_require_documents(build):
    with pytest.raises(ValueError, match="--dpo requires --reset-attention-mask"):
        build("--dpo", packing="", data="preferences.jsonl")


@pytest.mark.parametrize("margins", [None, [0.0] * 8, torch.zeros(7), torch.zeros(8, dtype=int)])
def test_margins_of_a_checkpoint_are_validated(margins):
    check_margins(torch.zeros(8), 8, "run")
    with pytest.raises(CheckpointError, match="run is .* must be a tensor of 8 fp32 numbers"):
        check_margins(margins, 8, "run")
