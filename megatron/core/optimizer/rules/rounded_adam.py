"""AdamW with moments or main parameters of less precision than fp32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.optimizer.flat_shard import (
    OPTIMIZER_PREFIX,
    PARAM_PREFIX,
    FlatShard,
    compute_scale,
    cut_into_slices,
    find_largest,
    store,
    widen,
)
from megatron.core.optimizer.update_rules import AdamTensors, AdamW, OptimizerGroup

_ADAM_PREFIXES = (PARAM_PREFIX, f"{OPTIMIZER_PREFIX}exp_avg.", f"{OPTIMIZER_PREFIX}exp_avg_sq.")


class RoundedAdamW(AdamW):
    """AdamW whose moments or main parameters are kept with less precision than fp32.

    A step computes in fp32 and rounds the results, a slice of bounded size at a time. A scale
    follows from all new values of a piece, so that a piece of several slices is computed twice: for
    the scales, and for the results.
    """

    def __init__(
        self,
        groups: Sequence[OptimizerGroup],
        hyperparameters: Mapping[str, Any],
        shards: Sequence[FlatShard],
    ) -> None:
        super().__init__(groups, hyperparameters)
        self._shards = {shard.param: shard for shard in shards}

    def update_group(self, group: OptimizerGroup) -> None:
        for param in group["params"]:
            shard = self._shards[param]
            if shard.scales:
                for param_index, param_slice in enumerate(shard.bucket.pieces()):
                    self._update_range(
                        group, shard, param_index, param_slice.start, param_slice.stop
                    )
            else:
                self._update_range(group, shard, 0, 0, len(param))
            # A skipped step does not count.
            self.state[param]["step"].add_(1.0 - self.found_inf)

    def _update_range(
        self, group: Mapping[str, Any], shard: FlatShard, param_index: int, start: int, stop: int
    ) -> None:
        """Update elements `[start, stop)` of a shard, which belong to one piece if it has
        scales.
        """
        slices = cut_into_slices(start, stop)
        scales: dict[str, Tensor] = {}
        if shard.scales and len(slices) > 1:
            largest: dict[str, Tensor] = {}
            for elements in slices:
                values = self._compute_slice(group, shard, param_index, elements, copy=True)
                for prefix in shard.scales:
                    slice_maximum = find_largest(values[prefix])
                    largest[prefix] = torch.maximum(
                        largest.get(prefix, slice_maximum), slice_maximum
                    )
            for prefix, maximum in largest.items():
                scales[prefix] = compute_scale(maximum, shard.tensors[prefix].dtype)
        for elements in slices:
            values = self._compute_slice(group, shard, param_index, elements, copy=False)
            for prefix in _ADAM_PREFIXES:
                state = shard.tensors[prefix]
                if state.dtype == torch.float32:
                    continue  # updated in place
                if prefix in shard.scales and prefix not in scales:  # the only slice
                    scales[prefix] = compute_scale(find_largest(values[prefix]), state.dtype)
                store(state[elements], values[prefix], scales.get(prefix))
        # Other slices of the parameter needed the old scales until now.
        for prefix, scale in scales.items():
            shard.scales[prefix][param_index].copy_(scale)

    def _compute_slice(
        self,
        group: Mapping[str, Any],
        shard: FlatShard,
        param_index: int,
        elements: slice,
        copy: bool,
    ) -> dict[str, Tensor]:
        """Return the new fp32 values of a slice by the prefix of their keys.

        Tensors in fp32 and gradients change in place, unless `copy`.
        """
        new = []
        for prefix in _ADAM_PREFIXES:
            state = shard.tensors[prefix][elements]
            new.append(widen(state, shard.get_scale(prefix, param_index), copy))
        param, mean, square = new
        gradient = shard.bucket.grad_shard[elements]
        if copy:
            gradient = gradient.clone()
        step = self.state[shard.param]["step"].clone()
        self._run_kernel(group, AdamTensors([param], [gradient], [mean], [square], [step]))
        return dict(zip(_ADAM_PREFIXES, new, strict=True))
