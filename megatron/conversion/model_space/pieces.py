"""Global tensors that lie in pieces of files: a box put together from them, and a tensor taken apart into them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from megatron.conversion.files import Progress, write_at
from megatron.conversion.model_space.source import Shape, Source, TensorInfo
from megatron.core.dist_checkpointing.ranges import Runs, byte_runs

ReadRegion = Callable[[Shape, Shape], torch.Tensor]  # (offset inside the piece, extent) -> tensor
ReadFlat = Callable[[int, int], torch.Tensor]  # (first element, count) -> 1-D tensor

_BLOCK = 32 << 20  # bytes of a tensor that are read at once to be written
_SMALL_GAP = 4096  # elements between two rows that are read together


class Piece(NamedTuple):
    """The box at `offset` of extent `shape`; `read` gives any region of it."""

    offset: Shape
    shape: Shape
    read: ReadRegion


class PieceTable:
    """Pieces by key; where several hold the same elements the first is read."""

    def __init__(self) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        self._pieces: dict[str, dict[tuple[Shape, Shape], Piece]] = {}

    def add(self, key: str, info: TensorInfo, piece: Piece) -> None:
        """Raises ValueError when pieces disagree about the tensor."""
        known = self.tensors.setdefault(key, info)
        if known != info:
            raise ValueError(f"{key}: {known.dtype} {known.shape} in one file, {info.dtype} {info.shape} in another")
        self._pieces.setdefault(key, {}).setdefault((piece.offset, piece.shape), piece)

    def pieces(self, key: str) -> list[Piece]:
        return list(self._pieces[key].values())

    def read(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        """The box of `key`. Raises KeyError for an unknown key, ValueError where no piece holds an element."""
        return paste(self.pieces(key), offset, shape, self.tensors[key].dtype, key)


def paste(pieces: Sequence[Piece], offset: Shape, shape: Shape, dtype: torch.dtype, key: str) -> torch.Tensor:
    """The box at `offset` of extent `shape`, from disjoint pieces."""
    whole: torch.Tensor | None = None
    found = 0
    for piece in pieces:
        low = tuple(max(a, b) for a, b in zip(offset, piece.offset, strict=True))
        ends = zip(offset, shape, piece.offset, piece.shape, strict=True)
        high = tuple(min(a + n, b + m) for a, n, b, m in ends)
        extent = tuple(h - lo for lo, h in zip(low, high, strict=True))
        if min(extent, default=1) <= 0:
            continue
        part = piece.read(tuple(lo - b for lo, b in zip(low, piece.offset, strict=True)), extent)
        if extent == shape:
            return part
        if whole is None:
            whole = torch.empty(shape, dtype=dtype)
        whole[tuple(slice(lo - a, h - a) for lo, h, a in zip(low, high, offset, strict=True))] = part
        found += math.prod(extent)
    if found != math.prod(shape):
        raise ValueError(
            f"{key}: of the box at {offset} of shape {shape} the files hold {found} of {math.prod(shape)} elements"
        )
    return torch.empty(shape, dtype=dtype) if whole is None else whole


def region_of_flat(read_flat: ReadFlat, start: int, shape: Shape) -> ReadRegion:
    """Regions of a row-major tensor of `shape` that begins at element `start` of something 1-D.

    `read_flat(start, count)` is asked for contiguous elements; small gaps between rows are read, large ones are not.
    """

    def elements(runs: Runs) -> list[torch.Tensor]:
        first, length, stride, repeats = start + runs.start, runs.length, runs.stride, runs.repeats
        if repeats > 1 and stride - length < _SMALL_GAP:
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
    rows = info.shape[0]
    step = max(1, _BLOCK * rows // max(1, info.nbytes))
    for first in range(0, rows, step):
        count = min(step, rows - first)
        last = first + count
        wanted = [place for place in places if place.offset[0] < last and first < place.offset[0] + place.shape[0]]
        if not wanted:
            continue
        block = source.read(key, (first,) + (0,) * (len(info.shape) - 1), (count, *info.shape[1:]))
        for place in wanted:
            progress(_write_part(block, first, place))


def _write_part(block: torch.Tensor, first: int, place: FilePlace) -> int:
    """Write the rows of `block`, which begins at row `first`, that `place` wants; returns their bytes."""
    low = max(first, place.offset[0])
    high = min(first + len(block), place.offset[0] + place.shape[0])
    columns = tuple(slice(o, o + n) for o, n in zip(place.offset[1:], place.shape[1:], strict=True))
    part = block[(slice(low - first, high - first), *columns)].contiguous()
    row = part.nbytes // len(part)
    write_at(place.path, part, place.position + (low - place.offset[0]) * row)
    return part.nbytes
