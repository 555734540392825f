"""Tensors in files: location of their rows and regions, and writers that formats share.

A row map lists runs of rows in the order of the model. Examples: with two query groups and q, k and
v in a tensor each, the model has q0 k0 v0 q1 k1 v1, so runs come from tensors 0 1 2 0 1 2. Gate and
up are a run from each of two tensors, or, if their rows alternate in one tensor, two runs of every
second row. An unchanged tensor has one run. Columns are never moved, so a box of rows and columns
needs only its own rows. One description serves reading and writing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megatron.core.dist_checkpointing import CheckpointError, StoredChunk
from megatron.core.dist_checkpointing.mapping import (
    Extent,
    LazyTensor,
    Overlap,
    Shape,
    compute_byte_runs,
    cut_rows,
    narrow,
    to_absolute,
    to_relative,
)
from megatron.core.dist_checkpointing.saving.placed_file import write_at
from megatron.core.durable_files import naming
from megatron.core.safe_files import safe_open
from megatron.core.safe_files.torch_zip import TensorSlot, lay_out_archive, view_bytes

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.saving.commit import Progress

_BLOCK = 32 << 20  # bytes of a tensor that are read at once for writing


class RowRun(NamedTuple):
    """Rows of stored tensor number `source`."""

    source: int
    rows: range

    @property
    def stored_slice(self) -> slice:
        """Slice of the stored tensor."""
        # Up to the last row, not beyond: the step may exceed the rows that follow.
        last = self.rows.start + (len(self.rows) - 1) * self.rows.step
        return slice(self.rows.start, last + 1, self.rows.step)


RowMap = tuple[RowRun, ...]


def map_unchanged(rows: int) -> RowMap:
    """Return the map of one stored tensor with the rows of the model."""
    return map_stacked(rows, 1)


def map_stacked(rows: int, count: int) -> RowMap:
    """Return the map of `count` stored tensors of `rows` rows each, in order."""
    return tuple(RowRun(source, range(rows)) for source in range(count))


def map_alternating(rows: int, count: int) -> RowMap:
    """Return the map of one stored tensor of `count * rows` rows.

    The model has its rows 0, `count`, 2 `count`, ... first, then 1, `count` + 1, ... and so on.
    """
    return tuple(RowRun(0, range(start, count * rows, count)) for start in range(count))


def map_separate_qkv(heads: int, groups: int, head_dim: int, gated: bool = False) -> RowMap:
    """Return the map of three stored tensors q, k and v, or four, q, gate, k and v, if `gated`.

    The model has query heads, their gates, key and value of each group in turn.
    """
    rows_per_group = list(_count_qkv_rows(heads, groups, head_dim))
    if gated:
        rows_per_group.insert(1, rows_per_group[0])
    runs = []
    for group in range(groups):
        for source, rows in enumerate(rows_per_group):
            runs.append(RowRun(source, range(group * rows, (group + 1) * rows)))
    return tuple(runs)


def _count_qkv_rows(heads: int, groups: int, head_dim: int) -> tuple[int, int, int]:
    """Return the numbers of query, key and value rows of a query group."""
    return (heads // groups * head_dim, head_dim, head_dim)


def map_skipped(rows: int, skipped: int) -> RowMap:
    """Return the map of one stored tensor with `skipped` rows before those of the model."""
    return (RowRun(0, range(skipped, skipped + rows)),)


def swap_halves(row_map: RowMap, head_dim: int, sources: Sequence[int]) -> RowMap:
    """Return the map of tensors of which `sources` have the halves of each head swapped."""
    half = head_dim // 2
    runs = []
    for run in row_map:
        if run.source not in sources:
            runs.append(run)
            continue
        for first in range(0, len(run.rows), head_dim):
            head = run.rows[first : first + head_dim]
            runs.append(RowRun(run.source, head[half:]))
            runs.append(RowRun(run.source, head[:half]))
    return tuple(runs)


def map_fused_qkv(
    heads: int, groups: int, head_dim: int, blocks: int, order: str = "qkv"
) -> RowMap:
    """Return the map of one stored tensor of `blocks` blocks, each q, k and v of some groups.

    `order` is that of the three in a block.

    The fused projection of GPT-2 has one block. Megatron-DeepSpeed has written one per
    tensor-parallel rank since December 2024.
    """
    if groups % blocks:
        raise ValueError(f"{groups} query groups do not divide into {blocks} blocks of q, k and v")
    rows_per_group = _count_qkv_rows(heads, groups, head_dim)
    rows_by_part = dict(zip("qkv", rows_per_group, strict=True))
    groups_per_block = groups // blocks
    runs = []
    for group in range(groups):
        block, index = divmod(group, groups_per_block)
        # First row of each part of the block.
        start = block * groups_per_block * sum(rows_per_group)
        starts = {}
        for projection in order:
            starts[projection] = start
            start += groups_per_block * rows_by_part[projection]
        for projection, rows in rows_by_part.items():
            first = starts[projection] + index * rows
            runs.append(RowRun(0, range(first, first + rows)))
    return tuple(runs)


def count_stored_rows(row_map: RowMap) -> list[int]:
    """Return the number of rows of every stored tensor."""
    num_tensors = 1 + max(run.source for run in row_map)
    rows = [0] * num_tensors
    for run in row_map:
        rows[run.source] = max(rows[run.source], run.stored_slice.stop)
    return rows


def cut_runs(row_map: RowMap, start: int, stop: int) -> Iterator[RowRun]:
    """Yield the runs with the model's rows `[start, stop)`, in the order of the model."""
    begin = 0  # of the run in the model
    for run in row_map:
        rows = run.rows[max(start - begin, 0) : max(stop - begin, 0)]
        if rows:
            yield RowRun(run.source, rows)
        begin += len(run.rows)


