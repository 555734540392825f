"""Which rank writes which box to which file: pure functions from the local states of all ranks.

`describe` and `pack` (on every rank) -> `make_plan` (on rank 0) -> the items of each rank, without
communication and without reading any tensor. `__{rank}_{n}.distcp` for n < workers contain the
tensors, `__{rank}_{workers}.distcp` the objects, whose lengths may change from save to save.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress

import numpy as np
import torch

from megatron.core.dist_checkpointing.box_table import BoxTable, CheckpointMetadata, StoredTensor
from megatron.core.dist_checkpointing.mapping import Shape
from megatron.core.dist_checkpointing.planning.balancing import (
    cut_into_shares,
    level_loads,
    spread_over_files,
)
from megatron.core.dist_checkpointing.planning.collection import (
    PackedSpec,
    Replicas,
    TensorType,
    collect_boxes,
    group_replicas,
    number_elements,
    number_first_elements,
    stack_shapes,
)
from megatron.core.safe_files.errors import CheckpointError
from megatron.core.safe_files.schema import abbreviate
from megatron.core.safe_files.torch_zip import ALIGNMENT, make_tensor_envelope

# ---- Coverage: the boxes of all ranks must tile every tensor, without gap or overlap ----


def check_coverage(tensors: Sequence[TensorType], boxes: BoxTable, replicas: Replicas) -> None:
    """Raise CheckpointError unless the boxes tile the tensors."""
    # One of the replicas of each box, sorted by tensor and position in the tensor
    distinct = boxes.take(replicas.order[replicas.starts])

    # The quick check confirms most tensors.
    is_tiled = np.zeros(len(tensors), dtype=bool)
    if len(distinct):
        is_tiled = _find_tiled_by_runs(tensors, distinct, replicas.elements)

    # The exact check finds the faults of the others, if any.
    if is_tiled.all():
        return
    faults = _find_faults(tensors, distinct, ~is_tiled)
    if faults:
        raise CheckpointError("boxes do not tile\n  " + abbreviate(faults))


def _find_faults(
    tensors: Sequence[TensorType], boxes: BoxTable, is_checked: np.ndarray
) -> list[str]:
    """Return a message for each of the checked tensors whose boxes do not tile it."""
    boxes_of_tensors = boxes.split_by_tensor([shape for _, shape, _ in tensors])
    faults = []
    # A main parameter and its moments have the same boxes, which are checked once.
    checked: dict[tuple[Shape, bytes, bytes], str | None] = {}  # faults by the content of the boxes
    for (key, global_shape, _), table in compress(
        zip(tensors, boxes_of_tensors, strict=True), is_checked
    ):
        content = (global_shape, table.offset.tobytes(), table.shape.tobytes())
        if content not in checked:
            checked[content] = table.find_gap_or_overlap(global_shape)
        fault = checked[content]
        if fault is not None:
            faults.append(f"{key} {global_shape}: {fault}")
    return faults


def _find_tiled_by_runs(
    tensors: Sequence[TensorType], boxes: BoxTable, start: np.ndarray
) -> np.ndarray:
    """Return for each tensor whether its boxes are consecutive runs of elements from start to end.

    Most tensors are tiled like that: those split along the first axis, and their shards of ZeRO-1.
    They are checked at once, which takes a tenth of the time of the exact check of each. `boxes`
    are distinct and sorted by `start`, the number of the first element of each.
    """
    tensor = boxes.tensor
    dims = boxes.shape.shape[1]
    global_shape = stack_shapes(tensors, dims)
    is_run = _find_runs(tensor, boxes.shape, global_shape)

    # A run must begin where the one before it ends. The first run of a tensor is checked below.
    stop = start + boxes.shape.prod(axis=1)
    is_consecutive = np.ones(len(tensor), dtype=bool)
    is_consecutive[1:] = start[1:] == stop[:-1]
    ends = np.searchsorted(tensor, np.arange(len(tensors) + 1))
    first_box = ends[:-1]  # [tensors]
    last_box = ends[1:] - 1
    has_boxes = last_box >= first_box
    is_consecutive[first_box[has_boxes]] = True

    # The first run of a tensor must begin at its first element, and the last one end with its last.
    first_element = number_first_elements(tensors)
    end_element = first_element + global_shape.prod(axis=1)
    # A tensor without boxes has an index that may be out of range; its result is not used.
    first_box = np.minimum(first_box, len(tensor) - 1)
    is_complete = start[first_box] == first_element
    is_complete &= stop[last_box] == end_element

    # Count the boxes of each tensor that are not runs, or not consecutive.
    is_faulty = ~(is_run & is_consecutive)  # [boxes]
    num_faults = np.bincount(tensor[is_faulty], minlength=len(tensors))
    is_without_fault = num_faults == 0  # [tensors]
    return has_boxes & is_complete & is_without_fault


def _find_runs(tensor: np.ndarray, shape: np.ndarray, global_shape: np.ndarray) -> np.ndarray:
    """Return for each box whether its elements are consecutive in its tensor.

    `tensor` is the index of each box's tensor, `shape` is [boxes, dimensions], and `global_shape`
    [tensors, dimensions]. A run has one index on the axes before its first longer axis, any range
    of it, and all indices of the axes after it.
    """
    is_run = np.ones(len(tensor), dtype=bool)
    is_after_longer = np.zeros(len(tensor), dtype=bool)
    for axis in range(global_shape.shape[1]):
        size = shape[:, axis]
        size_of_tensor = global_shape[:, axis]
        is_whole = size == size_of_tensor[tensor]
        is_run &= ~is_after_longer | is_whole
        is_after_longer |= size > 1
    return is_run


# ---- Plan ----


@dataclass
class SavePlan:
    """The plan for all ranks: `items` are the boxes to write, sorted by rank, with their files."""

    tensors: list[TensorType]
    objects: list[list[str]]  # keys, by rank
    items: BoxTable
    workers: int  # files with tensors per rank: file `n` of rank `r` has index `r * workers + n`

    @property
    def loads(self) -> list[int]:
        """Bytes that each rank writes."""
        world_size = len(self.objects)
        loads = _sum_by_rank(self.items.rank, self.items.nbytes, world_size)
        return loads.tolist()

    @property
    def nbytes(self) -> int:
        """Bytes of all files with tensors."""
        padded = _align(self.items.length)
        return int(padded.sum())

    def split_by_rank(self) -> list[BoxTable]:
        """Return the items of each rank, without the columns that it does not need."""
        items = BoxTable(
            offset=self.items.offset,
            shape=self.items.shape,
            box=self.items.box,
            file=self.items.file % self.workers,  # of the rank
            position=self.items.position,
        ).compact()
        ranks = np.arange(len(self.objects))
        starts = np.searchsorted(self.items.rank, ranks, side="left").tolist()
        stops = np.searchsorted(self.items.rank, ranks, side="right").tolist()
        return [items.take(slice(*ends)) for ends in zip(starts, stops, strict=True)]

    def build_metadata(self) -> CheckpointMetadata:
        """Return the metadata of the tensors; objects are added once their lengths are known."""
        files, file = self._list_used_files()
        items = BoxTable(
            offset=self.items.offset,
            shape=self.items.shape,
            tensor=self.items.tensor,
            file=file,
            position=self.items.position,
            length=self.items.length,
            files=files,
        )
        # Sort the items by tensor, and row-major in each tensor.
        elements = number_elements(self.tensors, items.tensor, items.offset)
        items = items.take(np.argsort(elements, kind="stable"))
        result = CheckpointMetadata()
        boxes_of_tensors = items.split_by_tensor([shape for _, shape, _ in self.tensors])
        for (key, shape, dtype), boxes in zip(self.tensors, boxes_of_tensors, strict=True):
            result.tensors[key] = StoredTensor(shape, dtype, boxes)
        return result

    def _list_used_files(self) -> tuple[tuple[str, ...], np.ndarray]:
        """Return the names of all files with tensors, and the index of each item's file in them.

        A rank may have fewer items than files.
        """
        num_items = np.bincount(self.items.file)  # of each file
        is_used = num_items > 0
        used_files = np.flatnonzero(is_used)
        names = []
        for file in used_files.tolist():
            rank, file_of_rank = divmod(file, self.workers)
            names.append(file_name(rank, file_of_rank))

        # The index of a used file is the number of used files before it.
        index_of_file = np.cumsum(is_used) - 1
        return tuple(names), index_of_file[self.items.file]


def file_name(rank: int, index: int) -> str:
    """Return the name of a file of a rank, as torch DCP chooses it."""
    return f"__{rank}_{index}.distcp"


def make_plan(
    specs: Sequence[PackedSpec], fully_parallel: bool = True, workers: int = 2
) -> SavePlan:
    """Assign every box to exactly one of the ranks that have it, and to one of its files.

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
    items = _choose_writers(boxes, replicas, fully_parallel, world_size)

    # Phase 3: choose the file of each item, and its position in the file.
    items = _place_in_files(tensors, items, workers)
    return SavePlan(tensors, _assign_objects(specs), items, workers)


