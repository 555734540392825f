"""Assignment of boxes to ranks: pure functions from the local states to a plan for all ranks.

`describe` and `pack` (on every rank) -> `make_plan` (on rank 0) -> one `RankPlan` per rank, without
communication and without reading any tensor. At 16,384 ranks there are millions of boxes, so the
plan of all of them consists of arrays with a row per box: `Segments`.
"""

from __future__ import annotations

import math
import pickle
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
from megatron.core.dist_checkpointing.planning.balancing import cut_into_shares, level_loads

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

    # Pickled tuple of TensorType. Many ranks (e.g., those of a TP group) have equal ones, which
    # rank 0 reads once.
    types: bytes
    objects: tuple[str, ...]
    counts: np.ndarray  # boxes of each tensor
    # [boxes, 2, dimensions]: offset and shape; missing dimensions at the end are 0 and 1.
    boxes: np.ndarray

    def read_types(self) -> tuple[TensorType, ...]:
        """Return key, global shape and dtype of each tensor."""
        types: tuple[TensorType, ...] = pickle.loads(self.types)
        return types


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
        """Return the item of `count` rows from row `first` on."""
        start, shape = locate_rows(self.shape, first, count)
        return self._replace(offset=to_absolute(self.offset, start), shape=shape)


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
        tensors.append(_describe_tensor(entry))
    _check_unique_keys([tensor.key for tensor in tensors] + objects)
    return LocalSpec(tuple(tensors), tuple(objects))


def _describe_tensor(entry: ShardedTensor) -> TensorSpec:
    """Return the structure of a tensor, which is kept with the entry."""
    spec: TensorSpec | None = entry.derived.get(TensorSpec)
    if spec is None:
        boxes = _select_boxes(entry)
        spec = TensorSpec(entry.key, entry.global_shape, entry.dtype, boxes)
        entry.derived[TensorSpec] = spec
    return spec


def _select_boxes(entry: ShardedTensor) -> tuple[Extent, ...]:
    """Return the boxes of a tensor that contain elements. Raises CheckpointError for a wrong one.

    An empty box is kept if the whole tensor is empty, so that some rank writes it.
    """
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
        # Other empty boxes do not have to be written.
        if 0 not in shape or 0 in entry.global_shape:
            boxes.append((box.offset, shape))
    return tuple(boxes)


def _is_inside(offset: Shape, shape: Shape, whole: Shape) -> bool:
    if not len(offset) == len(shape) == len(whole):
        return False
    for start, size, limit in zip(offset, shape, whole, strict=True):
        if start + size > limit:
            return False
    return True


def _check_unique_keys(keys: Sequence[str]) -> None:
    """Raise CheckpointError if two entries of a rank have the same key."""
    duplicates = []
    for key, count in Counter(keys).items():
        if count > 1:
            duplicates.append(key)
    if duplicates:
        raise CheckpointError(
            f"one rank holds several entries with the same key: {abbreviate(duplicates, 10, ', ')}"
        )


def pack(spec: LocalSpec) -> PackedSpec:
    """Convert a spec to arrays in which all boxes have the same number of dimensions."""
    dims = 0
    for tensor in spec.tensors:
        dims = max(dims, len(tensor.shape))

    # Dimensions that a tensor lacks have the offset 0 and the size 1.
    types: list[TensorType] = []
    counts = []
    extents = []
    for tensor in spec.tensors:
        types.append((tensor.key, tensor.shape, tensor.dtype))
        counts.append(len(tensor.boxes))
        missing = dims - len(tensor.shape)
        offset_end = (0,) * missing
        shape_end = (1,) * missing
        for offset, shape in tensor.boxes:
            extents.append((offset + offset_end, shape + shape_end))
    boxes = np.array(extents, dtype=np.int64).reshape(len(extents), 2, dims)
    if boxes.max(initial=0) < 1 << 31:
        boxes = boxes.astype(np.int32)  # to send less
    return PackedSpec(
        pickle.dumps(tuple(types)), spec.objects, np.array(counts, dtype=np.int32), boxes
    )


