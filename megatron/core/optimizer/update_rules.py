"""Update rules over flat shards; the result does not depend on the layout.

To add an optimizer, write a subclass of `UpdateRule`, add it to `UPDATE_RULES`, and declare its
hyperparameters in `OptimizerConfig`. Sharding, checkpoints, their validation and the conversion of
optimizer state are driven by the table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megatron.core.apex import import_apex, split_for_kernels
from megatron.core.distributed.param_and_grad_buffer import Bucket, ParamGroup
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.flat_shard import OPTIMIZER_PREFIX, PARAM_PREFIX, FlatShard
from megatron.core.optimizer.orthogonalization import Orthogonalizer
from megatron.core.optimizer.rounding import (
    compute_scale,
    cut_into_slices,
    find_largest,
    store,
    widen,
)


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
    NUM_BETAS: ClassVar[int] = 2
    """Length of `betas` in the parameter groups, if they have it."""
    HAS_UNIFORM_STATE: ClassVar[bool] = True
    """True if all parameters have the same state tensors, as legacy and universal files require."""
    MUP_POWERS: ClassVar[MupPowers | None]
    """Scales of muP; None if the update itself does not depend on the width."""

    grad_scale: Tensor
    found_inf: Tensor

    def __init__(
        self, groups: Sequence[dict[str, Any]], hyperparameters: Mapping[str, Any]
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
        cls, config: OptimizerConfig, stored: Sequence[Mapping[str, Any]]
    ) -> tuple[str, Any, Any] | None:
        """Return the flag that makes the state of the `stored` parameter groups unusable.

        The result is (flag, stored value, current value), or None if the state can be loaded.
        """
        return None

    @classmethod
    def from_config(
        cls, config: OptimizerConfig, groups: Sequence[dict[str, Any]], shards: Sequence[FlatShard]
    ) -> UpdateRule:
        """Make the rule for parameter groups of the flat tensors of `shards`."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            if group["params"]:
                self.update_group(group)

    def update_group(self, group: dict[str, Any]) -> None:
        raise NotImplementedError

    def collect_gradients(self, group: dict[str, Any]) -> list[Tensor]:
        """Return the gradients, not divided yet."""
        grads = []
        for param in group["params"]:
            if param.grad is not None:
                grads.append(param.grad)
        return grads

    def collect_states(self, group: dict[str, Any], name: str) -> list[Tensor]:
        """Return the state tensor `name` of each parameter of the group."""
        return [self.state[param][name] for param in group["params"]]

    def copy_gradient(self, param: Tensor) -> Tensor:
        """Return the divided gradient, or zeros if the step must not change anything."""
        assert param.grad is not None
        gradient = param.grad / self.grad_scale
        # Zeros, because nonfinite values would remain nonfinite when multiplied by 0.
        return gradient.masked_fill_(self.found_inf.bool(), 0.0)


_ADAM_PREFIXES = (PARAM_PREFIX, f"{OPTIMIZER_PREFIX}exp_avg.", f"{OPTIMIZER_PREFIX}exp_avg_sq.")


def _get_adam_hyperparameters(config: OptimizerConfig) -> dict[str, Any]:
    return {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps}


class AdamW(UpdateRule):
    """torch's fused AdamW (Loshchilov and Hutter 2019)."""

    STATE_SETS: ClassVar[tuple[tuple[str, ...], ...]] = (("exp_avg", "exp_avg_sq"),)
    # Each element of Adam's update has the size of the learning rate, for gradients of any size.
    MUP_POWERS: ClassVar[MupPowers | None] = MupPowers(hidden_lr=-1, hidden_eps=-1, other_lr=0)

    @classmethod
    def from_config(
        cls, config: OptimizerConfig, groups: Sequence[dict[str, Any]], shards: Sequence[FlatShard]
    ) -> UpdateRule:
        hyperparameters = _get_adam_hyperparameters(config)
        if config.optimizer_impl == "apex":
            return ApexAdam(groups, hyperparameters)
        if config.has_rounded_states:
            return RoundedAdamW(groups, hyperparameters, shards)
        return AdamW(groups, hyperparameters)

    def update_group(self, group: dict[str, Any]) -> None:
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


