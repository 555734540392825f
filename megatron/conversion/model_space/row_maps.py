"""Where the rows of a model-space tensor lie in the tensors of a file: one description, read in both directions.

Every layout in use is a sequence of interleaves. An interleave has `groups` equal groups of rows; each of its parts
gives so many rows to every group, and lies in one run of rows in one stored tensor:

    q, k, v apart       one interleave of three parts, each in a stored tensor of its own
    [q; k; v] thirds    one interleave of three parts in one stored tensor
    gate, up            one group of two parts
    as it is            one group of one part

Columns are never moved, so a box of rows and columns needs these rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class RowPart:
    """`rows` rows per group, one after the other from row `start` of stored tensor number `source`."""

    source: int
    start: int
    rows: int


@dataclass(frozen=True)
class Interleave:
    groups: int
    parts: tuple[RowPart, ...]

    @property
    def group_rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def rows(self) -> int:
        return self.groups * self.group_rows


RowMap = tuple[Interleave, ...]


def as_is(rows: int) -> RowMap:
    return (Interleave(1, (RowPart(0, 0, rows),)),)


def stacked(rows: int, count: int) -> RowMap:
    """`count` stored tensors of `rows` rows each, one above the other."""
    return (Interleave(1, tuple(RowPart(source, 0, rows) for source in range(count))),)


def qkv_apart(heads: int, groups: int, head_dim: int) -> RowMap:
    """Stored q, k and v; per group of the model: its query heads, its key, its value."""
    return (
        Interleave(groups, tuple(RowPart(s, 0, rows) for s, rows in enumerate(_qkv_rows(heads, groups, head_dim)))),
    )


def qkv_blocks(heads: int, groups: int, head_dim: int, blocks: int) -> RowMap:
    """One stored tensor of `blocks` blocks, each [q; k; v] of its share of the groups.

    One block: the fused projection of GPT-2. TP blocks: what Megatron-DeepSpeed writes since December 2024.
    """
    if groups % blocks:
        raise ValueError(f"{groups} query groups do not divide into {blocks} blocks of q, k and v")
    share = groups // blocks
    interleaves, start = [], 0
    for _ in range(blocks):
        parts = []
        for rows in _qkv_rows(heads, groups, head_dim):
            parts.append(RowPart(0, start, rows))
            start += share * rows
        interleaves.append(Interleave(share, tuple(parts)))
    return tuple(interleaves)


def _qkv_rows(heads: int, groups: int, head_dim: int) -> tuple[int, int, int]:
    return heads // groups * head_dim, head_dim, head_dim


def stored_rows(row_map: RowMap) -> list[int]:
    """Number of rows of every stored tensor."""
    rows: dict[int, int] = {}
    for block in row_map:
        for part in block.parts:
            rows[part.source] = rows.get(part.source, 0) + block.groups * part.rows
    return [rows[source] for source in range(len(rows))]


def unpack_rows(row_map: RowMap, start: int, stop: int, read: Callable[[int, int, int], torch.Tensor]) -> torch.Tensor:
    """Model rows `[start, stop)`; `read(source, first, count)` gives stored rows."""
    pieces, base = [], 0
    for block in row_map:
        lo, hi = max(start, base) - base, min(stop, base + block.rows) - base
        if lo < hi:
            first, last = lo // block.group_rows, -(-hi // block.group_rows)
            rows = [
                read(part.source, part.start + first * part.rows, (last - first) * part.rows).unflatten(
                    0, (last - first, part.rows)
                )
                for part in block.parts
            ]
            together = rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)
            skipped = first * block.group_rows
            pieces.append(together.flatten(0, 1)[lo - skipped : hi - skipped])
        base += block.rows
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def pack_rows(row_map: RowMap, source: int, model: torch.Tensor) -> torch.Tensor:
    """Stored tensor number `source`, from the whole model-space tensor: the inverse of `unpack_rows`."""
    pieces, base = [], 0
    for block in row_map:
        groups = model[base : base + block.rows].unflatten(0, (block.groups, block.group_rows))
        at = 0
        for part in block.parts:
            if part.source == source:
                pieces.append((part.start, groups[:, at : at + part.rows].flatten(0, 1)))
            at += part.rows
        base += block.rows
    pieces.sort(key=lambda piece: piece[0])
    return pieces[0][1] if len(pieces) == 1 else torch.cat([rows for _, rows in pieces])


class Share(NamedTuple):
    """Stored tensor number `source` gets, at its row `at`, the rows `[offset, offset + rows)` of each of `groups`."""

    source: int
    at: int
    groups: int
    offset: int
    rows: int

    def of(self, run: torch.Tensor) -> torch.Tensor:
        """The stored rows, from all rows of the run."""
        groups = run.unflatten(0, (self.groups, len(run) // self.groups))
        return groups[:, self.offset : self.offset + self.rows].flatten(0, 1)


class RowRun(NamedTuple):
    """Model rows `[first, first + rows)`, and who gets which of them."""

    first: int
    rows: int
    shares: tuple[Share, ...]


def runs(row_map: RowMap, most: int) -> Iterator[RowRun]:
    """All model rows in runs of at most `most` rows (or one group), each row once: `pack_rows` a little at a time."""
    base = 0
    for block in row_map:
        if block.groups == 1:
            yield from _runs_of_parts(block, base, most)
        else:
            yield from _runs_of_groups(block, base, max(1, most // block.group_rows))
        base += block.rows


def _runs_of_parts(block: Interleave, base: int, most: int) -> Iterator[RowRun]:
    for part in block.parts:
        for first in range(0, part.rows, most):
            count = min(most, part.rows - first)
            yield RowRun(base + first, count, (Share(part.source, part.start + first, 1, 0, count),))
        base += part.rows


def _runs_of_groups(block: Interleave, base: int, most: int) -> Iterator[RowRun]:
    for first in range(0, block.groups, most):
        groups, offset, shares = min(most, block.groups - first), 0, []
        for part in block.parts:
            shares.append(Share(part.source, part.start + first * part.rows, groups, offset, part.rows))
            offset += part.rows
        yield RowRun(base + first * block.group_rows, groups * block.group_rows, tuple(shares))
