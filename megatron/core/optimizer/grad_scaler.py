"""Loss scaling, so that small gradients do not vanish in fp16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron.core.optimizer.optimizer_config import OptimizerConfig


class GradScaler:
    """Factor of the loss: --loss-scale if given, a dynamic scale with fp16, else 1.

    A dynamic scale is doubled after `loss_scale_window` steps without overflow, and halved by the
    `hysteresis`-th overflow and each later one. As in Megatron-LM, the overflow count resets only
    when the scale grows, not after one good step. A fixed scale has no state.
    """

    def __init__(self, config: OptimizerConfig, fp16: bool) -> None:
        self.dynamic = fp16 and config.loss_scale is None
        if self.dynamic:
            self.scale = config.initial_loss_scale
        else:
            self.scale = config.loss_scale or 1.0
        self._config = config
        self._good_steps = 0
        self._remaining_overflows = config.hysteresis

    def update(self, found_inf: bool) -> None:
        """Adapt a dynamic scale to the outcome of a step."""
        if not self.dynamic:
            return
        if found_inf:
            # An overflow interrupts the row of good steps; only repeated ones lower the scale.
            self._good_steps = 0
            self._remaining_overflows -= 1
            if self._remaining_overflows <= 0:
                # A factor of two changes only exponents, so that unscaling is exact.
                self.scale = max(self.scale / 2, self._config.min_loss_scale)
            return
        self._good_steps += 1
        if self._good_steps == self._config.loss_scale_window:
            self._good_steps = 0
            self._remaining_overflows = self._config.hysteresis
            self.scale *= 2

    def state_dict(self) -> dict[str, Any]:
        """Return the state in Megatron-LM's form; empty unless the scale is dynamic."""
        if not self.dynamic:
            return {}
        return {
            "scale": torch.tensor([self.scale]),
            "growth_tracker": self._good_steps,
            "hysteresis_tracker": self._remaining_overflows,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a dynamic scale; the empty state of a run without one is ignored."""
        if not (state and self.dynamic):
            return
        missing = {"scale", "growth_tracker", "hysteresis_tracker"} - state.keys()
        if missing:
            raise ValueError(
                f"the checkpoint's loss scaling lacks {', '.join(sorted(missing))}: "
                "use --no-load-optim"
            )
        self.scale = float(state["scale"])
        self._good_steps = int(state["growth_tracker"])
        self._remaining_overflows = int(state["hysteresis_tracker"])
