"""Samples of `seq_length` tokens cut from the concatenated documents of one split of one indexed
dataset.

Which tokens sample i consists of is as in Megatron-LM: a document index (sequences, repeated per
epoch and shuffled), a sample index (where each sample starts in it) and a shuffle index (the order
in which samples are drawn); one `RandomState` serves all shuffles in turn. `FillInTheMiddle` may
reorder a sample's documents (Bavarian et al. 2022).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from megatron.core.datasets.config import SPLITS, GPTDatasetConfig, Split
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.indices import (
    Arrays,
    build_sample_index,
    digest_of,
    digest_of_array,
    load_or_build,
)


class TextTokenizer(Protocol):
    """The part of a tokenizer that is used here."""

    @property
    def tokenize(self) -> Callable[[str], list[int]]: ...

    @property
    def detokenize(self) -> Callable[[Sequence[int]], str]: ...

    @property
    def token_id(self) -> Callable[[str], int | None]: ...


class FillInTheMiddle:
    """A row of tokens to one of the same length in which a share --fim-rate of the documents is
    reordered.

        PSM   <prefix> prefix <suffix> suffix <middle> middle
        SPM   <prefix> <suffix> suffix <middle> prefix middle      with --fim-spm-rate

    Documents are cut between characters, so the tokens at a cut differ from those of the whole
    text. The draws and their order are Megatron-LM's. Its generator runs from sample to sample;
    ours comes with every row, so that a sample does not depend on those read before it.
    """

    def __init__(self, config: GPTDatasetConfig, tokenizer: TextTokenizer) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.prefix = self._token("--fim-prefix-token", config.fim_prefix_token)
        self.middle = self._token("--fim-middle-token", config.fim_middle_token)
        self.suffix = self._token("--fim-suffix-token", config.fim_suffix_token)
        self.pad = self._token("--fim-pad-token", config.fim_pad_token)
        self.eod = self._token("--fim-eod-token", config.fim_eod_token)
        self._special = [self.prefix, self.middle, self.suffix, self.pad, self.eod]
        self.fragment_end: int | None = None
        if config.fim_split_sample is not None:
            self.fragment_end = self._token("--fim-split-sample", config.fim_split_sample)
            self._special.append(self.fragment_end)
        self._begins = len(
            tokenizer.tokenize("")
        )  # tokens that every text begins with, such as BOS

    def _token(self, flag_name: str, token: str) -> int:
        found = self.tokenizer.token_id(token)
        if found is None:
            raise ValueError(
                f"{flag_name} {token}: the tokenizer has no such token; name one that it has, or add this one "
                "(--tokenizer-special-tokens)"
            )
        return found

    def __call__(self, text: np.ndarray, random: np.random.RandomState) -> np.ndarray:
        documents = _between(text, self.eod, lambda document: self._document(document, random))
        reordered = np.concatenate(list(documents))[: len(text)]
        return np.append(reordered, np.full(len(text) - len(reordered), self.pad))

    def _document(self, document: np.ndarray, random: np.random.RandomState) -> np.ndarray:
        """Each fragment by itself where --fim-split-sample cuts the document (files of a
        repository).
        """
        rate = self.config.fim_rate
        if self.fragment_end is None or self.fragment_end not in document:
            return self._reordered(document, rate, random)
        if not random.binomial(1, rate):
            return document
        fragment_rate = self.config.fim_fragment_rate
        assert fragment_rate is not None
        fragments = _between(
            document,
            self.fragment_end,
            lambda fragment: self._reordered(fragment, fragment_rate, random),
        )
        return np.concatenate(list(fragments))

    def _reordered(
        self, piece: np.ndarray, rate: float, random: np.random.RandomState
    ) -> np.ndarray:
        if not random.binomial(1, rate):
            return piece
        text = self.tokenizer.detokenize(piece[~np.isin(piece, self._special)].tolist())
        if self.config.fim_no_prefix is not None and text.startswith(self.config.fim_no_prefix):
            return piece
        first, second = sorted(random.randint(0, len(text) + 1, size=2))
        prefix, middle, suffix = map(
            self._tokens, (text[:first], text[first:second], text[second:])
        )
        if random.binomial(1, self.config.fim_spm_rate):
            ids = [self.prefix, self.suffix, *suffix, self.middle, *prefix, *middle]
        else:
            ids = [self.prefix, *prefix, self.suffix, *suffix, self.middle, *middle]
        return np.array(ids, dtype=np.int64)

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer.tokenize(text)[self._begins :]


def _between(
    tokens: np.ndarray, separator: int, change: Callable[[np.ndarray], np.ndarray]
) -> Iterator[np.ndarray | list[int]]:
    """The pieces between separators, changed, each with its separator; empty ones vanish, but for
    the last.
    """
    start = 0
    for place in np.flatnonzero(tokens == separator).tolist():
        if place > start:
            yield change(tokens[start:place])
            yield [separator]
        start = place + 1
    yield change(tokens[start:])


# The last epoch is shuffled on its own when less than this share of it is wanted; otherwise its few
# leftover samples could be drawn while samples of whole epochs are not.
SEPARATE_LAST_EPOCH_BELOW = 0.80


@dataclass(frozen=True)
class GPTIndexPlan:
    """Everything, beside the lengths of the sequences, that the arrays depend on."""

    first_sequence: int
    last_sequence: int
    tokens_per_epoch: int
    num_epochs: int
    separate_last_epoch: bool
    seq_length: int
    extra_tokens: int
    drop_last_partial: bool
    seed: int

    @property
    def num_samples(self) -> int:
        tokens = self.num_epochs * self.tokens_per_epoch - self.extra_tokens
        return (
            tokens // self.seq_length if self.drop_last_partial else -(-tokens // self.seq_length)
        )

    @property
    def num_samples_without_last_epoch(self) -> int:
        return (
            (self.num_epochs - 1) * self.tokens_per_epoch - self.extra_tokens
        ) // self.seq_length


def plan_epochs(
    tokens_per_epoch: int, num_samples: int | None, seq_length: int, extra_tokens: int
) -> tuple[int, bool]:
    """The fewest epochs that hold `num_samples` (None: one epoch), and whether the last one is
    shuffled separately.
    """
    assert tokens_per_epoch > 0
    if num_samples is None:
        return 1, False
    num_epochs = max(1, -(-(num_samples * seq_length + extra_tokens) // tokens_per_epoch))
    if num_epochs == 1:
        return 1, False
    without_last = ((num_epochs - 1) * tokens_per_epoch - extra_tokens) // seq_length
    per_epoch = (tokens_per_epoch - extra_tokens) // seq_length
    return num_epochs, num_samples - without_last < int(SEPARATE_LAST_EPOCH_BELOW * per_epoch)


def build_gpt_index(plan: GPTIndexPlan, sequence_lengths: np.ndarray) -> Arrays:
    """document_index int32 [epochs * sequences], sample_index [samples + 1, 2], shuffle_index
    [samples].
    """
    random = np.random.RandomState(
        plan.seed
    )  # the only numpy generator whose stream never changes between versions
    # The order of these two draws from one generator is part of the format: Megatron-LM's samples
    # depend on it.
    document_index = _document_index(plan, random)
    sample_index = build_sample_index(
        sequence_lengths, document_index, plan.seq_length, plan.num_samples, plan.extra_tokens
    )
    return {
        "document_index": document_index,
        "sample_index": sample_index,
        "shuffle_index": _shuffle_index(plan, random),
    }


def _document_index(plan: GPTIndexPlan, random: np.random.RandomState) -> np.ndarray:
    epoch = np.arange(plan.first_sequence, plan.last_sequence, dtype=np.int32)
    groups = (plan.num_epochs - 1, 1) if plan.separate_last_epoch else (plan.num_epochs,)
    documents = [np.tile(epoch, epochs) for epochs in groups]
    for group in documents:
        random.shuffle(group)
    return np.concatenate(documents)


def _shuffle_index(plan: GPTIndexPlan, random: np.random.RandomState) -> np.ndarray:
    dtype = np.uint32 if plan.num_samples < np.iinfo(np.uint32).max - 1 else np.int64
    order = np.arange(plan.num_samples, dtype=dtype)
    groups = [order]
    if plan.separate_last_epoch:
        groups = np.split(order, [plan.num_samples_without_last_epoch])
    for group in groups:  # views of `order`
        random.shuffle(group)
    return order


Sample = dict[str, np.ndarray]

PADDING = -1  # marks, before a sample is finished, positions that hold no token


class Dataset(Protocol):
    """What samplers and blends need: samples by number, how many, and what the order of the samples
    depends on.
    """

    @property
    def fingerprint(self) -> str:
        """Identifies the order of samples (32 hex digits): with equal ones sample i is the same cut
        of the data.

        It covers options, name and sequence lengths of the data, but not the tokens.
        """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


class GPTDataset:
    """Item i is sample `shuffle_index[i]`; all epochs that `num_samples` needs lie one after the
    other.

    `sequences` is the half-open range of the indexed dataset that belongs to the split, `num_samples` how many samples
    are wanted at least (None: one epoch), `eod` the end-of-document token, `vocab_size` the bound
    of all tokens, `fim` what reorders documents.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        sequences: tuple[int, int],
        split: Split,
        num_samples: int | None,
        config: GPTDatasetConfig,
        eod: int,
        vocab_size: int,
        fim: FillInTheMiddle | None = None,
    ) -> None:
        self.indexed = indexed
        self.fim = fim
        self.split = split
        self.config = config
        self.eod = eod
        self.vocab_size = vocab_size
        self.plan = _plan(indexed, sequences, split, num_samples, config)
        description = {
            "class": "GPTDataset",
            **asdict(self.plan),
            "sequence_lengths": digest_of_array(indexed.lengths),
        }
        self.fingerprint = digest_of(
            {**description, **config.fim_options(), "prefix": Path(indexed.prefix).name}
        )
        arrays = load_or_build(
            cache_directory(config, indexed.prefix),
            f"GPTDataset-{split}",
            description,
            lambda: build_gpt_index(self.plan, indexed.lengths),
            config.verify_index_cache,
        )
        self.document_index = arrays["document_index"]
        self.sample_index = arrays["sample_index"]
        self.shuffle_index = arrays["shuffle_index"]

    def __len__(self) -> int:
        return self.plan.num_samples

    def __getitem__(self, index: int) -> Sample:
        """tokens, labels, position_ids int64 [s], loss_mask float32 [s], and documents (see
        `finish_sample`).
        """
        text = self._read(int(self.shuffle_index[index]))
        highest = int(text.max())
        if highest >= self.vocab_size:
            raise ValueError(
                f"{self.indexed.prefix}.bin holds token {highest}, but the tokenizer has {self.vocab_size} tokens: "
                "the data was written with another tokenizer"
            )
        if self.fim is not None:
            random = generator_of(self.config.seed, self.split, index)
            filled = int((text != PADDING).sum())
            text[:filled] = self.fim(text[:filled], random)
        return finish_sample(text, self.config, self.eod)

    def _read(self, sample: int) -> np.ndarray:
        """The `seq_length + extra_tokens` tokens of a sample, int64, PADDING where the documents
        have ended.
        """
        text = np.full(self.config.seq_length + self.config.extra_tokens, PADDING, dtype=np.int64)
        first, start = self.sample_index[sample].tolist()
        last, end = self.sample_index[sample + 1].tolist()
        filled = 0
        for position in range(first, last + 1):
            sequence = int(self.document_index[position])
            count = end + self.config.extra_tokens - start if position == last else None
            piece = self.indexed.read(sequence, start, count)
            if piece.dtype.kind == "i" and len(piece) and piece.min() < 0:
                place = int(np.argmax(piece < 0))
                raise ValueError(
                    f"{self.indexed.prefix}.bin: token {start + place} of sequence {sequence} is {piece[place]}, which "
                    "is no token: the file is damaged, or was written with another type"
                )
            text[filled : filled + len(piece)] = piece
            filled += len(piece)
            start = 0
        return text


