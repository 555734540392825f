"""Connects what the flags of operations request with a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from megatron.core.parallel_state import ParallelState
from megatron.training.config.run_config import Config
from megatron.training.operations.collectives import CollectiveRecorder, recorded
from megatron.training.operations.hangs import HangMonitor
from megatron.training.operations.reexecution import observe_results
from megatron.training.operations.straggler import StragglerDetector
from megatron.training.run import Batch, Run


@contextmanager
def watched(config: Config, ps: ParallelState) -> Iterator[Callable[[Run], None]]:
    """Observe this rank inside the block; yields a function that also observes its run.

    Call the function once, when the run is built.
    """
    operations = config.operations
    with ExitStack() as stack:
        recorder = None
        monitor = None
        if operations.log_straggler or operations.hang_report_seconds is not None:
            recorder = stack.enter_context(recorded())
        if operations.hang_report_seconds is not None:
            assert recorder is not None
            monitor = HangMonitor(operations.hang_report_seconds, ps, recorder)
            stack.enter_context(monitor)
        yield partial(_observe, stack, monitor, recorder)


def _observe(
    stack: ExitStack, monitor: HangMonitor | None, recorder: CollectiveRecorder | None, run: Run
) -> None:
    observe_results(run)
    detector = None
    if run.config.operations.log_straggler:
        assert recorder is not None
        detector = StragglerDetector(run.config.operations, run, recorder)
        stack.callback(detector.close)
    compute_gradients = run.compute_gradients
    on_iteration = run.on_iteration

    def begin_iteration(
        run: Run, batches: Iterator[Batch] | None, num_microbatches: int
    ) -> torch.Tensor:
        if monitor is not None:
            monitor.iteration = run.state.iteration + 1
        if detector is not None:
            detector.before_iteration()
        return compute_gradients(run, batches, num_microbatches)

    def end_iteration() -> None:
        if detector is not None:
            detector.after_iteration()
        on_iteration()

    run.compute_gradients = begin_iteration
    run.on_iteration = end_iteration
