"""Generated sequences for --mock-data: nothing to download, and a loss that falls when the model learns."""

from __future__ import annotations

import numpy as np

from megatron.core.datasets.config import GPTDatasetConfig, Split
from megatron.core.datasets.gpt_dataset import Sample, finish_sample, generator_of
from megatron.core.datasets.index_cache import digest_of

SYMBOLS = 128  # few enough for a small model to learn in some dozen iterations
MEAN_DOCUMENT_LENGTH = 32


class MockGPTDataset:
    """Sample i is a function of (seed, split, i): documents that count upwards from a random start.

    A document ends before any token with probability 1/32, so the best possible loss is about
    (log(symbols) + entropy of the lengths) / 33 per token, far below log(vocab_size).
    """

    def __init__(self, split: Split, num_samples: int, config: GPTDatasetConfig, eod: int, vocab_size: int) -> None:
        self.config = config
        self.eod = eod
        self.num_samples = num_samples
        self.split = split
        words = [token for token in range(min(vocab_size, SYMBOLS + 1)) if token != eod]
        self.words = np.array(words[:SYMBOLS], dtype=np.int64)
        if len(self.words) < 2:
            raise ValueError(f"--mock-data needs a vocabulary of at least 3 tokens, got {vocab_size}")
        self.fingerprint = digest_of(
            {
                "class": "MockGPTDataset",
                "split": split,
                "num_samples": num_samples,
                "seq_length": config.seq_length,
                "extra_tokens": config.extra_tokens,
                "seed": config.seed,
                "eod": eod,
                "words": len(self.words),
            }
        )

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        random = generator_of(self.config.seed, self.split, index)
        length = self.config.seq_length + self.config.extra_tokens
        ends = random.random_sample(length) < 1 / (MEAN_DOCUMENT_LENGTH + 1)
        starts = random.randint(0, len(self.words), size=length)  # used at the first position of each document
        position = np.arange(length)
        first = np.maximum.accumulate(
            np.where(np.append(True, ends[:-1]), position, 0)
        )  # of the document at a position
        text = self.words[(starts[first] + position - first) % len(self.words)]
        text[ends] = self.eod
        return finish_sample(text, self.config, self.eod)
