"""Connects what the flags of operations request with a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from megatron.core.parallel_state import ParallelState
from megatron.core.wings import resolve
from megatron.training.config.run_config import Config
from megatron.training.operations.collectives import CollectiveRecorder, recorded
from megatron.training.operations.hangs import HangMonitor
from megatron.training.operations.replicas import (
    check_gradients_at_interval,
    check_weights_at_interval,
)
from megatron.training.operations.rerun import DeterminismReport, ResultValidator
from megatron.training.operations.straggler import StragglerDetector
from megatron.training.run import Batch, Run

logger = logging.getLogger(__name__)

_FIRST_SCALES = "megatron.training.operations.first_scales:set_first_scales"


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
    _observe_results(run)
    if run.config.model.low_precision == "delayed":
        resolve(_FIRST_SCALES)(run)
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


def _observe_results(run: Run) -> None:
    """Let `run` execute its steps as --rerun-mode and the checks of replicas require."""
    config = run.config.operations
    if config.rerun_mode == "validate_results":
        run.compute_gradients = ResultValidator(run).compute_gradients
    elif config.rerun_mode != "disabled":
        run.compute_gradients = DeterminismReport(run).compute_gradients
    if config.gradient_check_interval is not None and _has_replicas(run):
        if run.device.type == "cuda" and not run.config.distributed.deterministic_mode:
            raise ValueError(
                "--gradient-check-interval compares bits: on GPUs it requires --deterministic-mode"
            )
        interval = config.gradient_check_interval
        run.compute_gradients = partial(
            check_gradients_at_interval, interval, run.compute_gradients
        )
    if config.check_weight_hash_across_dp_replicas_interval is not None and _has_replicas(run):
        run.on_iteration = partial(check_weights_at_interval, run, run.on_iteration)


def _has_replicas(run: Run) -> bool:
    """Return whether the model has replicas to compare; warns if it does not."""
    if run.ps.dp.size > 1:
        return True
    logger.warning(
        "gradients and weights are not compared with those of a replica: there is only one "
        "(data-parallel size 1)"
    )
    return False
