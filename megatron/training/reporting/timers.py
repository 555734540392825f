"""Timers of the phases of an iteration."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist

TITLES = {  # by --timing-log-option
    "max": "max time across ranks",
    "minmax": "(min, max) time across ranks",
    "all": "times across ranks",
}


class Timers:
    """Timers that accumulate seconds by name; a timer above `level` is free.

    On CUDA an active timer synchronizes the device at both ends, so that only level 0 lets Python
    run ahead of the device. While `traced`, the blocks of all levels are ranges in the profiler's
    trace.
    """

    def __init__(self, level: int, option: str, device: torch.device) -> None:
        self.level = level
        self._option = option
        self._device = device
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self.traced = False

    @contextmanager
    def __call__(self, name: str, level: int = 1) -> Iterator[None]:
        """Time the block under `name`."""
        # Ranges cost microseconds, so they exist only while a trace is recorded.
        trace = torch.profiler.record_function(name) if self.traced else nullcontext()
        with trace:
            if level > self.level:
                yield
                return
            start = self._now()
            yield
            self._seconds[name] += self._now() - start

    def _now(self) -> float:
        """Return the time, after the kernels that are queued on the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()  # kernels are asynchronous
        return time.perf_counter()

    def take(self) -> dict[str, list[float]]:
        """Return the seconds of every rank by name, and reset the timers.

        Collective if the level is above 0.
        """
        if self.level == 0:
            return {}
        gathered: list[dict[str, float]] = [{}] * dist.get_world_size()
        dist.all_gather_object(gathered, dict(self._seconds))
        self._seconds.clear()

        # Stages have different timers: the others' are 0.
        num_ranks = len(gathered)
        result: dict[str, list[float]] = {}
        for rank, seconds_by_name in enumerate(gathered):
            for name, seconds in seconds_by_name.items():
                times = result.setdefault(name, [0.0] * num_ranks)
                times[rank] = seconds
        return result

    def report(self, taken: dict[str, list[float]], iterations: int) -> str:
        """Return log lines for the result of `take`, in milliseconds per iteration."""
        if not taken:
            return ""
        rows = [f"{TITLES[self._option]} (ms):"]
        for name, seconds in taken.items():
            milliseconds = [1000 * total / iterations for total in seconds]
            label = f"{name} "
            times = _format_times(milliseconds, self._option)
            rows.append(f"    {label:.<46}: {times}")
        return "\n".join(rows)


def _format_times(times: Sequence[float], option: str) -> str:
    """Format the times of all ranks as --timing-log-option specifies."""
    if option == "max":
        return f"{max(times):.2f}"
    if option == "minmax":
        return f"({min(times):.2f}, {max(times):.2f})"
    texts = [f"rank {rank}: {time:.2f}" for rank, time in enumerate(times)]
    return "  ".join(texts)
