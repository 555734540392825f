"""Per-rank optimizer shards: one set of flat tensors per bucket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron.core.distributed.param_and_grad_buffer import Bucket

# Keys in checkpoints: `optimizer.state.<name>.<parameter>` and `ema.<parameter>`.
OPTIMIZER_PREFIX = "optimizer.state."
AVERAGE_PREFIX = "ema."


@dataclass(frozen=True)
class FlatShard:
    """This rank's shard of a bucket as 1-D tensors of equal length, in fp32 except for `state`."""

    bucket: Bucket
    param: torch.Tensor
    """Main parameters; for an fp32 model the shard of the parameter buffer itself."""
    state: dict[str, torch.Tensor]
    """Tensors of the update rule by their name in checkpoints, in any dtype."""
    average: torch.Tensor | None = None
    """Exponential moving average of the main parameters (--ema-decay)."""

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors that a checkpoint stores, by the prefix of their keys."""
        tensors = {}
        for name, data in {"param": self.param, **self.state}.items():
            tensors[f"{OPTIMIZER_PREFIX}{name}."] = data
        if self.average is not None:
            tensors[AVERAGE_PREFIX] = self.average
        return tensors

    @property
    def is_fp8(self) -> bool:
        """True if the model's parameters are in fp8."""
        return self.bucket.param_shard.dtype == torch.uint8

    @property
    def is_model(self) -> bool:
        """True if the main parameters and the model's parameters share their memory (fp32
        models).
        """
        return self.param is self.bucket.param_shard


def allocate_shard(
    bucket: Bucket, state_dtypes: Mapping[str, torch.dtype], has_average: bool = False
) -> FlatShard:
    """Allocate main parameters, zero state of the given dtypes, and with `has_average` a zero
    average.

    The main parameters are not filled yet, unless the model is fp32.
    """
    # An fp32 model is its own main copy; otherwise the update needs more precision than the model.
    param = bucket.param_shard
    if param.dtype != torch.float32:
        param = torch.empty_like(param, dtype=torch.float32)
    # A view: reduced gradients appear here without a copy.
    param.grad = bucket.grad_shard
    state = {}
    for name, dtype in state_dtypes.items():
        state[name] = torch.zeros_like(param, dtype=dtype)
    average = None
    if has_average:
        average = torch.zeros_like(param)
    return FlatShard(bucket, param, state, average)


class _Fp8Part(NamedTuple):
    """The part of an fp8 tensor that is in this rank's shard."""

    tensor: torch.Tensor
    main: torch.Tensor | None  # its main parameters; None if the shard has no part of the tensor
    start: int | None  # index of their first element in the tensor


def cast_to_fp8(shards: Sequence[FlatShard], rescale: bool) -> None:
    """Quantize fp8 parameters from their main parameters.

    `rescale`: compute new scales instead of using the stored ones. Collective over the ranks that
    share the same buckets.
    """
    # One call per group: the parts of a tensor on all ranks of the group share a scale.
    by_group: dict[dist.ProcessGroup, list[FlatShard]] = {}
    for shard in shards:
        by_group.setdefault(shard.bucket.shard_group, []).append(shard)
    for group, members in by_group.items():
        tensors = []
        main_parts = []
        starts = []
        for shard in members:
            # Tensors without a part on this rank are included: their scales are reduced over all
            # ranks.
            for part in _iterate_fp8_parts(shard):
                tensors.append(part.tensor)
                main_parts.append(part.main)
                starts.append(part.start)
        # Any of the parameters provides the operation, which casts all of them.
        fp8 = members[0].bucket.plan.spans[0].spec.info.fp8
        assert fp8 is not None
        fp8.cast(tensors, main_parts, starts, group, rescale)


def _iterate_fp8_parts(shard: FlatShard) -> Iterator[_Fp8Part]:
    """Yield the part of each fp8 tensor of the bucket that is in this rank's shard."""
    bucket = shard.bucket
    shard_start = bucket.shard_start
    for span in bucket.plan.spans:
        fp8 = span.spec.info.fp8
        assert fp8 is not None
        # Indices of the bucket
        tensor_start = span.start
        # One parameter may consist of several quantized tensors, e.g. one per expert.
        for tensor in fp8.tensors:
            tensor_stop = tensor_start + tensor.numel()
            start = max(tensor_start, shard_start)
            stop = min(tensor_stop, bucket.shard_stop)
            if start < stop:
                main = shard.param[start - shard_start : stop - shard_start]
                yield _Fp8Part(tensor, main, start - tensor_start)
            else:
                yield _Fp8Part(tensor, None, None)
            tensor_start = tensor_stop
