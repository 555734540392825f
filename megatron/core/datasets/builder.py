"""Construction of the train, validation and test datasets of a run from its options."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from megatron.core.datasets.config import (
    SPLITS,
    Blend,
    Fractions,
    GPTDatasetConfig,
    Split,
    compute_sequence_range,
)
from megatron.core.datasets.gpt_dataset import Dataset, GPTDataset, Reorder, find_cache_directory
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.progress import ProgressBar
from megatron.core.wings import resolve

NO_TRAINING_DATA = (
    "there is no training data: --split gives it no share, or --train-data-path is missing"
)
_MOCK_DATASET = "megatron.core.datasets.mock:MockGPTDataset"
_BLENDED_DATASET = "megatron.core.datasets.blend:BlendedDataset"

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")

Build = Callable[[Split, int | None], Dataset | None]


def build_datasets(
    config: GPTDatasetConfig,
    num_samples: Sequence[int | None],
    eod: int,
    vocab_size: int,
    fim: Reorder | None = None,
    token_files: Mapping[str, str] | None = None,
) -> tuple[Dataset | None, Dataset | None, Dataset | None]:
    """Return (train, valid, test) with at least `num_samples` samples each.

    `token_files` are the prefixes of data paths that are not prefixes themselves. A split for which
    0 samples are requested, or that has no data, is None; a number of None means one pass over the
    data. This is not a collective: any rank may call it at any time, and the
    index cache is safe to share. If one rank of a node has built the datasets, the others need not
    verify the cache again (`config.verify_index_cache`).
    """
    assert len(num_samples) == len(SPLITS)
    build: Build
    if config.mock_data:
        build = partial(_build_mock, config, eod, vocab_size)
    else:
        build = _Builder(config, eod, vocab_size, fim, token_files or {}).build
    datasets = []
    for split, count in zip(SPLITS, num_samples, strict=True):
        dataset = None
        if count != 0:
            dataset = build(split, count)
        datasets.append(dataset)
    # Validation and test may be missing, training data may not.
    train, valid, test = datasets
    if train is None and num_samples[0] != 0:
        raise ValueError(NO_TRAINING_DATA)
    return train, valid, test


def _build_mock(
    config: GPTDatasetConfig, eod: int, vocab_size: int, split: Split, num_samples: int | None
) -> Dataset | None:
    if split not in config.split_intervals():
        return None
    if num_samples is None:
        raise ValueError("--mock-data has no end: request a number of samples")
    dataset: Dataset = resolve(_MOCK_DATASET)(split, num_samples, config, eod, vocab_size)
    return dataset


class _Builder:
    """Builds the datasets of token files; each file is opened once for all splits and blends."""

    def __init__(
        self,
        config: GPTDatasetConfig,
        eod: int,
        vocab_size: int,
        fim: Reorder | None,
        token_files: Mapping[str, str],
    ) -> None:
        self.config = config
        self.fim = fim
        self.eod = eod
        self.vocab_size = vocab_size
        self.sources = config.sources()
        prefixes = config.data_paths()

        def open_prefix(prefix: str) -> IndexedDataset:
            return IndexedDataset(token_files.get(prefix, prefix), config.mmap_bin_files)

        opened = self._map("opening data", open_prefix, prefixes)
        self.indexed = dict(zip(prefixes, opened, strict=True))

    def _map(
        self, description: str, function: Callable[[Item], Result], items: Sequence[Item]
    ) -> list[Result]:
        """Return `function` of each item, computed by --num-dataset-builder-threads threads."""
        results = []
        quiet = not self.config.verify_index_cache
        with (
            ThreadPoolExecutor(self.config.num_dataset_builder_threads) as threads,
            ProgressBar(description, len(items), "datasets", quiet=quiet) as progress,
        ):
            for result in threads.map(function, items):
                results.append(result)
                progress.add(1)
        return results

    def build(self, split: Split, num_samples: int | None) -> Dataset | None:
        """Return the dataset of a split, or None if it has no data."""
        if split not in self.sources:
            return None
        blend, fractions = self.sources[split]
        # A blend of one dataset with a weight is still a blend: its order of samples differs.
        is_single = len(blend.prefixes) == 1 and blend.weights is None
        if is_single:
            return self._build_member(split, fractions, blend.prefixes[0], num_samples)
        return self._build_blend(split, blend, fractions, num_samples)

    def _build_blend(
        self, split: Split, blend: Blend, fractions: Fractions, num_samples: int | None
    ) -> Dataset:
        if blend.weights is not None and num_samples is None:
            raise ValueError(
                f"the {split} split is a blend with weights, which has no end: request a number of "
                "samples"
            )
        size, member_sizes = _compute_blend_sizes(
            blend, num_samples, self.config.mid_level_dataset_surplus
        )

        def build_member(job: tuple[str, int | None]) -> GPTDataset:
            prefix, num_samples_of_member = job
            return self._build_member(split, fractions, prefix, num_samples_of_member)

        # Build the members in parallel, then the order in which the blend reads them.
        jobs = list(zip(blend.prefixes, member_sizes, strict=True))
        members = self._map(f"{split} indices", build_member, jobs)
        dataset = resolve(_BLENDED_DATASET)(
            members,
            blend.weights,
            size,
            find_cache_directory(self.config, self.indexed[blend.prefixes[0]].prefix),
            f"BlendedDataset-{split}",
            self.config.verify_index_cache,
        )
        for prefix, member, weight in zip(blend.prefixes, members, dataset.weights, strict=True):
            epochs = member.plan.num_epochs
            logger.info("%s blend: %.4f of %s, %d epochs", split, weight, prefix, epochs)
        blend_dataset: Dataset = dataset
        return blend_dataset

    def _build_member(
        self, split: Split, fractions: Fractions, prefix: str, num_samples: int | None
    ) -> GPTDataset:
        indexed = self.indexed[prefix]
        sequences = compute_sequence_range(fractions, len(indexed))
        return GPTDataset(
            indexed, sequences, split, num_samples, self.config, self.eod, self.vocab_size, self.fim
        )


def _compute_blend_sizes(
    blend: Blend, num_samples: int | None, surplus: float
) -> tuple[int | None, list[int | None]]:
    """Return the number of samples of the blend, and of each member.

    Without weights each member has one epoch (None).
    """
    if blend.weights is None:
        return num_samples, [None] * len(blend.prefixes)
    assert num_samples is not None
    total = 0
    member_sizes: list[int | None] = []
    for weight in blend.weights:
        # Rounded up per member, so that the total can exceed the request.
        share = math.ceil(num_samples * weight)
        total += share
        # A member may contribute slightly more than its share: the surplus makes room for that.
        member_sizes.append(math.ceil(share * (1 + surplus)))
    return total, member_sizes
