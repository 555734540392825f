"""Places of boxes: one row-major numbering of the elements of all tensors.

Sorting boxes by place sorts them by tensor, and by position in each tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megatron.core.dist_checkpointing.planning.structure import TensorType


def number_places(
    tensors: Sequence[TensorType], tensor: np.ndarray, offset: np.ndarray
) -> np.ndarray:
    """Return the place of each box: the number of its first element among those of all tensors.

    The elements are numbered by tensor, and row-major in each of them. `tensor` is the number of
    each box's tensor, and `offset` is [boxes, dimensions].
    """
    dims = offset.shape[1]
    shape_of_tensor = make_shape_table(tensors, dims)
    stride_of_tensor = _make_stride_table(shape_of_tensor)
    first_element = number_first_elements(tensors)
    place = first_element[tensor]  # [boxes]
    # One axis at a time: this needs a third of the time of a product of [boxes, dims].
    for axis in range(dims):
        stride = stride_of_tensor[:, axis]
        place += offset[:, axis] * stride[tensor]
    return place


def number_first_elements(tensors: Sequence[TensorType]) -> np.ndarray:
    """Return the number of the first element of each tensor; an empty one uses up a number, too."""
    places = []
    position = 0
    for _, shape, _ in tensors:
        places.append(position)
        numel = math.prod(shape)
        position += max(1, numel)
    assert position < 1 << 63, f"{position} elements are more than 64 bits can number"
    return np.array(places, dtype=np.int64)


def make_shape_table(tensors: Sequence[TensorType], dims: int) -> np.ndarray:
    """Return the global shapes, [tensors, dims], with the size 1 at the end."""
    padded = []
    for _, shape, _ in tensors:
        missing = dims - len(shape)
        padded.append(shape + (1,) * missing)
    table = np.array(padded, dtype=np.int64)
    return table.reshape(-1, dims)  # also for zero tensors


def _make_stride_table(shapes: np.ndarray) -> np.ndarray:
    """Return the elements between neighbors along each axis of row-major tensors.

    `shapes` and the result are [tensors, dimensions].
    """
    strides = np.ones_like(shapes)
    last = shapes.shape[1] - 1
    # From the last axis, whose neighbors are one element apart, to the first
    for axis in range(last, 0, -1):
        strides[:, axis - 1] = strides[:, axis] * shapes[:, axis]
    return strides
