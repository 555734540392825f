"""Training time that a save costs: iterations are slower while it is in progress.

Copies, writes and hashes compete with training for the driver, memory and cores, so that training
loses more time than it waits.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from megatron.core.dist_checkpointing.saving.save_thread import SaveReport

_MIN_BASELINE = 3  # iterations
_MAX_BASELINE = 50
_MIN_LATEST = 16  # iterations that the baseline of any save may have
_LONGEST_USUAL = 2.0  # of a baseline iteration, relative to the median


def compute_slowdown(during: Sequence[float], without: Sequence[float], waited: float) -> float:
    """Return the seconds that iterations lost to a save besides those that they `waited` for it.

    `during` are the seconds of the iterations during the save, `without` those of iterations
    without a save, whose mean they are compared with. 0 if there are too few of these.
    """
    if len(without) < _MIN_BASELINE:
        return 0.0
    # Not the median: most iterations of a loaded machine are faster than the mean, by as much as
    # its delays, which iterations during a save have as well. Those that compiled or were
    # suspended are left out.
    longest = _LONGEST_USUAL * statistics.median(without)
    usual = statistics.mean(seconds for seconds in without if seconds <= longest)
    lost = sum(seconds - usual for seconds in during)
    return max(0.0, lost - waited)


class _Mark(NamedTuple):
    """A moment of the host, or of the device that computes."""

    seconds: float
    event: torch.cuda.Event | None

    def is_reached(self) -> bool:
        return self.event is None or self.event.query()

    def measure_until(self, end: _Mark) -> float:
        """Return the seconds until `end`, which must have been reached."""
        if self.event is None or end.event is None:
            return end.seconds - self.seconds
        end.event.synchronize()
        return self.event.elapsed_time(end.event) / 1e3


class IterationTimes:
    """Times of iterations with and without a save, for the costs of saves.

    On a GPU, times are those of the device, which may be an iteration behind the host.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._during: list[tuple[SaveReport, _Mark, _Mark]] = []
        self._without: deque[tuple[_Mark, _Mark]] = deque(maxlen=_MAX_BASELINE)

    @contextmanager
    def measure(self, save: SaveReport | None) -> Iterator[None]:
        """Measure the iteration in the block, at whose beginning `save` is in progress."""
        begin = self._mark()
        yield
        end = self._mark()
        if save is None:
            self._without.append((begin, end))
        else:
            self._during.append((save, begin, end))

    def is_measured(self, save: SaveReport) -> bool:
        """Return whether the device has completed the iterations during a save."""
        return all(end.is_reached() for report, _, end in self._during if report is save)

    def charge(self, save: SaveReport) -> None:
        """Add the slowdown of the iterations during a save that has ended to its report."""
        during = []
        remaining = []
        for entry in self._during:
            if entry[0] is save:
                during.append(entry[1].measure_until(entry[2]))
            else:
                remaining.append(entry)
        self._during = remaining
        without = [begin.measure_until(end) for begin, end in self._without if end.is_reached()]
        # The latest ones: the first iterations on a GPU that is still cool are faster.
        latest = without[-max(_MIN_LATEST, 2 * len(during)) :]
        save.slowdown = compute_slowdown(during, latest, save.update_wait)

    def _mark(self) -> _Mark:
        event = None
        if torch.cuda.is_initialized():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return _Mark(self._clock(), event)
