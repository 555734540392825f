"""Names and places of training state in model space.

Every piece of state is a named global tensor; a rank holds a list of *boxes* of it, each an offset and a live view of
local memory. TP, PP, DP and ZeRO are only different tilings, so nothing here knows about any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron.core.dist_checkpointing.boxes import Shape, flat_range_boxes, shifted


@dataclass(frozen=True)
class Box:
    """An axis-aligned piece of a global tensor: `tensor` is a live view of the data at `offset`.

    Its shape is the extent of the box (same number of dimensions as the global tensor).
    """

    offset: Shape
    tensor: torch.Tensor

    @property
    def shape(self) -> Shape:
        return tuple(self.tensor.shape)


@dataclass(frozen=True)
class ShardedTensor:
    """This rank's part of the global tensor `key`.

    For a parameter, `local` is the whole local tensor and the boxes tile the leading part of its row-major elements, in
    order (a fused SwiGLU matrix is two boxes, gate then up; an embedding crops the rows that pad the vocabulary).
    Ranks that hold equal boxes are replicas of each other; who writes is decided by the save plan.
    """

    key: str
    global_shape: Shape
    dtype: torch.dtype
    boxes: tuple[Box, ...]
    local: torch.Tensor | None = None
    read: Callable[[Shape, Shape], torch.Tensor] | None = None  # of a `lazy` one: (offset, extent) -> values

    @classmethod
    def lazy(
        cls, key: str, shape: Shape, dtype: torch.dtype, read: Callable[[Shape, Shape], torch.Tensor]
    ) -> ShardedTensor:
        """A whole tensor that is not in memory: a save reads it a few rows at a time, from several threads."""
        meta = torch.empty(shape, dtype=dtype, device="meta")
        return cls(key, shape, dtype, (Box((0,) * len(shape), meta),), read=read)

    @classmethod
    def replicated(cls, key: str, tensor: torch.Tensor) -> ShardedTensor:
        """Every rank that has this key has the whole tensor."""
        shape = tuple(tensor.shape)
        return cls(key, shape, tensor.dtype, (Box((0,) * len(shape), tensor.detach()),), tensor)

    @classmethod
    def split(cls, key: str, tensor: torch.Tensor, dim: int, rank: int, size: int) -> ShardedTensor:
        """Equal parts along `dim`: part `rank` of `size` is `tensor`."""
        shape = list(tensor.shape)
        offset = [0] * len(shape)
        offset[dim] = rank * shape[dim]
        shape[dim] *= size
        return cls(key, tuple(shape), tensor.dtype, (Box(tuple(offset), tensor.detach()),), tensor)

    @classmethod
    def split_rows(
        cls, key: str, tensor: torch.Tensor, rank: int, size: int, num_blocks: int = 1, num_rows: int | None = None
    ) -> ShardedTensor:
        """Rows of `num_blocks` stacked matrices, each split evenly over `size` ranks.

        The global tensor is `[block_0; block_1; ...]`, the local one `[block_0 part; block_1 part; ...]`.
        `num_rows` crops the global tensor to its first rows (padded vocabulary; one block only).
        """
        if size == 1:
            num_blocks = 1  # the blocks are neighbours: one box
        local_rows = tensor.shape[0] // num_blocks
        assert local_rows * num_blocks == tensor.shape[0], (key, tuple(tensor.shape), num_blocks)
        assert num_rows is None or num_blocks == 1
        total = local_rows * size * num_blocks if num_rows is None else num_rows
        boxes = []
        for block, part in enumerate(tensor.detach().split(local_rows)):
            start = (block * size + rank) * local_rows
            part = part[: max(0, min(local_rows, total - start))]
            if len(part):
                boxes.append(Box((start,) + (0,) * (tensor.dim() - 1), part))
        return cls(key, (total, *tensor.shape[1:]), tensor.dtype, tuple(boxes), tensor)

    def flat_range(self, key: str, start: int, data: torch.Tensor) -> ShardedTensor:
        """State that belongs to local elements `[start, start + len(data))` of this parameter.

        `data` (1-D, contiguous) holds one value per element of the row-major local tensor: a ZeRO-1 shard of main
        parameters or moments. The result has the parameter's global shape and views `data`; nothing is copied.
        """
        boxes: list[Box] = []
        box_start = 0
        for box in self.boxes:
            numel = box.tensor.numel()
            lo, hi = max(start, box_start), min(start + data.numel(), box_start + numel)
            if lo < hi:
                part = data[lo - start : hi - start]
                cut = flat_range_boxes(box.shape, lo - box_start, part)
                boxes += [Box(shifted(box.offset, offset), view) for offset, view in cut]
            box_start += numel
        return ShardedTensor(key, self.global_shape, data.dtype, tuple(boxes))


@dataclass(frozen=True)
class ShardedObject:
    """A small Python value of plain types stored under its own key (RNG state, schedule); equal keys are replicas."""

    key: str
    value: Any


ShardedStateDict = dict[str, ShardedTensor | ShardedObject]


def map_keys(state: ShardedStateDict, rename: Callable[[str], str]) -> ShardedStateDict:
    """The same state under other keys."""
    return {rename(key): replace(entry, key=rename(key)) for key, entry in state.items()}
