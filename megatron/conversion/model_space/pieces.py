"""Tensors in files: which rows and regions of them lie where, and how several formats write them.

A row map lists runs of rows in the order of the model. Of two query groups with q, k and v in a
tensor each, the model has q0 k0 v0 q1 k1 v1, so that the runs come from tensors 0 1 2 0 1 2; gate
above up is a run from each of two tensors, or, where their rows alternate in one, two runs of every
second row; a tensor as it is has one run. Columns are never moved, so a box of rows and columns
needs these rows alone. One description is read in both directions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megatron.core.dist_checkpointing import CheckpointError, Shape, safe_open
from megatron.core.dist_checkpointing.format.torch_zip import (
    TensorSlot,
    lay_out_archive,
    view_bytes,
)
from megatron.core.dist_checkpointing.mapping import (
    Runs,
    compute_byte_runs,
    compute_overlap,
    cut_rows,
    narrow,
)
from megatron.core.durable_files import naming

if TYPE_CHECKING:
    from megatron.conversion.model_space.source import Progress, Source

ReadRegion = Callable[[Shape, Shape], torch.Tensor]  # (offset inside the piece, extent) -> tensor
ReadFlat = Callable[[int, int], torch.Tensor]  # (first element, count) -> 1-D tensor

_BLOCK = 32 << 20  # bytes of a tensor that are read at once to be written
_SMALL_GAP = 4096  # elements between two rows that are read together


class RowRun(NamedTuple):
    """`rows` rows from row `start` of stored tensor number `source`, each `step` rows after the one before."""

    source: int
    start: int
    rows: int
    step: int = 1

    @property
    def places(self) -> slice:
        return slice(self.start, self.start + (self.rows - 1) * self.step + 1, self.step)


RowMap = tuple[RowRun, ...]


def as_is(rows: int) -> RowMap:
    return stacked(rows, 1)


def stacked(rows: int, count: int) -> RowMap:
    """`count` stored tensors of `rows` rows each, one above the other."""
    return tuple(RowRun(source, 0, rows) for source in range(count))


def alternating(rows: int, count: int) -> RowMap:
    """One stored tensor of `count * rows` rows, of which every `count`-th ones are one above the
    other in the model.
    """
    return tuple(RowRun(0, start, rows, count) for start in range(count))


def qkv_apart(heads: int, groups: int, head_dim: int) -> RowMap:
    """Stored q, k and v; per group of the model: its query heads, its key, its value."""
    each = (heads // groups * head_dim, head_dim, head_dim)
    return tuple(
        RowRun(source, group * rows, rows)
        for group in range(groups)
        for source, rows in enumerate(each)
    )


def qkv_blocks(heads: int, groups: int, head_dim: int, blocks: int) -> RowMap:
    """One stored tensor of `blocks` blocks, each [q; k; v] of its share of the groups.

    One block: the fused projection of GPT-2. TP blocks: what Megatron-DeepSpeed writes since
    December 2024.
    """
    if groups % blocks:
        raise ValueError(f"{groups} query groups do not divide into {blocks} blocks of q, k and v")
    each = (heads // groups * head_dim, head_dim, head_dim)
    share = groups // blocks
    runs = []
    for group in range(groups):
        block, number = divmod(group, share)
        start = block * share * sum(each)
        for rows in each:
            runs.append(RowRun(0, start + number * rows, rows))
            start += share * rows
    return tuple(runs)


def stored_rows(row_map: RowMap) -> list[int]:
    """Number of rows of every stored tensor."""
    rows = [0] * (1 + max(run.source for run in row_map))
    for run in row_map:
        rows[run.source] += run.rows
    return rows


def cut(row_map: RowMap, start: int, stop: int) -> Iterator[RowRun]:
    """The runs that hold the model rows `[start, stop)`, in the order of the model."""
    begin = 0
    for run in row_map:
        first = max(start - begin, 0)
        last = min(stop - begin, run.rows)
        if first < last:
            yield RowRun(run.source, run.start + first * run.step, last - first, run.step)
        begin += run.rows


def unpack_rows(
    row_map: RowMap, start: int, stop: int, read: Callable[[int, int, int], torch.Tensor]
) -> torch.Tensor:
    """Model rows `[start, stop)`; `read(source, first, count)` gives stored rows."""
    runs = list(cut(row_map, start, stop))
    pieces = [read(run.source, run.start, run.places.stop - run.start)[:: run.step] for run in runs]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def pack_rows(row_map: RowMap, source: int, model: torch.Tensor) -> torch.Tensor:
    """Stored tensor number `source`, from the whole model-space tensor: the inverse of
    `unpack_rows`.
    """
    stored = model.new_empty(stored_rows(row_map)[source], *model.shape[1:])
    for run, piece in zip(row_map, model.split([run.rows for run in row_map]), strict=True):
        if run.source == source:
            stored[run.places] = piece
    return stored


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Equal, where NaNs must be the same NaNs, and zeros have the same sign."""
    one, other = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (first, second))
    return torch.equal(one, other)


