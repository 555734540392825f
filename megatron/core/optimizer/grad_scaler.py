"""Loss scales, norms and clipping: what is known of the gradients before they are applied.

The loss is multiplied by `scale` so that small gradients do not vanish in fp16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron.core.optimizer.config import OptimizerConfig


class GradScaler:
    """What the loss is multiplied by: --loss-scale if it is given, a dynamic scale for fp16, else 1.

    A dynamic scale is doubled after `loss_scale_window` steps without overflow, and halved by the `hysteresis`-th
    overflow and later ones. Overflows are counted since the scale last grew; a single good step does not forgive them
    (Megatron-LM's rule). A fixed one has no state.
    """

    def __init__(self, config: OptimizerConfig, fp16: bool) -> None:
        self.dynamic = fp16 and config.loss_scale is None
        self.scale = config.initial_loss_scale if self.dynamic else config.loss_scale or 1.0
        self._config = config
        self._good_steps = 0
        self._tolerated = config.hysteresis

    def update(self, found_inf: bool) -> None:
        """After every step."""
        if not self.dynamic:
            return
        if found_inf:
            self._good_steps = 0
            self._tolerated -= 1
            if self._tolerated <= 0:
                self.scale = max(self.scale / 2, self._config.min_loss_scale)
            return
        self._good_steps += 1
        if self._good_steps == self._config.loss_scale_window:
            self._good_steps = 0
            self._tolerated = self._config.hysteresis
            self.scale *= 2

    def state_dict(self) -> dict[str, Any]:
        """In Megatron-LM's form."""
        if not self.dynamic:
            return {}
        return {
            "scale": torch.tensor([self.scale]),
            "growth_tracker": self._good_steps,
            "hysteresis_tracker": self._tolerated,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The empty state of a run without dynamic scaling changes nothing."""
        if not (state and self.dynamic):
            return
        missing = {"scale", "growth_tracker", "hysteresis_tracker"} - state.keys()
        if missing:
            raise ValueError(f"the checkpoint's loss scaling lacks {', '.join(sorted(missing))}: give --no-load-optim")
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