def _assign_objects(specs: Sequence[PackedSpec]) -> list[list[str]]:
    """Return the keys of the objects that each rank writes: the lowest rank that has them."""
    objects: list[list[str]] = []
    assigned: set[str] = set()
    for spec in specs:
        new_keys = [key for key in spec.objects if key not in assigned]
        objects.append(new_keys)
        assigned.update(new_keys)
    return objects


# ---- Choice of writers ----


def _choose_writers(
    boxes: BoxTable, replicas: Replicas, fully_parallel: bool, world_size: int
) -> BoxTable:
    """Return the boxes, or rows of boxes, to write, sorted by rank and box."""
    # Boxes on one rank only (optimizer shards) have a fixed writer: count them before replicated
    # boxes are distributed.
    fixed = _find_fixed_boxes(replicas, fully_parallel)
    num_rows = boxes.count_rows()
    shares: list[tuple[int, int, int]] = []
    if fully_parallel:
        loads = _sum_by_rank(boxes.rank[fixed], boxes.nbytes[fixed], world_size)
        shares = _share_replicated_boxes(boxes, num_rows, replicas, loads.tolist())

    # Merge whole boxes and shares: both arrays are [3, items] with the index of the box, its first
    # row and the number of rows.
    whole = np.stack([fixed, np.zeros_like(fixed), num_rows[fixed]])
    shared = np.array(sorted(shares), dtype=np.int64)
    shared = shared.reshape(-1, 3).T  # also for zero shares
    items = np.concatenate([whole, shared], axis=1)

    # Both are sorted by index, so that sorting them together is a merge.
    order = np.argsort(items[0], kind="stable")
    selected, first, count = items[:, order]
    return boxes.take_rows(selected, first, count)