@dataclass(frozen=True)
class Segments:
    """Columns with a line per segment: rows `[first, first + count)` of a box of a rank.

    Lines are sorted by rank and box. Planning begins with the whole boxes of all ranks and selects
    the segments to write from them.
    """

    rank: np.ndarray
    box: np.ndarray  # number among the rank's boxes
    tensor: np.ndarray  # number in `SavePlan.tensors`
    first: np.ndarray
    count: np.ndarray
    offset: np.ndarray  # [lines, dimensions], as in PackedSpec
    shape: np.ndarray
    nbytes: np.ndarray

    def select(self, line: np.ndarray, first: np.ndarray, count: np.ndarray) -> Segments:
        """Return `count` rows from row `first` on of each of the given lines, whole boxes."""
        num_rows = self.count[line]
        nbytes = self.nbytes[line] // num_rows * count
        offset = self.offset.take(line, axis=0)  # copies, [lines, dimensions]
        shape = self.shape.take(line, axis=0)
        # Most boxes are written as a whole: only the others are narrowed.
        partial = np.flatnonzero(count != num_rows)
        axis = _find_row_axes(shape[partial])
        offset[partial, axis] += first[partial]
        shape[partial, axis] = count[partial]
        rank = self.rank[line]
        return Segments(
            rank, self.box[line], self.tensor[line], first, count, offset, shape, nbytes
        )


def _find_row_axes(shape: np.ndarray) -> np.ndarray:
    """Return the axis along which the rows of each box are counted: the first longer than 1."""
    return (shape > 1).argmax(axis=1)


@dataclass
class SavePlan:
    """The plan for all ranks: `segments` of `tensors`, and the keys of `objects` by rank."""

    tensors: list[TensorType]
    objects: list[list[str]]  # by rank
    segments: Segments

    @property
    def loads(self) -> list[int]:
        """Bytes that each rank writes."""
        segments = self.segments
        return _sum_by_group(segments.rank, segments.nbytes, len(self.objects)).tolist()

    def extents(self) -> Iterator[tuple[str, Extent]]:
        """Yield key and box (offset, shape) of each segment."""
        offsets = self.segments.offset.tolist()
        shapes = self.segments.shape.tolist()
        for number, offset, box_shape in zip(self.segments.tensor, offsets, shapes, strict=True):
            key, global_shape, _ = self.tensors[number]
            dims = len(global_shape)  # the columns have those of the largest tensor
            extent = (tuple(offset[:dims]), tuple(box_shape[:dims]))
            yield key, extent


def _get_itemsizes(tensors: Sequence[TensorType]) -> np.ndarray:
    """Return the bytes per element of each tensor."""
    return np.array([dtype.itemsize for _, _, dtype in tensors], dtype=np.int64)


def make_plan(specs: Sequence[PackedSpec], fully_parallel: bool = True) -> SavePlan:
    """Assign every box to exactly one of the ranks that have it.

    With `fully_parallel` replicated boxes are distributed so that all ranks write about the same
    number of bytes; large boxes are cut by rows. Otherwise the lowest rank that has a box writes
    it. Raises CheckpointError that names the keys whose shapes or dtypes differ between ranks or
    whose boxes do not tile them.
    """
    # Phase 1: list the boxes of all ranks, and find replicas.
    tensors, boxes = _collect_boxes(specs)
    replicas = _group_replicas(tensors, boxes)
    _check_coverage(tensors, boxes, replicas)
    # Phase 2: choose the rank that writes each box, or the ranks that share its rows.
    segments = _choose_writers(boxes, replicas, fully_parallel, len(specs))
    return SavePlan(tensors, _assign_objects(specs), segments)


