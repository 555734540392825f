"""Which rank writes which box: pure functions from the local states to a plan for all ranks.

`describe` and `pack` (on every rank) -> `make_plan` (on rank 0) -> one `RankPlan` per rank. There
is
no communication, and no tensor is touched. At 16,384 ranks there are millions of boxes, so the plan
of all of them consists of arrays with a row per box.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from megatron.core.dist_checkpointing.format.schema import CheckpointError
from megatron.core.dist_checkpointing.mapping import (
    BoxTable,
    Extent,
    Shape,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    find_row_axis,
    locate_rows,
    to_absolute,
)

TensorType = tuple[str, Shape, torch.dtype]  # key, global shape, dtype


class TensorSpec(NamedTuple):
    """The boxes of one tensor on one rank."""

    key: str
    shape: Shape
    dtype: torch.dtype
    boxes: tuple[Extent, ...]


class LocalSpec(NamedTuple):
    """The structure of one rank's state; a plan is valid while it is unchanged on every rank."""

    tensors: tuple[TensorSpec, ...]
    objects: tuple[str, ...]


class PackedSpec(NamedTuple):
    """A `LocalSpec` as compact arrays, to be sent to rank 0."""

    tensors: tuple[TensorType, ...]
    objects: tuple[str, ...]
    counts: np.ndarray  # boxes of each tensor
    # [boxes, 2, dimensions]: offset and shape; missing dimensions at the end are 0 and 1.
    boxes: np.ndarray


class Item(NamedTuple):
    """The box at `offset` of `shape`, a range of rows of this rank's box at `box`."""

    key: str
    dtype: torch.dtype
    box: Shape
    offset: Shape
    shape: Shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def select_rows(self, first: int, count: int) -> Item:
        offset, shape = locate_rows(self.shape, first, count)
        return self._replace(offset=to_absolute(self.offset, offset), shape=shape)


class RankPlan(NamedTuple):
    """The part of the plan for one rank.

    Each item is rows `[first, first + count)` of its box number `box`, at `position` of file
    `file`.
    """

    items: np.ndarray  # [items, 5]: box, first, count, file, position
    objects: list[str]


def describe(state: ShardedStateDict) -> LocalSpec:
    """Return the structure of `state`. Raises CheckpointError for an inconsistent tensor."""
    tensors = []
    objects = []
    for name, entry in state.items():
        if isinstance(entry, ShardedObject):
            objects.append(entry.key)
            continue
        if not isinstance(entry, ShardedTensor):
            raise CheckpointError(
                f"{name}: {type(entry).__name__} is neither ShardedTensor nor ShardedObject"
            )
        boxes = []
        for box in entry.boxes:
            shape = box.shape
            if box.tensor.dtype != entry.dtype:
                raise CheckpointError(
                    f"{entry.key}: a box is {box.tensor.dtype}, the tensor {entry.dtype}"
                )
            if not _is_inside(box.offset, shape, entry.global_shape):
                raise CheckpointError(
                    f"{entry.key}: the box at {box.offset} of shape {shape} is not inside "
                    f"{entry.global_shape}"
                )
            if 0 not in shape or 0 in entry.global_shape:
                boxes.append((box.offset, shape))
        tensors.append(TensorSpec(entry.key, entry.global_shape, entry.dtype, tuple(boxes)))
    counts = Counter([tensor.key for tensor in tensors] + objects)
    twice = [key for key, count in counts.items() if count > 1]
    if twice:
        raise CheckpointError(
            f"one rank holds several entries with the same key: {abbreviate(twice, 10, ', ')}"
        )
    return LocalSpec(tuple(tensors), tuple(objects))


def _is_inside(offset: Shape, shape: Shape, whole: Shape) -> bool:
    if not len(offset) == len(shape) == len(whole):
        return False
    return all(o + n <= w for o, n, w in zip(offset, shape, whole, strict=True))


def pack(spec: LocalSpec) -> PackedSpec:
    """Convert a spec to arrays in which all boxes have the same number of dimensions."""
    dims = max((len(tensor.shape) for tensor in spec.tensors), default=0)
    extents = []
    for tensor in spec.tensors:
        missing = dims - len(tensor.shape)
        for offset, shape in tensor.boxes:
            extents.append((offset + (0,) * missing, shape + (1,) * missing))
    boxes = np.array(extents, dtype=np.int64).reshape(len(extents), 2, dims)
    if boxes.max(initial=0) < 1 << 31:
        boxes = boxes.astype(np.int32)  # to send less
    counts = np.array([len(tensor.boxes) for tensor in spec.tensors], dtype=np.int32)
    return PackedSpec(tuple(tensor[:3] for tensor in spec.tensors), spec.objects, counts, boxes)