def region_of_flat(read_flat: ReadFlat, start: int, shape: Shape) -> ReadRegion:
    """Regions of a row-major tensor of `shape` that begins at element `start` of something 1-D.

    `read_flat(start, count)` is asked for contiguous elements; small gaps between rows are read, large ones are not.
    """

    def elements(runs: Runs) -> list[torch.Tensor]:
        first = start + runs.start
        length = runs.length
        stride = runs.stride
        repeats = runs.repeats
        if repeats > 1 and runs.gap < _SMALL_GAP:
            span = read_flat(first, (repeats - 1) * stride + length)
            return [
                span.as_strided((repeats, length), (stride, 1), span.storage_offset()).reshape(-1)
            ]
        return [read_flat(first + i * stride, length) for i in range(repeats)]

    def read(offset: Shape, extent: Shape) -> torch.Tensor:
        parts = [
            part
            for runs in compute_byte_runs(shape, offset, extent, itemsize=1)
            for part in elements(runs)
        ]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(extent)

    return read


class FilePlace(NamedTuple):
    """The box at `offset` of extent `shape` goes to byte `position` of `path`, row by row."""

    offset: Shape
    shape: Shape
    path: Path
    position: int


def write_to_places(
    source: Source, key: str, places: Sequence[FilePlace], progress: Progress
) -> None:
    """Stream the tensor `key`, a few rows at a time, to all of its places. The files exist and are
    long enough.
    """
    info = source.tensors[key]
    for offset, shape in cut_rows(info.shape, info.dtype.itemsize, _BLOCK):
        found = [
            (place, compute_overlap((offset, shape), (place.offset, place.shape)))
            for place in places
        ]
        wanted = [(place, common) for place, common in found if common is not None]
        block = source.read(key, offset, shape) if wanted else None
        for place, common in wanted:
            assert block is not None
            part = narrow(block, common.in_first, common.shape).contiguous()
            # Whole rows of a piece are neighbours in its file: one run, one write.
            (run,) = compute_byte_runs(
                place.shape, common.in_second, common.shape, info.dtype.itemsize
            )
            write_at(place.path, part, place.position + run.start)
            progress(part.nbytes)


def make_empty_directory(directory: Path) -> None:
    """Create `directory`; a directory with anything in it is refused, so that no stale file joins
    the new ones.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise ValueError(f"{directory} is not empty: choose another target or remove it first")


def write_at(path: Path, tensor: torch.Tensor, position: int) -> None:
    """Write at byte `position` of an existing file, which is open only meanwhile: there is no limit
    on their number.
    """
    view = view_bytes(tensor.reshape(-1))
    descriptor = os.open(path, os.O_WRONLY)
    try:
        with naming(path):
            while view:
                count = os.pwrite(descriptor, view, position)
                view = view[count:]
                position = position + count
    finally:
        os.close(descriptor)


def write_archive(path: Path, value: Any) -> list[tuple[TensorSlot, int]]:
    """Write what `torch.load` reads as `value`; returns its slots and where their bytes go, which
    are zero so far.
    """
    layout = lay_out_archive(value)
    with naming(path), path.open("wb") as file:
        file.truncate(layout.size)
        for position, fixed in layout.fixed:
            file.seek(position)
            file.write(fixed)
        for slot, position in layout.places:
            if slot.content is not None:
                file.seek(position)
                file.write(view_bytes(slot.content.view(-1)))
    return [(slot, position) for slot, position in layout.places if slot.content is None]


def archive_faults(paths: Iterable[Path], directory: Path) -> list[str]:
    """Files of torch.save below `directory` that are missing or structurally damaged."""
    faults = []
    for path in paths:
        if not path.is_file():
            faults.append(f"{path.relative_to(directory)} is missing")
            continue
        try:
            safe_open(path)  # an archive lists its content at its end
        except CheckpointError as error:
            faults.append(str(error))
    return faults


def run_jobs(jobs: Iterable[Callable[[], None]], workers: int) -> None:
    """Run independent jobs on `workers` threads; the first error stops the rest.

    Threads are enough: the work is reading, writing and copying, and all three release the
    interpreter lock.
    """
    if workers <= 1:
        for job in jobs:
            job()
        return
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(job) for job in jobs]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
