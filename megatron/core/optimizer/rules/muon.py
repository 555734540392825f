"""Muon (--optimizer muon)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.distributed.param_and_grad_buffer import Bucket, ParamGroup
from megatron.core.optimizer.flat_shard import FlatShard
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.orthogonalization import Orthogonalizer
from megatron.core.optimizer.update_rules import (
    AdamW,
    OptimizerGroup,
    UpdateRule,
    get_adam_hyperparameters,
)


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
        groups: Sequence[OptimizerGroup],
        config: OptimizerConfig,
        bucket_of: Mapping[Tensor, Bucket],
    ) -> None:
        super().__init__(groups, get_adam_hyperparameters(config))
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
        cls, config: OptimizerConfig, groups: Sequence[OptimizerGroup], shards: Sequence[FlatShard]
    ) -> UpdateRule:
        bucket_of = {shard.param: shard.bucket for shard in shards}
        return cls(groups, config, bucket_of)

    def update_group(self, group: OptimizerGroup) -> None:
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
        for param_slice in bucket.pieces():
            # The whole matrix, of which the shard may have a part only
            param = param_slice.param
            start = bucket.shard_start + param_slice.start - param_slice.param_start
            matrix = whole[start : start + param.numel()].view(param.shape)
            orthogonal = self._orthogonalizer.orthogonalize(matrix, param_slice.info.sharding)
            # Keep the part of the shard.
            param_stop = param_slice.param_start + param_slice.stop - param_slice.start
            flat = orthogonal.reshape(-1)
            result[param_slice.start : param_slice.stop] = flat[
                param_slice.param_start : param_stop
            ]
        return result