def _find_fixed_boxes(replicas: Replicas, fully_parallel: bool) -> np.ndarray:
    """Return the indices, in order, of the boxes that are written whole by a fixed rank.

    These are the boxes on one rank only. Without load balancing, the lowest rank with a box writes
    it: the first one of its replicas.
    """
    has_fixed_writer = replicas.count_ranks() == 1  # [distinct boxes]
    if not fully_parallel:
        has_fixed_writer[:] = True
    starts = replicas.starts[has_fixed_writer]

    # A mask puts the indices in order faster than a sort.
    is_fixed = np.zeros(len(replicas.order), dtype=bool)  # [boxes]
    is_fixed[replicas.order[starts]] = True
    return np.flatnonzero(is_fixed)


def _share_replicated_boxes(
    boxes: BoxTable, num_rows: np.ndarray, replicas: Replicas, loads: list[int]
) -> list[tuple[int, int, int]]:
    """Distribute the rows of replicated boxes over the ranks that have them.

    `loads` are the bytes of each rank so far, to which the assigned ones are added. Returns (index
    of the box of the rank, first row, number of rows) for each share.
    """
    shares = []
    for ranks, replicas_of_boxes in _group_by_ranks(boxes, replicas):
        # The replicas of a box have equal sizes: take them from the first one.
        first_replicas = [indices[0] for indices in replicas_of_boxes]
        rows = num_rows[first_replicas].tolist()
        nbytes = boxes.nbytes[first_replicas].tolist()
        sizes = list(zip(rows, nbytes, strict=True))

        # Divide the bytes of all boxes of the group, then cut the boxes accordingly.
        group_loads = [loads[rank] for rank in ranks]
        bytes_of_ranks = level_loads(group_loads, sum(nbytes))
        for member, box, first, count in cut_into_shares(bytes_of_ranks, sizes):
            shares.append((replicas_of_boxes[box][member], first, count))
            row_bytes = nbytes[box] // rows[box]
            loads[ranks[member]] += count * row_bytes
    return shares


