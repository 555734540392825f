"""Training time that an asynchronous save costs, in one run of pretrain_gpt.py.

    python benchmarks/save_cost.py --save DIR FLAGS OF pretrain_gpt.py

After 30 iterations to warm up, 4 windows of 15 iterations that begin with a save take turns with 4
windows without one. The cost of a save is the difference of the times of both, divided by the
number of saves; each must end within its window. The last line of the output is a JSON object with
this cost, its standard error, its distribution over the iterations of a window, and the cost that
the run has logged, all in ms, the bytes of a save and their throughput. Costs that differ by less
than two standard errors are not distinguishable.
"""

import itertools
import json
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron.training.config.parsing import parse_args  # noqa: E402
from megatron.training.reporting.intervals import Interval  # noqa: E402
from megatron.training.training import pretrain  # noqa: E402
from pretrain_gpt import datasets_provider, forward_step, model_provider  # noqa: E402

WINDOW = 15
WARM_UP = 2 * WINDOW
PAIRS = 4
TOTAL = WARM_UP + 2 * WINDOW * PAIRS


class Mark:
    """A time: of the device if there is one. The host does not wait for the device."""

    def __init__(self) -> None:
        self._event = None
        if torch.cuda.is_initialized():
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        self._seconds = time.perf_counter()

    def measure(self, end: "Mark") -> float:
        """Return the milliseconds until `end`."""
        if self._event is not None and end._event is not None:
            return self._event.elapsed_time(end._event)
        return (end._seconds - self._seconds) * 1e3


def average_windows(milliseconds: list[float], first: int) -> list[float]:
    """Return the mean of each iteration over every other window, from the window `first` on."""
    starts = range(first * WINDOW, len(milliseconds), 2 * WINDOW)
    windows = [milliseconds[start : start + WINDOW] for start in starts]
    return [statistics.mean(iterations) for iterations in zip(*windows, strict=True)]


class Saves:
    """Writer that keeps the metrics of each save."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def interval(self, interval: Interval) -> None:
        """Ignore losses."""

    def scalars(self, values: dict[str, float], iteration: int, samples: int | None = None) -> None:
        if "save-blocking-time" in values and iteration < TOTAL:
            self.metrics.append(values)

    def close(self) -> None:
        """Keep the metrics."""


def main() -> None:
    flags = ["--async-save", "--keep-last-n", "1", "--save-interval", str(2 * WINDOW)]
    config = parse_args([*sys.argv[1:], "--train-iters", str(TOTAL), *flags], 1)
    iteration = 0
    marks: list[Mark] = []  # after each iteration

    def after_iteration() -> None:
        nonlocal iteration
        iteration += 1
        if iteration >= WARM_UP:
            marks.append(Mark())

    saves = Saves()
    pretrain(
        config,
        model_provider,
        datasets_provider,
        forward_step,
        writers=[saves],
        on_iteration=after_iteration,
    )
    # At the ends of windows, before the save that follows
    window_marks = marks[::WINDOW]
    windows = [begin.measure(end) for begin, end in itertools.pairwise(window_marks)]
    with_saves = sum(windows[::2])
    plain = sum(windows[1::2])
    differences = [
        saving - usual for saving, usual in zip(windows[::2], windows[1::2], strict=True)
    ]
    milliseconds = [begin.measure(end) for begin, end in itertools.pairwise(marks)]
    by_iteration = [
        round(saving - usual, 1)
        for saving, usual in zip(
            average_windows(milliseconds, 0), average_windows(milliseconds, 1), strict=True
        )
    ]
    metrics = saves.metrics
    result = {
        "iteration_ms": plain / (PAIRS * WINDOW),
        "iteration_with_saves_ms": with_saves / (PAIRS * WINDOW),
        "num_saves": len(metrics),
        "cost_ms": statistics.mean(differences),
        "cost_error_ms": statistics.stdev(differences) / PAIRS**0.5,
        "logged_ms": statistics.mean(row["save-blocking-time"] for row in metrics) * 1e3,
        "waited_ms": statistics.mean(row["save-end-wait-time"] for row in metrics) * 1e3,
        "gigabytes": metrics[0]["save-gigabytes"],
        "gigabytes_per_second": statistics.mean(
            row["save-gigabytes-per-second"] for row in metrics
        ),
    }
    rounded = {name: round(value, 3) for name, value in result.items()}
    print(json.dumps(rounded | {"cost_ms_by_iteration": by_iteration}))


if __name__ == "__main__":
    main()
