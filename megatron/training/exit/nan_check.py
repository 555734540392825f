"""Stops a run whose loss or gradient is no longer finite, and says where it began."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.core.optimizer import StepResult
from megatron.core.parallel_state import ParallelState
from megatron.training.reporting.logging import Interval
from megatron.training.reporting.measurements import HostCopy


class NotFiniteError(ValueError):
    """A loss or gradient is NaN or infinite."""


@dataclass(frozen=True)
class _Submitted:
    iteration: int
    loss: torch.Tensor
    step: StepResult
    skipped: HostCopy


class FiniteCheck:
    """Looks at every iteration, one iteration late, so that the device need not stop for it.

    The optimizer leaves out every update whose gradient norm is not finite, so nothing is damaged in the meantime. With
    a dynamic loss scale an overflow of the gradient is part of the game; a loss that is not finite is not.
    """

    def __init__(self, ps: ParallelState, wanted: bool, dynamic_loss_scale: bool) -> None:
        self._ps = ps
        self._wanted = wanted
        self._dynamic_loss_scale = dynamic_loss_scale
        self._last: _Submitted | None = None

    def submit(self, iteration: int, loss: torch.Tensor, step: StepResult) -> None:
        """Check the iteration before this one, and keep this one for the next call."""
        self.finish()
        if self._wanted:
            self._last = _Submitted(iteration, loss, step, HostCopy.start(step.skipped))

    def finish(self) -> None:
        """Check what is still unchecked. Raises NotFiniteError on every rank with the ranks where it began."""
        last, self._last = self._last, None
        if last is None or not last.skipped.wait():  # the same on all ranks: the norm is over all gradients
            return
        finite = bool(torch.isfinite(last.loss).all())
        places: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(places, None if finite else self._place())
        where = ", ".join(place for place in places if place is not None)
        if where:
            raise NotFiniteError(f"iteration {last.iteration}: the loss is not finite on {where}. {_ADVICE}")
        if not self._dynamic_loss_scale:
            norm = last.step.grad_norm.item()
            raise NotFiniteError(
                f"iteration {last.iteration}: the gradient norm is {norm}, the loss is finite on all ranks. {_ADVICE}"
            )

    def look_at(self, interval: Interval) -> None:
        """Check the losses of a closed interval: one may be NaN while its gradient is finite."""
        for iteration in interval.iterations:
            if self._wanted and not iteration.skipped and not math.isfinite(iteration.lm_loss):
                raise NotFiniteError(f"iteration {iteration.iteration}: the loss is {iteration.lm_loss}. {_ADVICE}")

    def _place(self) -> str:
        ps = self._ps
        return f"rank {ps.rank} ({ps.place})"


_ADVICE = (
    "Nothing was saved since. Look at the data of that iteration, lower --lr, or go on "
    "past such iterations with --no-check-for-nan-in-loss-and-grad"
)
