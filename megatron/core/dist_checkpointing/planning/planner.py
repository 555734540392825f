"""Who writes which box: pure functions from what every rank holds to what every rank writes.

`describe` and `pack` (on every rank) -> `make_plan` (on one) -> one `RankPlan` per rank. No communication, no tensors.
At 16,384 ranks there are millions of boxes, so the plan of all of them is made of arrays, a row per
box.
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
    """What one rank holds of one tensor."""

    key: str
    shape: Shape
    dtype: torch.dtype
    boxes: tuple[Extent, ...]


class LocalSpec(NamedTuple):
    """What one rank holds; a plan holds as long as all of these stay the same."""

    tensors: tuple[TensorSpec, ...]
    objects: tuple[str, ...]


class PackedSpec(NamedTuple):
    """A `LocalSpec` on its way to the rank that plans."""

    tensors: tuple[TensorType, ...]
    objects: tuple[str, ...]
    counts: np.ndarray  # boxes of each tensor
    boxes: (
        np.ndarray
    )  # [boxes, 2, dimensions]: offset and shape; missing dimensions at the end are 0 and 1


class Item(NamedTuple):
    """The box at `offset` of `shape`, some rows of this rank's box at `box`."""

    key: str
    dtype: torch.dtype
    box: Shape
    offset: Shape
    shape: Shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def rows(self, first: int, count: int) -> Item:
        offset, shape = locate_rows(self.shape, first, count)
        return self._replace(offset=to_absolute(self.offset, offset), shape=shape)


class RankPlan(NamedTuple):
    """What one rank writes: rows `[first, first + count)` of its box number `box`, at `position` of
    file `file`.
    """

    items: np.ndarray  # [items, 5]: box, first, count, file, position
    objects: list[str]


def describe(state: ShardedStateDict) -> LocalSpec:
    """The structure of `state`. Raises CheckpointError for a tensor that contradicts itself."""
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
            outside = len(box.offset) != len(entry.global_shape) or len(shape) != len(
                entry.global_shape
            )
            if outside or any(
                o + n > g for o, n, g in zip(box.offset, shape, entry.global_shape, strict=True)
            ):
                raise CheckpointError(
                    f"{entry.key}: the box at {box.offset} of shape {shape} does not lie in {entry.global_shape}"
                )
            if 0 not in shape or 0 in entry.global_shape:
                boxes.append((box.offset, shape))
        tensors.append(TensorSpec(entry.key, entry.global_shape, entry.dtype, tuple(boxes)))
    twice = [
        key
        for key, count in Counter([tensor.key for tensor in tensors] + objects).items()
        if count > 1
    ]
    if twice:
        raise CheckpointError(
            f"one rank holds several entries with the same key: {abbreviate(twice, 10, ', ')}"
        )
    return LocalSpec(tuple(tensors), tuple(objects))


def pack(spec: LocalSpec) -> PackedSpec:
    dims = max((len(tensor.shape) for tensor in spec.tensors), default=0)
    extents = [
        (offset + (0,) * (dims - len(shape)), shape + (1,) * (dims - len(shape)))
        for tensor in spec.tensors
        for offset, shape in tensor.boxes
    ]
    boxes = np.array(extents, dtype=np.int64).reshape(len(extents), 2, dims)
    if boxes.max(initial=0) < 1 << 31:
        boxes = boxes.astype(np.int32)  # to send less
    counts = np.array([len(tensor.boxes) for tensor in spec.tensors], dtype=np.int32)
    return PackedSpec(tuple(tensor[:3] for tensor in spec.tensors), spec.objects, counts, boxes)


@dataclass
class Rows:
    """Rows of boxes that are written, one line each, in the order of the ranks and of their boxes."""

    rank: np.ndarray
    box: np.ndarray  # number among the rank's boxes
    tensor: np.ndarray  # number in `SavePlan.tensors`
    first: np.ndarray
    count: np.ndarray
    offset: np.ndarray  # [lines, dimensions], as in PackedSpec
    shape: np.ndarray


