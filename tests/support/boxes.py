"""Boxes of tensors in tests."""

from collections.abc import Sequence


def index_box(offset: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of a box in its tensor."""
    slices = []
    for start, size in zip(offset, shape, strict=True):
        slices.append(slice(start, start + size))
    return tuple(slices)
