"""Replicas: equal boxes of several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron.core.dist_checkpointing.planning.places import number_places
from megatron.core.dist_checkpointing.planning.segments import Segments
from megatron.core.dist_checkpointing.planning.structure import TensorType
from megatron.core.safe_files.errors import CheckpointError


class Replicas(NamedTuple):
    """The lines of the whole boxes, grouped by box."""

    order: np.ndarray  # the lines sorted by place; those of one box are in rank order
    starts: np.ndarray  # the indices in `order` where a new box begins
    places: np.ndarray  # the place of each box (`number_places`)

    def count_ranks(self) -> np.ndarray:
        """Return the number of ranks that have each box."""
        return np.diff(self.starts, append=len(self.order))


def group_replicas(tensors: Sequence[TensorType], boxes: Segments) -> Replicas:
    """Find the boxes that several ranks have.

    Raises CheckpointError if a rank has a box twice.
    """
    # Sort by place, so that replicas are neighbors. The sort is stable: they stay in rank order.
    places = number_places(tensors, boxes.tensor, boxes.offset)
    order = np.argsort(places, kind="stable")
    places = places[order]
    shape = boxes.shape.take(order, axis=0)  # [lines, dimensions]
    rank = boxes.rank[order]

    # A line begins a new box if its place or shape differs from the previous line's.
    differs = _differs_from_previous(places)  # [lines - 1]
    for axis in range(shape.shape[1]):
        differs |= _differs_from_previous(shape[:, axis])

    # Replicas are in rank order, so two of the same rank are neighbors.
    is_duplicate = ~differs
    is_duplicate &= ~_differs_from_previous(rank)
    duplicates = np.flatnonzero(is_duplicate)
    if len(duplicates):
        line = order[duplicates[0]]
        key, global_shape, _ = tensors[boxes.tensor[line]]
        dims = len(global_shape)
        offset = tuple(boxes.offset[line, :dims].tolist())
        raise CheckpointError(f"{key}: rank {boxes.rank[line]} holds the box at {offset} twice")

    is_new = np.ones(len(order), dtype=bool)  # the first line begins a box
    is_new[1:] = differs
    starts = np.flatnonzero(is_new)
    return Replicas(order, starts, places[starts])


def _differs_from_previous(values: np.ndarray) -> np.ndarray:
    """Return for each value but the first whether it differs from the one before it."""
    current = values[1:]
    previous = values[:-1]
    is_different: np.ndarray = current != previous
    return is_different
