"""How large a global batch is and how many micro batches it takes, as functions of the samples consumed so far."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rampup:
    """`--rampup-batch-size START INCREMENT SAMPLES`: the global batch grows in equal steps over SAMPLES samples."""

    start: int
    increment: int
    samples: int


@dataclass(frozen=True)
class BatchSchedule:
    """Global batch size and number of micro batches at any point of a run; nothing is counted here.

    With `decrease_if_needed`, a global batch that is no multiple of micro batch x replicas is rounded down to one;
    otherwise it is a ValueError when the schedule is made, for every size that the ramp-up passes through.
    """

    global_batch_size: int
    micro_batch_size: int
    data_parallel_size: int
    rampup: Rampup | None = None
    decrease_if_needed: bool = False
    steps: tuple[tuple[int, int], ...] = ()  # (samples, global batch from there on), in place of a ramp-up

    def __post_init__(self) -> None:
        for name in ("global_batch_size", "micro_batch_size", "data_parallel_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name.replace('_', ' ')} must be positive, got {getattr(self, name)}")
        if self.rampup is not None:
            _check_rampup(self.rampup, self.global_batch_size)
        for size in self._requested_sizes():
            self._check_size(size)

    @property
    def samples_per_microbatch(self) -> int:
        """Samples that all replicas together take per micro batch."""
        return self.micro_batch_size * self.data_parallel_size

    def global_batch_size_at(self, consumed_samples: int) -> int:
        """Samples of the iteration that starts after `consumed_samples`."""
        size = self._size_at(consumed_samples)
        return size - size % self.samples_per_microbatch

    def num_microbatches_at(self, consumed_samples: int) -> int:
        """Micro batches per replica of the iteration that starts after `consumed_samples`."""
        return self.global_batch_size_at(consumed_samples) // self.samples_per_microbatch

    def consumed_after(self, iterations: int, consumed_samples: int = 0) -> int:
        """Samples consumed when `iterations` more iterations are done."""
        while iterations > 0 and self._ramps_at(consumed_samples):
            consumed_samples += self.global_batch_size_at(consumed_samples)
            iterations -= 1
        return consumed_samples + iterations * self.global_batch_size_at(consumed_samples)

    def iterations_for(self, samples: int, consumed_samples: int = 0) -> int:
        """Whole iterations from `consumed_samples` on until `samples` samples in all are used up."""
        consumed, iterations = consumed_samples, 0
        while self._ramps_at(consumed):
            if consumed + self.global_batch_size_at(consumed) > samples:
                return iterations
            consumed += self.global_batch_size_at(consumed)
            iterations += 1
        return iterations + max(0, samples - consumed) // self.global_batch_size_at(consumed)

    def _ramps_at(self, consumed_samples: int) -> bool:
        if self.steps:
            return consumed_samples < self.steps[-1][0]
        return self.rampup is not None and consumed_samples < self.rampup.samples

    def _size_at(self, consumed_samples: int) -> int:
        if self.steps:
            return [size for start, size in self.steps if start <= consumed_samples][-1]
        if self.rampup is None or not self._ramps_at(consumed_samples):
            return self.global_batch_size
        steps = (self.global_batch_size - self.rampup.start) // self.rampup.increment
        return self.rampup.start + consumed_samples * steps // self.rampup.samples * self.rampup.increment

    def sizes(self) -> list[int]:
        """Every global batch size that the run passes through."""
        return [size - size % self.samples_per_microbatch for size in self._requested_sizes()]

    def _requested_sizes(self) -> Iterator[int]:
        yield from (size for _, size in self.steps[:-1])
        if self.rampup is not None and self.rampup.samples > 0:
            yield from range(self.rampup.start, self.global_batch_size, self.rampup.increment)
        yield self.global_batch_size

    def _check_size(self, size: int) -> None:
        product = f"micro batch size {self.micro_batch_size} x data-parallel size {self.data_parallel_size}"
        if size < self.samples_per_microbatch:
            raise ValueError(f"global batch size {size} is less than {product} = {self.samples_per_microbatch}")
        if size % self.samples_per_microbatch and not self.decrease_if_needed:
            raise ValueError(
                f"global batch size {size} is not a multiple of {product} = {self.samples_per_microbatch}: change one "
                "of them, or give --decrease-batch-size-if-needed"
            )


def _check_rampup(rampup: Rampup, global_batch_size: int) -> None:
    flag = f"--rampup-batch-size {rampup.start} {rampup.increment} {rampup.samples}"
    if rampup.start < 1 or rampup.increment < 1 or rampup.samples < 0:
        raise ValueError(f"{flag}: START and INCREMENT must be positive, SAMPLES not negative")
    if rampup.start > global_batch_size:
        raise ValueError(f"{flag}: START is larger than --global-batch-size {global_batch_size}")
    if (global_batch_size - rampup.start) % rampup.increment:
        raise ValueError(
            f"{flag}: steps of {rampup.increment} do not lead from {rampup.start} to --global-batch-size "
            f"{global_batch_size}"
        )


_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_steps(text: str, seq_length: int) -> tuple[tuple[int, int], ...]:
    """(samples, global batch size) of `--step-batch-size-schedule`, which counts in tokens; ValueError otherwise."""
    steps = []
    for entry in text.replace(",", " ").split():
        match = re.fullmatch(r"([\d.]+)([KMBT]?):(\d+)", entry.upper())
        if match is None:
            raise ValueError(f"--step-batch-size-schedule: {entry!r} is not TOKENS:SIZE, such as 0:384 or 1.5B:768")
        number, unit, size = match.groups()
        steps.append((int(float(number) * _UNITS.get(unit, 1)) // seq_length, int(size)))
    starts = [start for start, _ in steps]
    if not steps or starts[0] != 0 or any(a >= b for a, b in itertools.pairwise(starts)):
        raise ValueError(f"--step-batch-size-schedule {text}: the first step begins at 0, every other one after it")
    return tuple(steps)


def build_batch_schedule(
    global_batch_size: int | None,
    micro_batch_size: int,
    data_parallel_size: int,
    rampup_batch_size: Sequence[int] | None = None,
    decrease_if_needed: bool = False,
    steps: tuple[tuple[int, int], ...] = (),
) -> BatchSchedule:
    """The schedule that the flags describe; without a global batch size, one micro batch per replica."""
    if steps:
        return BatchSchedule(steps[-1][1], micro_batch_size, data_parallel_size, steps=steps)
    rampup = None
    if rampup_batch_size is not None:
        if len(rampup_batch_size) != 3:
            raise ValueError(
                f"--rampup-batch-size takes START INCREMENT SAMPLES, got {' '.join(map(str, rampup_batch_size))}"
            )
        rampup = Rampup(*rampup_batch_size)
    size = micro_batch_size * data_parallel_size if global_batch_size is None else global_batch_size
    return BatchSchedule(size, micro_batch_size, data_parallel_size, rampup, decrease_if_needed)
