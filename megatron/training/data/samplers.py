"""How large a global batch is, which samples each replica gets of it, and the iterator that training takes them from.

The stream of samples is a function of consumed samples and seed alone. Micro batch m of an iteration takes the next
micro_batch_size * DP samples of the stream, replica r the r-th part of them, so data-parallel size, micro batch and
global batch may change between runs without loss or repetition.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import torch

from megatron.core.datasets import Dataset
from megatron.core.datasets.ordered_workers import OrderedWorkers
from megatron.core.transformer.placement import WHOLE_SEQUENCES, ContextParallel
from megatron.core.utils import flag

Step = tuple[int, int]  # (consumed samples, global batch size from there on)


@dataclass(frozen=True)
class BatchSchedule:
    """Global batch size and number of micro batches at any point of a run; nothing is counted here.

    With `decrease_if_needed`, a global batch that is no multiple of micro batch x replicas is rounded down to one;
    otherwise it is a ValueError when the schedule is made, for every size that the run passes through.
    """

    steps: tuple[Step, ...]  # in order; the first is at 0
    micro_batch_size: int
    data_parallel_size: int
    decrease_if_needed: bool = False

    def __post_init__(self) -> None:
        for name in ("global_batch_size", "micro_batch_size", "data_parallel_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name.replace('_', ' ')} must be positive, got {getattr(self, name)}")
        product = f"micro batch size {self.micro_batch_size} x data-parallel size {self.data_parallel_size}"
        for _, size in self.steps:
            if size < self.samples_per_microbatch:
                raise ValueError(f"global batch size {size} is less than {product} = {self.samples_per_microbatch}")
            if size % self.samples_per_microbatch and not self.decrease_if_needed:
                raise ValueError(
                    f"global batch size {size} is not a multiple of {product} = {self.samples_per_microbatch}: change "
                    "one of them, or give --decrease-batch-size-if-needed"
                )

    @property
    def global_batch_size(self) -> int:
        """That of the end."""
        return self.steps[-1][1]

    @property
    def samples_per_microbatch(self) -> int:
        """Samples that all replicas together take per micro batch."""
        return self.micro_batch_size * self.data_parallel_size

    @property
    def num_microbatches(self) -> int:
        """Micro batches per replica at the end."""
        return self.global_batch_size // self.samples_per_microbatch

    def sizes(self) -> list[int]:
        """Every global batch size that the run passes through."""
        return [size - size % self.samples_per_microbatch for _, size in self.steps]

    def global_batch_size_at(self, consumed_samples: int) -> int:
        """Samples of the iteration that starts after `consumed_samples`."""
        _, size = self.steps[bisect.bisect_right(self.steps, consumed_samples, key=itemgetter(0)) - 1]
        return size - size % self.samples_per_microbatch

    def num_microbatches_at(self, consumed_samples: int) -> int:
        """Micro batches per replica of the iteration that starts after `consumed_samples`."""
        return self.global_batch_size_at(consumed_samples) // self.samples_per_microbatch

    def consumed_after(self, iterations: int, consumed_samples: int = 0) -> int:
        """Samples consumed when `iterations` more iterations are done."""
        for size, within in self._stretches(consumed_samples):
            if within is None or iterations < within:
                break
            consumed_samples += within * size
            iterations -= within
        return consumed_samples + iterations * size

    def iterations_for(self, samples: int, consumed_samples: int = 0) -> int:
        """Whole iterations from `consumed_samples` on until `samples` samples in all are used up."""
        iterations = 0
        for size, within in self._stretches(consumed_samples):
            fitting = max(0, samples - consumed_samples) // size
            if within is None or fitting < within:
                break
            consumed_samples += within * size
            iterations += within
        return iterations + fitting

    def _stretches(self, consumed_samples: int) -> Iterator[tuple[int, int | None]]:
        """(global batch size, number of iterations that have it) from there on; None: all that follow.

        A ramp-up can last for 10,000 iterations, and how many are left is asked in each of them.
        """
        while consumed_samples < self.steps[-1][0]:
            size = self.global_batch_size_at(consumed_samples)
            ahead = self.steps[bisect.bisect_right(self.steps, consumed_samples, key=itemgetter(0))][0]
            within = -(-(ahead - consumed_samples) // size)
            yield size, within
            consumed_samples += within * size
        yield self.global_batch_size_at(consumed_samples), None


def rampup_steps(rampup_batch_size: Sequence[int], global_batch_size: int) -> tuple[Step, ...]:
    """--rampup-batch-size START INCREMENT SAMPLES: the global batch grows in equal steps over SAMPLES samples."""
    flag = f"--rampup-batch-size {' '.join(map(str, rampup_batch_size))}"
    if len(rampup_batch_size) != 3:
        raise ValueError(f"{flag}: it takes START INCREMENT SAMPLES")
    start, increment, samples = rampup_batch_size
    if start < 1 or increment < 1 or samples < 0:
        raise ValueError(f"{flag}: START and INCREMENT must be positive, SAMPLES not negative")
    if start > global_batch_size:
        raise ValueError(f"{flag}: START is larger than --global-batch-size {global_batch_size}")
    count, rest = divmod(global_batch_size - start, increment)
    if rest:
        raise ValueError(
            f"{flag}: steps of {increment} do not lead from {start} to --global-batch-size {global_batch_size}"
        )
    if samples == 0 or count == 0:
        return ((0, global_batch_size),)
    return tuple((-(-step * samples // count), start + step * increment) for step in range(count + 1))


_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def token_steps(text: str, seq_length: int) -> tuple[Step, ...]:
    """--step-batch-size-schedule, such as 0:384 1.5B:768, which counts in tokens; ValueError otherwise."""
    steps = []
    for entry in text.replace(",", " ").split():
        match = re.fullmatch(r"([\d.]+)([KMBT]?):(\d+)", entry.upper())
        if match is None:
            raise ValueError(f"--step-batch-size-schedule: {entry!r} is not TOKENS:SIZE, such as 0:384 or 1.5B:768")
        number, unit, size = match.groups()
        steps.append((int(float(number) * _UNITS.get(unit, 1)) // seq_length, int(size)))
    starts = [start for start, _ in steps]
    if not steps or starts[0] != 0 or any(a >= b for a, b in itertools.pairwise(starts)):
        raise ValueError(f"--step-batch-size-schedule {text}: the first step must begin at 0, every other after it")
    return tuple(steps)


Batch = dict[str, torch.Tensor]


@dataclass
class DataLoaderConfig:
    """How samples reach the training loop. Field names are Megatron-LM's argument names."""

    dataloader_type: str = flag("single", choices=("single", "cyclic"))
    """single: read a data set once, in its order; cyclic: read it repeatedly, reshuffled every time."""
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


def _read(dataset: Dataset, numbers: list[int]) -> dict[str, np.ndarray]:
    """Arrays [micro batch, ...] of these samples."""
    samples = [dataset[number] for number in numbers]
    return {key: np.stack([sample[key] for sample in samples]) for key in samples[0]}


class DataIterator:
    """Micro batches of one replica, on the CPU: tokens, labels, position_ids int64 and loss_mask fp32 [mbs, s], and
    documents int64 [mbs, s] with --reset-attention-mask. Context-parallel ranks keep their parts, but all of documents.

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
            f"the data is exhausted: of {len(self.dataset)} samples, {consumed_samples} were consumed before "
            f"this run, and no micro batch of {micro_batch_size} for each of {dp_size} replicas is "
            "left. Build a larger data set (--train-iters, --train-samples) or use --dataloader-type cyclic"
        )
