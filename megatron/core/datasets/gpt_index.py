"""Which tokens sample i of a GPT data set consists of, as Megatron-LM orders them.

A document index (sequences, repeated per epoch and shuffled), a sample index (where each sample starts in it) and a
shuffle index (the order in which samples are drawn); one `RandomState` serves all shuffles in turn.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron.core.datasets.helpers import build_sample_index
from megatron.core.datasets.index_cache import Arrays

# The last epoch is shuffled on its own when less than this share of it is wanted; otherwise its few leftover
# samples could be drawn while samples of whole epochs are not.
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
        return tokens // self.seq_length if self.drop_last_partial else -(-tokens // self.seq_length)

    @property
    def num_samples_without_last_epoch(self) -> int:
        return ((self.num_epochs - 1) * self.tokens_per_epoch - self.extra_tokens) // self.seq_length

    def describe(self) -> dict[str, Any]:
        return asdict(self)


def plan_epochs(tokens_per_epoch: int, num_samples: int | None, seq_length: int, extra_tokens: int) -> tuple[int, bool]:
    """(epochs, is the last one shuffled on its own): the fewest that hold `num_samples`; None stands for one epoch."""
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
    """document_index int32 [epochs * sequences], sample_index [samples + 1, 2], shuffle_index [samples]."""
    random = np.random.RandomState(plan.seed)  # the only numpy generator whose stream never changes between versions
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