@dataclass
class SavePlan:
    """What all ranks write."""

    tensors: list[TensorType]
    objects: list[list[str]]  # by rank
    rows: Rows

    @property
    def nbytes(self) -> np.ndarray:
        """Of every line."""
        itemsize = np.array([dtype.itemsize for _, _, dtype in self.tensors], dtype=np.int64)
        return self.rows.shape.prod(axis=1) * itemsize[self.rows.tensor]

    @property
    def loads(self) -> list[int]:
        """Bytes that each rank writes."""
        return _sums(self.rows.rank, self.nbytes, len(self.objects)).tolist()

    def extents(self) -> Iterator[tuple[str, Extent]]:
        """Key and box of every line."""
        for tensor, *extent in zip(
            self.rows.tensor, self.rows.offset.tolist(), self.rows.shape.tolist(), strict=True
        ):
            key, shape, _ = self.tensors[tensor]
            offset, extents = (tuple(numbers[: len(shape)]) for numbers in extent)
            yield key, (offset, extents)


def make_plan(specs: Sequence[PackedSpec], fully_parallel: bool = True) -> SavePlan:
    """Every box is written exactly once, by one of the ranks that hold it.

    Boxes that several ranks hold are shared out so that all ranks write about the same number of
    bytes (`fully_parallel`; large boxes are cut by rows), otherwise the lowest of these ranks
    writes them. Raises CheckpointError naming the keys whose shapes or dtypes differ between ranks
    or whose boxes do not tile them.
    """
    # Phase 1: one line for every box of every rank, and which lines are the same box.
    held = _Held.of(specs)
    order, starts = _replicas(held)
    _check_coverage(held, order[starts])
    # Phase 2: for every box the rank that writes it, or the ranks that share its rows.
    line, first, count = _choose(held, order, starts, fully_parallel, len(specs))
    # Phase 3: a line for every run of rows that is written.
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
class _Held:
    """All boxes of all ranks, a line each, in the order of the ranks and of their boxes."""

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
    def of(cls, specs: Sequence[PackedSpec]) -> _Held:
        numbers: dict[TensorType, int] = {}
        per_rank = [
            [numbers.setdefault(tensor, len(numbers)) for tensor in spec.tensors] for spec in specs
        ]
        tensors = list(numbers)
        objects = {key for spec in specs for key in spec.objects}
        keys = {key for key, _, _ in tensors}
        if len(keys) < len(tensors) or keys & objects:
            raise CheckpointError(_conflicts(specs))
        dims = max(1, *(spec.boxes.shape[2] for spec in specs))
        owner = [
            np.repeat(np.array(n, dtype=np.int64), s.counts)
            for n, s in zip(per_rank, specs, strict=True)
        ]
        boxes = np.concatenate([_padded(spec.boxes, dims) for spec in specs]).astype(np.int64)
        offset = boxes[:, 0]
        shape = boxes[:, 1]
        tensor = np.concatenate(owner)
        itemsize = np.array([dtype.itemsize for _, _, dtype in tensors], dtype=np.int64)
        axis = (shape > 1).argmax(axis=1)
        rows = np.maximum(1, shape[np.arange(len(shape)), axis])
        lengths = [len(spec.boxes) for spec in specs]
        rank = np.repeat(np.arange(len(specs)), lengths)
        box = np.concatenate([np.arange(n) for n in lengths])
        return cls(
            tensors,
            rank,
            box,
            tensor,
            offset,
            shape,
            shape.prod(axis=1) * itemsize[tensor],
            axis,
            rows,
        )

    def places(self) -> np.ndarray:
        """For every box a number that says where it begins: ascending by tensor, then row-major."""
        return number_places(self.tensors, self.tensor, self.offset)


def number_places(
    tensors: Sequence[TensorType], tensor: np.ndarray, offset: np.ndarray
) -> np.ndarray:
    """For boxes of `tensors` a number that says where each begins: ascending by tensor, then
    row-major.
    """
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


def _padded(boxes: np.ndarray, dims: int) -> np.ndarray:
    missing = dims - boxes.shape[2]
    if not missing:
        return boxes
    ends = np.broadcast_to(np.array([[0], [1]]), (len(boxes), 2, missing))
    return np.concatenate([boxes, ends], axis=2)


