"""Samples of `seq_length` tokens, cut from the concatenated documents of a split of token files.

The tokens of sample i are the same as in Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from megatron.core.datasets.config import SPLITS, GPTDatasetConfig, Split
from megatron.core.datasets.index_cache import (
    Arrays,
    build_sample_index,
    compute_array_digest,
    compute_digest,
    load_or_build,
)
from megatron.core.datasets.indexed_dataset import IndexedDataset

# ---- The interface of datasets, the tensors of a sample, and its random generator ----

Sample = dict[str, np.ndarray]
Reorder = Callable[[np.ndarray, np.random.RandomState], np.ndarray]
"""Reorders documents of a row of tokens, whose length is unchanged (fill-in-the-middle)."""

CACHE_NAME = "GPTDataset_indices"
PADDING = -1  # marks positions without a token until `finish_sample`


class Dataset(Protocol):
    """The interface that samplers and blends use."""

    @property
    def fingerprint(self) -> str:
        """Identifies the order of samples (32 hex digits): with equal fingerprints, sample i is the
        same cut of the data.

        It covers the options and the name and sequence lengths of the data, but not the tokens.
        """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


@runtime_checkable
class TokenFiles(Protocol):
    """A dataset that reads token files."""

    def digest_tokens(self, num_blocks: int) -> str:
        """Return the digest (32 hex digits) of at most `num_blocks` blocks of the files.

        It takes the same time for files of any size.
        """


def make_generator(seed: int, split: Split, index: int) -> np.random.RandomState:
    """Return the generator of sample `index`, independent of the samples read before it."""
    # Seeds are 32-bit words, so a 64-bit sample number needs two of them.
    low = index & 0xFFFFFFFF
    high = index >> 32
    return np.random.RandomState([seed, SPLITS.index(split), low, high])


def finish_sample(text: np.ndarray, config: GPTDatasetConfig, eod: int) -> Sample:
    """Return inputs, labels and masks of one row of tokens.

    tokens, labels, position_ids: int64 [s]; loss_mask: float32 [s]. With --reset-attention-mask
    also `documents` [s], the number of the document of each position: attention is restricted to
    equal numbers, in 1/s of the memory of a mask.
    """
    # Position i predicts token i + 1.
    if config.add_extra_token_to_sequence:
        tokens = text[:-1].copy()
        labels = text[1:].copy()
    else:
        tokens = text
        labels = np.append(text[1:], PADDING)
    # Whether a document starts at a position; position 0 needs no mark.
    starts = np.zeros(len(tokens), dtype=np.bool_)
    starts[1:] = tokens[:-1] == eod

    loss_mask = (labels != PADDING).astype(np.float32)
    if config.eod_mask_loss:
        loss_mask[tokens == eod] = 0.0
    sample = {"loss_mask": loss_mask}
    if config.reset_attention_mask:
        sample["documents"] = np.cumsum(starts)
    position_ids = np.arange(len(tokens))
    if config.reset_position_ids:
        document_starts = np.maximum.accumulate(np.where(starts, position_ids, 0))
        position_ids = position_ids - document_starts
    tokens[tokens == PADDING] = 0
    labels[labels == PADDING] = 0
    return sample | {"tokens": tokens, "labels": labels, "position_ids": position_ids}


# ---- Order of the samples: epochs, shuffles, and the start of each sample ----

# The last epoch is shuffled separately if less than this share of it is needed. Otherwise its few
# samples could be drawn instead of samples of whole epochs.
SEPARATE_LAST_EPOCH_BELOW = 0.80


@dataclass(frozen=True)
class GPTIndexPlan:
    """All parameters of the index except the lengths of the sequences."""

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
        if self.drop_last_partial:
            return tokens // self.seq_length
        return -(-tokens // self.seq_length)  # rounded up

    @property
    def num_samples_without_last_epoch(self) -> int:
        tokens = (self.num_epochs - 1) * self.tokens_per_epoch - self.extra_tokens
        return tokens // self.seq_length


def plan_epochs(
    tokens_per_epoch: int, num_samples: int | None, seq_length: int, extra_tokens: int
) -> tuple[int, bool]:
    """Return the minimum number of epochs that contain `num_samples` (None: one epoch).

    The second result is whether the last epoch is shuffled separately.
    """
    assert tokens_per_epoch > 0
    if num_samples is None:
        return 1, False
    tokens = num_samples * seq_length + extra_tokens
    num_epochs = max(1, -(-tokens // tokens_per_epoch))  # rounded up
    if num_epochs == 1:
        return 1, False
    # Samples of the other epochs, of a whole epoch, and of those that the last epoch provides
    without_last = ((num_epochs - 1) * tokens_per_epoch - extra_tokens) // seq_length
    per_epoch = (tokens_per_epoch - extra_tokens) // seq_length
    from_last = num_samples - without_last
    is_separate = from_last < int(SEPARATE_LAST_EPOCH_BELOW * per_epoch)
    return num_epochs, is_separate


def build_gpt_index(plan: GPTIndexPlan, sequence_lengths: np.ndarray) -> Arrays:
    """Return the three arrays of the index.

    document_index: int32 [epochs * sequences], sequence numbers, repeated per epoch and shuffled;
    sample_index: [samples + 1, 2], start of each sample in it as (position, token offset);
    shuffle_index: [samples], the order in which samples are drawn.
    """
    # RandomState is the only generator of NumPy whose stream never changes between versions.
    random = np.random.RandomState(plan.seed)
    # Both shuffles draw from one generator in this order, as in Megatron-LM, whose samples depend
    # on it.
    document_index = _build_document_index(plan, random)
    sample_index = build_sample_index(
        sequence_lengths, document_index, plan.seq_length, plan.num_samples, plan.extra_tokens
    )
    return {
        "document_index": document_index,
        "sample_index": sample_index,
        "shuffle_index": _build_shuffle_index(plan, random),
    }


def _build_document_index(plan: GPTIndexPlan, random: np.random.RandomState) -> np.ndarray:
    """Return the sequences of all epochs, shuffled together or with a separate last epoch."""
    epoch = np.arange(plan.first_sequence, plan.last_sequence, dtype=np.int32)
    epochs_of_groups = [plan.num_epochs]
    if plan.separate_last_epoch:
        epochs_of_groups = [plan.num_epochs - 1, 1]
    groups = []
    for num_epochs in epochs_of_groups:
        group = np.tile(epoch, num_epochs)
        random.shuffle(group)
        groups.append(group)
    return np.concatenate(groups)


def _build_shuffle_index(plan: GPTIndexPlan, random: np.random.RandomState) -> np.ndarray:
    """Return the order of the samples, in which those of a separate last epoch come last."""
    fits_uint32 = plan.num_samples < np.iinfo(np.uint32).max - 1
    dtype = np.uint32 if fits_uint32 else np.int64
    order = np.arange(plan.num_samples, dtype=dtype)
    groups = [order]
    if plan.separate_last_epoch:
        groups = np.split(order, [plan.num_samples_without_last_epoch])
    for group in groups:  # views of `order`
        random.shuffle(group)
    return order


# ---- Samples ----


class GPTDataset:
    """Samples of one split of one indexed dataset, in the order of the shuffle index.

    `sequences` is the half-open range of the split in the indexed dataset, `num_samples` the
    minimum number of samples (None: one epoch), `eod` the end-of-document token, `vocab_size` the
    bound of all tokens. The optional `fim` reorders documents.
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
        fim: Reorder | None = None,
    ) -> None:
        self.indexed = indexed
        self.fim = fim
        self.split = split
        self.config = config
        self.eod = eod
        self.vocab_size = vocab_size
        self.plan = _plan_index(indexed, sequences, split, num_samples, config)
        # Everything that determines the index: a change of it invalidates the cached arrays.
        description = {
            "class": "GPTDataset",
            **asdict(self.plan),
            "sequence_lengths": compute_array_digest(indexed.lengths),
        }
        # The fingerprint also covers options that change samples but not the index.
        self.fingerprint = compute_digest(
            {**description, **config.fim_options(), "prefix": Path(indexed.prefix).name}
        )
        arrays = load_or_build(
            find_cache_directory(config, indexed.prefix),
            f"GPTDataset-{split}",
            description,
            lambda: build_gpt_index(self.plan, indexed.lengths),
            config.verify_index_cache,
        )
        # Memory-mapped: sequences of all epochs, sample starts, and the order of samples.
        self.document_index = arrays["document_index"]
        self.sample_index = arrays["sample_index"]
        self.shuffle_index = arrays["shuffle_index"]

    def __len__(self) -> int:
        return self.plan.num_samples

    def __getitem__(self, index: int) -> Sample:
        """Return the tensors of a sample (see `finish_sample`)."""
        text = self._read(int(self.shuffle_index[index]))
        # A token outside the vocabulary would fail in the embedding, on a GPU without a message.
        highest = int(text.max())
        if highest >= self.vocab_size:
            raise ValueError(
                f"{self.indexed.prefix}.bin holds token {highest}, but the tokenizer has "
                f"{self.vocab_size} tokens: the data was written with another tokenizer"
            )
        if self.fim is not None:
            random = make_generator(self.config.seed, self.split, index)
            num_tokens = int((text != PADDING).sum())
            text[:num_tokens] = self.fim(text[:num_tokens], random)
        return finish_sample(text, self.config, self.eod)

    def digest_tokens(self, num_blocks: int) -> str:
        return compute_array_digest(np.frombuffer(self.indexed.read_blocks(num_blocks), np.uint8))

    def _read(self, sample: int) -> np.ndarray:
        """Return the tokens of a sample, int64 [seq_length + extra_tokens].

        Positions after the end of the last document are PADDING.
        """
        extra_tokens = self.config.extra_tokens
        text = np.full(self.config.seq_length + extra_tokens, PADDING, dtype=np.int64)
        first, start = self.sample_index[sample].tolist()
        last, end = self.sample_index[sample + 1].tolist()
        filled = 0
        for position in range(first, last + 1):
            sequence = int(self.document_index[position])
            count = None  # to the end of the sequence
            if position == last:
                count = end + extra_tokens - start
            tokens = self.indexed.read(sequence, start, count)
            self._check_tokens(tokens, sequence, start)
            text[filled : filled + len(tokens)] = tokens
            filled += len(tokens)
            start = 0
        return text

    def _check_tokens(self, tokens: np.ndarray, sequence: int, start: int) -> None:
        """Raise ValueError for negative numbers, which would pass for padding."""
        if tokens.dtype.kind == "i" and len(tokens) and tokens.min() < 0:
            offset = int(np.argmax(tokens < 0))
            raise ValueError(
                f"{self.indexed.prefix}.bin: token {start + offset} of sequence {sequence} is "
                f"{tokens[offset]}, not a valid token id: the file is corrupt or has another dtype"
            )


