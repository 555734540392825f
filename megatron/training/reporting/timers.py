"""Named timers of the phases of an iteration, compared over ranks."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist


class Timers:
    """Accumulates seconds per name; a timer above `level` costs nothing.

    On CUDA an active timer synchronizes the device at both ends, so level 0 keeps the device running ahead of Python.
    While `traced`, the blocks of all levels are ranges in the profiler's trace.
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
        with torch.profiler.record_function(name) if self.traced else nullcontext():
            if level > self.level:
                yield
                return
            start = self._now()
            yield
            self._seconds[name] += self._now() - start

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def take(self) -> dict[str, list[float]]:
        """Seconds of every rank by name since the last call, and start again. Collective if the level is above 0."""
        if self.level == 0:
            return {}
        gathered: list[dict[str, float]] = [{}] * dist.get_world_size()
        dist.all_gather_object(gathered, dict(self._seconds))
        self._seconds.clear()
        names = list(dict.fromkeys(name for seconds in gathered for name in seconds))
        return {name: [seconds.get(name, 0.0) for seconds in gathered] for name in names}

    def report(self, taken: dict[str, list[float]], iterations: int) -> str:
        """The lines of the log for what `take` gave, in milliseconds per iteration."""
        if not taken:
            return ""
        lines = [f"{TITLES[self._option]} (ms):"]
        for name, seconds in taken.items():
            values = [1000 * s / iterations for s in seconds]
            lines.append(f"    {name + ' ':.<46}: {_FORMATS[self._option](values)}")
        return "\n".join(lines)


TITLES = {"max": "max time across ranks", "minmax": "(min, max) time across ranks", "all": "times across ranks"}
_FORMATS = {
    "max": lambda values: f"{max(values):.2f}",
    "minmax": lambda values: f"({min(values):.2f}, {max(values):.2f})",
    "all": lambda values: "  ".join(f"rank {rank}: {value:.2f}" for rank, value in enumerate(values)),
}
