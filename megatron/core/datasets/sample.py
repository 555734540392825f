"""Samples: the interface of datasets, the tensors of a sample, and its random generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from megatron.core.datasets.config import SPLITS, GPTDatasetConfig, Split

Sample = dict[str, np.ndarray]
Reorder = Callable[[np.ndarray, np.random.RandomState], np.ndarray]
"""Reorders documents of a row of tokens, whose length is unchanged (fill-in-the-middle)."""

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
