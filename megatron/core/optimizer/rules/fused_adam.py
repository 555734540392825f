"""AdamW whose kernel also writes the weights of the model (on CUDA with Triton)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.fused_kernels import find_kernel
from megatron.core.optimizer.flat_shard import FlatShard
from megatron.core.optimizer.update_rules import AdamW, OptimizerGroup
from megatron.core.private_operators import add_to_tensors


class FusedAdamW(AdamW):
    """AdamW that reads and writes each element once: 30 bytes for an element of a bf16 model.

    torch's kernel and the copy to the model take 38 bytes: it also writes divided gradients.
    """

    WRITES_MODEL = True

    def __init__(
        self,
        groups: Sequence[OptimizerGroup],
        hyperparameters: Mapping[str, Any],
        shards: Sequence[FlatShard],
    ) -> None:
        super().__init__(groups, hyperparameters)
        self._weights: dict[Tensor, Tensor] = {}
        for shard in shards:
            if not (shard.is_model or shard.is_fp8):
                self._weights[shard.param] = shard.bucket.param_shard

    def update_group(self, group: OptimizerGroup) -> None:
        beta1, beta2 = group["betas"]
        steps = self.collect_states(group, "step")
        # A skipped step does not count. All parameters have taken the same number of steps.
        add_to_tensors(steps, 1.0 - self.found_inf)
        step = steps[0].double()
        step_size = group["lr"] / (1.0 - beta1**step)
        correction = torch.rsqrt(1.0 - beta2**step)
        scalars = torch.stack(
            (self.grad_scale.double(), self.found_inf.double(), step_size, correction)
        ).float()
        for param in group["params"]:
            assert param.grad is not None
            state = self.state[param]
            kernel = find_kernel("adamw", param)
            assert kernel is not None
            kernel(
                param,
                param.grad,
                state["exp_avg"],
                state["exp_avg_sq"],
                self._weights.get(param),
                scalars,
                group["lr"],
                beta1,
                beta2,
                group["eps"],
                group["weight_decay"],
            )