@dataclass
class Rows:
    """Columns of the plan: one line per range of rows to write, sorted by rank and box."""

    rank: np.ndarray
    box: np.ndarray  # number among the rank's boxes
    tensor: np.ndarray  # number in `SavePlan.tensors`
    first: np.ndarray
    count: np.ndarray
    offset: np.ndarray  # [lines, dimensions], as in PackedSpec
    shape: np.ndarray


@dataclass
class SavePlan:
    """The plan for all ranks: `rows` of `tensors`, and the keys of `objects` by rank."""

    tensors: list[TensorType]
    objects: list[list[str]]  # by rank
    rows: Rows

    @property
    def nbytes(self) -> np.ndarray:
        """Bytes of each line of `rows`."""
        itemsize = np.array([dtype.itemsize for _, _, dtype in self.tensors], dtype=np.int64)
        return self.rows.shape.prod(axis=1) * itemsize[self.rows.tensor]

    @property
    def loads(self) -> list[int]:
        """Bytes that each rank writes."""
        return _sum_by_group(self.rows.rank, self.nbytes, len(self.objects)).tolist()

    def extents(self) -> Iterator[tuple[str, Extent]]:
        """Yield key and box (offset, shape) of each line of `rows`."""
        offsets = self.rows.offset.tolist()
        shapes = self.rows.shape.tolist()
        for number, offset, extent in zip(self.rows.tensor, offsets, shapes, strict=True):
            key, shape, _ = self.tensors[number]
            dims = len(shape)
            yield key, (tuple(offset[:dims]), tuple(extent[:dims]))


def make_plan(specs: Sequence[PackedSpec], fully_parallel: bool = True) -> SavePlan:
    """Assign every box to exactly one of the ranks that have it.

    With `fully_parallel` replicated boxes are distributed so that all ranks write about the same
    number of bytes; large boxes are cut by rows. Otherwise the lowest rank that has a box writes
    it. Raises CheckpointError that names the keys whose shapes or dtypes differ between ranks or
    whose boxes do not tile them.
    """
    # Phase 1: list the boxes of all ranks, and find replicas.
    held = _BoxColumns.collect(specs)
    order, starts = _group_replicas(held)
    _check_coverage(held, order[starts])
    # Phase 2: choose the rank that writes each box, or the ranks that share its rows.
    line, first, count = _choose_writers(held, order, starts, fully_parallel, len(specs))
    # Phase 3: make a line for each range of rows that is written.
    offset = held.offset[line]
    shape = held.shape[line]
    part = np.flatnonzero(count != held.rows[line])
    axis = held.axis[line[part]]
    offset[part, axis] += first[part]
    shape[part, axis] = count[part]
    objects: list[list[str]] = []
    written: set[str] = set()
    for spec in specs:
        objects.append([key for key in spec.objects if key not in written])
        written.update(spec.objects)
    rows = Rows(held.rank[line], held.box[line], held.tensor[line], first, count, offset, shape)
    return SavePlan(held.tensors, objects, rows)


@dataclass
class _BoxColumns:
    """All boxes of all ranks: one line per box, sorted by rank and box."""

    tensors: list[TensorType]
    rank: np.ndarray
    box: np.ndarray
    tensor: np.ndarray
    offset: np.ndarray
    shape: np.ndarray
    nbytes: np.ndarray
    axis: np.ndarray  # along which rows are counted
    rows: np.ndarray

    @classmethod
    def collect(cls, specs: Sequence[PackedSpec]) -> _BoxColumns:
        """Concatenate the boxes of all ranks. Raises CheckpointError if their tensors conflict."""
        # Number the distinct tensors of all ranks.
        numbers: dict[TensorType, int] = {}
        numbers_of_rank = []
        for spec in specs:
            ours = [numbers.setdefault(tensor, len(numbers)) for tensor in spec.tensors]
            numbers_of_rank.append(np.array(ours, dtype=np.int64))
        tensors = list(numbers)
        keys = {key for key, _, _ in tensors}
        objects = {key for spec in specs for key in spec.objects}
        if len(keys) < len(tensors) or keys & objects:
            raise CheckpointError(_describe_conflicts(specs))

        # Concatenate the boxes, and repeat the numbers of rank and tensor for each of them.
        dims = max(1, *(spec.boxes.shape[2] for spec in specs))
        boxes = np.concatenate([_pad_dimensions(spec.boxes, dims) for spec in specs])
        boxes = boxes.astype(np.int64)
        offset = boxes[:, 0]
        shape = boxes[:, 1]
        lengths = [len(spec.boxes) for spec in specs]
        rank = np.repeat(np.arange(len(specs)), lengths)
        box = np.concatenate([np.arange(length) for length in lengths])
        repeated = []
        for ours_of_rank, spec in zip(numbers_of_rank, specs, strict=True):
            repeated.append(np.repeat(ours_of_rank, spec.counts))
        tensor = np.concatenate(repeated)

        # Rows are counted along the first axis that is longer than 1.
        axis = (shape > 1).argmax(axis=1)
        rows = np.maximum(1, shape[np.arange(len(shape)), axis])
        itemsize = np.array([dtype.itemsize for _, _, dtype in tensors], dtype=np.int64)
        nbytes = shape.prod(axis=1) * itemsize[tensor]
        return cls(tensors, rank, box, tensor, offset, shape, nbytes, axis, rows)

    def places(self) -> np.ndarray:
        """Return `number_places` of all boxes."""
        return number_places(self.tensors, self.tensor, self.offset)


