"""Global tensors that lie in pieces: which pieces a box needs, and the box put together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from megatron.conversion.model_space import Shape, TensorInfo

ReadRegion = Callable[[Shape, Shape], torch.Tensor]  # (offset inside the piece, extent) -> tensor


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

    def read(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        """The box of `key`. Raises KeyError for an unknown key, ValueError where no piece holds an element."""
        pieces = list(self._pieces[key].values())
        return paste(pieces, offset, shape, self.tensors[key].dtype, key)


def paste(pieces: Sequence[Piece], offset: Shape, shape: Shape, dtype: torch.dtype, key: str) -> torch.Tensor:
    """The box at `offset` of extent `shape`, from disjoint pieces."""
    whole = torch.empty(shape, dtype=dtype)
    found = 0
    for piece in pieces:
        low = tuple(max(a, b) for a, b in zip(offset, piece.offset, strict=True))
        ends = zip(offset, shape, piece.offset, piece.shape, strict=True)
        high = tuple(min(a + n, b + m) for a, n, b, m in ends)
        extent = tuple(h - lo for lo, h in zip(low, high, strict=True))
        if min(extent, default=1) <= 0:
            continue
        part = piece.read(tuple(lo - b for lo, b in zip(low, piece.offset, strict=True)), extent)
        whole[tuple(slice(lo - a, h - a) for lo, h, a in zip(low, high, offset, strict=True))] = part
        found += math.prod(extent)
    if found != math.prod(shape):
        raise ValueError(
            f"{key}: of the box at {offset} of shape {shape} the files hold {found} of {math.prod(shape)} elements"
        )
    return whole


def region_of(tensor: torch.Tensor) -> ReadRegion:
    """Regions of a tensor that is at hand (mapped from a file, say)."""

    def read(offset: Shape, shape: Shape) -> torch.Tensor:
        return tensor[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]

    return read


def region_of_flat(read_flat: Callable[[int, int], torch.Tensor], start: int, shape: Shape) -> ReadRegion:
    """Regions of a row-major tensor of `shape` that begins at element `start` of something 1-D.

    `read_flat(start, count)` is asked for whole rows once per region.
    """

    def read(offset: Shape, extent: Shape) -> torch.Tensor:
        if not shape:
            return read_flat(start, 1).view(())
        row = math.prod(shape[1:])
        rows = read_flat(start + offset[0] * row, extent[0] * row).view(extent[0], *shape[1:])
        return rows[(slice(None), *(slice(o, o + n) for o, n in zip(offset[1:], extent[1:], strict=True)))]

    return read