def _assign_objects(specs: Sequence[PackedSpec]) -> list[list[str]]:
    """Return the keys of the objects that each rank writes: the lowest rank that has them."""
    objects: list[list[str]] = []
    assigned: set[str] = set()
    for spec in specs:
        objects.append([key for key in spec.objects if key not in assigned])
        assigned.update(spec.objects)
    return objects


def _collect_boxes(specs: Sequence[PackedSpec]) -> tuple[list[TensorType], Segments]:
    """Return the tensors and the whole boxes of all ranks.

    Raises CheckpointError if the tensors of two ranks conflict.
    """
    tensors, number_of_spec = _number_tensors(specs)
    dims = 1
    for spec in specs:
        dims = max(dims, spec.boxes.shape[2])

    # Concatenate the boxes, and repeat the numbers of rank and tensor for each of them.
    lengths = np.array([len(spec.boxes) for spec in specs])
    padded = [_pad_dimensions(spec.boxes, dims) for spec in specs]
    # Two contiguous arrays [boxes, dims]: `take` selects their rows in a quarter of the time.
    offset = np.concatenate([extents[:, 0] for extents in padded], dtype=np.int64)
    shape = np.concatenate([extents[:, 1] for extents in padded], dtype=np.int64)
    rank = np.repeat(np.arange(len(specs)), lengths)
    first_of_rank = np.repeat(np.cumsum(lengths) - lengths, lengths)
    box = np.arange(len(offset)) - first_of_rank
    counts = np.concatenate([spec.counts for spec in specs])
    tensor = np.repeat(number_of_spec, counts)

    num_rows = np.maximum(1, shape[np.arange(len(shape)), _find_row_axes(shape)])
    nbytes = shape.prod(axis=1) * _get_itemsizes(tensors)[tensor]
    first = np.zeros_like(num_rows)
    return tensors, Segments(rank, box, tensor, first, num_rows, offset, shape, nbytes)


def _number_tensors(specs: Sequence[PackedSpec]) -> tuple[list[TensorType], np.ndarray]:
    """Return the distinct tensors of all ranks, and the number of each tensor of each rank.

    Raises CheckpointError if shape, dtype or kind of a key differs between ranks.
    """
    # Tensors with the same key but another shape or dtype get different numbers.
    numbers: dict[TensorType, int] = {}
    known: dict[bytes, np.ndarray] = {}
    number_of_spec = []
    objects: set[str] = set()
    for spec in specs:
        if spec.types not in known:
            ours = []
            for tensor in spec.read_types():
                ours.append(numbers.setdefault(tensor, len(numbers)))
            known[spec.types] = np.array(ours, dtype=np.int64)
        number_of_spec.append(known[spec.types])
        objects.update(spec.objects)
    tensors = list(numbers)
    keys = {key for key, _, _ in tensors}
    if len(keys) < len(tensors) or keys & objects:
        raise CheckpointError(_describe_conflicts(specs))
    return tensors, np.concatenate(number_of_spec)


def number_places(
    tensors: Sequence[TensorType], tensor: np.ndarray, offset: np.ndarray
) -> np.ndarray:
    """Number the first element of each box: tensors in order, elements row-major."""
    dims = offset.shape[1]
    strides = []
    for _, shape, _ in tensors:
        padded = shape + (1,) * (dims - len(shape))
        strides.append(_compute_strides(padded))
    stride_of_tensor = np.array(strides, dtype=np.int64).reshape(-1, dims)
    place = _number_first_elements(tensors)[tensor]  # [boxes]
    # One axis at a time: this needs a third of the time of a product of [boxes, dims].
    for axis in range(dims):
        place += offset[:, axis] * stride_of_tensor[:, axis][tensor]
    return place


def _number_first_elements(tensors: Sequence[TensorType]) -> np.ndarray:
    """Return the number of the first element of each tensor; an empty one uses up a number, too."""
    places = []
    position = 0
    for _, shape, _ in tensors:
        places.append(position)
        position += max(1, math.prod(shape))
    assert position < 1 << 63, f"{position} elements are more than 64 bits can number"
    return np.array(places, dtype=np.int64)


