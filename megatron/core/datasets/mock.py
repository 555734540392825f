"""Generated sequences with a structure that a model can learn (--mock-data)."""

from __future__ import annotations

import numpy as np

from megatron.core.datasets.config import GPTDatasetConfig, Split
from megatron.core.datasets.gpt_dataset import Sample, finish_sample, make_generator
from megatron.core.datasets.index_cache import compute_digest

SYMBOLS = 128  # few enough for a small model to learn within some dozen iterations
MEAN_DOCUMENT_LENGTH = 32


class MockGPTDataset:
    """Documents that count upwards from a random start.

    Sample i is a function of (seed, split, i). A document ends before each token with probability
    1/33, so the minimum loss is about (log(symbols) + entropy of the lengths) / 33 per token, far
    below log(vocab_size).
    """

    def __init__(
        self, split: Split, num_samples: int, config: GPTDatasetConfig, eod: int, vocab_size: int
    ) -> None:
        self.config = config
        self.eod = eod
        self.num_samples = num_samples
        self.split = split
        # The synthetic text avoids EOD, which would end documents at random.
        words = [token for token in range(min(vocab_size, SYMBOLS + 1)) if token != eod]
        self.words = np.array(words[:SYMBOLS], dtype=np.int64)
        if len(self.words) < 2:
            raise ValueError(
                f"--mock-data needs a vocabulary of at least 3 tokens, got {vocab_size}"
            )
        description = {
            "class": "MockGPTDataset",
            "split": split,
            "seq_length": config.seq_length,
            "extra_tokens": config.extra_tokens,
            "seed": config.seed,
            "eod": eod,
            "words": len(self.words),
        }
        self.fingerprint = compute_digest(description)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        random = make_generator(self.config.seed, self.split, index)
        length = self.config.seq_length + self.config.extra_tokens
        is_end = random.random_sample(length) < 1 / (MEAN_DOCUMENT_LENGTH + 1)
        # Drawn for each position, but used only at the first position of each document.
        first_words = random.randint(0, len(self.words), size=length)
        position = np.arange(length)
        is_start = np.append(True, is_end[:-1])
        document_start = np.maximum.accumulate(np.where(is_start, position, 0))
        word_indices = first_words[document_start] + position - document_start
        text = self.words[word_indices % len(self.words)]
        text[is_end] = self.eod
        return finish_sample(text, self.config, self.eod)
