"""SGD (--optimizer sgd)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim.sgd import sgd

from megatron.core.distributed.param_and_grad_buffer import ParamGroup
from megatron.core.optimizer.flat_shard import FlatShard
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.update_rules import MupPowers, OptimizerGroup, UpdateRule


class SGD(UpdateRule):
    """torch's fused SGD; weight decay is part of the gradient."""

    STATE_SETS = (("momentum_buffer",), ())  # without momentum there is no state
    MUP_POWERS = MupPowers(hidden_lr=0, hidden_eps=0, other_lr=1)

    @classmethod
    def select_states(cls, config: OptimizerConfig, group: ParamGroup) -> tuple[str, ...]:
        if not config.sgd_momentum:
            return ()
        return cls.STATE_SETS[0]

    @classmethod
    def find_conflict(
        cls, config: OptimizerConfig, saved_groups: Sequence[Mapping[str, Any]]
    ) -> tuple[str, Any, Any] | None:
        # Momentum other than 0 has a state, which does not depend on its value.
        momentum = saved_groups[0].get("momentum") if saved_groups else None
        if momentum is None or bool(momentum) == bool(config.sgd_momentum):
            return None
        return "--sgd-momentum", momentum, config.sgd_momentum

    @classmethod
    def from_config(
        cls, config: OptimizerConfig, groups: Sequence[OptimizerGroup], shards: Sequence[FlatShard]
    ) -> UpdateRule:
        return cls(groups, {"momentum": config.sgd_momentum})

    def update_group(self, group: OptimizerGroup) -> None:
        # The kernel expects None for parameters without momentum.
        buffers: list[Tensor | None] = []
        for param in group["params"]:
            buffers.append(self.state[param].get("momentum_buffer"))
        sgd(
            group["params"],
            self.collect_gradients(group),
            buffers,
            fused=True,
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
