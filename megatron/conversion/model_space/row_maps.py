"""Where the rows of a model-space tensor lie in the tensors of a file: one description, read in both directions.

A row map lists runs of rows in the order of the model. Of two query groups with q, k and v in a tensor each, the model
has q0 k0 v0 q1 k1 v1, so that the runs come from tensors 0 1 2 0 1 2; gate above up is a run from each of two tensors,
or, where their rows alternate in one, two runs of every second row; a tensor as it is has one run. Columns are never
moved, so a box of rows and columns needs these rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch


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
    """One stored tensor of `count * rows` rows, of which every `count`-th ones are one above the other in the model."""
    return tuple(RowRun(0, start, rows, count) for start in range(count))


def qkv_apart(heads: int, groups: int, head_dim: int) -> RowMap:
    """Stored q, k and v; per group of the model: its query heads, its key, its value."""
    each = (heads // groups * head_dim, head_dim, head_dim)
    return tuple(RowRun(source, group * rows, rows) for group in range(groups) for source, rows in enumerate(each))


def qkv_blocks(heads: int, groups: int, head_dim: int, blocks: int) -> RowMap:
    """One stored tensor of `blocks` blocks, each [q; k; v] of its share of the groups.

    One block: the fused projection of GPT-2. TP blocks: what Megatron-DeepSpeed writes since December 2024.
    """
    if groups % blocks:
        raise ValueError(f"{groups} query groups do not divide into {blocks} blocks of q, k and v")
    each, share = (heads // groups * head_dim, head_dim, head_dim), groups // blocks
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
        first, last = max(start - begin, 0), min(stop - begin, run.rows)
        if first < last:
            yield RowRun(run.source, run.start + first * run.step, last - first, run.step)
        begin += run.rows


def unpack_rows(row_map: RowMap, start: int, stop: int, read: Callable[[int, int, int], torch.Tensor]) -> torch.Tensor:
    """Model rows `[start, stop)`; `read(source, first, count)` gives stored rows."""
    runs = list(cut(row_map, start, stop))
    pieces = [read(run.source, run.start, run.places.stop - run.start)[:: run.step] for run in runs]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def pack_rows(row_map: RowMap, source: int, model: torch.Tensor) -> torch.Tensor:
    """Stored tensor number `source`, from the whole model-space tensor: the inverse of `unpack_rows`."""
    stored = model.new_empty(stored_rows(row_map)[source], *model.shape[1:])
    for run, piece in zip(row_map, model.split([run.rows for run in row_map]), strict=True):
        if run.source == source:
            stored[run.places] = piece
    return stored