def _compute_strides(shape: Shape) -> list[int]:
    """Return the distance in elements between neighbors along each axis, in row-major order."""
    strides = []
    distance = 1
    for size in reversed(shape):
        strides.append(distance)
        distance *= size
    strides.reverse()
    return strides


def _pad_dimensions(boxes: np.ndarray, dims: int) -> np.ndarray:
    """Return `[boxes, 2, fewer]` as `[boxes, 2, dims]`, with offset 0 and size 1 at the end."""
    missing = dims - boxes.shape[2]
    if not missing:
        return boxes
    offset_and_size = np.array([[0], [1]])
    ends = np.broadcast_to(offset_and_size, (len(boxes), 2, missing))
    return np.concatenate([boxes, ends], axis=2)


class _Replicas(NamedTuple):
    """The lines of the whole boxes, grouped by box."""

    order: np.ndarray
    """The lines sorted by place; those of one box are in rank order."""
    starts: np.ndarray
    """The indices in `order` where a new box begins."""
    places: np.ndarray
    """The place of each box (`number_places`)."""

    def count_ranks(self) -> np.ndarray:
        """Return the number of ranks that have each box."""
        return np.diff(self.starts, append=len(self.order))


def _group_replicas(tensors: Sequence[TensorType], boxes: Segments) -> _Replicas:
    """Find the boxes that several ranks have.

    Raises CheckpointError if a rank has a box twice.
    """
    places = number_places(tensors, boxes.tensor, boxes.offset)
    order = np.argsort(places, kind="stable")
    places = places[order]
    shape = boxes.shape.take(order, axis=0)
    rank = boxes.rank[order]

    # A line begins a new box if its place or shape differs from the previous line's.
    is_new = np.ones(len(order), dtype=bool)
    is_new[1:] = places[1:] != places[:-1]
    for axis in range(shape.shape[1]):
        extent = shape[:, axis]
        is_new[1:] |= extent[1:] != extent[:-1]

    # Lines of one box are in rank order, so two of the same rank are neighbors.
    is_same_rank = rank[1:] == rank[:-1]
    duplicates = np.flatnonzero(~is_new[1:] & is_same_rank)
    if len(duplicates):
        line = order[duplicates[0]]
        key, global_shape, _ = tensors[boxes.tensor[line]]
        offset = tuple(boxes.offset[line].tolist()[: len(global_shape)])
        raise CheckpointError(f"{key}: rank {boxes.rank[line]} holds the box at {offset} twice")
    starts = np.flatnonzero(is_new)
    return _Replicas(order, starts, places[starts])


def _check_coverage(tensors: Sequence[TensorType], boxes: Segments, replicas: _Replicas) -> None:
    """Raise CheckpointError unless the distinct boxes tile the tensors."""
    lines_of_boxes = replicas.order[replicas.starts]  # sorted by tensor
    offset = boxes.offset.take(lines_of_boxes, axis=0)
    shape = boxes.shape.take(lines_of_boxes, axis=0)
    tensor = boxes.tensor[lines_of_boxes]
    ends = np.searchsorted(tensor, np.arange(len(tensors) + 1))
    is_tiled = np.zeros(len(tensors), dtype=bool)
    if len(tensor):
        is_tiled = _find_tiled_by_runs(tensors, tensor, shape, replicas.places, ends)
    problems = []
    # A main parameter and its moments have the same boxes, which are checked once.
    faults: dict[tuple[Shape, bytes, bytes], str | None] = {}
    for number in np.flatnonzero(~is_tiled).tolist():
        key, global_shape, _ = tensors[number]
        lines = slice(ends[number], ends[number + 1])
        dims = len(global_shape)
        table = BoxTable(offset[lines, :dims], shape[lines, :dims])
        content = (global_shape, table.offset.tobytes(), table.shape.tobytes())
        if content not in faults:
            faults[content] = table.find_gap_or_overlap(global_shape)
        fault = faults[content]
        if fault is not None:
            problems.append(f"{key} {global_shape}: {fault}")
    if problems:
        raise CheckpointError("boxes do not tile\n  " + abbreviate(problems))