def _replicas(held: _Held) -> tuple[np.ndarray, np.ndarray]:
    """Lines in the order of places, and where in it a new box begins; the lines of one box are in
    rank order.
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


def _check_coverage(held: _Held, distinct: np.ndarray) -> None:
    """`distinct` boxes, in the order of the tensors, tile these."""
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


def _conflicts(specs: Sequence[PackedSpec]) -> str:
    """Which keys differ in shape or dtype, or are a tensor here and an object there."""
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


def _choose(
    held: _Held, order: np.ndarray, starts: np.ndarray, fully_parallel: bool, world: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which lines are written, and which of their rows, in the order of the lines: (line, first,
    count).
    """
    counts = np.diff(starts, append=len(order))
    # What one rank alone holds (its optimizer shard) leaves no choice; it counts as load before
    # replicas are shared.
    alone = order[starts[(counts == 1) | (not fully_parallel)]]
    loads = _sums(held.rank[alone], held.nbytes[alone], world).tolist()
    shared: dict[bytes, list[np.ndarray]] = defaultdict(
        list
    )  # lines of each box, by the ranks that hold it
    several = np.flatnonzero(counts > 1) if fully_parallel else ()
    for number in several:
        lines = order[starts[number] : starts[number] + counts[number]]
        shared[held.rank[lines].tobytes()].append(lines)
    cut = []
    # Small groups first: they have the least choice; the larger ones then level out what is left.
    by_ranks = [
        (np.frombuffer(ranks, dtype=held.rank.dtype).tolist(), boxes)
        for ranks, boxes in shared.items()
    ]
    for group, boxes in sorted(by_ranks, key=lambda entry: (len(entry[0]), entry[0])):
        heads = [lines[0] for lines in boxes]
        sizes = list(zip(held.rows[heads].tolist(), held.nbytes[heads].tolist(), strict=True))
        shares = _level([loads[rank] for rank in group], sum(nbytes for _, nbytes in sizes))
        for member, box, start, rows in _share_out(shares, sizes):
            cut.append((boxes[box][member], start, rows))
            loads[group[member]] += rows * (sizes[box][1] // sizes[box][0])
    whole = np.stack([alone, np.zeros_like(alone), held.rows[alone]], axis=1)
    line, first, count = np.concatenate([whole, np.array(cut, dtype=np.int64).reshape(-1, 3)]).T
    in_order = np.argsort(line, kind="stable")
    return line[in_order], first[in_order], count[in_order]


def share_evenly(items: Sequence[Item], size: int) -> list[list[Item]]:
    """Split boxes that all of `size` ranks hold into one share per rank, equal in bytes up to a
    row.
    """
    sizes = [
        (1 if (axis := find_row_axis(item.shape)) is None else item.shape[axis], item.nbytes)
        for item in items
    ]
    shares: list[list[Item]] = [[] for _ in range(size)]
    for rank, number, first, count in _share_out(
        _level([0] * size, sum(nbytes for _, nbytes in sizes)), sizes
    ):
        shares[rank].append(items[number].rows(first, count))
    return shares


def _level(loads: list[int], total: int) -> list[int]:
    """How many of `total` bytes each rank takes so that the loads become as level as possible."""
    order = sorted(range(len(loads)), key=lambda i: (loads[i], i))
    filled = total
    count = 0
    # Pour `total` over the loads like water: the lowest ranks fill up to one level, the others get
    # nothing.
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


def _share_out(
    shares: list[int], sizes: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int, int, int]]:
    """Walk over boxes of (rows, bytes) as one sequence of bytes and cut it, at rows, where a share
    is reached.

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
                # As many rows as come nearest to the share: rounding down would leave all
                # remainders to the last one.
                take = min(take, -(-(2 * left - row_bytes) // (2 * row_bytes)))
            if take > 0:
                yield due[current][0], number, done, take
                done += take
                left -= take * row_bytes
            if done < rows:
                current += 1
                left += due[current][1]  # what was rounded to a row goes to the next
    assert current < len(due)


def _sums(group: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """The sum of the values of each group; exact up to 2^53."""
    return np.bincount(group, weights=values, minlength=size).astype(np.int64)


def abbreviate(lines: Sequence[str], limit: int = 20, between: str = "\n  ") -> str:
    """The first of many lines, and how many more there are."""
    more = f" ... and {len(lines) - limit} more" if len(lines) > limit else ""
    return between.join(lines[:limit]) + more