def _plan(
    indexed: IndexedDataset,
    sequences: tuple[int, int],
    split: Split,
    num_samples: int | None,
    config: GPTDatasetConfig,
) -> GPTIndexPlan:
    first, last = sequences
    tokens_per_epoch = int(indexed.lengths[first:last].sum(dtype=np.int64))
    where = f"the {split} split of {indexed.prefix} (sequences {first} to {last} of {len(indexed)})"
    if tokens_per_epoch == 0:
        raise ValueError(
            f"{where} holds no tokens, but {'one epoch' if num_samples is None else num_samples} samples are wanted: "
            "give the split a larger share in --split or data of its own (--train-, --valid-, --test-data-path), "
            "or do not use it (--eval-iters 0 for validation and test)"
        )
    num_epochs, separate = plan_epochs(
        tokens_per_epoch, num_samples, config.seq_length, config.extra_tokens
    )
    plan = GPTIndexPlan(
        first_sequence=first,
        last_sequence=last,
        tokens_per_epoch=tokens_per_epoch,
        num_epochs=num_epochs,
        separate_last_epoch=separate,
        seq_length=config.seq_length,
        extra_tokens=config.extra_tokens,
        drop_last_partial=split != "valid" or config.drop_last_partial_validation_sequence,
        seed=config.seed,
    )
    if plan.num_samples == 0:
        raise ValueError(
            f"{where} holds {tokens_per_epoch} tokens, less than one sample of --seq-length {config.seq_length} "
            f"(+ {config.extra_tokens}), and is read only once: use a longer corpus, or weights in the blend"
        )
    return plan


