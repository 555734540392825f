"""From the options to the three datasets of a run: one corpus, a blend of several, or generated
sequences.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from megatron.core.datasets.config import (
    SPLITS,
    Blend,
    Fractions,
    GPTDatasetConfig,
    Split,
    sequence_range,
)
from megatron.core.datasets.gpt_dataset import (
    Dataset,
    FillInTheMiddle,
    GPTDataset,
    Sample,
    cache_directory,
    finish_sample,
    generator_of,
)
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.indices import (
    MAX_BLEND_MEMBERS,
    Arrays,
    build_blend_index,
    digest_of,
    load_or_build,
)
from megatron.core.progress import ProgressBar


class BlendedDataset:
    """At every length, each member has given its share of the samples to within one.

    With `weights` (summing to 1) the shares are theirs; without, members are mixed by their lengths
    and never repeat. `size` is the number of samples (None, without weights only: all of them).
    """

    def __init__(
        self,
        members: Sequence[Dataset],
        weights: Sequence[float] | None,
        size: int | None,
        cache: Path | None,
        name: str = "BlendedDataset",
        verify_cache: bool = True,
    ) -> None:
        assert members and (size is not None or weights is None)
        if len(members) > MAX_BLEND_MEMBERS:
            raise ValueError(
                f"a blend has at most {MAX_BLEND_MEMBERS} members, got {len(members)}: merge some of them"
            )
        self.members = members
        limits = [len(member) for member in members]
        total = sum(limits)
        self.weights = [limit / total for limit in limits] if weights is None else list(weights)
        self.size = total if size is None else size
        if weights is None and self.size > total:
            raise ValueError(
                f"{self.size} samples are wanted of a blend without weights, which is read once and holds {total} "
                f"({' + '.join(map(str, limits))}): give weights to repeat members, or ask for fewer samples"
            )
        description = {
            "class": "BlendedDataset",
            "weights": [weight.hex() for weight in map(float, self.weights)],
            "limits": limits if weights is None else None,
            "size": self.size,
        }
        self.fingerprint = digest_of(
            {**description, "members": [member.fingerprint for member in members]}
        )
        own_limits = limits if weights is None else None
        arrays = load_or_build(
            cache, name, description, lambda: self._build(own_limits), verify_cache
        )
        self.dataset_index = arrays["dataset_index"]
        self.dataset_sample_index = arrays["dataset_sample_index"]
        self._check_members(limits)

    def _build(self, limits: list[int] | None) -> Arrays:
        dataset_index, dataset_sample_index = build_blend_index(
            np.array(self.weights, dtype=np.float64),
            self.size,
            None if limits is None else np.array(limits),
        )
        return {"dataset_index": dataset_index, "dataset_sample_index": dataset_sample_index}

    def _check_members(self, limits: list[int]) -> None:
        drawn = np.bincount(self.dataset_index, minlength=len(limits))
        for member, (count, limit) in enumerate(zip(drawn.tolist(), limits, strict=True)):
            if count > limit:
                raise ValueError(
                    f"member {member} of the blend has {limit} samples, but its weight {self.weights[member]:.6g} asks "
                    f"for {count} of {self.size}: raise --mid-level-dataset-surplus"
                )

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        return self.members[int(self.dataset_index[index])][int(self.dataset_sample_index[index])]


SYMBOLS = 128  # few enough for a small model to learn in some dozen iterations
MEAN_DOCUMENT_LENGTH = 32


class MockGPTDataset:
    """Sample i is a function of (seed, split, i): documents that count upwards from a random start.

    A document ends before any token with probability 1/32, so the best possible loss is about
    (log(symbols) + entropy of the lengths) / 33 per token, far below log(vocab_size).
    """

    def __init__(
        self, split: Split, num_samples: int, config: GPTDatasetConfig, eod: int, vocab_size: int
    ) -> None:
        self.config = config
        self.eod = eod
        self.num_samples = num_samples
        self.split = split
        words = [token for token in range(min(vocab_size, SYMBOLS + 1)) if token != eod]
        self.words = np.array(words[:SYMBOLS], dtype=np.int64)
        if len(self.words) < 2:
            raise ValueError(
                f"--mock-data needs a vocabulary of at least 3 tokens, got {vocab_size}"
            )
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
        starts = random.randint(
            0, len(self.words), size=length
        )  # used at the first position of each document
        position = np.arange(length)
        first = np.maximum.accumulate(
            np.where(np.append(True, ends[:-1]), position, 0)
        )  # of the document at a position
        text = self.words[(starts[first] + position - first) % len(self.words)]
        text[ends] = self.eod
        return finish_sample(text, self.config, self.eod)


logger = logging.getLogger(__name__)

Build = Callable[[Split, int | None], Dataset | None]


def build_datasets(
    config: GPTDatasetConfig,
    num_samples: Sequence[int | None],
    eod: int,
    vocab_size: int,
    fim: FillInTheMiddle | None = None,
) -> tuple[Dataset | None, Dataset | None, Dataset | None]:
    """(train, valid, test) with at least `num_samples` samples each.

    A split for which 0 samples are wanted, or that has no data, is None; None samples stand for one
    pass over the data. Every rank may call this, at any time: no collective is involved, and the
    index cache is safe to share. Where one rank of a node has done it, the others need not verify
    the cache again (`config.verify_index_cache`).
    """
    assert len(num_samples) == len(SPLITS)
    build: Build = (
        partial(_build_mock, config, eod, vocab_size)
        if config.mock_data
        else _Builder(config, eod, vocab_size, fim)
    )
    train, valid, test = (
        build(s, n) if n != 0 else None for s, n in zip(SPLITS, num_samples, strict=True)
    )
    if train is None and num_samples[0] != 0:
        raise ValueError(
            "there is no training data: --split gives it no share, or --train-data-path is missing"
        )
    return train, valid, test


def _build_mock(
    config: GPTDatasetConfig, eod: int, vocab_size: int, split: Split, num_samples: int | None
) -> Dataset | None:
    if split not in config.split_intervals():
        return None
    if num_samples is None:
        raise ValueError("--mock-data has no end: a number of samples must be asked for")
    return MockGPTDataset(split, num_samples, config, eod, vocab_size)


class _Builder:
    """Opens every prefix once, whatever the number of splits and blend members that read it."""

    def __init__(
        self, config: GPTDatasetConfig, eod: int, vocab_size: int, fim: FillInTheMiddle | None
    ) -> None:
        self.config = config
        self.fim = fim
        self.eod = eod
        self.vocab_size = vocab_size
        self.sources = config.sources()
        prefixes = list(
            dict.fromkeys(prefix for blend, _ in self.sources.values() for prefix in blend.prefixes)
        )
        opened = self._map(
            "opening data", lambda prefix: IndexedDataset(prefix, config.mmap_bin_files), prefixes
        )
        self.indexed = dict(zip(prefixes, opened, strict=True))

    def _map(self, what: str, function: Callable, *items: Sequence) -> list:
        """`function` of all items, one per dataset, by several threads."""
        results = []
        with (
            ThreadPoolExecutor(self.config.num_dataset_builder_threads) as threads,
            ProgressBar(
                what, len(items[0]), "datasets", quiet=not self.config.verify_index_cache
            ) as progress,
        ):
            for result in threads.map(function, *items):
                results.append(result)
                progress.add(1)
        return results

    def __call__(self, split: Split, num_samples: int | None) -> Dataset | None:
        if split not in self.sources:
            return None
        blend, fractions = self.sources[split]
        if len(blend.prefixes) == 1 and blend.weights is None:
            return self._member(split, fractions, blend.prefixes[0], num_samples)
        return self._blend(split, blend, fractions, num_samples)

    def _blend(
        self, split: Split, blend: Blend, fractions: Fractions, num_samples: int | None
    ) -> BlendedDataset:
        if blend.weights is not None and num_samples is None:
            raise ValueError(
                f"the {split} split is a blend with weights, which has no end: ask for a number of samples"
            )
        size, wanted = _blend_sizes(blend, num_samples, self.config.mid_level_dataset_surplus)
        members = self._map(
            f"{split} indices",
            lambda prefix, n: self._member(split, fractions, prefix, n),
            blend.prefixes,
            wanted,
        )
        cache = cache_directory(self.config, blend.prefixes[0])
        name = f"BlendedDataset-{split}"
        verify = self.config.verify_index_cache
        dataset = BlendedDataset(members, blend.weights, size, cache, name, verify)
        for prefix, member, weight in zip(blend.prefixes, members, dataset.weights, strict=True):
            logger.info(
                "%s blend: %.4f of %s, %d epochs", split, weight, prefix, member.plan.num_epochs
            )
        return dataset

    def _member(
        self, split: Split, fractions: Fractions, prefix: str, num_samples: int | None
    ) -> GPTDataset:
        indexed = self.indexed[prefix]
        sequences = sequence_range(fractions, len(indexed))
        return GPTDataset(
            indexed, sequences, split, num_samples, self.config, self.eod, self.vocab_size, self.fim
        )


def _blend_sizes(
    blend: Blend, num_samples: int | None, surplus: float
) -> tuple[int | None, list[int | None]]:
    """(samples of the blend, samples each member is built with): shares are rounded up, members get a little more.

    Without weights members are built with one epoch each.
    """
    if blend.weights is None:
        return num_samples, [None] * len(blend.prefixes)
    assert num_samples is not None
    # A member may give a little more than its share: the surplus makes room for that.
    shares = [math.ceil(num_samples * weight) for weight in blend.weights]
    return sum(shares), [math.ceil(share * (1 + surplus)) for share in shares]
