"""First scales of delayed scaling in fp8: from maxima of a pass in bf16 instead of 1.

With scale 1, e5m2 rounds gradients below 2^-17 to zero, so that the first updates are too small.
The maxima are those that fp8 would record: of inputs, weights and gradients of outputs. Transformer
Engine records the first two (`calibrating`), except for experts, some of which may have no input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_engine.modules import (
    STEP,
    EngineLinearMixin,
    make_recipe,
)

_BACKWARD_TENSORS = 2  # of a matrix product: gradients of output and input


class Calibration:
    """Maxima of the linear layers that compute in fp8, in the order of their first call."""

    def __init__(self) -> None:
        self._gradients: dict[EngineLinearMixin, Tensor] = {}  # fp32 scalars
        self._experts: dict[EngineLinearMixin, Tensor] = {}  # [3 * experts]

    def record(self, layer: EngineLinearMixin, output: Tensor) -> None:
        """Record the gradient of an output in the backward pass."""
        if layer not in self._gradients:
            self._gradients[layer] = torch.zeros((), device=output.device)
        if output.requires_grad:
            output.register_hook(partial(self._record_gradient, layer))

    def _record_gradient(self, layer: EngineLinearMixin, gradient: Tensor) -> None:
        """Increase the maximum of a layer to that of a gradient."""
        amax = gradient.detach().abs().amax().float()
        self._gradients[layer] = torch.maximum(self._gradients[layer], amax)

    def record_experts(self, layer: Any, x: Tensor, splits: Sequence[int]) -> None:
        """Record inputs `[rows, in]`, of which `splits` rows belong to each expert, and weights."""
        values = []
        inputs = x.detach().split(list(splits))
        for rows, weight in zip(inputs, layer.weight.detach(), strict=True):
            zero = weight.new_zeros(())
            # An expert may be without rows.
            values.append(rows.abs().amax() if len(rows) else zero)
            values.append(weight.abs().amax())
            values.append(zero)
        latest = torch.stack(values).float()

        # The maximum over micro-batches
        earlier = self._experts.get(layer)
        if earlier is not None:
            latest = torch.maximum(earlier, latest)
        self._experts[layer] = latest

    def set_scales(self, config: TransformerConfig, group: dist.ProcessGroup | None) -> None:
        """Set the scales of all layers from the maxima on the ranks of `group`. Collective."""
        recipe: Any = make_recipe(config)
        forward_max, backward_max = recipe.fp8_format.value
        states: list[tuple[Any, float]] = []  # with the largest value of their format
        maxima: list[Tensor] = []  # of the tensors of each state
        for layer, gradient in self._gradients.items():
            meta = layer.prepare_fp8_state(config)
            forward = meta["scaling_fwd"]
            states.append((forward, forward_max))
            maxima.append(self._experts.get(layer, forward.amax_history[0]))

            # All products of a layer (one per expert) get the same scale.
            backward = meta["scaling_bwd"]
            states.append((backward, backward_max))
            backward_maxima = torch.zeros_like(backward.scale)
            backward_maxima[::_BACKWARD_TENSORS] = gradient
            maxima.append(backward_maxima)
        if not states:
            return

        reduced = torch.cat(maxima)
        dist.all_reduce(reduced, dist.ReduceOp.MAX, group=group)
        sizes = [len(values) for values in maxima]
        for (state, format_max), amax in zip(states, reduced.split(sizes), strict=True):
            scale = format_max / amax / 2**recipe.margin
            state.scale.copy_(torch.where(amax > 0, scale, state.scale))
            # As after a step: the next row to write is zero.
            state.amax_history[-1].copy_(amax)
            state.amax_history[0].zero_()


@contextmanager
def calibrating() -> Iterator[Calibration]:
    """Compute in bf16 instead of fp8 inside, and record the maxima."""
    calibration = Calibration()
    STEP.calibration = calibration
    try:
        yield calibration
    finally:
        STEP.calibration = None
