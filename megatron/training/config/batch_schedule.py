"""Global batch size over a run: constant, ramped up, or in steps."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

Step = tuple[int, int]  # (consumed samples, global batch size from there on)

_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class BatchSchedule:
    """Global batch size and number of micro-batches as functions of the consumed samples.

    All sizes of the run are checked when the schedule is made: a global batch must be a multiple of
    micro-batch x replicas, or, with `decrease_if_needed`, is rounded down to one.
    """

    steps: tuple[Step, ...]  # in order; the first is at 0
    micro_batch_size: int
    data_parallel_size: int
    decrease_if_needed: bool = False

    def __post_init__(self) -> None:
        unit = self.samples_per_microbatch
        product = (
            f"micro-batch size {self.micro_batch_size} x "
            f"data-parallel size {self.data_parallel_size} = {unit}"
        )
        for _, size in self.steps:
            if size < unit:
                raise ValueError(
                    f"global batch size {size} is less than {product}: increase "
                    "--global-batch-size, or reduce --micro-batch-size or the number of processes"
                )
            if size % unit and not self.decrease_if_needed:
                raise ValueError(
                    f"global batch size {size} is not a multiple of {product}: change one of them, "
                    "or give --decrease-batch-size-if-needed"
                )

    @property
    def global_batch_size(self) -> int:
        """The global batch size at the end of the run."""
        return self.steps[-1][1]

    @property
    def samples_per_microbatch(self) -> int:
        """Number of samples per micro-batch over all replicas."""
        return self.micro_batch_size * self.data_parallel_size

    @property
    def num_microbatches(self) -> int:
        """Number of micro-batches per replica at the end of the run."""
        return self.global_batch_size // self.samples_per_microbatch

    def sizes(self) -> list[int]:
        """Return every global batch size of the run."""
        return [self._round_down(size) for _, size in self.steps]

    def global_batch_size_at(self, consumed_samples: int) -> int:
        """Return the samples of the iteration that starts after `consumed_samples`."""
        # The first step is at 0, so there is always one before the next.
        next_step = self._find_next_step(consumed_samples)
        _, size = self.steps[next_step - 1]
        return self._round_down(size)

    def num_microbatches_at(self, consumed_samples: int) -> int:
        """Return the micro-batches per replica of the iteration after `consumed_samples`."""
        return self.global_batch_size_at(consumed_samples) // self.samples_per_microbatch

    def consumed_after(self, iterations: int, consumed_samples: int = 0) -> int:
        """Return the samples consumed after `iterations` more iterations."""
        for size, length in self._iterate_stretches(consumed_samples):
            if length is None or iterations < length:
                break
            consumed_samples += length * size
            iterations -= length
        return consumed_samples + iterations * size

    def iterations_for(self, samples: int, consumed_samples: int = 0) -> int:
        """Return the whole iterations from `consumed_samples` to a total of `samples`."""
        iterations = 0
        for size, length in self._iterate_stretches(consumed_samples):
            # An incomplete global batch at the end is not trained on.
            remaining = max(0, samples - consumed_samples) // size
            if length is None or remaining < length:
                break
            consumed_samples += length * size
            iterations += length
        return iterations + remaining

    def _round_down(self, size: int) -> int:
        return size - size % self.samples_per_microbatch

    def _find_next_step(self, consumed_samples: int) -> int:
        """Return the index of the first step after `consumed_samples`."""
        return bisect.bisect_right(self.steps, consumed_samples, key=itemgetter(0))

    def _iterate_stretches(self, consumed_samples: int) -> Iterator[tuple[int, int | None]]:
        """Yield (global batch size, number of iterations with it); the last number is None.

        A ramp-up can take 10,000 iterations, and each of them computes how many are left: do not
        walk through single iterations.
        """
        while consumed_samples < self.steps[-1][0]:
            size = self.global_batch_size_at(consumed_samples)
            end, _ = self.steps[self._find_next_step(consumed_samples)]
            length = -(-(end - consumed_samples) // size)  # rounded up
            yield size, length
            consumed_samples += length * size
        yield self.global_batch_size_at(consumed_samples), None


def make_rampup_steps(rampup_batch_size: Sequence[int], global_batch_size: int) -> tuple[Step, ...]:
    """Return the steps of --rampup-batch-size START INCREMENT SAMPLES: equal steps over SAMPLES
    samples. Raises ValueError if they do not lead to the global batch size.
    """
    name = f"--rampup-batch-size {' '.join(map(str, rampup_batch_size))}"
    if len(rampup_batch_size) != 3:
        raise ValueError(f"{name}: requires START INCREMENT SAMPLES")
    start, increment, samples = rampup_batch_size
    if start < 1 or increment < 1 or samples < 0:
        raise ValueError(f"{name}: START and INCREMENT must be positive, SAMPLES not negative")
    if start > global_batch_size:
        raise ValueError(f"{name}: START is larger than --global-batch-size {global_batch_size}")
    # The last step must be the global batch size itself.
    num_steps, remainder = divmod(global_batch_size - start, increment)
    if remainder:
        raise ValueError(
            f"{name}: steps of {increment} do not lead from {start} to --global-batch-size "
            f"{global_batch_size}"
        )
    if samples == 0 or num_steps == 0:
        return ((0, global_batch_size),)
    steps = []
    for step in range(num_steps + 1):
        # A step begins with the first iteration that starts at or after its share of SAMPLES.
        begin = -(-step * samples // num_steps)  # rounded up
        steps.append((begin, start + step * increment))
    return tuple(steps)


def make_token_steps(schedule: str, seq_length: int) -> tuple[Step, ...]:
    """Return the steps of --step-batch-size-schedule, e.g. 0:384 1.5B:768, which counts tokens.
    Raises ValueError if it is malformed.
    """
    steps = []
    for entry in schedule.replace(",", " ").split():
        match = re.fullmatch(r"([\d.]+)([KMBT]?):(\d+)", entry.upper())
        if match is None:
            raise ValueError(
                f"--step-batch-size-schedule: {entry!r} is not TOKENS:SIZE, e.g. 0:384 or 1.5B:768"
            )
        count, unit, size = match.groups()
        # The schedule counts tokens, the run counts samples.
        tokens = int(float(count) * _UNITS.get(unit, 1))
        steps.append((tokens // seq_length, int(size)))
    starts = [start for start, _ in steps]
    is_ordered = starts == sorted(set(starts))
    if not steps or starts[0] != 0 or not is_ordered:
        raise ValueError(
            f"--step-batch-size-schedule {schedule}: the first step must begin at 0, each other "
            "step after the one before it"
        )
    return tuple(steps)