def unpack_rows(
    row_map: RowMap, start: int, stop: int, read: Callable[[int, int, int], torch.Tensor]
) -> torch.Tensor:
    """Return the model's rows `[start, stop)`; `read(source, first, count)` returns stored rows."""
    blocks = []
    for run in cut_runs(row_map, start, stop):
        # Rows in between, of other matrices, are read and skipped.
        first = run.rows.start
        span_rows = read(run.source, first, run.stored_slice.stop - first)
        blocks.append(span_rows[:: run.rows.step])
    return join_rows(blocks)


def join_rows(blocks: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate along the first axis, without a copy of a single piece."""
    if len(blocks) == 1:
        return blocks[0]
    return torch.cat(blocks)


def pack_rows(row_map: RowMap, source: int, model: torch.Tensor) -> torch.Tensor:
    """Return stored tensor number `source` of the whole model-space tensor.

    The inverse of `unpack_rows`. Rows that the model does not have are zero.
    """
    stored_rows = model.new_zeros(count_stored_rows(row_map)[source], *model.shape[1:])
    blocks = model.split([len(run.rows) for run in row_map])
    for run, block in zip(row_map, blocks, strict=True):
        if run.source == source:
            stored_rows[run.stored_slice] = block
    return stored_rows


def read_stored_rows(
    row_map: RowMap,
    source: int,
    first: int,
    result: torch.Tensor,
    read_rows: Callable[[int, int], torch.Tensor],
) -> None:
    """Fill `result` with the rows of stored tensor `source` from row `first` on.

    `read_rows(first, count)` returns rows of the model.
    """
    count = result.shape[0]
    model_row = 0  # first row of the run in the model
    for run in row_map:
        # Members of the run with stored rows in [first, first + count).
        # A negated floor division rounds up: the first member at or after row `first`.
        run_start, step = run.rows.start, run.rows.step
        start = max(0, -((run_start - first) // step))
        stop = min(len(run.rows), -((run_start - first - count) // step))
        if run.source == source and start < stop:
            begin = run_start + start * step - first
            end = begin + (stop - start) * step
            result[begin:end:step] = read_rows(model_row + start, stop - start)
        model_row += len(run.rows)


def is_bitwise_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether tensors are equal bitwise, including the sign of zeros and bits of NaNs."""
    return torch.equal(_view_as_bytes(first), _view_as_bytes(second))


def _view_as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def compute_overlap(first: Extent, second: Extent) -> Overlap | None:
    """Return the common part of two boxes of one tensor, or None if it is empty."""
    # Corners of the common part, absolute
    low = tuple(map(max, first[0], second[0]))
    high = map(min, to_absolute(*first), to_absolute(*second))
    shape = to_relative(tuple(high), low)
    if min(shape, default=1) <= 0:
        return None
    return Overlap(to_relative(low, first[0]), to_relative(low, second[0]), shape)


def paste_boxes(
    boxes: Iterable[tuple[Shape, LazyTensor]], dtype: torch.dtype, offset: Shape, shape: Shape
) -> tuple[torch.Tensor, int]:
    """Return a box of `dtype`, and the number of its elements that `boxes` contain."""
    result: torch.Tensor | None = None
    num_read = 0
    for origin, tensor in boxes:
        common = compute_overlap((origin, tensor.shape), (offset, shape))
        if common is None:
            continue
        content = tensor.read(common.in_first, common.shape)
        if common.shape == shape:  # most boxes are inside one of them and need no copy
            return content.to(dtype), content.numel()
        if result is None:
            result = torch.empty(shape, dtype=dtype)
        narrow(result, common.in_second, common.shape).copy_(content)
        num_read += content.numel()
    if result is None:
        result = torch.empty(shape, dtype=dtype)
    return result, num_read


def write_to_places(tensor: LazyTensor, chunks: Sequence[StoredChunk], progress: Progress) -> None:
    """Stream a tensor, a few rows at a time, to boxes in existing files that are long enough."""
    itemsize = tensor.dtype.itemsize
    for offset, shape in cut_rows(tensor.shape, itemsize, _BLOCK):
        block: torch.Tensor | None = None  # read if any place needs it
        for chunk in chunks:
            common = compute_overlap((offset, shape), (chunk.offset, chunk.shape))
            if common is None:
                continue
            if block is None:
                block = tensor.read(offset, shape)
            values = narrow(block, common.in_first, common.shape).contiguous()
            # Whole rows of a box are contiguous in its file: one run, one write.
            (runs,) = compute_byte_runs(chunk.shape, common.in_second, common.shape, itemsize)
            file, position, _ = chunk.location
            write_at(Path(file), values, position + runs.start)
            progress(values.nbytes)


def make_empty_directory(directory: Path) -> None:
    """Create `directory`. Raises ValueError if it has content: stale files would mix with
    new ones.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise ValueError(f"{directory} is not empty: choose another target or remove it first")


def write_archive(path: Path, value: Any) -> list[tuple[TensorSlot, int]]:
    """Write the file that `torch.load` reads as `value`, with zeros for slots without content.

    Returns these slots with the positions of their bytes.
    """
    layout = lay_out_archive(value)
    empty_slots = []
    with naming(path), path.open("wb") as file:
        # Sparse: the bytes of empty slots are written later, by other threads.
        file.truncate(layout.size)
        for position, fixed in layout.fixed:
            file.seek(position)
            file.write(fixed)
        for slot, position in layout.slot_offsets:
            if slot.content is None:
                empty_slots.append((slot, position))
            else:
                file.seek(position)
                file.write(view_bytes(slot.content.view(-1)))
    return empty_slots


def find_archive_faults(paths: Iterable[Path], directory: Path) -> list[str]:
    """Return a message for each file of torch.save that is missing or structurally damaged."""
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
    """Run independent jobs on `workers` threads. The first error cancels those not yet started.

    Threads suffice: reading, writing and copying release the interpreter lock.
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
