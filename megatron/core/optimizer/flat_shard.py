"""What a rank's optimizer works on: flat fp32 tensors, one set per bucket, under torch's fused update rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.distributed.param_and_grad_buffer import Bucket
from megatron.core.optimizer.config import OptimizerConfig


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
    def is_model(self) -> bool:
        """Main parameters and the model's are the same memory."""
        return self.param is self.bucket.param_shard


def make_shard(bucket: Bucket, config: OptimizerConfig) -> FlatShard:
    """Allocates the main parameters (not filled yet, unless the model is fp32) and zero state."""
    names = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",) if config.sgd_momentum else ()}
    model = bucket.param_shard
    param = model if model.dtype == torch.float32 else torch.empty_like(model, dtype=torch.float32)
    param.grad = bucket.grad_shard
    return FlatShard(bucket, param, {name: torch.zeros_like(param) for name in names[config.optimizer]})


def make_torch_optimizer(shards: Sequence[FlatShard], config: OptimizerConfig) -> torch.optim.Optimizer:
    """torch's AdamW or SGD over the flat tensors, with its state allocated.

    Every rank has the same groups, be they empty, so that a checkpoint's `param_groups` fit any rank.
    """
    if config.lr is None:
        raise ValueError("--lr must be given")
    groups = _make_groups(shards, config)
    if config.optimizer == "sgd":
        sgd = torch.optim.SGD(groups, lr=config.lr, momentum=config.sgd_momentum, fused=True)
        for shard in shards:
            sgd.state[shard.param] = dict(shard.state)
        return sgd
    betas = (config.adam_beta1, config.adam_beta2)
    adam = torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.adam_eps, fused=True)
    for shard in shards:
        step = torch.zeros((), dtype=torch.float32, device=shard.param.device)
        adam.state[shard.param] = {"step": step, **shard.state}
    return adam


def _make_groups(shards: Sequence[FlatShard], config: OptimizerConfig) -> list[dict[str, Any]]:
    """Parameters with weight decay, those without, and with --decoupled-lr embedding and output layer."""
    assert config.lr is not None
    kinds = [(1.0, False), (0.0, False)]  # (wd_mult, is_decoupled_lr)
    if config.decoupled_lr is not None:
        kinds.append((1.0, True))
    params: dict[tuple[float, bool], list[torch.Tensor]] = {kind: [] for kind in kinds}
    for shard in shards:
        group = shard.bucket.plan.group
        wd_mult, is_decoupled_lr = float(group.weight_decay), group.embedding and config.decoupled_lr is not None
        params[wd_mult, is_decoupled_lr].append(shard.param)
    groups = []
    for (wd_mult, is_decoupled_lr), tensors in params.items():
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
        )
    return groups
