"""From the options to the three data sets of a run."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.config import SPLITS, Blend, Fractions, GPTDatasetConfig, Split, sequence_range
from megatron.core.datasets.fim import FillInTheMiddle
from megatron.core.datasets.gpt_dataset import Dataset, GPTDataset, cache_directory
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.mock_dataset import MockGPTDataset
from megatron.core.progress import Progress

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

    A split for which 0 samples are wanted, or that has no data, is None; None samples stand for one pass over the data.
    Every rank may call this, at any time: no collective is involved, and the index cache is safe to share. Where one
    rank of a node has done it, the others need not verify the cache again (`config.verify_index_cache`).
    """
    assert len(num_samples) == len(SPLITS)
    build: Build = (
        partial(_build_mock, config, eod, vocab_size) if config.mock_data else _Builder(config, eod, vocab_size, fim)
    )
    train, valid, test = (build(s, n) if n != 0 else None for s, n in zip(SPLITS, num_samples, strict=True))
    if train is None and num_samples[0] != 0:
        raise ValueError("there is no training data: --split gives it no share, or --train-data-path is missing")
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

    def __init__(self, config: GPTDatasetConfig, eod: int, vocab_size: int, fim: FillInTheMiddle | None) -> None:
        self.config = config
        self.fim = fim
        self.eod = eod
        self.vocab_size = vocab_size
        self.sources = config.sources()
        prefixes = list(dict.fromkeys(prefix for blend, _ in self.sources.values() for prefix in blend.prefixes))
        opened = self._map("opening data", lambda prefix: IndexedDataset(prefix, config.mmap_bin_files), prefixes)
        self.indexed = dict(zip(prefixes, opened, strict=True))

    def _map(self, what: str, function: Callable, *items: Sequence) -> list:
        """`function` of all items, one per data set, by several threads."""
        results = []
        with (
            ThreadPoolExecutor(self.config.num_dataset_builder_threads) as threads,
            Progress(what, len(items[0]), "data sets", quiet=not self.config.verify_index_cache) as progress,
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

    def _blend(self, split: Split, blend: Blend, fractions: Fractions, num_samples: int | None) -> BlendedDataset:
        if blend.weights is not None and num_samples is None:
            raise ValueError(
                f"the {split} split is a blend with weights, which has no end: ask for a number of samples"
            )
        size, wanted = _blend_sizes(blend, num_samples, self.config.mid_level_dataset_surplus)
        members = self._map(
            f"{split} indices", lambda prefix, n: self._member(split, fractions, prefix, n), blend.prefixes, wanted
        )
        cache = cache_directory(self.config, blend.prefixes[0])
        name, verify = f"BlendedDataset-{split}", self.config.verify_index_cache
        dataset = BlendedDataset(members, blend.weights, size, cache, name, verify)
        for prefix, member, weight in zip(blend.prefixes, members, dataset.weights, strict=True):
            logger.info("%s blend: %.4f of %s, %d epochs", split, weight, prefix, member.plan.num_epochs)
        return dataset

    def _member(self, split: Split, fractions: Fractions, prefix: str, num_samples: int | None) -> GPTDataset:
        indexed = self.indexed[prefix]
        sequences = sequence_range(fractions, len(indexed))
        return GPTDataset(indexed, sequences, split, num_samples, self.config, self.eod, self.vocab_size, self.fim)


def _blend_sizes(blend: Blend, num_samples: int | None, surplus: float) -> tuple[int | None, list[int | None]]:
    """(samples of the blend, samples each member is built with): shares are rounded up, members get a little more.

    Without weights members are built with one epoch each.
    """
    if blend.weights is None:
        return num_samples, [None] * len(blend.prefixes)
    assert num_samples is not None
    shares = [math.ceil(num_samples * weight) for weight in blend.weights]
    return sum(shares), [math.ceil(share * (1 + surplus)) for share in shares]
