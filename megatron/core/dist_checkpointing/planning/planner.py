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
    shape: Shape  # global
    dtype: torch.dtype
    boxes: tuple[Extent, ...]  # (offset, shape) of each


class LocalSpec(NamedTuple):
    """The structure of one rank's state; a plan is valid while it is unchanged on every rank."""

    tensors: tuple[TensorSpec, ...]
    objects: tuple[str, ...]  # keys


class PackedSpec(NamedTuple):
    """A `LocalSpec` as compact arrays, to be sent to rank 0."""

    # Pickled tuple of TensorType. Many ranks (e.g., those of a TP group) have equal ones, which
    # rank 0 reads once.
    types: bytes
    objects: tuple[str, ...]  # keys
    counts: np.ndarray  # number of boxes of each tensor
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
        numel = math.prod(self.shape)
        return numel * self.dtype.itemsize

    def select_rows(self, first: int, count: int) -> Item:
        """Return the item of `count` rows from row `first` on."""
        start, shape = locate_rows(self.shape, first, count)
        offset = to_absolute(self.offset, start)
        return self._replace(offset=offset, shape=shape)


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

    tensor_keys = [tensor.key for tensor in tensors]
    _check_unique_keys(tensor_keys + objects)
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
    is_empty = 0 in entry.global_shape
    boxes = []
    for box in entry.boxes:
        offset = box.offset
        shape = box.shape
        dtype = box.tensor.dtype
        if dtype != entry.dtype and not entry.is_cast:
            raise CheckpointError(f"{entry.key}: a box is {dtype}, the tensor {entry.dtype}")
        if not _is_inside(offset, shape, entry.global_shape):
            raise CheckpointError(
                f"{entry.key}: the box at {offset} of shape {shape} is not inside "
                f"{entry.global_shape}"
            )
        # Other empty boxes do not have to be written.
        if is_empty or 0 not in shape:
            boxes.append((offset, shape))
    return tuple(boxes)