class RoundedAdamW(AdamW):
    """AdamW whose moments or main parameters are kept with less precision than fp32.

    A step computes in fp32 and rounds the results, a slice of bounded size at a time. A scale
    follows from all new values of a piece, so that a piece of several slices is computed twice: for
    the scales, and for the results.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        hyperparameters: Mapping[str, Any],
        shards: Sequence[FlatShard],
    ) -> None:
        super().__init__(groups, hyperparameters)
        self._shards = {shard.param: shard for shard in shards}

    def update_group(self, group: dict[str, Any]) -> None:
        for param in group["params"]:
            shard = self._shards[param]
            if shard.scales:
                for number, piece in enumerate(shard.bucket.pieces()):
                    self._update_range(group, shard, number, piece.start, piece.stop)
            else:
                self._update_range(group, shard, 0, 0, len(param))
            # A skipped step does not count.
            self.state[param]["step"].add_(1.0 - self.found_inf)

    def _update_range(
        self, group: Mapping[str, Any], shard: FlatShard, piece: int, start: int, stop: int
    ) -> None:
        """Update elements `[start, stop)` of a shard, which belong to one piece if it has
        scales.
        """
        slices = cut_into_slices(start, stop)
        scales: dict[str, Tensor] = {}
        if shard.scales and len(slices) > 1:
            largest: dict[str, Tensor] = {}
            for part in slices:
                values = self._compute_slice(group, shard, piece, part, copy=True)
                for prefix in shard.scales:
                    found = find_largest(values[prefix])
                    largest[prefix] = torch.maximum(largest.get(prefix, found), found)
            for prefix, maximum in largest.items():
                scales[prefix] = compute_scale(maximum, shard.tensors[prefix].dtype)
        for part in slices:
            values = self._compute_slice(group, shard, piece, part, copy=False)
            for prefix in _ADAM_PREFIXES:
                stored = shard.tensors[prefix]
                if stored.dtype == torch.float32:
                    continue  # updated in place
                if prefix in shard.scales and prefix not in scales:  # the only slice
                    scales[prefix] = compute_scale(find_largest(values[prefix]), stored.dtype)
                store(stored[part], values[prefix], scales.get(prefix))
        # Other slices of the piece needed the old scales until now.
        for prefix, scale in scales.items():
            shard.scales[prefix][piece].copy_(scale)

    def _compute_slice(
        self, group: Mapping[str, Any], shard: FlatShard, piece: int, part: slice, copy: bool
    ) -> dict[str, Tensor]:
        """Return the new fp32 values of a slice by the prefix of their keys.

        Tensors in fp32 and gradients change in place, unless `copy`.
        """
        new = []
        for prefix in _ADAM_PREFIXES:
            stored = shard.tensors[prefix][part]
            new.append(widen(stored, shard.get_scale(prefix, piece), copy))
        param, mean, square = new
        gradient = shard.bucket.grad_shard[part]
        if copy:
            gradient = gradient.clone()
        step = self.state[shard.param]["step"].clone()
        self._run_kernel(group, AdamTensors([param], [gradient], [mean], [square], [step]))
        return dict(zip(_ADAM_PREFIXES, new, strict=True))


class ApexAdam(UpdateRule):
    """`apex.optimizers.FusedAdam` over the flat state (--optimizer-impl apex).

    Moments and steps are views of this object's state. This object also acts as the gradient scaler
    that FusedAdam reads `grad_scale` and `found_inf` from. Gradients are divided in place. No call
    waits for the device.
    """

    STATE_SETS = AdamW.STATE_SETS
    MUP_POWERS = AdamW.MUP_POWERS

    def __init__(
        self, groups: Sequence[dict[str, Any]], hyperparameters: Mapping[str, Any]
    ) -> None:
        super().__init__(groups, hyperparameters)
        apex_groups = []
        for group in self.param_groups:
            parts = split_for_kernels(group["params"])
            # The learning rate on the device, where `step` changes it.
            lr = torch.tensor(group["lr"])
            apex_groups.append(group | {"lr": lr, "params": parts})
        optimizers = import_apex("apex.optimizers", "--optimizer-impl")
        self._adam = optimizers.FusedAdam(apex_groups, capturable=True)

    @torch.no_grad()
    def step(self) -> None:
        # FusedAdam does not reset its overflow flag, and would not count this step after a bad one.
        self._adam._dummy_overflow_buf.zero_()
        for group, apex_group in zip(self.param_groups, self._adam.param_groups, strict=True):
            if group["params"]:
                apex_group["lr"].fill_(group["lr"])
                apex_group["weight_decay"] = group["weight_decay"]
                # The parameters of a group have taken the same number of steps.
                first_step = self.collect_states(group, "step")[0]
                apex_group["step"] = first_step.int().view(1)
                self._share_tensors(group, apex_group["params"])
        self._adam.step(grad_scaler=self)
        # A skipped step does not count.
        for state in self.state.values():
            state["step"].add_(1.0 - self.found_inf)

    def _share_tensors(self, group: dict[str, Any], parts: Sequence[Tensor]) -> None:
        """Give views of gradients and moments to the `parts` of the group's parameters."""
        gradients = split_for_kernels(self.collect_gradients(group))
        means = split_for_kernels(self.collect_states(group, "exp_avg"))
        squares = split_for_kernels(self.collect_states(group, "exp_avg_sq"))
        for part, gradient, mean, square in zip(parts, gradients, means, squares, strict=True):
            part.grad = gradient
            self._adam.state[part] = {"exp_avg": mean, "exp_avg_sq": square}

    def _check_inf_per_device(self, optimizer: Any) -> dict[torch.device, Tensor]:
        return {self.found_inf.device: self.found_inf}

    def _get_scale_async(self) -> Tensor:
        return self.grad_scale


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
        cls, config: OptimizerConfig, stored: Sequence[Mapping[str, Any]]
    ) -> tuple[str, Any, Any] | None:
        # Momentum other than 0 has a state, which does not depend on its value.
        momentum = stored[0].get("momentum") if stored else None
        if momentum is None or bool(momentum) == bool(config.sgd_momentum):
            return None
        return "--sgd-momentum", momentum, config.sgd_momentum

    @classmethod
    def from_config(
        cls, config: OptimizerConfig, groups: Sequence[dict[str, Any]], shards: Sequence[FlatShard]
    ) -> UpdateRule:
        return cls(groups, {"momentum": config.sgd_momentum})

    def update_group(self, group: dict[str, Any]) -> None:
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


