"""Update rules over flat shards; the result does not depend on the layout.

To add an optimizer, write a subclass of `UpdateRule` in `rules/`, add it to `UPDATE_RULES`, and
declare its hyperparameters in `OptimizerConfig`. Sharding, checkpoints, their validation and the
conversion of optimizer state are driven by the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megatron.core.distributed.param_and_grad_buffer import ParamGroup
from megatron.core.fused_kernels import find_kernel
from megatron.core.optimizer.flat_shard import FlatShard
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.wings import resolve

OptimizerGroup = dict[str, Any]
"""Parameters of an optimizer (`params`) and their options, as in torch."""


class MupPowers(NamedTuple):
    """Powers of the width, relative to the base model, that multiply hyperparameters with muP.

    Yang et al. 2022 (Tensor Programs V), table 8, as Megatron-LM applies it.
    """

    hidden_lr: int
    """Learning rate of matrices whose sizes both grow with the width."""
    hidden_eps: int
    """Term in the denominator of the update of these matrices."""
    other_lr: int
    """Learning rate of vectors, embeddings and the output layer."""


class AdamTensors(NamedTuple):
    """Arguments of the fused kernel: lists with one flat fp32 tensor for each parameter."""

    params: list[Tensor]
    gradients: list[Tensor]
    means: list[Tensor]
    squares: list[Tensor]
    steps: list[Tensor]


class UpdateRule:
    """Parameter groups of flat fp32 tensors, their state, and the change made by a step.

    Gradients are divided by `grad_scale`; a step with `found_inf` 1 is skipped. This class does
    not derive from `torch.optim.Optimizer`, whose constructor imports torch's compiler, which
    takes as long as importing torch itself.
    """

    STATE_SETS: ClassVar[tuple[tuple[str, ...], ...]]
    """Possible sets of state tensors of a parameter, by their names in checkpoints."""
    HAS_UNIFORM_STATE: ClassVar[bool] = True
    """True if all parameters have the same state tensors, as legacy and universal files require."""
    MUP_POWERS: ClassVar[MupPowers | None]
    """Scales of muP; None if the update itself does not depend on the width."""
    WRITES_MODEL: ClassVar[bool] = False
    """True if the update also writes the model's weights, except those in fp8."""

    grad_scale: Tensor
    found_inf: Tensor

    def __init__(
        self, groups: Sequence[OptimizerGroup], hyperparameters: Mapping[str, Any]
    ) -> None:
        """Initialize from torch's form of groups; `hyperparameters` are the groups' defaults."""
        self.param_groups = [{**hyperparameters, **group} for group in groups]
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    @classmethod
    def select_states(cls, config: OptimizerConfig, group: ParamGroup) -> tuple[str, ...]:
        """Return the names of the state tensors of a parameter of `group`."""
        return cls.STATE_SETS[0]

    @classmethod
    def matrix_hyperparameters(cls, config: OptimizerConfig) -> dict[str, Any] | None:
        """Return the hyperparameters of a separate group for matrices, or None without one."""
        return None

    @classmethod
    def find_conflict(
        cls, config: OptimizerConfig, saved_groups: Sequence[Mapping[str, Any]]
    ) -> tuple[str, Any, Any] | None:
        """Return the flag that makes the state of the parameter groups `saved_groups` unusable.

        The result is (flag, stored value, current value), or None if the state can be loaded.
        """
        return None

    @classmethod
    def from_config(
        cls, config: OptimizerConfig, groups: Sequence[OptimizerGroup], shards: Sequence[FlatShard]
    ) -> UpdateRule:
        """Make the rule for parameter groups of the flat tensors of `shards`."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            if group["params"]:
                self.update_group(group)

    def update_group(self, group: OptimizerGroup) -> None:
        raise NotImplementedError

    def collect_gradients(self, group: OptimizerGroup) -> list[Tensor]:
        """Return the gradients, not divided yet."""
        grads = []
        for param in group["params"]:
            if param.grad is not None:
                grads.append(param.grad)
        return grads

    def collect_states(self, group: OptimizerGroup, name: str) -> list[Tensor]:
        """Return the state tensor `name` of each parameter of the group."""
        return [self.state[param][name] for param in group["params"]]

    def copy_gradient(self, param: Tensor) -> Tensor:
        """Return the divided gradient, or zeros if the step must not change anything."""
        assert param.grad is not None
        gradient = param.grad / self.grad_scale
        # Zeros, because nonfinite values would remain nonfinite when multiplied by 0.
        return gradient.masked_fill_(self.found_inf.bool(), 0.0)


# Imported if a flag requests it
_APEX_ADAM = "megatron.core.optimizer.rules.apex_adam:ApexAdam"
_FUSED_ADAM = "megatron.core.optimizer.rules.fused_adam:FusedAdamW"
_ROUNDED_ADAM = "megatron.core.optimizer.rules.rounded_adam:RoundedAdamW"


def get_adam_hyperparameters(config: OptimizerConfig) -> dict[str, Any]:
    return {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps}


class AdamW(UpdateRule):
    """AdamW (Loshchilov and Hutter 2019), by torch's fused kernel."""

    STATE_SETS: ClassVar[tuple[tuple[str, ...], ...]] = (("exp_avg", "exp_avg_sq"),)
    # Each element of Adam's update has the size of the learning rate, for gradients of any size.
    MUP_POWERS: ClassVar[MupPowers | None] = MupPowers(hidden_lr=-1, hidden_eps=-1, other_lr=0)

    @classmethod
    def from_config(
        cls, config: OptimizerConfig, groups: Sequence[OptimizerGroup], shards: Sequence[FlatShard]
    ) -> UpdateRule:
        hyperparameters = get_adam_hyperparameters(config)
        rule: UpdateRule
        if config.optimizer_impl == "apex":
            rule = resolve(_APEX_ADAM)(groups, hyperparameters)
            return rule
        if config.has_rounded_states:
            rule = resolve(_ROUNDED_ADAM)(groups, hyperparameters, shards)
            return rule
        if find_kernel("adamw", shards[0].param) is not None:
            rule = resolve(_FUSED_ADAM)(groups, hyperparameters, shards)
            return rule
        return AdamW(groups, hyperparameters)

    def update_group(self, group: OptimizerGroup) -> None:
        tensors = AdamTensors(
            group["params"],
            self.collect_gradients(group),
            self.collect_states(group, "exp_avg"),
            self.collect_states(group, "exp_avg_sq"),
            self.collect_states(group, "step"),
        )
        self._run_kernel(group, tensors)

    def _run_kernel(self, group: Mapping[str, Any], tensors: AdamTensors) -> None:
        """Update tensors with the hyperparameters of a group; gradients are divided in place."""
        beta1, beta2 = group["betas"]
        # The fused kernel reads grad_scale and found_inf on the device, without synchronization.
        adamw(
            tensors.params,
            tensors.gradients,
            tensors.means,
            tensors.squares,
            [],  # maxima of amsgrad
            tensors.steps,
            fused=True,
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


# Value of --optimizer -> its update rule, which is imported on demand.
UPDATE_RULES = {
    "adam": "megatron.core.optimizer.update_rules:AdamW",
    "sgd": "megatron.core.optimizer.rules.sgd:SGD",
    "ademamix": "megatron.core.optimizer.rules.ademamix:AdEMAMix",
    "muon": "megatron.core.optimizer.rules.muon:Muon",
    "lion": "megatron.core.optimizer.rules.lion:Lion",
}


def get_update_rule(optimizer: str) -> type[UpdateRule]:
    """Return the update rule of a value of --optimizer."""
    rule: type[UpdateRule] = resolve(UPDATE_RULES[optimizer])
    return rule


def select_states(config: OptimizerConfig, group: ParamGroup) -> tuple[str, ...]:
    """Return the names in checkpoints of the state tensors of a parameter of `group`."""
    return get_update_rule(config.optimizer).select_states(config, group)


def make_update_rule(config: OptimizerConfig, shards: Sequence[FlatShard]) -> UpdateRule:
    """Create the update rule of --optimizer over the flat shards, with its state allocated."""
    if config.lr is None:
        raise ValueError("--lr must be given")
    rule_type = get_update_rule(config.optimizer)
    groups = _make_param_groups(config, shards, rule_type)
    rule = rule_type.from_config(config, groups, shards)
    for shard in shards:
        state = dict(shard.state)
        if "exp_avg_sq" in state:  # the correction of its bias needs the number of steps
            state["step"] = torch.zeros((), dtype=torch.float32, device=shard.param.device)
        rule.state[shard.param] = state
    return rule


def _make_param_groups(
    config: OptimizerConfig, shards: Sequence[FlatShard], rule_type: type[UpdateRule]
) -> list[dict[str, Any]]:
    """Return the parameter groups, the same ones on each rank, possibly empty.

    In this order: parameters with weight decay, those without, with --decoupled-lr the embedding
    and the output layer, matrices if the rule has hyperparameters for them, and with muP the other
    hidden matrices. As the groups do not depend on the rank, a checkpoint's `param_groups` fit any
    rank.
    """
    # Scales of muP; all powers are 0 for a rule that does not depend on the width.
    width_mult = shards[0].bucket.plan.group.width_mult
    powers = rule_type.MUP_POWERS or MupPowers(hidden_lr=0, hidden_eps=0, other_lr=0)
    other_scale = width_mult**powers.other_lr
    decayed = _make_param_group(config, wd_mult=1.0, lr_scale=other_scale)
    not_decayed = _make_param_group(config, wd_mult=0.0, lr_scale=other_scale)
    groups = [decayed, not_decayed]
    embeddings = decayed
    if config.decoupled_lr is not None:
        embeddings = _make_param_group(config, wd_mult=1.0, is_decoupled_lr=True)
        groups.append(embeddings)
    matrices = decayed
    matrix_hyperparameters = rule_type.matrix_hyperparameters(config)
    if matrix_hyperparameters is not None:
        matrices = _make_param_group(config, wd_mult=1.0)
        matrices.update(matrix_hyperparameters)
        groups.append(matrices)
    hidden = matrices
    # Without muP, hidden matrices are in the group of the other matrices.
    if width_mult != 1.0 and rule_type.MUP_POWERS is not None:
        hidden = _make_param_group(config, wd_mult=1.0, lr_scale=width_mult**powers.hidden_lr)
        hidden.update(matrix_hyperparameters or {})
        if powers.hidden_eps:
            hidden["eps"] = config.adam_eps * width_mult**powers.hidden_eps
        groups.append(hidden)

    # Assign the shards.
    for shard in shards:
        group_key = shard.bucket.plan.group
        if not group_key.weight_decay:
            not_decayed["params"].append(shard.param)
        elif group_key.embedding:
            embeddings["params"].append(shard.param)
        elif group_key.is_hidden:
            hidden["params"].append(shard.param)
        elif group_key.is_matrix:
            matrices["params"].append(shard.param)
        else:
            decayed["params"].append(shard.param)
    return groups


def _make_param_group(
    config: OptimizerConfig, wd_mult: float, is_decoupled_lr: bool = False, lr_scale: float = 1.0
) -> dict[str, Any]:
    """Return an empty parameter group with Megatron-LM's entries.

    `lr_scale` multiplies both ends of the learning rate's schedule, which Megatron-LM stores
    already multiplied.
    """
    assert config.lr is not None
    max_lr = config.lr * lr_scale
    min_lr = config.min_lr * lr_scale
    if is_decoupled_lr:
        assert config.decoupled_lr is not None
        max_lr = config.decoupled_lr
        min_lr = config.decoupled_min_lr or 0.0
    return {
        "params": [],
        "wd_mult": wd_mult,
        "lr_mult": 1.0,
        "is_decoupled_lr": is_decoupled_lr,
        "lr_scale": lr_scale,
        "max_lr": max_lr,
        "min_lr": min_lr,
        "lr": max_lr,
        "weight_decay": config.weight_decay_range[0] * wd_mult,
    }