def cache_directory(config: GPTDatasetConfig, prefix: str) -> Path:
    """Where the indices of `prefix` are kept."""
    if config.data_cache_path is not None:
        return Path(config.data_cache_path)
    return Path(prefix).parent / "cache" / "GPTDataset_indices"


def generator_of(seed: int, split: Split, index: int) -> np.random.RandomState:
    """What sample `index` draws its random numbers from: they do not depend on the samples read
    before it.
    """
    return np.random.RandomState([seed, SPLITS.index(split), index & 0xFFFFFFFF, index >> 32])


def finish_sample(text: np.ndarray, config: GPTDatasetConfig, eod: int) -> Sample:
    """Inputs, labels and masks of one row of tokens.

    With --reset-attention-mask there are `documents` [s], the number of the document that a
    position belongs to: what attention does not see follows from that, in a s-th of the memory of a
    mask.
    """
    if config.add_extra_token_to_sequence:
        tokens = text[:-1].copy()
        labels = text[1:].copy()
    else:
        tokens = text
        labels = np.append(text[1:], PADDING)
    starts = np.zeros(
        len(tokens), dtype=np.bool_
    )  # where a document starts, other than at position 0
    starts[1:] = tokens[:-1] == eod
    loss_mask = (labels != PADDING).astype(np.float32)
    if config.eod_mask_loss:
        loss_mask[tokens == eod] = 0.0
    position_ids = np.arange(len(tokens))
    sample = {"loss_mask": loss_mask}
    if config.reset_attention_mask:
        sample["documents"] = np.cumsum(starts)
    if config.reset_position_ids:
        position_ids = position_ids - np.maximum.accumulate(np.where(starts, position_ids, 0))
    tokens[tokens == PADDING] = 0
    labels[labels == PADDING] = 0
    return sample | {"tokens": tokens, "labels": labels, "position_ids": position_ids}