def _is_inside(offset: Shape, shape: Shape, whole: Shape) -> bool:
    """Return whether a box is inside a tensor of shape `whole`, with the same dimensions."""
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
    types: list[TensorType] = []
    counts: list[int] = []
    dims = 0
    for tensor in spec.tensors:
        types.append((tensor.key, tensor.shape, tensor.dtype))
        counts.append(len(tensor.boxes))
        dims = max(dims, len(tensor.shape))

    # Dimensions that a tensor lacks have the offset 0 and the size 1.
    extents: list[Extent] = []
    for tensor in spec.tensors:
        missing = dims - len(tensor.shape)
        offset_end = (0,) * missing
        shape_end = (1,) * missing
        for offset, shape in tensor.boxes:
            padded_offset = offset + offset_end
            padded_shape = shape + shape_end
            extents.append((padded_offset, padded_shape))

    boxes = np.array(extents, dtype=np.int64)
    boxes = boxes.reshape(len(extents), 2, dims)  # also for zero boxes
    fits_32_bits = boxes.max(initial=0) < 1 << 31
    if fits_32_bits:
        # Half the bytes to send: ranks send millions of boxes to rank 0.
        boxes = boxes.astype(np.int32)
    return PackedSpec(
        types=pickle.dumps(tuple(types)),
        objects=spec.objects,
        counts=np.array(counts, dtype=np.int32),
        boxes=boxes,
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
    first: np.ndarray  # first row
    count: np.ndarray  # number of rows
    offset: np.ndarray  # [lines, dimensions], as in PackedSpec
    shape: np.ndarray  # [lines, dimensions]
    nbytes: np.ndarray

    def select(self, line: np.ndarray, first: np.ndarray, count: np.ndarray) -> Segments:
        """Return `count` rows from row `first` on of each of the given lines, whole boxes."""
        num_rows = self.count[line]
        row_bytes = self.nbytes[line] // num_rows
        offset = self.offset.take(line, axis=0)  # copies, [lines, dimensions]
        shape = self.shape.take(line, axis=0)

        # Most boxes are written as a whole: only the others are narrowed.
        partial = np.flatnonzero(count != num_rows)
        axis = _find_row_axes(shape[partial])
        offset[partial, axis] += first[partial]
        shape[partial, axis] = count[partial]
        return Segments(
            rank=self.rank[line],
            box=self.box[line],
            tensor=self.tensor[line],
            first=first,
            count=count,
            offset=offset,
            shape=shape,
            nbytes=row_bytes * count,
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
    distinct = _select_distinct_boxes(tensors, boxes, replicas)
    _check_coverage(tensors, distinct)

    # Phase 2: choose the rank that writes each box, or the ranks that share its rows.
    segments = _choose_writers(boxes, replicas, fully_parallel, len(specs))
    return SavePlan(tensors, _assign_objects(specs), segments)


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


def _collect_boxes(specs: Sequence[PackedSpec]) -> tuple[list[TensorType], Segments]:
    """Return the tensors and the whole boxes of all ranks.

    Raises CheckpointError if the tensors of two ranks conflict.
    """
    tensors, number_of_spec = _number_tensors(specs)
    counts = np.concatenate([spec.counts for spec in specs])
    tensor = np.repeat(number_of_spec, counts)
    offset, shape = _concatenate_boxes(specs)

    # The boxes of each rank are consecutive, and numbered from 0.
    boxes_of_rank = np.array([len(spec.boxes) for spec in specs])
    first_of_rank = np.cumsum(boxes_of_rank) - boxes_of_rank
    rank = np.repeat(np.arange(len(specs)), boxes_of_rank)
    box = np.arange(len(offset))
    box -= np.repeat(first_of_rank, boxes_of_rank)

    # A scalar or an empty box is one row.
    row_axis = _find_row_axes(shape)
    num_rows = shape[np.arange(len(shape)), row_axis]
    num_rows = np.maximum(1, num_rows)
    itemsize = _get_itemsizes(tensors)[tensor]
    segments = Segments(
        rank=rank,
        box=box,
        tensor=tensor,
        first=np.zeros_like(num_rows),
        count=num_rows,
        offset=offset,
        shape=shape,
        nbytes=shape.prod(axis=1) * itemsize,
    )
    return tensors, segments


def _concatenate_boxes(specs: Sequence[PackedSpec]) -> tuple[np.ndarray, np.ndarray]:
    """Return offset and shape of the boxes of all ranks, each [boxes, dimensions]."""
    dims = 1
    for spec in specs:
        dims = max(dims, spec.boxes.shape[2])
    offsets = []
    shapes = []
    for spec in specs:
        boxes = _pad_dimensions(spec.boxes, dims)
        offsets.append(boxes[:, 0])
        shapes.append(boxes[:, 1])
    # Two contiguous arrays: `take` selects their rows in a quarter of the time.
    offset = np.concatenate(offsets, dtype=np.int64)
    shape = np.concatenate(shapes, dtype=np.int64)
    return offset, shape


def _number_tensors(specs: Sequence[PackedSpec]) -> tuple[list[TensorType], np.ndarray]:
    """Return the distinct tensors of all ranks, and the number of each tensor of each rank.

    Raises CheckpointError if shape, dtype or kind of a key differs between ranks.
    """
    # Tensors with the same key but another shape or dtype get different numbers.
    number_of_tensor: dict[TensorType, int] = {}
    numbers_of_types: dict[bytes, np.ndarray] = {}  # by `PackedSpec.types`
    numbers_of_ranks: list[np.ndarray] = []
    object_keys: set[str] = set()
    for spec in specs:
        # Ranks with equal types are numbered once.
        numbers = numbers_of_types.get(spec.types)
        if numbers is None:
            new_numbers = []
            for tensor in spec.read_types():
                next_number = len(number_of_tensor)
                number = number_of_tensor.setdefault(tensor, next_number)
                new_numbers.append(number)
            numbers = np.array(new_numbers, dtype=np.int64)
            numbers_of_types[spec.types] = numbers
        numbers_of_ranks.append(numbers)
        object_keys.update(spec.objects)

    # Every key must have one shape and dtype, or be an object.
    tensors = list(number_of_tensor)
    tensor_keys = {key for key, _, _ in tensors}
    has_different_tensors = len(tensor_keys) < len(tensors)
    has_different_kinds = not tensor_keys.isdisjoint(object_keys)
    if has_different_tensors or has_different_kinds:
        raise CheckpointError(_describe_conflicts(specs))
    return tensors, np.concatenate(numbers_of_ranks)


def number_places(
    tensors: Sequence[TensorType], tensor: np.ndarray, offset: np.ndarray
) -> np.ndarray:
    """Return the place of each box: the number of its first element among those of all tensors.

    The elements are numbered by tensor, and row-major in each of them. `tensor` is the number of
    each box's tensor, and `offset` is [boxes, dimensions].
    """
    dims = offset.shape[1]
    shape_of_tensor = _make_shape_table(tensors, dims)
    stride_of_tensor = _make_stride_table(shape_of_tensor)
    first_element = _number_first_elements(tensors)
    place = first_element[tensor]  # [boxes]
    # One axis at a time: this needs a third of the time of a product of [boxes, dims].
    for axis in range(dims):
        stride = stride_of_tensor[:, axis]
        place += offset[:, axis] * stride[tensor]
    return place


def _number_first_elements(tensors: Sequence[TensorType]) -> np.ndarray:
    """Return the number of the first element of each tensor; an empty one uses up a number, too."""
    places = []
    position = 0
    for _, shape, _ in tensors:
        places.append(position)
        numel = math.prod(shape)
        position += max(1, numel)
    assert position < 1 << 63, f"{position} elements are more than 64 bits can number"
    return np.array(places, dtype=np.int64)


def _make_stride_table(shapes: np.ndarray) -> np.ndarray:
    """Return the elements between neighbors along each axis of row-major tensors.

    `shapes` and the result are [tensors, dimensions].
    """
    strides = np.ones_like(shapes)
    for axis in range(shapes.shape[1] - 1, 0, -1):
        strides[:, axis - 1] = strides[:, axis] * shapes[:, axis]
    return strides


def _pad_dimensions(boxes: np.ndarray, dims: int) -> np.ndarray:
    """Return `[boxes, 2, fewer]` as `[boxes, 2, dims]`, with offset 0 and size 1 at the end."""
    num_boxes = len(boxes)
    missing = dims - boxes.shape[2]
    if not missing:
        return boxes
    offset_and_size = np.array([[0], [1]])
    ends = np.broadcast_to(offset_and_size, (num_boxes, 2, missing))
    return np.concatenate([boxes, ends], axis=2)


class _Replicas(NamedTuple):
    """The lines of the whole boxes, grouped by box."""

    order: np.ndarray  # the lines sorted by place; those of one box are in rank order
    starts: np.ndarray  # the indices in `order` where a new box begins
    places: np.ndarray  # the place of each box (`number_places`)

    def count_ranks(self) -> np.ndarray:
        """Return the number of ranks that have each box."""
        return np.diff(self.starts, append=len(self.order))


def _group_replicas(tensors: Sequence[TensorType], boxes: Segments) -> _Replicas:
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
    return _Replicas(order, starts, places[starts])


def _differs_from_previous(values: np.ndarray) -> np.ndarray:
    """Return for each value but the first whether it differs from the one before it."""
    is_different: np.ndarray = values[1:] != values[:-1]
    return is_different


class _DistinctBoxes(NamedTuple):
    """The boxes of all ranks without replicas, sorted by tensor and by place."""

    tensor: np.ndarray  # number in `SavePlan.tensors`
    place: np.ndarray  # as from `number_places`
    offset: np.ndarray  # [boxes, dimensions]
    shape: np.ndarray  # [boxes, dimensions]
    # The boxes of tensor number i are `[ends[i], ends[i + 1])`.
    ends: np.ndarray

    def make_table(self, number: int, dims: int) -> BoxTable:
        """Return the boxes of a tensor with `dims` dimensions."""
        start = self.ends[number]
        stop = self.ends[number + 1]
        offset = self.offset[start:stop, :dims]
        shape = self.shape[start:stop, :dims]
        return BoxTable(offset, shape)


def _select_distinct_boxes(
    tensors: Sequence[TensorType], boxes: Segments, replicas: _Replicas
) -> _DistinctBoxes:
    """Return one of the replicas of each box."""
    lines = replicas.order[replicas.starts]
    tensor = boxes.tensor[lines]
    return _DistinctBoxes(
        tensor=tensor,
        place=replicas.places,
        offset=boxes.offset.take(lines, axis=0),
        shape=boxes.shape.take(lines, axis=0),
        ends=np.searchsorted(tensor, np.arange(len(tensors) + 1)),
    )


def _check_coverage(tensors: Sequence[TensorType], boxes: _DistinctBoxes) -> None:
    """Raise CheckpointError unless the boxes tile the tensors."""
    # The quick check confirms most tensors.
    is_tiled = np.zeros(len(tensors), dtype=bool)
    if len(boxes.tensor):
        is_tiled = _find_tiled_by_runs(tensors, boxes)

    # The exact check finds the faults of the others, if any. A main parameter and its moments have
    # the same boxes, which are checked once.
    problems = []
    known_faults: dict[tuple[Shape, bytes, bytes], str | None] = {}  # by the content of the boxes
    unconfirmed = np.flatnonzero(~is_tiled)
    for number in unconfirmed.tolist():
        key, global_shape, _ = tensors[number]
        table = boxes.make_table(number, len(global_shape))
        content = (global_shape, table.offset.tobytes(), table.shape.tobytes())
        if content not in known_faults:
            known_faults[content] = table.find_gap_or_overlap(global_shape)
        fault = known_faults[content]
        if fault is not None:
            problems.append(f"{key} {global_shape}: {fault}")
    if problems:
        raise CheckpointError("boxes do not tile\n  " + abbreviate(problems))


def _find_tiled_by_runs(tensors: Sequence[TensorType], boxes: _DistinctBoxes) -> np.ndarray:
    """Return for each tensor whether its boxes are consecutive runs of elements from start to end.

    Most tensors are tiled like that: those split along the first axis, and their shards of ZeRO-1.
    They are checked at once, which takes a tenth of the time of the exact check of each.
    """
    tensor = boxes.tensor
    global_shape = _make_shape_table(tensors, boxes.shape.shape[1])
    is_run = _find_runs(tensor, boxes.shape, global_shape)

    # A run must begin where the one before it ends. The first run of a tensor is checked below.
    start = boxes.place
    stop = start + boxes.shape.prod(axis=1)
    is_consecutive = np.ones(len(tensor), dtype=bool)
    is_consecutive[1:] = start[1:] == stop[:-1]
    first_box = boxes.ends[:-1]  # [tensors]
    last_box = boxes.ends[1:] - 1
    has_boxes = last_box >= first_box
    is_consecutive[first_box[has_boxes]] = True

    # The first run of a tensor must begin at its first element, and the last one end with its last.
    first_place = _number_first_elements(tensors)
    end_place = first_place + global_shape.prod(axis=1)
    # A tensor without boxes has an index that may be out of range; its result is not used.
    first_box = np.minimum(first_box, len(tensor) - 1)
    is_complete = start[first_box] == first_place
    is_complete &= stop[last_box] == end_place

    # Count the boxes of each tensor that are not runs, or not consecutive.
    is_faulty = ~(is_run & is_consecutive)
    num_faults = np.bincount(tensor[is_faulty], minlength=len(tensors))
    return has_boxes & is_complete & (num_faults == 0)


def _find_runs(tensor: np.ndarray, shape: np.ndarray, global_shape: np.ndarray) -> np.ndarray:
    """Return for each box whether its elements are consecutive in its tensor.

    `tensor` is the number of each box's tensor, `shape` is [boxes, dimensions], and `global_shape`
    [tensors, dimensions]. A run has one index on the axes before its first longer axis, any range
    of it, and all indices of the axes after it.
    """
    is_run = np.ones(len(tensor), dtype=bool)
    is_after_longer = np.zeros(len(tensor), dtype=bool)
    for axis in range(global_shape.shape[1]):
        size = shape[:, axis]
        whole_size = global_shape[:, axis][tensor]
        is_run &= ~is_after_longer | (size == whole_size)
        is_after_longer |= size > 1
    return is_run


def _make_shape_table(tensors: Sequence[TensorType], dims: int) -> np.ndarray:
    """Return the global shapes, [tensors, dimensions], with the size 1 at the end."""
    padded = []
    for _, shape, _ in tensors:
        missing = dims - len(shape)
        padded.append(shape + (1,) * missing)
    table = np.array(padded, dtype=np.int64)
    return table.reshape(-1, dims)


def _describe_conflicts(specs: Sequence[PackedSpec]) -> str:
    """Return a message about keys whose shape, dtype or kind differs between ranks."""
    conflicts = _find_different_tensors(specs)
    conflicts |= _find_different_kinds(specs)
    return "ranks disagree about\n  " + abbreviate(list(conflicts.values()))


def _find_different_tensors(specs: Sequence[PackedSpec]) -> dict[str, str]:
    """Return a message for each key whose shape or dtype differs between ranks."""
    first_seen: dict[str, tuple[TensorType, int]] = {}  # (tensor, rank) by key
    conflicts: dict[str, str] = {}
    for rank, spec in enumerate(specs):
        for tensor in spec.read_types():
            key, shape, dtype = tensor
            first_tensor, first_rank = first_seen.setdefault(key, (tensor, rank))
            if tensor == first_tensor or key in conflicts:
                continue
            _, first_shape, first_dtype = first_tensor
            conflicts[key] = (
                f"{key}: {first_shape} {first_dtype} on rank {first_rank}, "
                f"{shape} {dtype} on rank {rank}"
            )
    return conflicts


def _find_different_kinds(specs: Sequence[PackedSpec]) -> dict[str, str]:
    """Return a message for each key that is a tensor on one rank and an object on another one."""
    rank_of_tensor: dict[str, int] = {}
    rank_of_object: dict[str, int] = {}
    for rank, spec in enumerate(specs):
        for key, _, _ in spec.read_types():
            rank_of_tensor.setdefault(key, rank)
        for key in spec.objects:
            rank_of_object.setdefault(key, rank)

    conflicts = {}
    for key in rank_of_object.keys() & rank_of_tensor.keys():
        conflicts[key] = (
            f"{key}: an object on rank {rank_of_object[key]}, "
            f"a tensor on rank {rank_of_tensor[key]}"
        )
    return conflicts


def _choose_writers(
    boxes: Segments, replicas: _Replicas, fully_parallel: bool, world_size: int
) -> Segments:
    """Return the segments to write, sorted by rank and box."""
    # Boxes on one rank only (optimizer shards) have a fixed writer: count them before replicated
    # boxes are distributed.
    fixed_lines = _find_fixed_lines(replicas, fully_parallel)
    parts: list[_Part] = []
    if fully_parallel:
        loads = _sum_by_group(boxes.rank[fixed_lines], boxes.nbytes[fixed_lines], world_size)
        parts = _share_replicated_boxes(boxes, replicas, loads.tolist())

    # Merge whole boxes and parts. Columns: line, first row, number of rows
    first_rows = np.zeros_like(fixed_lines)
    whole = np.stack([fixed_lines, first_rows, boxes.count[fixed_lines]])
    shared = np.array(sorted(parts), dtype=np.int64)
    shared = shared.reshape(-1, 3).T
    line, first, count = np.concatenate([whole, shared], axis=1)
    # Both are sorted, so that sorting them together is a merge.
    order = np.argsort(line, kind="stable")
    return boxes.select(line[order], first[order], count[order])


def _find_fixed_lines(replicas: _Replicas, fully_parallel: bool) -> np.ndarray:
    """Return the lines, in order, of the boxes that are written whole by a fixed rank.

    These are the boxes on one rank only. Without load balancing, the lowest rank with a box writes
    it: the first line of every box.
    """
    has_fixed_writer = replicas.count_ranks() == 1  # [boxes]
    if not fully_parallel:
        has_fixed_writer[:] = True
    first_lines = replicas.order[replicas.starts[has_fixed_writer]]

    # A mask puts the lines in order faster than a sort.
    is_fixed = np.zeros(len(replicas.order), dtype=bool)  # [lines]
    is_fixed[first_lines] = True
    return np.flatnonzero(is_fixed)


class _Part(NamedTuple):
    """Rows of a replicated box that one rank writes."""

    line: int  # of the box in the segments of all ranks
    first_row: int
    num_rows: int


def _share_replicated_boxes(boxes: Segments, replicas: _Replicas, loads: list[int]) -> list[_Part]:
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
        shares = level_loads(group_loads, sum(nbytes))
        for member, box, first, count in cut_into_shares(shares, sizes):
            line_of_member = lines_of_boxes[box][member]
            parts.append(_Part(line_of_member, first, count))
            row_bytes = nbytes[box] // num_rows[box]
            loads[ranks[member]] += count * row_bytes
    return parts


class _ReplicaGroup(NamedTuple):
    """Ranks that have the same replicated boxes."""

    ranks: list[int]
    lines_of_boxes: list[np.ndarray]  # of each box: its lines in the order of `ranks`


def _group_by_ranks(boxes: Segments, replicas: _Replicas) -> list[_ReplicaGroup]:
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


def share_evenly(items: Sequence[Item], size: int) -> list[list[Item]]:
    """Split boxes that all `size` ranks have into shares of equal bytes, up to a row.

    Returns the parts of boxes of each rank.
    """
    # (rows, bytes) of each box, and the bytes of all boxes
    sizes = []
    total = 0
    for item in items:
        axis = find_row_axis(item.shape)
        num_rows = 1
        if axis is not None:
            num_rows = item.shape[axis]
        sizes.append((num_rows, item.nbytes))
        total += item.nbytes

    no_loads = [0] * size
    bytes_of_ranks = level_loads(no_loads, total)
    shares: list[list[Item]] = [[] for _ in range(size)]
    for rank, number, first, count in cut_into_shares(bytes_of_ranks, sizes):
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
