"""Storage of optimizer tensors with less precision than fp32.

Values in bf16 are stored as they are. Values in fp16 and fp8 (e4m3) are divided by an fp32 scale,
one for each parameter and shard, as in Transformer Engine's FusedAdam.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
