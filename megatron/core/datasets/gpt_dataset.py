"""Samples of `seq_length` tokens, cut from the concatenated documents of a split of token files.

The tokens of sample i are the same as in Megatron-LM.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np

from megatron.core.datasets.config import GPTDatasetConfig, Split
from megatron.core.datasets.gpt_index import GPTIndexPlan, build_gpt_index, plan_epochs
from megatron.core.datasets.index_cache import (
    compute_array_digest,
    compute_digest,
    load_or_build,
)
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.sample import PADDING, Reorder, Sample, finish_sample, make_generator


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
    return Path(prefix).parent / "cache" / "GPTDataset_indices"
