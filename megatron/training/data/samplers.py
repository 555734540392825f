"""Which samples each replica gets, and the iterator that the training loop takes micro batches from.

The stream of samples is a function of consumed samples and seed alone. Micro batch m of an iteration takes the next
micro_batch_size * DP samples of the stream, replica r the r-th part of them, so data-parallel size, micro batch and
global batch may change between runs without loss or repetition.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from megatron.core.datasets import Dataset, Sample
from megatron.core.datasets.ordered_workers import OrderedWorkers
from megatron.core.transformer.context_parallel import WHOLE_SEQUENCES, ContextParallel
from megatron.core.utils import flag

Batch = dict[str, torch.Tensor]


@dataclass
class DataLoaderConfig:
    """How samples reach the training loop. Field names are Megatron-LM's argument names."""

    dataloader_type: str = flag("single", choices=("single", "cyclic"))
    """single: the samples of a data set once, in its order; cyclic: again and again, shuffled anew every time."""
    num_workers: int = flag(2)
    """Processes per rank and data set that read ahead; 0 reads in the training process."""
    seed: int = flag(1234)
    """Seed of everything: initial weights (with the parameter's name), data order, dropout."""

    def __post_init__(self) -> None:
        if self.num_workers < 0:
            raise ValueError(f"--num-workers must not be negative, got {self.num_workers}")


Stream = Callable[[int, int], list[int]]  # the samples at positions [start, stop)


class CyclicStream:
    """Position p holds entry p mod N of a permutation that seed and epoch (p div N) decide."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples = num_samples
        self.seed = seed
        self._permutation = functools.lru_cache(maxsize=1)(self._shuffle)

    def __call__(self, start: int, stop: int) -> list[int]:
        samples: list[int] = []
        while start < stop:
            epoch, first = divmod(start, self.num_samples)
            count = min(stop - start, self.num_samples - first)
            samples += self._permutation(epoch)[first : first + count].tolist()
            start += count
        return samples

    def _shuffle(self, epoch: int) -> np.ndarray:
        return np.random.RandomState([self.seed, epoch]).permutation(self.num_samples)


def microbatches(
    stream: Stream, end: int | None, consumed_samples: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> Iterator[list[int]]:
    """Lists of sample numbers, one per micro batch of one replica, from `consumed_samples` on.

    A stream with an `end` is left where not all replicas would get a whole micro batch.
    """
    step, start = micro_batch_size * dp_size, consumed_samples
    while end is None or start + step <= end:
        first = start + dp_rank * micro_batch_size
        yield stream(first, first + micro_batch_size)
        start += step


def collate(samples: list[Sample]) -> dict[str, np.ndarray]:
    """Arrays [micro batch, ...]."""
    return {key: np.stack([sample[key] for sample in samples]) for key in samples[0]}


def _read(dataset: Dataset, numbers: list[int]) -> dict[str, np.ndarray]:
    return collate([dataset[number] for number in numbers])


class DataIterator:
    """Micro batches of one replica, on the CPU: tokens, labels, position_ids int64 and loss_mask fp32 [mbs, s], and
    attention_mask bool [mbs, 1, s, s] with --reset-attention-mask. Context-parallel ranks keep their parts of the same.

    Its worker processes start with the first batch and end with `close`, with the iterator, or with the process.
    Raises ValueError when the data is used up.
    """

    def __init__(
        self,
        dataset: Dataset,
        consumed_samples: int,
        micro_batch_size: int,
        config: DataLoaderConfig,
        dp_rank: int = 0,
        dp_size: int = 1,
        cp: ContextParallel = WHOLE_SEQUENCES,
        pin_memory: bool = False,
    ) -> None:
        assert 0 <= dp_rank < dp_size and micro_batch_size > 0 and consumed_samples >= 0
        cyclic = config.dataloader_type == "cyclic"
        stream: Stream = CyclicStream(len(dataset), config.seed) if cyclic else lambda a, b: list(range(a, b))
        self._place = (consumed_samples, micro_batch_size, dp_rank, dp_size)
        self.dataset = dataset
        self.cp = cp
        self.pin_memory = pin_memory
        numbers = microbatches(stream, None if cyclic else len(dataset), *self._place)
        self._batches = OrderedWorkers(functools.partial(_read, dataset), numbers, config.num_workers)

    def __iter__(self) -> DataIterator:
        return self

    def __next__(self) -> Batch:
        try:
            _, arrays = next(self._batches)
        except StopIteration:
            raise ValueError(self._exhausted()) from None
        batch = self.cp.part_of({key: torch.from_numpy(array) for key, array in arrays.items()})
        return {key: tensor.pin_memory() for key, tensor in batch.items()} if self.pin_memory else batch

    def close(self) -> None:
        """End the worker processes."""
        self._batches.close()

    def _exhausted(self) -> str:
        consumed_samples, micro_batch_size, _, dp_size = self._place
        return (
            f"the data is used up: of {len(self.dataset)} samples, {consumed_samples} were consumed before "
            f"this run, and no micro batch of {micro_batch_size} for each of {dp_size} replicas is "
            "left. Build a larger data set (--train-iters, --train-samples) or use --dataloader-type cyclic"
        )
