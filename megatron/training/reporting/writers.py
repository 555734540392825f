"""Destinations of metrics: the log line, the record of the run, TensorBoard and trackers.

Used on rank 0 only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Protocol

from megatron.core.transformer.config_parts import LOAD
from megatron.core.wings import resolve
from megatron.training.config.run_options import LoggingConfig
from megatron.training.reporting.intervals import Interval
from megatron.training.reporting.run_record import RunRecord

DASHBOARDS = "megatron.training.reporting.dashboards:make_dashboards"


class Writer(Protocol):
    """A destination of metrics."""

    def interval(self, interval: Interval) -> None:
        """Write the metrics of an interval."""

    def scalars(self, values: dict[str, float], iteration: int, samples: int | None = None) -> None:
        """Write points at an iteration, optionally also over the consumed training samples."""

    def close(self) -> None:
        """Flush and close the destination."""


def make_writers(
    config: LoggingConfig,
    save: str | None,
    args: dict[str, Any],
    iteration: int,
    consumed_samples: int = 0,
) -> list[Writer]:
    """Return the writers that `config` requests, for a launch that begins after `iteration`.

    Raises ValueError if a destination cannot be created.
    """
    if not config.dashboards():
        return []
    writers: list[Writer] = resolve(DASHBOARDS)(config, save, args, iteration, consumed_samples)
    return writers


# The log line


def format_throughput(tflops: float) -> str:
    """Format with one decimal, or three significant digits below 10; never with an exponent."""
    if tflops >= 10:
        return f"{tflops:.1f}"
    magnitude = 0
    if tflops > 0:
        magnitude = math.floor(math.log10(tflops))
    return f"{tflops:.{2 - magnitude}f}"


def format_log_line(interval: Interval, train_iters: int) -> str:
    """Return the log line of an interval: Megatron-LM's fields in its order, then our own."""
    last = interval.last
    now = f"{datetime.now():%Y-%m-%d %H:%M:%S.%f}"
    milliseconds = 1000 * interval.seconds_per_iteration
    throughput = format_throughput(interval.tflops_per_device)

    # Megatron-LM, and the scripts that parse its logs, define these names and formats.
    log_fields = [
        f" [{now}] iteration {last.iteration:8d}/{train_iters:8d}",
        f"consumed samples: {last.consumed_train_samples:12d}",
        f"elapsed time per iteration (ms): {milliseconds:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {throughput}",
        f"learning rate: {last.learning_rate:.6E}",
        f"global batch size: {last.batch_size:5d}",
        f"lm loss: {interval.mean_loss:.6E}",
    ]
    for name, mean in interval.mean_metrics.items():
        log_fields.append(f"{name}: {mean:.6E}")
    for name, values in last.experts.items():
        if name != LOAD:
            log_fields.append(f"{name}: {compute_mean(values):.6E}")

    # State of the optimizer. Metrics that the flags do not request are None.
    log_fields.append(f"loss scale: {last.loss_scale:.1f}")
    log_fields.append(f"grad norm: {last.grad_norm:.3f}")
    if last.num_zeros_in_grad is not None:
        log_fields.append(f"num zeros: {last.num_zeros_in_grad:.0f}")
    if last.params_norm is not None:
        log_fields.append(f"params norm: {last.params_norm:.3f}")
    log_fields.append(f"number of skipped iterations: {interval.num_skipped:3d}")
    log_fields.append(f"number of nan iterations: {interval.num_nan:3d}")

    # Fields that Megatron-LM does not have come last: scripts cut its line by position.
    seconds = interval.estimate_remaining_seconds(train_iters)
    remaining = timedelta(seconds=round(seconds))
    log_fields.append(f"tokens/s: {interval.tokens_per_second:.0f}")
    log_fields.append(f"ETA: {remaining}")
    return " | ".join(log_fields) + " |"


def compute_mean(values: Sequence[float]) -> float:
    """Return the mean of at least one value."""
    return sum(values) / len(values)


# Writers


class RecordWriter:
    """Writes measurements to the record of the run."""

    def __init__(self, record: RunRecord) -> None:
        self._record = record

    def interval(self, interval: Interval) -> None:
        self._record.write("interval", **interval.as_fields())

    def scalars(self, values: dict[str, float], iteration: int, samples: int | None = None) -> None:
        self._record.write("point", iteration=iteration, values=values)

    def close(self) -> None:
        pass  # every line is written at once
