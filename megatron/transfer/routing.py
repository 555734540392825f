"""Schedules of all ranks for a transfer between two layouts of the same global tensors.

Rank 0 intersects the boxes that ranks need with those that ranks have. Every element that a rank
needs and lacks is sent to it exactly once, in the smaller of the two dtypes: no exchange moves
fewer bytes without changing their encoding. Of several replicas the rank that has sent least sends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch.distributed as dist

from megatron.conversion.model_space.pieces import compute_overlap
from megatron.core.dist_checkpointing import CheckpointError, ShardedStateDict
from megatron.core.dist_checkpointing.box_table import BoxTable
from megatron.core.dist_checkpointing.mapping import (
    Extent,
    to_absolute,
    to_relative,
)
from megatron.core.dist_checkpointing.planning.collection import (
    LocalSpec,
    PackedSpec,
    TensorType,
    collect_boxes,
    describe,
    pack,
)
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.safe_files.schema import abbreviate
from megatron.transfer.rounds import Router
from megatron.transfer.schedule import Copy, Region, TransferSchedule
from megatron.transfer.sources import WeightSource, to_state

DEFAULT_BUCKET_BYTES = 64 << 20
_MAX_LINES = 20  # tensors listed in an error

Packed = tuple[PackedSpec, PackedSpec]  # source and target of a rank


def plan_transfer(
    source: WeightSource | None,
    target: ShardedStateDict | None,
    *,
    group: dist.ProcessGroup | None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> TransferSchedule:
    """Return this rank's schedule for filling `target` from `source`. Collective over `group`.

    `source` has the tensors of this rank: the sharded state dictionary of a running layout, or a
    checkpoint of any format, which this rank can read completely. `target` has the tensors that
    this rank needs. Either is None on a rank without such tensors. A rank sends and receives about
    `bucket_bytes` at a time. Raises ValueError on all ranks for invalid arguments of one rank, and
    for a tensor of a target that is missing, incomplete or of another shape in the sources.
    """

    def describe_both() -> tuple[LocalSpec, LocalSpec]:
        if bucket_bytes <= 0:
            raise ValueError(f"bucket_bytes={bucket_bytes} must be positive, e.g. {64 << 20}")
        return describe(to_state(source)), describe(target or {})

    ranks = Coordination.of(group)
    has, needs = ranks.run_on_all(describe_both)

    def plan(specs: list[Packed]) -> list[TransferSchedule]:
        return plan_ranks(specs, bucket_bytes)

    schedule: TransferSchedule = ranks.gather_compute_scatter((pack(has), pack(needs)), plan)
    return schedule.with_structure(has, needs)


def plan_ranks(specs: Sequence[Packed], bucket_bytes: int) -> list[TransferSchedule]:
    """Return the schedules of all ranks, from what each rank has and needs.

    Raises CheckpointError, which names the tensors that cannot be filled.
    """
    # Phase 1: collect the boxes of all ranks.
    sources = _index_boxes([has for has, _ in specs])
    targets = _index_boxes([needs for _, needs in specs])
    _check_tensors(sources, targets)

    # Phase 2: choose the rank that sends each element.
    router = Router(len(specs), bucket_bytes)
    faults = []
    for key, target in targets.items():
        try:
            _route_tensor(sources[key], target, router)
        except CheckpointError as error:
            faults.append(str(error))
    if faults:
        raise CheckpointError(abbreviate(faults, _MAX_LINES))

    # Phase 3: put the messages in order.
    return router.make_schedules()


# ---- Boxes of all ranks ----


class _Tensor(NamedTuple):
    """A global tensor: its distinct boxes, and for each the ranks that have it.

    A rank may have a box several times, e.g., copies of the embedding in a target.
    """

    type: TensorType
    extents: list[Extent]
    owners: list[list[tuple[int, int]]]  # of each extent: (rank, index among its boxes)


def _index_boxes(specs: Sequence[PackedSpec]) -> dict[str, _Tensor]:
    """Return the tensors of all ranks by key. Raises CheckpointError where ranks disagree."""
    types, table = collect_boxes(specs)
    tensors = [_Tensor(type, [], []) for type in types]
    position_of_extent: list[dict[Extent, int]] = [{} for _ in types]
    box_indices = _number_boxes(table).tolist()
    offsets = table.offset.tolist()
    shapes = table.shape.tolist()
    for entry, index in enumerate(table.tensor.tolist()):
        tensor = tensors[index]
        dims = len(tensor.type[1])
        extent = (tuple(offsets[entry][:dims]), tuple(shapes[entry][:dims]))
        positions = position_of_extent[index]
        if extent not in positions:
            positions[extent] = len(tensor.extents)
            tensor.extents.append(extent)
            tensor.owners.append([])
        owner = (int(table.rank[entry]), box_indices[entry])
        tensor.owners[positions[extent]].append(owner)
    return {tensor.type[0]: tensor for tensor in tensors}


def _number_boxes(table: BoxTable) -> np.ndarray:
    """Return the index of each box among the boxes of the same tensor and rank, in order."""
    is_first = np.ones(len(table), dtype=bool)
    is_first[1:] = (np.diff(table.rank) != 0) | (np.diff(table.tensor) != 0)
    first_boxes = np.flatnonzero(is_first)
    num_boxes = np.diff(first_boxes, append=len(table))
    return np.arange(len(table)) - np.repeat(first_boxes, num_boxes)


def _check_tensors(sources: dict[str, _Tensor], targets: dict[str, _Tensor]) -> None:
    """Raise CheckpointError for tensors of the target without a source of the same shape."""
    faults = []
    for key, target in targets.items():
        _, shape, _ = target.type
        if key not in sources:
            faults.append(f"{key}: the target needs it, and no rank has it in its source")
            continue
        _, source_shape, _ = sources[key].type
        if source_shape != shape:
            faults.append(f"{key}: the source has shape {source_shape}, the target {shape}")
    if faults:
        raise CheckpointError(
            "the source and the target are of different models:\n  "
            + abbreviate(faults, _MAX_LINES)
        )


# ---- Choice of senders ----


def _route_tensor(source: _Tensor, target: _Tensor, router: Router) -> None:
    """Choose the sender of every element of a target. Raises CheckpointError for missing ones."""
    key, shape, source_dtype = source.type
    _, _, target_dtype = target.type
    dtype = min(source_dtype, target_dtype, key=lambda dtype: dtype.itemsize)
    table = BoxTable.of(source.extents, len(shape))
    box_of_rank = [dict(owners) for owners in source.owners]  # of each extent

    for extent, receivers in zip(target.extents, target.owners, strict=True):
        candidates = [index for index, _ in table.overlaps(*extent)]
        for receiver, target_box in receivers:
            # Elements that the receiver has itself are not sent.
            local = [index for index in candidates if receiver in box_of_rank[index]]
            remote = [index for index in candidates if receiver not in box_of_rank[index]]
            for index, piece in _divide(extent, local + remote, source, receiver):
                boxes = box_of_rank[index]
                sender = router.choose_sender(boxes, receiver)
                sent = _locate(key, boxes[sender], source.extents[index], piece)
                received = _locate(key, target_box, extent, piece)
                router.add(sender, receiver, Copy(sent, received), dtype)


def _locate(key: str, box: int, extent: Extent, piece: Extent) -> Region:
    """Return the region of a piece in a box with the index `box` and the given extent."""
    box_offset, _ = extent
    offset, shape = piece
    return Region(key, box, to_relative(offset, box_offset), shape)


def _divide(
    extent: Extent, candidates: Sequence[int], source: _Tensor, receiver: int
) -> Iterator[tuple[int, Extent]]:
    """Yield boxes that tile `extent`, with the index of the first candidate that contains each.

    Candidates are indices of source extents. Raises CheckpointError if they do not cover `extent`.
    """
    uncovered = [extent]
    for index in candidates:
        remaining: list[Extent] = []
        for box in uncovered:
            common = compute_overlap(box, source.extents[index])
            if common is None:
                remaining.append(box)
                continue
            offset, _ = box
            piece = (to_absolute(offset, common.in_first), common.shape)
            yield index, piece
            remaining.extend(_subtract(box, piece))
        uncovered = remaining

    if uncovered and 0 not in extent[1]:
        key, _, _ = source.type
        offset, shape = uncovered[0]
        raise CheckpointError(
            f"{key}: rank {receiver} needs elements of shape {shape} at {offset}, which no rank "
            "has in its source"
        )


def _subtract(whole: Extent, hole: Extent) -> Iterator[Extent]:
    """Yield boxes that tile the part of a box outside of another one, which is inside of it."""
    offset, shape = whole
    hole_offset, hole_shape = hole
    for axis in range(len(offset)):
        # Parts before and after the hole along this axis
        start = offset[axis]
        stop = start + shape[axis]
        hole_start = hole_offset[axis]
        hole_stop = hole_start + hole_shape[axis]
        if start < hole_start:
            yield _replace_range((offset, shape), axis, start, hole_start)
        if hole_stop < stop:
            yield _replace_range((offset, shape), axis, hole_stop, stop)
        # The remaining axes are cut inside the range of the hole.
        offset, shape = _replace_range((offset, shape), axis, hole_start, hole_stop)


def _replace_range(extent: Extent, axis: int, start: int, stop: int) -> Extent:
    """Return a box with another range along one axis."""
    offset = list(extent[0])
    shape = list(extent[1])
    offset[axis] = start
    shape[axis] = stop - start
    return tuple(offset), tuple(shape)