def _plan_index(
    indexed: IndexedDataset,
    sequences: tuple[int, int],
    split: Split,
    num_samples: int | None,
    config: GPTDatasetConfig,
) -> GPTIndexPlan:
    """Return the plan of the index; raises ValueError if the split has too few tokens."""
    first, last = sequences
    tokens_per_epoch = int(indexed.lengths[first:last].sum(dtype=np.int64))
    description = (
        f"the {split} split of {indexed.prefix} (sequences {first} to {last} of {len(indexed)})"
    )
    if tokens_per_epoch == 0:
        requested = "one epoch" if num_samples is None else num_samples
        raise ValueError(
            f"{description} holds no tokens, but {requested} samples are requested: give the split "
            "a larger share in --split or data of its own (--train-, --valid-, --test-data-path), "
            "or do not use it (--eval-iters 0 for validation and test)"
        )
    # Repeat the sequences until there are enough tokens for all samples.
    num_epochs, separate_last_epoch = plan_epochs(
        tokens_per_epoch, num_samples, config.seq_length, config.extra_tokens
    )
    plan = GPTIndexPlan(
        first_sequence=first,
        last_sequence=last,
        tokens_per_epoch=tokens_per_epoch,
        num_epochs=num_epochs,
        separate_last_epoch=separate_last_epoch,
        seq_length=config.seq_length,
        extra_tokens=config.extra_tokens,
        drop_last_partial=split != "valid" or config.drop_last_partial_validation_sequence,
        seed=config.seed,
    )
    # One pass over very little data may not fill a single sample.
    if plan.num_samples == 0:
        raise ValueError(
            f"{description} holds {tokens_per_epoch} tokens, less than one sample of --seq-length "
            f"{config.seq_length} (+ {config.extra_tokens}), and is read only once: use a longer "
            "corpus, or weights in the blend"
        )
    return plan


def find_cache_directory(config: GPTDatasetConfig, prefix: str) -> Path:
    """Return the directory of the indices of `prefix`."""
    if config.data_cache_path is not None:
        return Path(config.data_cache_path)
    directory = Path(prefix).parent
    if directory.name == CACHE_NAME:  # token files that were made from text
        return directory
    return directory / "cache" / CACHE_NAME