def number_places(
    tensors: Sequence[TensorType], tensor: np.ndarray, offset: np.ndarray
) -> np.ndarray:
    """Number the first element of each box: tensors in order, elements row-major."""
    strides = []
    base = []
    position = 0
    for _, shape, _ in tensors:
        padded = shape + (1,) * (offset.shape[1] - len(shape))
        strides.append([math.prod(padded[axis + 1 :]) for axis in range(len(padded))])
        base.append(position)
        position += max(1, math.prod(shape))
    assert position < 1 << 63, f"{position} elements are more than 64 bits can number"
    steps = np.array(strides, dtype=np.int64).reshape(-1, offset.shape[1])[tensor]
    return np.array(base, dtype=np.int64)[tensor] + (offset * steps).sum(axis=1)


def _pad_dimensions(boxes: np.ndarray, dims: int) -> np.ndarray:
    missing = dims - boxes.shape[2]
    if not missing:
        return boxes
    ends = np.broadcast_to(np.array([[0], [1]]), (len(boxes), 2, missing))
    return np.concatenate([boxes, ends], axis=2)


def _group_replicas(held: _BoxColumns) -> tuple[np.ndarray, np.ndarray]:
    """Return the lines sorted by place, and the indices in this order where a new box begins.

    The lines of one box are in rank order.
    """
    places = held.places()
    order = np.argsort(places, kind="stable")
    shape = held.shape[order]
    rank = held.rank[order]
    new = np.ones(len(order), dtype=bool)
    new[1:] = (np.diff(places[order]) != 0) | (shape[1:] != shape[:-1]).any(axis=1)
    # Lines of one box are in rank order, so two of the same rank are neighbours.
    twice = np.flatnonzero(~new[1:] & (rank[1:] == rank[:-1]))
    if len(twice):
        line = order[twice[0]]
        key = held.tensors[held.tensor[line]][0]
        dims = len(held.tensors[held.tensor[line]][1])
        place = tuple(held.offset[line].tolist()[:dims])
        raise CheckpointError(f"{key}: rank {held.rank[line]} holds the box at {place} twice")
    return order, np.flatnonzero(new)


def _check_coverage(held: _BoxColumns, distinct: np.ndarray) -> None:
    """Raise CheckpointError unless the `distinct` boxes, sorted by tensor, tile the tensors."""
    ends = np.searchsorted(held.tensor[distinct], np.arange(len(held.tensors) + 1))
    problems = []
    for number, (key, shape, _) in enumerate(held.tensors):
        lines = distinct[ends[number] : ends[number + 1]]
        table = BoxTable(held.offset[lines, : len(shape)], held.shape[lines, : len(shape)])
        fault = table.find_gap_or_overlap(shape)
        if fault is not None:
            problems.append(f"{key} {shape}: {fault}")
    if problems:
        raise CheckpointError("boxes do not tile\n  " + abbreviate(problems))


def _describe_conflicts(specs: Sequence[PackedSpec]) -> str:
    """Return a message about keys whose shape, dtype or kind differs between ranks."""
    first: dict[str, tuple[TensorType, int]] = {}
    objects: dict[str, int] = {}
    conflicts: dict[str, str] = {}
    for rank, spec in enumerate(specs):
        objects.update({key: rank for key in spec.objects if key not in objects})
        for tensor in spec.tensors:
            key, shape, dtype = tensor
            known, other = first.setdefault(key, (tensor, rank))
            if known != tensor and key not in conflicts:
                conflicts[key] = (
                    f"{key}: {known[1]} {known[2]} on rank {other}, {shape} {dtype} on rank {rank}"
                )
    for key in objects.keys() & first.keys():
        conflicts[key] = (
            f"{key}: an object on rank {objects[key]}, a tensor on rank {first[key][1]}"
        )
    return "ranks disagree about\n  " + abbreviate(list(conflicts.values()))