def _find_tiled_by_runs(
    tensors: Sequence[TensorType],
    tensor: np.ndarray,
    shape: np.ndarray,
    place: np.ndarray,
    ends: np.ndarray,
) -> np.ndarray:
    """Return for each tensor whether its boxes are consecutive runs of elements from start to end.

    Most tensors are tiled like that: those split along the first axis, and their shards of ZeRO-1.
    They are checked at once, which takes a tenth of the time of the exact check of each. `ends`
    are the ends of each tensor's boxes, which are sorted by `place`; `shape` is `[boxes, dims]`.
    """
    dims = shape.shape[1]
    padded = []
    for _, global_shape, _ in tensors:
        missing = dims - len(global_shape)
        padded.append(global_shape + (1,) * missing)
    whole = np.array(padded, dtype=np.int64).reshape(-1, dims)

    # A run has one index on the axes before the first longer one, and all indices after it.
    is_run = np.ones(len(shape), dtype=bool)
    has_begun = np.zeros(len(shape), dtype=bool)
    for axis in range(dims):
        extent = shape[:, axis]
        is_run &= ~has_begun | (extent == whole[:, axis][tensor])
        has_begun |= extent > 1

    # It begins where the one before it ends, in the numbering of the elements of all tensors.
    stop = place + shape.prod(axis=1)
    is_next = np.ones(len(shape), dtype=bool)
    is_next[1:] = place[1:] == stop[:-1]

    # The first run of a tensor begins at its first element, and the last one ends with it.
    numel = whole.prod(axis=1)
    first_place = _number_first_elements(tensors)
    last_place = first_place + numel
    first_box = ends[:-1]
    last_box = ends[1:] - 1
    has_boxes = last_box >= first_box
    is_next[first_box[has_boxes]] = True
    # The tensors that have no boxes may have any index here.
    first_box = np.minimum(first_box, len(place) - 1)
    is_complete = place[first_box] == first_place
    is_complete &= stop[last_box] == last_place
    is_faulty = ~(is_run & is_next)
    num_faults = np.bincount(tensor[is_faulty], minlength=len(tensors))
    return has_boxes & is_complete & (num_faults == 0)


def _describe_conflicts(specs: Sequence[PackedSpec]) -> str:
    """Return a message about keys whose shape, dtype or kind differs between ranks."""
    # Key -> the first tensor with it, and its rank
    first: dict[str, tuple[TensorType, int]] = {}
    objects: dict[str, int] = {}
    conflicts: dict[str, str] = {}
    for rank, spec in enumerate(specs):
        for key in spec.objects:
            objects.setdefault(key, rank)
        for tensor in spec.read_types():
            key, shape, dtype = tensor
            known, other = first.setdefault(key, (tensor, rank))
            if known != tensor and key not in conflicts:
                _, known_shape, known_dtype = known
                conflicts[key] = (
                    f"{key}: {known_shape} {known_dtype} on rank {other}, "
                    f"{shape} {dtype} on rank {rank}"
                )
    # A key is either a tensor or an object on all ranks.
    for key in objects.keys() & first.keys():
        _, rank_of_tensor = first[key]
        conflicts[key] = (
            f"{key}: an object on rank {objects[key]}, a tensor on rank {rank_of_tensor}"
        )
    return "ranks disagree about\n  " + abbreviate(list(conflicts.values()))