def compute_slow_weight(step: Tensor, alpha: float, warmup: int | None) -> Tensor:
    """Return AdEMAMix's weight of the slow mean at `step`, which rises linearly to `alpha`."""
    if not warmup:
        return torch.full_like(step, alpha)
    return (step * (alpha / warmup)).clamp(max=alpha)


def compute_slow_beta(
    step: Tensor, beta_start: float, beta_end: float, warmup: int | None
) -> Tensor:
    """Return AdEMAMix's decay of the slow mean at `step`.

    Its half-life grows linearly from that of `beta_start` to that of `beta_end`.
    """
    if not warmup:
        return torch.full_like(step, beta_end)
    # The half-life of a decay beta is proportional to 1 / log(beta).
    done = (step / warmup).clamp(max=1.0)
    log_start = math.log(beta_start)
    log_end = math.log(beta_end)
    log_beta = log_start * log_end / ((1.0 - done) * log_end + done * log_start)
    return torch.exp(log_beta).clamp(max=beta_end)


class AdEMAMix(UpdateRule):
    """Adam with a second, much slower running mean of the gradient (Pagliardini et al. 2024).

    `exp_avg` is the fast mean, `exp_avg_slow` the slow one. Weight decay is decoupled.
    """

    STATE_SETS = (("exp_avg", "exp_avg_slow", "exp_avg_sq"),)
    NUM_BETAS = 3
    MUP_POWERS = AdamW.MUP_POWERS

    @classmethod
    def from_config(
        cls, config: OptimizerConfig, groups: Sequence[dict[str, Any]], shards: Sequence[FlatShard]
    ) -> UpdateRule:
        hyperparameters = {
            "betas": (config.adam_beta1, config.adam_beta2, config.ademamix_beta3),
            "eps": config.adam_eps,
            "alpha": config.ademamix_alpha,
            "alpha_warmup": config.ademamix_alpha_warmup,
            "beta3_warmup": config.ademamix_beta3_warmup,
        }
        return cls(groups, hyperparameters)

    def update_group(self, group: dict[str, Any]) -> None:
        keep = 1.0 - self.found_inf  # 0 skips the step without waiting for the device
        for param in group["params"]:
            self._update_param(param, group, keep)

    def _update_param(self, param: Tensor, group: dict[str, Any], keep: Tensor) -> None:
        """Update a parameter and its state, without any effect if `keep` is 0."""
        beta1, beta2, beta3 = group["betas"]
        state = self.state[param]
        step = state["step"].add_(keep)
        step = step.clamp(min=1.0)  # a first step that is skipped must not divide by zero
        gradient = self.copy_gradient(param)

        # Running means
        # A rate of 0 leaves a mean unchanged.
        slow_rate = 1.0 - compute_slow_beta(step, beta1, beta3, group["beta3_warmup"])
        state["exp_avg"].lerp_(gradient, (1.0 - beta1) * keep)
        state["exp_avg_slow"].lerp_(gradient, slow_rate * keep)
        state["exp_avg_sq"].lerp_(gradient.square_(), (1.0 - beta2) * keep)

        # Update: (fast mean + alpha * slow mean) / root mean square
        slow_weight = compute_slow_weight(step, group["alpha"], group["alpha_warmup"])
        update = state["exp_avg"] / (1.0 - beta1**step)
        update.addcmul_(state["exp_avg_slow"], slow_weight)
        mean_square = state["exp_avg_sq"] / (1.0 - beta2**step)
        update /= mean_square.sqrt_().add_(group["eps"])
        update.add_(param, alpha=group["weight_decay"])
        param.sub_(update.mul_(group["lr"] * keep))


