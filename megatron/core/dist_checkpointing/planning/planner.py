"""Assignment of boxes to ranks: pure functions from the local states to a plan for all ranks.

`describe` and `pack` (on every rank) -> `make_plan` (on rank 0) -> one `RankPlan` per rank, without
communication and without reading any tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron.core.dist_checkpointing.mapping import Extent
from megatron.core.dist_checkpointing.planning.balancing import cut_into_shares, level_loads
from megatron.core.dist_checkpointing.planning.coverage import check_coverage
from megatron.core.dist_checkpointing.planning.replicas import Replicas, group_replicas
from megatron.core.dist_checkpointing.planning.segments import Segments, collect_boxes
from megatron.core.dist_checkpointing.planning.structure import PackedSpec, TensorType


class RankPlan(NamedTuple):
    """The part of the plan for one rank.

    Each item is rows `[first, first + count)` of its box number `box`, at `position` of file
    `file`.
    """

    items: np.ndarray  # [items, 5]: box, first, count, file, position
    objects: list[str]


@dataclass
class SavePlan:
    """The plan for all ranks: `segments` of `tensors`, and the keys of `objects` by rank."""

    tensors: list[TensorType]
    objects: list[list[str]]  # by rank
    segments: Segments

    @property
    def loads(self) -> list[int]:
        """Bytes that each rank writes."""
        world_size = len(self.objects)
        loads = _sum_by_group(self.segments.rank, self.segments.nbytes, world_size)
        return loads.tolist()

    def extents(self) -> Iterator[tuple[str, Extent]]:
        """Yield key and box (offset, shape) of each segment."""
        # Lists: single elements of an array are slow.
        numbers = self.segments.tensor.tolist()
        offsets = self.segments.offset.tolist()
        shapes = self.segments.shape.tolist()
        for number, offset, shape in zip(numbers, offsets, shapes, strict=True):
            key, global_shape, _ = self.tensors[number]
            # The arrays have the dimensions of the tensor that has the most.
            dims = len(global_shape)
            box_offset = tuple(offset[:dims])
            box_shape = tuple(shape[:dims])
            yield key, (box_offset, box_shape)


def make_plan(specs: Sequence[PackedSpec], fully_parallel: bool = True) -> SavePlan:
    """Assign every box to exactly one of the ranks that have it.

    With `fully_parallel` replicated boxes are distributed so that all ranks write about the same
    number of bytes; large boxes are cut by rows. Otherwise the lowest rank that has a box writes
    it. Raises CheckpointError that names the keys whose shapes or dtypes differ between ranks or
    whose boxes do not tile them.
    """
    # Phase 1: list the boxes of all ranks, and find replicas.
    tensors, boxes = collect_boxes(specs)
    replicas = group_replicas(tensors, boxes)
    check_coverage(tensors, boxes, replicas)

    # Phase 2: choose the rank that writes each box, or the ranks that share its rows.
    world_size = len(specs)
    segments = _choose_writers(boxes, replicas, fully_parallel, world_size)
    objects = _assign_objects(specs)
    return SavePlan(tensors, objects, segments)


def _assign_objects(specs: Sequence[PackedSpec]) -> list[list[str]]:
    """Return the keys of the objects that each rank writes: the lowest rank that has them."""
    objects: list[list[str]] = []
    assigned: set[str] = set()
    for spec in specs:
        mine = []
        for key in spec.objects:
            if key not in assigned:
                mine.append(key)
        objects.append(mine)
        assigned.update(spec.objects)
    return objects


def _choose_writers(
    boxes: Segments, replicas: Replicas, fully_parallel: bool, world_size: int
) -> Segments:
    """Return the segments to write, sorted by rank and box."""
    # Boxes on one rank only (optimizer shards) have a fixed writer: count them before replicated
    # boxes are distributed.
    fixed_lines = _find_fixed_lines(replicas, fully_parallel)
    parts: list[_Part] = []
    if fully_parallel:
        rank = boxes.rank[fixed_lines]
        nbytes = boxes.nbytes[fixed_lines]
        loads = _sum_by_group(rank, nbytes, world_size)
        parts = _share_replicated_boxes(boxes, replicas, loads.tolist())

    # Merge whole boxes and parts: both arrays are [3, segments] with line, first row and number of
    # rows.
    first_rows = np.zeros_like(fixed_lines)
    num_rows = boxes.count[fixed_lines]
    whole = np.stack([fixed_lines, first_rows, num_rows])
    shared = np.array(sorted(parts), dtype=np.int64)
    shared = shared.reshape(-1, 3).T  # also for zero parts
    segments = np.concatenate([whole, shared], axis=1)

    # Both are sorted by line, so that sorting them together is a merge.
    order = np.argsort(segments[0], kind="stable")
    line, first, count = segments[:, order]
    return boxes.select(line, first, count)


def _find_fixed_lines(replicas: Replicas, fully_parallel: bool) -> np.ndarray:
    """Return the lines, in order, of the boxes that are written whole by a fixed rank.

    These are the boxes on one rank only. Without load balancing, the lowest rank with a box writes
    it: the first line of every box.
    """
    has_fixed_writer = replicas.count_ranks() == 1  # [boxes]
    if not fully_parallel:
        has_fixed_writer[:] = True
    starts = replicas.starts[has_fixed_writer]
    first_lines = replicas.order[starts]

    # A mask puts the lines in order faster than a sort.
    is_fixed = np.zeros(len(replicas.order), dtype=bool)  # [lines]
    is_fixed[first_lines] = True
    return np.flatnonzero(is_fixed)


class _Part(NamedTuple):
    """Rows of a replicated box that one rank writes."""

    line: int  # of the box in the segments of all ranks
    first_row: int
    num_rows: int


def _share_replicated_boxes(boxes: Segments, replicas: Replicas, loads: list[int]) -> list[_Part]:
    """Distribute the rows of replicated boxes over the ranks that have them.

    `loads` are the bytes of each rank so far, to which the assigned ones are added.
    """
    parts = []
    for ranks, lines_of_boxes in _group_by_ranks(boxes, replicas):
        # The replicas of a box have equal sizes: take them from the first one.
        first_lines = [lines[0] for lines in lines_of_boxes]
        num_rows = boxes.count[first_lines].tolist()
        nbytes = boxes.nbytes[first_lines].tolist()
        sizes = list(zip(num_rows, nbytes, strict=True))

        # Divide the bytes of all boxes of the group, then cut the boxes accordingly.
        group_loads = [loads[rank] for rank in ranks]
        total = sum(nbytes)
        shares = level_loads(group_loads, total)
        for member, box, first, count in cut_into_shares(shares, sizes):
            line = lines_of_boxes[box][member]
            parts.append(_Part(line, first, count))
            row_bytes = nbytes[box] // num_rows[box]
            rank = ranks[member]
            loads[rank] += count * row_bytes
    return parts


class _ReplicaGroup(NamedTuple):
    """Ranks that have the same replicated boxes."""

    ranks: list[int]
    lines_of_boxes: list[np.ndarray]  # of each box: its lines in the order of `ranks`


def _group_by_ranks(boxes: Segments, replicas: Replicas) -> list[_ReplicaGroup]:
    """Return the replicated boxes, grouped by the ranks that have them.

    Small groups of ranks come first; larger groups then balance the remaining load.
    """
    # The ranks as bytes are a key that is made quickly.
    boxes_of_ranks: dict[bytes, list[np.ndarray]] = defaultdict(list)
    counts = replicas.count_ranks()
    replicated = np.flatnonzero(counts > 1)
    for number in replicated:
        start = replicas.starts[number]
        stop = start + counts[number]
        lines = replicas.order[start:stop]
        packed_ranks = boxes.rank[lines].tobytes()
        boxes_of_ranks[packed_ranks].append(lines)

    groups = []
    for packed_ranks, lines_of_boxes in boxes_of_ranks.items():
        ranks = np.frombuffer(packed_ranks, dtype=boxes.rank.dtype)
        groups.append(_ReplicaGroup(ranks.tolist(), lines_of_boxes))
    groups.sort(key=lambda group: (len(group.ranks), group.ranks))
    return groups


def _sum_by_group(group: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """Return the sum of the values of each group; exact up to 2^53."""
    sums = np.bincount(group, weights=values, minlength=size)  # float64
    return sums.astype(np.int64)
