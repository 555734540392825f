"""Traces of torch's profiler, imported for --profile."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile

from megatron.training.config.run_options import ProfilingConfig
from megatron.training.reporting.console import EVERY_RANK
from megatron.training.reporting.measurements import Timers

logger = logging.getLogger(__name__)


class StepProfiler:
    """Writer of a trace of the iterations that the flags select.

    Sequence of calls, on any rank: `before` each iteration; leaving the context ends a trace that
    is still open. The phases of an iteration are ranges of the trace, under the names of the
    timers.
    """

    def __init__(
        self, config: ProfilingConfig, tensorboard_dir: str | None, rank: int, timers: Timers
    ) -> None:
        self._config = config
        self._rank = rank
        self._timers = timers
        self._directory = Path(config.profile_dir or tensorboard_dir or "profile")
        self._requested = config.profile and rank in (config.profile_ranks or [0])
        self._profiler: profile | None = None
        self._first = 0
        self._last = 0
        if self._requested:
            _check_writable(self._directory)

    def __enter__(self) -> StepProfiler:
        return self

    def before(self, iteration: int) -> None:
        """Start the trace before its first iteration, and end it after its last."""
        # A resumed run may begin within the range, or after it.
        if self._profiler is not None and iteration >= self._config.profile_step_end:
            self._finish(iteration - 1)
        first = self._config.profile_step_start
        if self._requested and first <= iteration < self._config.profile_step_end:
            self._start(iteration)
        self._last = iteration

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        # The run ended or failed within the range: a shorter trace is better than none.
        if self._profiler is not None:
            self._finish(self._last)
        elif self._requested and error_type is None:
            window = f"{self._config.profile_step_start} to {self._config.profile_step_end - 1}"
            logger.warning(
                f"rank {self._rank} trained none of iterations {window}: no trace", extra=EVERY_RANK
            )

    def _start(self, iteration: int) -> None:
        """Start the trace with an iteration."""
        self._requested = False
        self._first = iteration
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=activities, record_shapes=True, profile_memory=True)
        self._profiler.start()
        self._timers.traced = True

    def _finish(self, last: int) -> None:
        """End the trace, whose last iteration is `last`, and write it."""
        assert self._profiler is not None
        self._profiler.stop()
        self._timers.traced = False

        # The trace. TensorBoard finds traces by this suffix.
        name = f"rank_{self._rank}_iterations_{self._first}_to_{last}"
        trace = self._directory / f"{name}.pt.trace.json"
        self._profiler.export_chrome_trace(str(trace))

        # A table of the slowest operators, which needs no trace viewer
        sort_key = "self_cpu_time_total"
        if torch.cuda.is_available():
            sort_key = "self_device_time_total"
        averages = self._profiler.key_averages()
        table = averages.table(sort_by=sort_key, row_limit=40)
        summary = self._directory / f"{name}.txt"
        summary.write_text(table)
        logger.info(
            f"rank {self._rank}: trace of iterations {self._first} to {last} in {trace}",
            extra=EVERY_RANK,
        )
        self._profiler = None


def _check_writable(directory: Path) -> None:
    """Raise ValueError, before training, if no trace can be written to the directory."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK):
            raise PermissionError("it is not writable")
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(
            f"--profile: no traces in {directory}: {reason}; give another --profile-dir"
        ) from None
