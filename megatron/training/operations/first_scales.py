"""First scales of fp8 with delayed scaling, from the first batch of a run.

The batch is computed in bf16 first, without an update. A run that resumes has the scales of its
checkpoint, and a run whose checkpoint lacks them begins in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from megatron.core.transformer.transformer_engine.calibration import calibrating
from megatron.core.transformer.transformer_engine.modules import EngineLinearMixin, TEPrecision
from megatron.training.checkpoint.contents import set_rng_state
from megatron.training.operations.reexecution import (
    Step,
    execute,
    is_true_anywhere,
    record_step,
)
from megatron.training.run import Batch, ComputeGradients, Run


def set_first_scales(run: Run) -> None:
    """Let the first step of a launch set the scales if the run does not have any.

    The buffers of --tp-comm-overlap may be for fp8 only, in which case no pass in bf16 is possible.
    """
    if not run.config.model.tp_comm_overlap:
        run.compute_gradients = _FirstStep(run.compute_gradients)


class _FirstStep:
    """Sets the scales before the gradients of the first step."""

    def __init__(self, compute_gradients: ComputeGradients) -> None:
        self._compute_gradients = compute_gradients
        self._is_first = True

    def __call__(self, run: Run, batches: Iterator[Batch] | None, num_microbatches: int) -> Tensor:
        if self._is_first:
            self._is_first = False
            has_scales = any(layer.has_fp8_scales() for layer in _iterate_layers(run))
            if not is_true_anywhere(run, has_scales):
                step = record_step(run, batches, num_microbatches)
                _calibrate(run, step)
                batches = iter(step.microbatches)
        return self._compute_gradients(run, batches, num_microbatches)


def _calibrate(run: Run, step: Step) -> None:
    """Set the scales from a step in bf16, and leave the rest of the run as before the step."""
    with calibrating() as calibration:
        execute(run, step)
    for chunk in run.chunks:
        chunk.finish_grad_sync()
        chunk.zero_grad_buffer()
    calibration.set_scales(run.config.model, _find_precision(run).group)
    set_rng_state(step.rng_state, run.rng)


def _iterate_layers(run: Run) -> Iterator[EngineLinearMixin]:
    for chunk in run.chunks:
        for module in chunk.modules():
            if isinstance(module, EngineLinearMixin):
                yield module


def _find_precision(run: Run) -> TEPrecision:
    """Return the precision contexts of a chunk; all chunks of a stage share scales."""
    for module in run.chunks[0].modules():
        precision = getattr(module, "precision", None)
        if isinstance(precision, TEPrecision):
            return precision
    raise AssertionError("a chunk of Transformer Engine has precision contexts")
