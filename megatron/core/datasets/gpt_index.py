"""Order of the samples of a GPT dataset: epochs, shuffles, and the start of each sample."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron.core.datasets.index_cache import Arrays
from megatron.core.datasets.index_helpers import build_sample_index

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
