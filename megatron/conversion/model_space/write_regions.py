"""One read of a global tensor, many places in files that receive a part of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from megatron.conversion.files import Progress, write_at
from megatron.conversion.model_space.source import Shape, Source

_BLOCK = 32 << 20  # bytes read at once


class Place(NamedTuple):
    """The box at `offset` of extent `shape` goes to byte `position` of `path`, row by row."""

    offset: Shape
    shape: Shape
    path: Path
    position: int


def scatter(source: Source, key: str, places: Sequence[Place], progress: Progress) -> None:
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


def _write_part(block: torch.Tensor, first: int, place: Place) -> int:
    """Write the rows of `block`, which begins at row `first`, that `place` wants; returns their bytes."""
    low = max(first, place.offset[0])
    high = min(first + len(block), place.offset[0] + place.shape[0])
    columns = tuple(slice(o, o + n) for o, n in zip(place.offset[1:], place.shape[1:], strict=True))
    part = block[(slice(low - first, high - first), *columns)].contiguous()
    row = part.nbytes // len(part)
    write_at(place.path, part, place.position + (low - place.offset[0]) * row)
    return part.nbytes