def _group_by_ranks(
    boxes: BoxTable, replicas: Replicas
) -> list[tuple[list[int], list[np.ndarray]]]:
    """Return the replicated boxes, grouped by the ranks that have them.

    Each group is (ranks, for each box its indices in the order of these ranks). Small groups of
    ranks come first; larger groups then balance the remaining load.
    """
    # The ranks as bytes are a key that is made quickly.
    boxes_of_ranks: dict[bytes, list[np.ndarray]] = defaultdict(list)
    counts = replicas.count_ranks()
    replicated = np.flatnonzero(counts > 1)
    for box in replicated:
        start = replicas.starts[box]
        indices = replicas.order[start : start + counts[box]]
        packed_ranks = boxes.rank[indices].tobytes()
        boxes_of_ranks[packed_ranks].append(indices)

    groups = []
    for packed_ranks, replicas_of_boxes in boxes_of_ranks.items():
        ranks = np.frombuffer(packed_ranks, dtype=boxes.rank.dtype)
        groups.append((ranks.tolist(), replicas_of_boxes))
    groups.sort(key=lambda group: (len(group[0]), group[0]))
    return groups


def _sum_by_rank(rank: np.ndarray, nbytes: np.ndarray, world_size: int) -> np.ndarray:
    """Return the bytes of the boxes of each rank; exact up to 2^53."""
    sums = np.bincount(rank, weights=nbytes, minlength=world_size)  # float64
    return sums.astype(np.int64)


# ---- Places in files ----


def _place_in_files(tensors: Sequence[TensorType], items: BoxTable, workers: int) -> BoxTable:
    """Spread the items of every rank over at most `workers` files of about equal size."""
    file = items.rank * workers + spread_over_files(items.rank, items.nbytes, workers)

    # Sort the items by file, and place all files one after the other: `starts` are the positions
    # of the sorted items in the concatenation.
    length = items.nbytes + _compute_envelope_sizes(tensors, items)
    order = np.argsort(file, kind="stable")
    sorted_file = file[order]
    sorted_length = _align(length)[order]
    ends = np.cumsum(sorted_length)
    starts = np.concatenate([[0], ends[:-1]])

    # The position in a file is that in the concatenation minus the start of the file.
    begins_file = np.diff(sorted_file, prepend=-1)
    first_items = np.flatnonzero(begins_file)
    num_items = np.diff(first_items, append=len(order))  # of each file
    start_of_file = np.repeat(starts[first_items], num_items)
    position = np.empty_like(ends)
    position[order] = starts - start_of_file
    return replace(items, file=file, position=position, length=length)


def _compute_envelope_sizes(tensors: Sequence[TensorType], items: BoxTable) -> np.ndarray:
    """Return the bytes around the raw data of each item, which depend on dtype and shape.

    Millions of items have few combinations of dtype and shape: one envelope is made for each.
    """
    # Number the combinations: items with the same number agree in all properties so far.
    combination = _number_dtypes_and_dims(tensors)[items.tensor]  # [items]
    for extent in items.shape.T:
        combination = _combine_numbers(combination, extent)

    # Make one envelope per combination, from its first item.
    _, examples, combination = np.unique(combination, return_index=True, return_inverse=True)
    sizes = []
    for example in examples.tolist():
        _, global_shape, dtype = tensors[items.tensor[example]]
        dims = len(global_shape)
        shape = tuple(items.shape[example, :dims].tolist())
        prefix, suffix = make_tensor_envelope(dtype, shape)
        sizes.append(len(prefix) + len(suffix))
    size_of_combination = np.array(sizes, dtype=np.int64)
    size: np.ndarray = size_of_combination[combination]
    return size


def _number_dtypes_and_dims(tensors: Sequence[TensorType]) -> np.ndarray:
    """Return a number for each tensor that is the same for equal dtype and dimensions."""
    group_numbers: dict[tuple[torch.dtype, int], int] = {}
    number_of_tensor = []
    for _, shape, dtype in tensors:
        number_of_tensor.append(group_numbers.setdefault((dtype, len(shape)), len(group_numbers)))
    return np.array(number_of_tensor, dtype=np.int64)


def _combine_numbers(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return a number for each pair of numbers, the same for equal pairs."""
    num_second = _count_numbers(second)
    num_pairs = _count_numbers(first) * num_second
    if num_pairs >= 1 << 63:
        # Replace the numbers by consecutive ones, so that the result fits. This needs a sort.
        _, first = np.unique(first, return_inverse=True)
        _, second = np.unique(second, return_inverse=True)
        num_second = _count_numbers(second)
    return first * num_second + second


def _count_numbers(group_numbers: np.ndarray) -> int:
    """Return one more than the largest number, or 1 for an empty array."""
    return int(group_numbers.max(initial=0)) + 1


def _align(length: np.ndarray) -> np.ndarray:
    """Round lengths up to the alignment of items in a file."""
    return -(-length // ALIGNMENT) * ALIGNMENT