class Muon(AdamW):
    """Muon for matrices, AdamW for the other parameters. Collective over DP shards and TP.

    Muon orthogonalizes the momentum of a matrix before applying it: Jordan et al. 2024 ("Muon: An
    optimizer for hidden layers in neural networks"), with the scale of Liu et al. 2025 ("Muon is
    Scalable for LLM Training"). Matrices are all weights with weight decay except the word
    embedding and the output layer; each expert has its own. The momentum is a flat tensor of a
    shard, sharded and saved like Adam's moments. Orthogonalization needs whole matrices: the
    momentum of a bucket is gathered over data parallelism, then each matrix in a rank's shard over
    tensor parallelism.
    """

    _MATRIX_STATES = ("momentum_buffer",)
    STATE_SETS = (_MATRIX_STATES, *AdamW.STATE_SETS)
    # The scale of an orthogonalized update already follows from the shape (--muon-scale-mode).
    MUP_POWERS = None
    HAS_UNIFORM_STATE = False

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        config: OptimizerConfig,
        bucket_of: Mapping[Tensor, Bucket],
    ) -> None:
        super().__init__(groups, _get_adam_hyperparameters(config))
        self._nesterov = config.muon_nesterov
        self._bucket_of = bucket_of
        self._orthogonalizer = Orthogonalizer(config)

    @classmethod
    def select_states(cls, config: OptimizerConfig, group: ParamGroup) -> tuple[str, ...]:
        if group.is_matrix:
            return cls._MATRIX_STATES
        return AdamW.select_states(config, group)

    @classmethod
    def matrix_hyperparameters(cls, config: OptimizerConfig) -> dict[str, Any] | None:
        return {"use_muon": True, "momentum": config.muon_momentum}

    @classmethod
    def from_config(
        cls, config: OptimizerConfig, groups: Sequence[dict[str, Any]], shards: Sequence[FlatShard]
    ) -> UpdateRule:
        bucket_of = {shard.param: shard.bucket for shard in shards}
        return cls(groups, config, bucket_of)

    def update_group(self, group: dict[str, Any]) -> None:
        if not group.get("use_muon"):
            super().update_group(group)
            return
        keep = 1.0 - self.found_inf
        for param in group["params"]:
            momentum = self._update_momentum(param, group["momentum"], keep)
            update = self._orthogonalize_bucket(self._bucket_of[param], momentum)
            # Decoupled weight decay, as in AdamW.
            param.mul_(1.0 - group["lr"] * group["weight_decay"] * keep)
            param.sub_(update.mul_(group["lr"] * keep))

    def _update_momentum(self, param: Tensor, momentum: float, keep: Tensor) -> Tensor:
        """Advance the running mean of the gradient and return it, with Nesterov's look-ahead."""
        buffer = self.state[param]["momentum_buffer"]
        gradient = self.copy_gradient(param)
        buffer.lerp_(gradient, (1.0 - momentum) * keep)
        if not self._nesterov:
            return buffer
        return gradient.lerp_(buffer, momentum)

    def _orthogonalize_bucket(self, bucket: Bucket, update: Tensor) -> Tensor:
        """Return `update`, this rank's shard of a bucket, with each matrix orthogonalized."""
        # Shards split matrices at any element, so that each rank needs the whole bucket.
        whole = bucket.gather(update)  # 1-D, all parameters of the bucket
        result = torch.zeros_like(update)
        for piece in bucket.pieces():
            # The whole matrix, of which the shard may have a part only
            param = piece.param
            start = bucket.shard_start + piece.start - piece.param_start
            matrix = whole[start : start + param.numel()].view(param.shape)
            orthogonal = self._orthogonalizer.orthogonalize(matrix, piece.info.sharding)
            # Keep the part of the shard.
            param_stop = piece.param_start + piece.stop - piece.start
            flat = orthogonal.reshape(-1)
            result[piece.start : piece.stop] = flat[piece.param_start : param_stop]
        return result


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
        cls, config: OptimizerConfig, groups: Sequence[dict[str, Any]], shards: Sequence[FlatShard]
    ) -> UpdateRule:
        return cls(groups, _get_adam_hyperparameters(config))

    def update_group(self, group: dict[str, Any]) -> None:
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


# Value of --optimizer -> its update rule.
UPDATE_RULES: dict[str, type[UpdateRule]] = {
    "adam": AdamW,
    "sgd": SGD,
    "ademamix": AdEMAMix,
    "muon": Muon,
    "lion": Lion,
}


def select_states(config: OptimizerConfig, group: ParamGroup) -> tuple[str, ...]:
    """Return the names in checkpoints of the state tensors of a parameter of `group`."""
    return UPDATE_RULES[config.optimizer].select_states(config, group)


def make_update_rule(config: OptimizerConfig, shards: Sequence[FlatShard]) -> UpdateRule:
    """Create the update rule of --optimizer over the flat shards, with its state allocated."""
    if config.lr is None:
        raise ValueError("--lr must be given")
    rule_type = UPDATE_RULES[config.optimizer]
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
        kind = shard.bucket.plan.group
        if not kind.weight_decay:
            not_decayed["params"].append(shard.param)
        elif kind.embedding:
            embeddings["params"].append(shard.param)
        elif kind.is_hidden:
            hidden["params"].append(shard.param)
        elif kind.is_matrix:
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
