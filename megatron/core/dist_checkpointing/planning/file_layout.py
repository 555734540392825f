"""Where every byte of a rank's files goes: a pure function of its plan, so it holds as long as the plan does.

`__{rank}_{n}.distcp` for n < workers hold the tensors, `__{rank}_{workers}.distcp` the objects, whose lengths may
change from save to save.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron.core.dist_checkpointing.format.metadata import CheckpointMetadata, Location, StoredChunk, StoredTensor
from megatron.core.dist_checkpointing.format.torch_zip import ALIGNMENT, tensor_envelope
from megatron.core.dist_checkpointing.planning.planner import LocalSpec, RankPlan, WriteItem


class PlacedItem(NamedTuple):
    """An item at `position` of its file; `data` is where its raw bytes begin, `end` where the next item may."""

    item: WriteItem
    position: int
    data: int
    length: int
    end: int


class FileLayout(NamedTuple):
    name: str
    items: list[PlacedItem]
    size: int


def layout_files(plan: RankPlan, rank: int, workers: int) -> list[FileLayout]:
    """Spread the items of `rank` over at most `workers` files of about equal size."""
    order = sorted(range(len(plan.items)), key=lambda i: -plan.items[i].nbytes)
    file_of, sizes = [0] * len(plan.items), [0] * workers
    for index in order:
        file_of[index] = smallest = sizes.index(min(sizes))
        sizes[smallest] += plan.items[index].nbytes + 1024
    layouts = []
    for n in range(workers):
        placed, position = [], 0
        for index, item in enumerate(plan.items):
            if file_of[index] == n:
                placed.append(_place(item, position))
                position = placed[-1].end
        if placed:
            layouts.append(FileLayout(f"__{rank}_{n}.distcp", placed, position))
    return layouts


def _place(item: WriteItem, position: int) -> PlacedItem:
    envelope = tensor_envelope(item.dtype, item.shape)
    data = position + len(envelope.prefix)
    length = len(envelope.prefix) + item.nbytes + len(envelope.suffix)
    end = position + -(-length // ALIGNMENT) * ALIGNMENT
    return PlacedItem(item, position, data, length, end)


def plan_metadata(specs: list[LocalSpec], layouts: list[list[FileLayout]]) -> CheckpointMetadata:
    """The metadata of the tensors of a plan; objects are added when their lengths are known."""
    result = CheckpointMetadata()
    for spec in specs:
        for tensor in spec.tensors:
            if tensor.key not in result.tensors:
                result.tensors[tensor.key] = StoredTensor(tensor.shape, tensor.dtype)
    for files in layouts:
        for file in files:
            for placed in file.items:
                location = Location(file.name, placed.position, placed.length)
                chunk = StoredChunk(placed.item.offset, placed.item.shape, location)
                result.tensors[placed.item.key].chunks.append(chunk)
    for stored in result.tensors.values():
        stored.chunks.sort()
    return result