def _choose_writers(
    held: _BoxColumns, order: np.ndarray, starts: np.ndarray, fully_parallel: bool, world: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the lines to write and their rows, sorted by line: (line, first, count)."""
    counts = np.diff(starts, append=len(order))
    # Boxes on one rank only (optimizer shards) have a fixed writer: count them before replicated
    # boxes are distributed.
    alone = order[starts[(counts == 1) | (not fully_parallel)]]
    loads = _sum_by_group(held.rank[alone], held.nbytes[alone], world).tolist()
    # Lines of each replicated box, by the ranks that have it.
    shared: dict[bytes, list[np.ndarray]] = defaultdict(list)
    several = np.flatnonzero(counts > 1) if fully_parallel else ()
    for number in several:
        lines = order[starts[number] : starts[number] + counts[number]]
        shared[held.rank[lines].tobytes()].append(lines)
    # Assign small replica groups first; larger groups then balance the remaining load.
    groups = []
    for ranks, boxes in shared.items():
        groups.append((np.frombuffer(ranks, dtype=held.rank.dtype).tolist(), boxes))
    groups.sort(key=lambda entry: (len(entry[0]), entry[0]))
    cut = []
    for group, boxes in groups:
        heads = [lines[0] for lines in boxes]
        sizes = list(zip(held.rows[heads].tolist(), held.nbytes[heads].tolist(), strict=True))
        total = sum(nbytes for _, nbytes in sizes)
        shares = _level_loads([loads[rank] for rank in group], total)
        for member, box, start, rows in _cut_into_shares(shares, sizes):
            cut.append((boxes[box][member], start, rows))
            row_bytes = sizes[box][1] // sizes[box][0]
            loads[group[member]] += rows * row_bytes
    whole = np.stack([alone, np.zeros_like(alone), held.rows[alone]], axis=1)
    line, first, count = np.concatenate([whole, np.array(cut, dtype=np.int64).reshape(-1, 3)]).T
    in_order = np.argsort(line, kind="stable")
    return line[in_order], first[in_order], count[in_order]


def share_evenly(items: Sequence[Item], size: int) -> list[list[Item]]:
    """Split boxes that all `size` ranks have into one share per rank, equal in bytes up to
    a row.
    """
    sizes = []
    for item in items:
        axis = find_row_axis(item.shape)
        rows = 1 if axis is None else item.shape[axis]
        sizes.append((rows, item.nbytes))
    total = sum(nbytes for _, nbytes in sizes)
    shares: list[list[Item]] = [[] for _ in range(size)]
    for rank, number, first, count in _cut_into_shares(_level_loads([0] * size, total), sizes):
        shares[rank].append(items[number].select_rows(first, count))
    return shares


def _level_loads(loads: list[int], total: int) -> list[int]:
    """Return the part of `total` bytes that each rank takes so that loads become equal."""
    order = sorted(range(len(loads)), key=lambda i: (loads[i], i))
    filled = total
    count = 0
    # The ranks with the lowest loads are filled up to a common level, the others get no bytes.
    for index in order:
        if count and filled <= loads[index] * count:
            break
        filled += loads[index]
        count += 1
    level, rest = divmod(filled, count)
    shares = [0] * len(loads)
    for position, index in enumerate(order[:count]):
        shares[index] = level + (position < rest) - loads[index]
    assert sum(shares) == total, (shares, total)
    return shares


def _cut_into_shares(
    shares: list[int], sizes: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int, int, int]]:
    """Cut a sequence of boxes (rows, bytes) into shares of the given bytes, between rows.

    Yields (number of the share, number of the box, first row, count).
    """
    due = [(member, share) for member, share in enumerate(shares) if share] or [(0, 0)]
    current = 0
    left = due[0][1]
    for number, (rows, nbytes) in enumerate(sizes):
        row_bytes = nbytes // rows
        done = 0
        while done < rows:
            take = rows - done
            if current < len(due) - 1 and row_bytes:
                # Round to the nearest row: rounding down would add all remainders to the last
                # share.
                take = min(take, -(-(2 * left - row_bytes) // (2 * row_bytes)))
            if take > 0:
                yield due[current][0], number, done, take
                done += take
                left -= take * row_bytes
            if done < rows:
                current += 1
                left += due[current][1]  # what was rounded to a row goes to the next
    assert current < len(due)


def _sum_by_group(group: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """Return the sum of the values of each group; exact up to 2^53."""
    return np.bincount(group, weights=values, minlength=size).astype(np.int64)


def abbreviate(lines: Sequence[str], limit: int = 20, between: str = "\n  ") -> str:
    """Join the first `limit` lines, and append the number of the others."""
    more = f" ... and {len(lines) - limit} more" if len(lines) > limit else ""
    return between.join(lines[:limit]) + more
