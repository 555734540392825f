"""Who writes which box: pure functions from what every rank holds to what every rank writes.

`describe` (on every rank) -> `make_plan` (on one) -> one `RankPlan` per rank. No communication, no tensors: a plan for
thousands of ranks can be computed on one machine.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.mapping import Shape, ShardedObject, ShardedStateDict, ShardedTensor

Extent = tuple[Shape, Shape]  # offset and shape of a box


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


class WriteItem(NamedTuple):
    """The box at `offset` of extent `shape`, a run of rows of this rank's box at `box`."""

    key: str
    dtype: torch.dtype
    box: Shape
    offset: Shape
    shape: Shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class RankPlan(NamedTuple):
    """What one rank writes."""

    items: list[WriteItem]
    objects: list[str]

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)


def describe(state: ShardedStateDict) -> LocalSpec:
    """The structure of `state`. Raises CheckpointError for a tensor that contradicts itself."""
    tensors, objects = [], []
    for name, entry in state.items():
        if isinstance(entry, ShardedObject):
            objects.append(entry.key)
            continue
        if not isinstance(entry, ShardedTensor):
            raise CheckpointError(f"{name}: {type(entry).__name__} is neither ShardedTensor nor ShardedObject")
        boxes = []
        for box in entry.boxes:
            shape = box.shape
            if box.tensor.dtype != entry.dtype:
                raise CheckpointError(f"{entry.key}: a box is {box.tensor.dtype}, the tensor {entry.dtype}")
            outside = len(box.offset) != len(entry.global_shape) or len(shape) != len(entry.global_shape)
            if outside or any(o + n > g for o, n, g in zip(box.offset, shape, entry.global_shape, strict=True)):
                raise CheckpointError(
                    f"{entry.key}: the box at {box.offset} of shape {shape} does not lie in {entry.global_shape}"
                )
            if 0 not in shape or 0 in entry.global_shape:
                boxes.append((box.offset, shape))
        tensors.append(TensorSpec(entry.key, entry.global_shape, entry.dtype, tuple(boxes)))
    keys = [tensor.key for tensor in tensors] + objects
    if len(set(keys)) != len(keys):
        raise CheckpointError(f"one rank holds several entries with the same key: {_some(_duplicates(keys))}")
    return LocalSpec(tuple(tensors), tuple(objects))


def make_plan(specs: Sequence[LocalSpec], fully_parallel: bool = True) -> list[RankPlan]:
    """Every box is written exactly once, by one of the ranks that hold it.

    Boxes that several ranks hold are shared out so that all ranks write about the same number of bytes
    (`fully_parallel`; large boxes are cut by rows), otherwise the lowest of these ranks writes them.
    Raises CheckpointError naming the keys whose shapes or dtypes differ between ranks or whose boxes do not tile them.
    """
    _check_agreement(specs)
    holders = _holders(specs)
    _check_coverage(specs, holders)
    plans = [RankPlan([], []) for _ in specs]
    loads = [0] * len(specs)
    shared: dict[tuple[int, ...], list[WriteItem]] = defaultdict(list)
    for key, (dtype, boxes) in holders.items():
        for (offset, shape), ranks in boxes.items():
            item = WriteItem(key, dtype, offset, offset, shape)
            if len(ranks) == 1 or not fully_parallel:
                plans[ranks[0]].items.append(item)
                loads[ranks[0]] += item.nbytes
            else:
                shared[tuple(ranks)].append(item)
    # Small groups first: they have the least choice; the larger ones then level out what is left.
    for group, items in sorted(shared.items(), key=lambda entry: (len(entry[0]), entry[0])):
        shares = _level([loads[rank] for rank in group], sum(item.nbytes for item in items))
        for rank, item in _share_out(group, shares, items):
            plans[rank].items.append(item)
            loads[rank] += item.nbytes
    written: set[str] = set()
    for plan, spec in zip(plans, specs, strict=True):
        plan.objects.extend(key for key in spec.objects if key not in written)
        written.update(spec.objects)
    return plans


def share_evenly(items: list[WriteItem], size: int) -> list[list[WriteItem]]:
    """Split boxes that all of `size` ranks hold into one share per rank, equal in bytes up to a row."""
    shares: list[list[WriteItem]] = [[] for _ in range(size)]
    for rank, item in _share_out(range(size), _level([0] * size, sum(item.nbytes for item in items)), items):
        shares[rank].append(item)
    return shares


Holders = dict[str, tuple[torch.dtype, dict[Extent, list[int]]]]


def _holders(specs: Sequence[LocalSpec]) -> Holders:
    """Who holds each box, in ascending rank order."""
    result: Holders = {}
    for rank, spec in enumerate(specs):
        for key, _, dtype, extents in spec.tensors:
            boxes = result.setdefault(key, (dtype, {}))[1]
            for extent in extents:
                ranks = boxes.get(extent)
                if ranks is None:
                    boxes[extent] = [rank]
                elif ranks[-1] != rank:
                    ranks.append(rank)
                else:
                    raise CheckpointError(f"{key}: rank {rank} holds the box at {extent[0]} twice")
    return result