def _choose_writers(
    boxes: Segments, replicas: _Replicas, fully_parallel: bool, world_size: int
) -> Segments:
    """Return the segments to write, sorted by rank and box."""
    # Boxes on one rank only (optimizer shards) have a fixed writer: count them before replicated
    # boxes are distributed.
    has_fixed_writer = replicas.count_ranks() == 1
    if not fully_parallel:
        has_fixed_writer[:] = True
    fixed = replicas.order[replicas.starts[has_fixed_writer]]
    loads = _sum_by_group(boxes.rank[fixed], boxes.nbytes[fixed], world_size).tolist()
    parts: list[tuple[int, int, int]] = []
    if fully_parallel:
        parts = _share_replicated_boxes(boxes, replicas, loads)

    # Concatenate whole boxes and parts, [lines, 3]: line, first row, count. Both are sorted, so
    # that sorting them together is a merge.
    is_fixed = np.zeros(len(boxes.rank), dtype=bool)
    is_fixed[fixed] = True
    fixed = np.flatnonzero(is_fixed)
    whole = np.stack([fixed, np.zeros_like(fixed), boxes.count[fixed]], axis=1)
    shared = np.array(sorted(parts), dtype=np.int64).reshape(-1, 3)
    line, first, count = np.concatenate([whole, shared]).T
    order = np.argsort(line, kind="stable")
    return boxes.select(line[order], first[order], count[order])


def _share_replicated_boxes(
    boxes: Segments, replicas: _Replicas, loads: list[int]
) -> list[tuple[int, int, int]]:
    """Distribute the rows of replicated boxes over the ranks that have them.

    `loads` are the bytes of each rank so far, to which the assigned ones are added. Returns (line,
    first row, count) of each part.
    """
    # Lines of each replicated box, by the ranks that have it.
    order, starts, _ = replicas
    counts = replicas.count_ranks()
    boxes_of_ranks: dict[bytes, list[np.ndarray]] = defaultdict(list)
    for number in np.flatnonzero(counts > 1):
        start = starts[number]
        lines = order[start : start + counts[number]]
        boxes_of_ranks[boxes.rank[lines].tobytes()].append(lines)

    # Assign small replica groups first; larger groups then balance the remaining load.
    groups = []
    for packed_ranks, lines_of_boxes in boxes_of_ranks.items():
        ranks = np.frombuffer(packed_ranks, dtype=boxes.rank.dtype).tolist()
        groups.append((ranks, lines_of_boxes))
    groups.sort(key=lambda group: (len(group[0]), group[0]))

    parts = []
    for ranks, lines_of_boxes in groups:
        first_lines = [lines[0] for lines in lines_of_boxes]
        num_rows = boxes.count[first_lines].tolist()
        nbytes = boxes.nbytes[first_lines].tolist()
        group_loads = [loads[rank] for rank in ranks]
        shares = level_loads(group_loads, sum(nbytes))
        sizes = list(zip(num_rows, nbytes, strict=True))
        for member, box, first, count in cut_into_shares(shares, sizes):
            line = lines_of_boxes[box][member]
            parts.append((line, first, count))
            row_bytes = nbytes[box] // num_rows[box]
            loads[ranks[member]] += count * row_bytes
    return parts


def share_evenly(items: Sequence[Item], size: int) -> list[list[Item]]:
    """Split boxes that all `size` ranks have into shares of equal bytes, up to a row."""
    sizes = []
    total = 0
    for item in items:
        axis = find_row_axis(item.shape)
        num_rows = 1 if axis is None else item.shape[axis]
        sizes.append((num_rows, item.nbytes))
        total += item.nbytes
    bytes_of_rank = level_loads([0] * size, total)
    shares: list[list[Item]] = [[] for _ in range(size)]
    for rank, number, first, count in cut_into_shares(bytes_of_rank, sizes):
        part = items[number].select_rows(first, count)
        shares[rank].append(part)
    return shares


def _sum_by_group(group: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """Return the sum of the values of each group; exact up to 2^53."""
    return np.bincount(group, weights=values, minlength=size).astype(np.int64)


def abbreviate(lines: Sequence[str], limit: int = 20, between: str = "\n  ") -> str:
    """Join the first `limit` lines, and append the number of the others."""
    text = between.join(lines[:limit])
    if len(lines) > limit:
        text += f" ... and {len(lines) - limit} more"
    return text
