"""Global batch size over a run: constant, ramped up, or in steps."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter

Step = tuple[int, int]  # (consumed samples, global batch size from there on)


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