def _check_agreement(specs: Sequence[LocalSpec]) -> None:
    """Shape and dtype of a key are the same on all ranks, and no key is a tensor here and an object there."""
    first: dict[str, tuple[Shape, torch.dtype, int]] = {}
    objects: dict[str, int] = {}
    conflicts: dict[str, str] = {}
    for rank, spec in enumerate(specs):
        objects.update({key: rank for key in spec.objects if key not in objects})
        for key, shape, dtype, _ in spec.tensors:
            known = first.setdefault(key, (shape, dtype, rank))
            if known[:2] != (shape, dtype) and key not in conflicts:
                conflicts[key] = f"{key}: {known[0]} {known[1]} on rank {known[2]}, {shape} {dtype} on rank {rank}"
    for key in objects.keys() & first.keys():
        conflicts[key] = f"{key}: an object on rank {objects[key]}, a tensor on rank {first[key][2]}"
    if conflicts:
        lines = list(conflicts.values())
        raise CheckpointError("ranks disagree about\n  " + "\n  ".join(lines[:20]) + _more(lines))


def _check_coverage(specs: Sequence[LocalSpec], holders: Holders) -> None:
    shapes = {tensor.key: tensor.shape for spec in specs for tensor in spec.tensors}
    problems = []
    for key, (_, boxes) in holders.items():
        fault = find_fault(shapes[key], boxes)
        if fault is not None:
            problems.append(f"{key} {shapes[key]}: {fault}")
    if problems:
        raise CheckpointError("boxes do not tile\n  " + "\n  ".join(problems[:20]) + _more(problems))


def find_fault(shape: Shape, boxes: Iterable[Extent]) -> str | None:
    """None if `boxes` cover every element of `shape` exactly once; else where the first hole or overlap is.

    Exact and linear in the number of boxes: how often each element is covered is a function on the grid, and its mixed
    difference lives on the corners of the boxes, +1 or -1 each. Two such functions are equal if these differences are,
    and at the first corner (in row-major order) where they differ so do the functions, by that amount.
    """
    if 0 in shape:
        return None
    corners: dict[Shape, int] = defaultdict(int)

    def add(offset: Shape, extent: Shape, sign: int) -> None:
        for upper in product((False, True), repeat=len(extent)):
            corner = tuple(o + n if up else o for o, n, up in zip(offset, extent, upper, strict=True))
            corners[corner] += -sign if sum(upper) % 2 else sign

    for offset, extent in boxes:
        add(offset, extent, 1)
    add((0,) * len(shape), shape, -1)
    wrong = [corner for corner, count in corners.items() if count]
    if not wrong:
        return None
    first = min(wrong)
    return f"element {first} is held by no rank" if corners[first] < 0 else f"different boxes overlap at {first}"


def _level(loads: list[int], total: int) -> list[int]:
    """How many of `total` bytes each rank takes so that the loads become as level as possible."""
    order = sorted(range(len(loads)), key=lambda i: (loads[i], i))
    filled, count = total, 0
    for index in order:  # water level over the `count` lowest
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


def _share_out(ranks: Sequence[int], shares: list[int], items: list[WriteItem]) -> Iterator[tuple[int, WriteItem]]:
    """Walk over `items` as one sequence of bytes and cut it, at rows, where a rank's share is reached."""
    due = [(rank, share) for rank, share in zip(ranks, shares, strict=True) if share] or [(ranks[0], 0)]
    current, left = 0, due[0][1]
    for item in items:
        axis = next((i for i, extent in enumerate(item.shape) if extent > 1), None)
        rows = 1 if axis is None else item.shape[axis]
        row_bytes = item.nbytes // rows
        done = 0
        while done < rows:
            last = current == len(due) - 1
            take = (
                rows - done
                if last or not row_bytes
                else min(rows - done, -(-(2 * left - row_bytes) // (2 * row_bytes)))
            )
            if take > 0:
                yield due[current][0], _rows(item, axis, done, take)
                done += take
                left -= take * row_bytes
            if done < rows:
                current += 1
                left += due[current][1]  # what was rounded to a row goes to the next
    assert current < len(due)


def _rows(item: WriteItem, axis: int | None, start: int, count: int) -> WriteItem:
    if axis is None or count == item.shape[axis]:
        return item
    offset = tuple(o + start * (i == axis) for i, o in enumerate(item.offset))
    shape = tuple(count if i == axis else n for i, n in enumerate(item.shape))
    return item._replace(offset=offset, shape=shape)


def _duplicates(keys: list[str]) -> list[str]:
    seen: set[str] = set()
    return [key for key in keys if key in seen or seen.add(key)]  # type: ignore[func-returns-value]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + _more(names, 10)


def _more(lines: Sequence[str], shown: int = 20) -> str:
    return f" ... and {len(lines) - shown} more" if len(lines) > shown else ""
