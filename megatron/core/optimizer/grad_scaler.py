"""Loss scales, norms and clipping: what is known of the gradients before they are applied.

The loss is multiplied by `scale` so that small gradients do not vanish in fp16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from megatron.core.optimizer.config import OptimizerConfig


class GradScaler(Protocol):
    """`update` is called once per step; the state is Megatron-LM's and empty when there is nothing to keep."""

    scale: float
    dynamic: bool

    def update(self, found_inf: bool) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def make_grad_scaler(config: OptimizerConfig, fp16: bool) -> GradScaler:
    """A fixed scale if one is given, a dynamic one for fp16, else 1."""
    if config.loss_scale is not None:
        return ConstantGradScaler(config.loss_scale)
    if not fp16:
        return ConstantGradScaler(1.0)
    return DynamicGradScaler(
        config.initial_loss_scale, config.min_loss_scale, config.loss_scale_window, config.hysteresis
    )


class ConstantGradScaler:
    """The same scale for ever."""

    dynamic = False

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def update(self, found_inf: bool) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class DynamicGradScaler:
    """Doubled after `growth_interval` steps without overflow, halved by the `hysteresis`-th overflow and later ones.

    Overflows are counted since the scale last grew; a single good step does not forgive them (Megatron-LM's rule).
    """

    dynamic = True

    def __init__(self, initial_scale: float, min_scale: float, growth_interval: int, hysteresis: int) -> None:
        self.scale = initial_scale
        self.min_scale = min_scale
        self.growth_interval = growth_interval
        self.hysteresis = hysteresis
        self._good_steps = 0
        self._tolerated = hysteresis

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self._good_steps = 0
            self._tolerated -= 1
            if self._tolerated <= 0:
                self.scale = max(self.scale / 2, self.min_scale)
            return
        self._good_steps += 1
        if self._good_steps == self.growth_interval:
            self._good_steps = 0
            self._tolerated = self.hysteresis
            self.scale *= 2

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": torch.tensor([self.scale]),
            "growth_tracker": self._good_steps,
            "hysteresis_tracker": self._tolerated,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The empty state of a run without dynamic scaling changes nothing."""
        missing = {"scale", "growth_tracker", "hysteresis_tracker"} - state.keys()
        if state and missing:
            raise ValueError(f"the checkpoint's loss scaling lacks {', '.join(sorted(missing))}: give --no-load-optim")
        if state:
            self.scale = float(state["scale"])
            self._good_steps = int(state["growth_tracker"])
            self._tolerated = int(state["hysteresis_tracker"])


_ROW = 1024


def sum_of_squares(grads: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Sum of the squares of flat fp32 tensors, a scalar in fp64.

    Rows are summed in fp32 and the rows' sums in fp64: as fast as one fp32 sum and as precise as an fp64 one. (A plain
    fp32 sum on a CPU is off by 1e-3 for 32 million elements.)
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for grad in grads:
        whole_rows = grad.numel() // _ROW * _ROW
        for rows in (grad[:whole_rows].view(-1, _ROW), grad[whole_rows:].view(1, -1)):
            total += torch.linalg.vector_norm(rows, dim=1).double().square().sum()
    return total


def count_zeros(grads: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Number of zeros, a scalar in fp64."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for grad in grads:
        total += grad.numel() - torch.count_nonzero(grad)
    return total


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What gradients of `norm` are multiplied by; `max_norm` 0 means no clipping."""
    if max_norm == 0:
        return torch.ones_like(norm)
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
