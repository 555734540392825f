"""All examples of some files, tokenized once and cached in the format of indexed datasets."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

import numpy as np

from megatron.core.datasets import GPTDatasetConfig, IndexedDataset
from megatron.core.datasets.config import Fractions, compute_sequence_range
from megatron.core.datasets.gpt_dataset import find_cache_directory
from megatron.core.datasets.index_cache import compute_digest
from megatron.core.datasets.ordered_workers import OrderedWorkers
from megatron.core.progress import ProgressBar
from megatron.training.data.data_files import find_data_files
from megatron.training.data.token_cache import SMALL_BYTES, cached_tokens, compute_file_digest
from megatron.training.sft.chat_template import ExampleEncoder
from megatron.training.sft.examples import read_example_chunks

logger = logging.getLogger(__name__)

CACHE_VERSION = 1  # increased if the tokens or masks of the same input change


class SFTCorpus:
    """Examples of the files of `paths`, in their order.

    A record is one example, or a chosen and a rejected one (--dpo). `lengths` are the numbers of
    tokens of the examples, and `first_trained` the positions of the first token that is trained on.
    """

    def __init__(
        self, paths: tuple[str, ...], config: GPTDatasetConfig, encoder: ExampleEncoder
    ) -> None:
        self.files: list[str] = []
        for path in paths:
            self.files += find_data_files(path)
        self.name = " ".join(paths)
        self.cache_directory = find_cache_directory(config, self.files[0])
        self.examples_per_record = 2 if encoder.reads_pairs else 1
        # Equal digests mean equal tokens and masks.
        file_digests = [compute_file_digest(path, self.cache_directory) for path in self.files]
        self.digest = compute_digest(
            {
                "class": "PreferenceCorpus" if encoder.reads_pairs else "SFTCorpus",
                "version": CACHE_VERSION,
                "files": file_digests,
                "tokenizer": _compute_tokenizer_digest(encoder),
                "train_on": encoder.train_on,
                "exclude": encoder.exclude,
            }
        )
        prefix = self.cache_directory / f"{self.digest}-SFTCorpus"
        if not Path(f"{prefix}.idx").exists():
            self._tokenize(prefix, encoder)
        self._indexed = IndexedDataset(prefix, config.mmap_bin_files)
        sequence_lengths = self._indexed.lengths.reshape(-1, 2)
        self.first_trained = sequence_lengths[:, 0]
        self.lengths = sequence_lengths.sum(axis=1, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, example: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids of an example, and whether each is trained on."""
        # Tokens that are not trained on are stored as their complement.
        context = self._indexed.read(2 * example)
        remainder = self._indexed.read(2 * example + 1)
        encoded = np.concatenate((context, remainder))
        is_trained = encoded >= 0
        return np.where(is_trained, encoded, ~encoded), is_trained

    def find_examples(self, fractions: Fractions) -> tuple[int, int]:
        """Return the half-open range of the examples of a split."""
        num_records = len(self) // self.examples_per_record
        first, end = compute_sequence_range(fractions, num_records)
        return first * self.examples_per_record, end * self.examples_per_record

    def locate(self, example: int) -> str:
        """Return the file and line of an example, for messages. Reads the files again."""
        record = example // self.examples_per_record
        first_record = 0  # of a chunk
        for chunk in read_example_chunks(self.files):
            end_record = first_record + len(chunk.documents)
            if record < end_record:
                line_number, _ = chunk.documents[record - first_record]
                return f"{chunk.path}:{line_number}"
            first_record = end_record
        raise AssertionError(f"{self.name} has no example {example}")

    def _tokenize(self, prefix: Path, encoder: ExampleEncoder) -> None:
        """Write the examples to the cache."""
        num_bytes = sum(os.path.getsize(path) for path in self.files)
        num_workers = (os.cpu_count() or 1) if num_bytes > SMALL_BYTES else 0
        workers = OrderedWorkers(encoder, read_example_chunks(self.files), num_workers)
        with (
            cached_tokens(prefix, np.int32, self.name) as builder,
            ProgressBar(f"tokenizing {self.name}", None, "tokens") as progress,
            contextlib.closing(workers),
        ):
            for _, encoded in workers:
                num_examples = len(encoded.lengths) // 2
                builder.add(encoded.tokens, encoded.lengths, [2] * num_examples)
                progress.add(len(encoded.tokens))
            if builder.num_documents == 0:
                raise ValueError(f"--data-path {self.name} has no examples: the files are empty")


def _compute_tokenizer_digest(encoder: ExampleEncoder) -> str:
    """Return the digest of everything in the tokenizer that determines tokens and masks."""
    tokenizer = encoder.tokenizer
    description = {
        "pipeline": tokenizer.backend_tokenizer.to_str(),
        "special_tokens": {name: str(text) for name, text in tokenizer.special_tokens_map.items()},
        "templates": tokenizer.chat_template,  # one, or several by their names
    }
    return compute_digest(description)
