"""Per-rank optimizer shards: one set of flat tensors per bucket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.distributed.param_and_grad_buffer import Bucket

# Keys in checkpoints: `optimizer.state.<name>.<parameter>` and `ema.<parameter>`.
OPTIMIZER_PREFIX = "optimizer.state."
PARAM_PREFIX = f"{OPTIMIZER_PREFIX}param."
AVERAGE_PREFIX = "ema."


@dataclass(frozen=True)
class FlatShard:
    """This rank's shard of a bucket as 1-D tensors of equal length."""

    bucket: Bucket
    param: torch.Tensor
    """Main parameters, in fp32 or fp16; for an fp32 model the shard of the parameter buffer."""
    state: dict[str, torch.Tensor]
    """Tensors of the update rule by their name in checkpoints, in any dtype."""
    scales: dict[str, torch.Tensor]
    """Scales of `param` and `state` in fp16 and fp8, one for each piece of the bucket's shard, by
    the prefix of the keys.
    """
    average: torch.Tensor | None = None
    """Exponential moving average of the main parameters (--ema-decay), in fp32."""

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors that a checkpoint stores, by the prefix of their keys."""
        tensors = {PARAM_PREFIX: self.param}
        for name, data in self.state.items():
            tensors[f"{OPTIMIZER_PREFIX}{name}."] = data
        if self.average is not None:
            tensors[AVERAGE_PREFIX] = self.average
        return tensors

    def get_scale(self, prefix: str, param_index: int) -> torch.Tensor | None:
        """Return the scale of a piece's values in the tensor `prefix`, a live scalar, if any."""
        if prefix not in self.scales:
            return None
        return self.scales[prefix][param_index]

    def set_main_parameters(self, values: torch.Tensor) -> None:
        """Set the main parameters to `values`, of any dtype."""
        if PARAM_PREFIX not in self.scales:
            self.param.copy_(values)
            return
        for elements, scale in self._list_scales():
            store_with_new_scale(self.param[elements], values[elements], scale)

    def copy_main_parameters(self, target: torch.Tensor) -> None:
        """Copy the main parameters to `target`, of any dtype."""
        if PARAM_PREFIX not in self.scales:
            target.copy_(self.param)
            return
        for elements, scale in self._list_scales():
            copy_widened(target[elements], self.param[elements], scale)

    def _list_scales(self) -> Iterator[tuple[slice, torch.Tensor | None]]:
        """Yield the elements of each parameter, and the scale of its main parameters."""
        for param_index, param_slice in enumerate(self.bucket.pieces()):
            elements = slice(param_slice.start, param_slice.stop)
            yield elements, self.get_scale(PARAM_PREFIX, param_index)

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
    bucket: Bucket,
    main_dtype: torch.dtype,
    state_dtypes: Mapping[str, torch.dtype],
    has_average: bool = False,
) -> FlatShard:
    """Allocate main parameters, zero state of the given dtypes, and with `has_average` a zero
    average.

    The main parameters are not filled yet, unless the model is fp32.
    """
    # An fp32 model is its own main copy; otherwise the update needs more precision than the model.
    param = bucket.param_shard
    if param.dtype != torch.float32:
        param = torch.zeros_like(param, dtype=main_dtype)
    if param.dtype == torch.float32:  # torch allows only gradients of the same dtype
        # A view: reduced gradients appear here without a copy.
        param.grad = bucket.grad_shard
    state = {}
    for name, dtype in state_dtypes.items():
        state[name] = torch.zeros_like(param, dtype=dtype)
    average = None
    if has_average:
        average = torch.zeros_like(param)
    shard = FlatShard(bucket, param, state, {}, average)
    num_pieces = len(list(bucket.pieces()))
    for prefix, data in shard.tensors.items():
        if has_scale(data.dtype):
            shard.scales[prefix] = torch.ones(num_pieces, device=param.device)
    return shard


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
            for fp8_slice in _iterate_fp8_parts(shard):
                tensors.append(fp8_slice.tensor)
                main_parts.append(fp8_slice.main)
                starts.append(fp8_slice.start)
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


# ---- Storage of optimizer tensors with less precision than fp32 ----
#
# Values in bf16 are stored as they are. Values in fp16 and fp8 (e4m3) are divided by an fp32 scale,
# one for each parameter and shard, as in Transformer Engine's FusedAdam.

_SLICE_SIZE = 1 << 22
"""Elements that are converted at a time: an fp32 copy of them takes 16 MiB."""

_LARGEST_VALUES = {
    torch.float16: torch.finfo(torch.float16).max / 2,
    torch.float8_e4m3fn: torch.finfo(torch.float8_e4m3fn).max,
}
"""Stored value of the largest magnitude, by dtype, for the dtypes with a scale."""


def has_scale(dtype: torch.dtype) -> bool:
    """Return whether values of `dtype` are stored divided by a scale."""
    return dtype in _LARGEST_VALUES


def cut_into_slices(start: int, stop: int) -> list[slice]:
    """Cut a range of elements into slices of bounded size."""
    slices = []
    for first in range(start, stop, _SLICE_SIZE):
        slices.append(slice(first, min(first + _SLICE_SIZE, stop)))
    return slices


def find_largest(values: Tensor) -> Tensor:
    """Return the largest magnitude as an fp32 scalar, without a copy of `values`."""
    low, high = torch.aminmax(values)
    return torch.maximum(-low, high).float()


def compute_scale(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale of values whose largest magnitude is `largest`.

    The same scale follows from the values as they are stored, although the product of the largest
    stored value and the scale may differ from `largest`: neither a load nor a skipped step rounds
    again.
    """
    # A tensor, because a GPU multiplies by the reciprocal of a number.
    limit = torch.full_like(largest, _LARGEST_VALUES[dtype])
    # The minimum is for zeros, and for values whose scale has no normal fp32 reciprocal.
    return (largest / limit).clamp(min=torch.finfo(torch.float32).tiny)


def widen(rounded: Tensor, scale: Tensor | None, copy: bool = False) -> Tensor:
    """Return values in fp32: `rounded` itself if it is fp32, unless `copy`."""
    values = rounded.to(torch.float32, copy=copy)
    if scale is not None:
        values.mul_(scale)
    return values


def store(rounded: Tensor, values: Tensor, scale: Tensor | None) -> None:
    """Round fp32 `values` into `rounded`; they are overwritten."""
    if scale is not None:
        values.mul_(scale.reciprocal())
    rounded.copy_(values)


def store_with_new_scale(rounded: Tensor, values: Tensor, scale: Tensor | None) -> None:
    """Round `values` of any dtype into `rounded`, and set the scale, if there is one."""
    if scale is None:
        rounded.copy_(values)
        return
    scale.copy_(compute_scale(find_largest(values), rounded.dtype))
    for elements in cut_into_slices(0, len(values)):
        store(rounded[elements], values[elements].to(torch.float32, copy=True), scale)


def copy_widened(target: Tensor, rounded: Tensor, scale: Tensor | None) -> None:
    """Copy stored values to `target`, of any dtype."""
    for elements in cut_into_slices(0, len(rounded)):
        target[elements].copy_(widen(rounded[elements], scale))
