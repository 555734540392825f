"""What a rank's optimizer works on: flat fp32 tensors, one set per bucket, under one update rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.param_and_grad_buffer import Bucket, ParamGroup
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.update_rules import (
    SGD,
    AdamW,
    AdEMAMix,
    ApexAdam,
    MatrixLayout,
    Muon,
    UpdateRule,
)


@dataclass(frozen=True)
class FlatShard:
    """This rank's shard of a bucket as 1-D fp32 tensors of one length."""

    bucket: Bucket
    param: torch.Tensor
    """The main parameters; for an fp32 model the shard of the parameter buffer itself."""
    state: dict[str, torch.Tensor]
    """What the update rule keeps, by its name in checkpoints."""

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All that a checkpoint holds of it, by name."""
        return {"param": self.param, **self.state}

    @property
    def is_fp8(self) -> bool:
        """The model's parameters are in fp8."""
        return self.bucket.param_shard.dtype == torch.uint8

    @property
    def is_model(self) -> bool:
        """Main parameters and the model's are the same memory."""
        return self.param is self.bucket.param_shard


def cast_to_fp8(shards: Sequence[FlatShard], rescale: bool) -> None:
    """The bytes of fp8 parameters from the main ones; collective over those who have shards of the
    same.
    """
    by_group: dict[dist.ProcessGroup, list[FlatShard]] = {}
    for shard in shards:
        by_group.setdefault(shard.bucket.shard_group, []).append(shard)
    for group, members in by_group.items():
        parts = [part for shard in members for part in _fp8_parts(shard)]
        fp8 = members[0].bucket.plan.spans[0].spec.info.fp8
        assert fp8 is not None
        fp8.cast(
            [part[0] for part in parts],
            [part[1] for part in parts],
            [part[2] for part in parts],
            group,
            rescale,
        )


def _fp8_parts(shard: FlatShard) -> Iterator[tuple[torch.Tensor, torch.Tensor | None, int | None]]:
    """(tensor, main parameters in this shard, where they begin in the tensor) of every fp8 tensor of the bucket."""
    for span in shard.bucket.plan.spans:
        assert span.spec.info.fp8 is not None
        place = span.start
        for tensor in span.spec.info.fp8.tensors:
            start = max(place, shard.bucket.shard_start)
            stop = min(place + tensor.numel(), shard.bucket.shard_stop)
            mine = shard.param[start - shard.bucket.shard_start : stop - shard.bucket.shard_start]
            yield (tensor, mine, start - place) if start < stop else (tensor, None, None)
            place += tensor.numel()


def state_names(config: OptimizerConfig, group: ParamGroup) -> tuple[str, ...]:
    """The tensors that the update rule keeps of a parameter of `group`, by their names in
    checkpoints.
    """
    if config.optimizer == "sgd":
        return ("momentum_buffer",) if config.sgd_momentum else ()
    if config.optimizer == "ademamix":
        return "exp_avg", "exp_avg_slow", "exp_avg_sq"
    if config.optimizer == "muon" and group.is_matrix:
        return ("momentum_buffer",)
    return "exp_avg", "exp_avg_sq"


def make_shard(bucket: Bucket, config: OptimizerConfig) -> FlatShard:
    """Allocates the main parameters (not filled yet, unless the model is fp32) and zero state."""
    names = state_names(config, bucket.plan.group)
    model = bucket.param_shard
    param = model if model.dtype == torch.float32 else torch.empty_like(model, dtype=torch.float32)
    param.grad = bucket.grad_shard
    return FlatShard(bucket, param, {name: torch.zeros_like(param) for name in names})


def make_update_rule(
    shards: Sequence[FlatShard],
    config: OptimizerConfig,
    layouts: Mapping[nn.Parameter, MatrixLayout],
) -> UpdateRule:
    """The rule of --optimizer over the flat tensors, with its state allocated.

    `layouts` says how the matrices of the model are split, for Muon. Every rank has the same groups, be they empty, so
    that a checkpoint's `param_groups` fit any rank.
    """
    if config.lr is None:
        raise ValueError("--lr must be given")
    rule: UpdateRule
    groups = _make_groups(shards, config)
    betas = (config.adam_beta1, config.adam_beta2)
    if config.optimizer == "sgd":
        rule = SGD(groups, momentum=config.sgd_momentum)
    elif config.optimizer == "ademamix":
        rule = AdEMAMix(
            groups,
            betas=(*betas, config.ademamix_beta3),
            eps=config.adam_eps,
            alpha=config.ademamix_alpha,
            alpha_warmup=config.ademamix_alpha_warmup,
            beta3_warmup=config.ademamix_beta3_warmup,
        )
    elif config.optimizer == "muon":
        rule = Muon(groups, {shard.param: shard.bucket for shard in shards}, config, layouts)
    elif config.optimizer_impl == "apex":
        rule = ApexAdam(groups, betas=betas, eps=config.adam_eps)
    else:
        rule = AdamW(groups, betas=betas, eps=config.adam_eps)
    for shard in shards:
        state = dict(shard.state)
        if "exp_avg" in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=shard.param.device)
        rule.state[shard.param] = state
    return rule


def _make_groups(shards: Sequence[FlatShard], config: OptimizerConfig) -> list[dict[str, Any]]:
    """Parameters with weight decay, those without, with --decoupled-lr embedding and output layer,
    Muon's matrices.
    """
    assert config.lr is not None
    kinds = [(1.0, False, False), (0.0, False, False)]  # (wd_mult, is_decoupled_lr, use_muon)
    if config.decoupled_lr is not None:
        kinds.append((1.0, True, False))
    if config.optimizer == "muon":
        kinds.append((1.0, False, True))
    params: dict[tuple[float, bool, bool], list[torch.Tensor]] = {kind: [] for kind in kinds}
    for shard in shards:
        group = shard.bucket.plan.group
        is_decoupled_lr = group.embedding and config.decoupled_lr is not None
        use_muon = config.optimizer == "muon"
        params[float(group.weight_decay), is_decoupled_lr, use_muon and group.is_matrix].append(
            shard.param
        )
    groups = []
    for (wd_mult, is_decoupled_lr, use_muon), tensors in params.items():
        ends = (config.lr, config.min_lr)
        if is_decoupled_lr:
            ends = (config.decoupled_lr or 0.0, config.decoupled_min_lr or 0.0)
        groups.append(
            {
                "params": tensors,
                "wd_mult": wd_mult,
                "lr_mult": 1.0,
                "is_decoupled_lr": is_decoupled_lr,
                "max_lr": ends[0],
                "min_lr": ends[1],
                "lr": ends[0],
                "weight_decay": config.weight_decay_range[0] * wd_mult,
            }
            | ({"use_muon": True, "momentum": config.muon_momentum} if use_muon else {})
        )
    return groups
