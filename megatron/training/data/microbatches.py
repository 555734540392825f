"""How large a global batch is and how many micro batches it takes, as functions of the samples consumed so far."""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

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
        while iterations > 0 and consumed_samples < self.steps[-1][0]:
            consumed_samples += self.global_batch_size_at(consumed_samples)
            iterations -= 1
        return consumed_samples + iterations * self.global_batch_size_at(consumed_samples)

    def iterations_for(self, samples: int, consumed_samples: int = 0) -> int:
        """Whole iterations from `consumed_samples` on until `samples` samples in all are used up."""
        consumed, iterations = consumed_samples, 0
        while consumed < self.steps[-1][0]:
            if consumed + self.global_batch_size_at(consumed) > samples:
                return iterations
            consumed += self.global_batch_size_at(consumed)
            iterations += 1
        return iterations + max(0, samples - consumed) // self.global_batch_size_at(consumed)


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
