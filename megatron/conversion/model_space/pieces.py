"""Global tensors that lie in pieces of files: a box put together from them, and a tensor taken apart into them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.conversion.model_space.source import Progress, Shape, Source, TensorInfo
from megatron.core.dist_checkpointing import CheckpointError, safe_open
from megatron.core.dist_checkpointing.boxes import Runs, byte_runs, cut_rows, narrow, overlap
from megatron.core.dist_checkpointing.format.torch_zip import TensorSlot, bytes_of, lay_out_archive
from megatron.core.distributed.param_and_grad_buffer import ParamSpec
from megatron.core.durable_files import naming

ReadRegion = Callable[[Shape, Shape], torch.Tensor]  # (offset inside the piece, extent) -> tensor
ReadFlat = Callable[[int, int], torch.Tensor]  # (first element, count) -> 1-D tensor

_BLOCK = 32 << 20  # bytes of a tensor that are read at once to be written
_SMALL_GAP = 4096  # elements between two rows that are read together


class StoredPiece(NamedTuple):
    """The box at `offset` of extent `shape`; `read` gives any region of it."""

    offset: Shape
    shape: Shape
    read: ReadRegion


@dataclass(frozen=True)
class LocalBox:
    """Elements from `start` of the row-major local tensor are the box at `offset` of the global one."""

    offset: Shape
    shape: Shape
    start: int


@dataclass(frozen=True)
class LocalParameter(ParamSpec):
    """A parameter of one rank's chunk; `name` is Megatron-LM's, with the chunk's own layer numbers."""

    key: str
    global_shape: Shape
    boxes: tuple[LocalBox, ...]


class PieceTable:
    """Pieces by key; where several hold the same elements the first is read."""

    def __init__(self) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        self.pieces: dict[str, dict[tuple[Shape, Shape], StoredPiece]] = {}  # by key, then by box

    def add(self, key: str, info: TensorInfo, piece: StoredPiece) -> None:
        """Raises ValueError when pieces disagree about the tensor."""
        known = self.tensors.setdefault(key, info)
        if known != info:
            raise ValueError(f"{key}: {known.dtype} {known.shape} in one file, {info.dtype} {info.shape} in another")
        self.pieces.setdefault(key, {}).setdefault((piece.offset, piece.shape), piece)

    def read(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        """The box of `key`. Raises KeyError for an unknown key, ValueError where no piece holds an element."""
        return paste(list(self.pieces[key].values()), offset, shape, self.tensors[key].dtype, key)


def paste(pieces: Sequence[StoredPiece], offset: Shape, shape: Shape, dtype: torch.dtype, key: str) -> torch.Tensor:
    """The box at `offset` of extent `shape`, from disjoint pieces."""
    whole: torch.Tensor | None = None
    found = 0
    for piece in pieces:
        common = overlap((piece.offset, piece.shape), (offset, shape))
        if common is None:
            continue
        part = piece.read(common.in_first, common.shape)
        # Most boxes lie within one piece, and need no copy.
        if common.shape == shape:
            return part
        if whole is None:
            whole = torch.empty(shape, dtype=dtype)
        narrow(whole, common.in_second, common.shape).copy_(part)
        found += part.numel()
    if found != math.prod(shape):
        raise ValueError(
            f"{key}: of the box at {offset} of shape {shape} the files hold {found} of {math.prod(shape)} elements"
        )
    return torch.empty(shape, dtype=dtype) if whole is None else whole


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: equal where NaNs are the same NaNs, and zeros have the same sign."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def region_of_flat(read_flat: ReadFlat, start: int, shape: Shape) -> ReadRegion:
    """Regions of a row-major tensor of `shape` that begins at element `start` of something 1-D.

    `read_flat(start, count)` is asked for contiguous elements; small gaps between rows are read, large ones are not.
    """

    def elements(runs: Runs) -> list[torch.Tensor]:
        first, length, stride, repeats = start + runs.start, runs.length, runs.stride, runs.repeats
        if repeats > 1 and runs.gap < _SMALL_GAP:
            span = read_flat(first, (repeats - 1) * stride + length)
            return [span.as_strided((repeats, length), (stride, 1), span.storage_offset()).reshape(-1)]
        return [read_flat(first + i * stride, length) for i in range(repeats)]

    def read(offset: Shape, extent: Shape) -> torch.Tensor:
        parts = [part for runs in byte_runs(shape, offset, extent, itemsize=1) for part in elements(runs)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(extent)

    return read


class FilePlace(NamedTuple):
    """The box at `offset` of extent `shape` goes to byte `position` of `path`, row by row."""

    offset: Shape
    shape: Shape
    path: Path
    position: int


def write_to_places(source: Source, key: str, places: Sequence[FilePlace], progress: Progress) -> None:
    """Stream the tensor `key`, a few rows at a time, to all of its places. The files exist and are long enough."""
    info = source.tensors[key]
    for offset, shape in cut_rows(info.shape, info.dtype.itemsize, _BLOCK):
        found = [(place, overlap((offset, shape), (place.offset, place.shape))) for place in places]
        wanted = [(place, common) for place, common in found if common is not None]
        block = source.read(key, offset, shape) if wanted else None
        for place, common in wanted:
            assert block is not None
            part = narrow(block, common.in_first, common.shape).contiguous()
            # Whole rows of a piece are neighbours in its file: one run, one write.
            (run,) = byte_runs(place.shape, common.in_second, common.shape, info.dtype.itemsize)
            write_at(place.path, part, place.position + run.start)
            progress(part.nbytes)


def make_empty_directory(directory: Path) -> None:
    """Create `directory`; a directory with anything in it is refused, so that no stale file joins the new ones."""
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise ValueError(f"{directory} is not empty: choose another target or remove it first")


def write_at(path: Path, tensor: torch.Tensor, position: int) -> None:
    """Write at byte `position` of an existing file, which is open only meanwhile: there is no limit on their number."""
    view = bytes_of(tensor.reshape(-1))
    descriptor = os.open(path, os.O_WRONLY)
    try:
        with naming(path):
            while view:
                count = os.pwrite(descriptor, view, position)
                view, position = view[count:], position + count
    finally:
        os.close(descriptor)


def write_archive(path: Path, value: Any) -> list[tuple[TensorSlot, int]]:
    """Write what `torch.load` reads as `value`; returns its slots and where their bytes go, which are zero so far."""
    layout = lay_out_archive(value)
    with naming(path), path.open("wb") as file:
        file.truncate(layout.size)
        for position, fixed in layout.fixed:
            file.seek(position)
            file.write(fixed)
        for slot, position in layout.places:
            if slot.content is not None:
                file.seek(position)
                file.write(bytes_of(slot.content.view(-1)))
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

    Threads are enough: the work is reading, writing and copying, and all three release the interpreter lock.
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
