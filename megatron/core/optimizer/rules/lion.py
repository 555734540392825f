"""Lion (--optimizer lion)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.distributed.param_and_grad_buffer import ParamGroup
from megatron.core.optimizer.flat_shard import FlatShard
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.update_rules import (
    AdamW,
    MupPowers,
    OptimizerGroup,
    UpdateRule,
    get_adam_hyperparameters,
)


class Lion(AdamW):
    """Lion for matrices, AdamW for the other parameters.

    Lion moves each element by the sign of an interpolation between the gradient and its running
    mean: Chen et al. 2023 ("Symbolic Discovery of Optimization Algorithms"). Matrices are those of
    Muon, as in Megatron-LM.
    """

    _MATRIX_STATES = ("exp_avg",)
    STATE_SETS = (_MATRIX_STATES, *AdamW.STATE_SETS)
    MUP_POWERS = MupPowers(hidden_lr=-1, hidden_eps=0, other_lr=0)
    HAS_UNIFORM_STATE = False

    @classmethod
    def select_states(cls, config: OptimizerConfig, group: ParamGroup) -> tuple[str, ...]:
        if group.is_matrix:
            return cls._MATRIX_STATES
        return AdamW.select_states(config, group)

    @classmethod
    def matrix_hyperparameters(cls, config: OptimizerConfig) -> dict[str, Any] | None:
        return {"use_lion": True}

    @classmethod
    def from_config(
        cls, config: OptimizerConfig, groups: Sequence[OptimizerGroup], shards: Sequence[FlatShard]
    ) -> UpdateRule:
        return cls(groups, get_adam_hyperparameters(config))

    def update_group(self, group: OptimizerGroup) -> None:
        if not group.get("use_lion"):
            super().update_group(group)
            return
        keep = 1.0 - self.found_inf  # 0 skips the step without waiting for the device
        beta1, beta2 = group["betas"]
        for param in group["params"]:
            mean = self.state[param]["exp_avg"]
            gradient = self.copy_gradient(param)
            # The update uses beta1 and the stored mean beta2, so the mean is read before it
            # changes.
            direction = mean.lerp(gradient, 1.0 - beta1).sign_()
            mean.lerp_(gradient, (1.0 - beta2) * keep)
            # Decoupled weight decay, as in AdamW.
            param.mul_(1.0 - group["lr"] * group["weight_decay"] * keep)
            param.sub_(direction.mul_(group["lr"] * keep))
