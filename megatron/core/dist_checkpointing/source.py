"""The protocol `TensorSource`: global tensors that can be read piece by piece."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron.core.dist_checkpointing.mapping import Shape


@dataclass(frozen=True)
class TensorInfo:
    """Global shape and dtype of one tensor."""

    shape: Shape
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


class TensorSource(Protocol):
    """Global tensors that can be read piece by piece. Only `read` reads more than metadata."""

    description: str  # format and path, for messages

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Global shape and dtype of every tensor by its key."""
        ...

    def read(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        """Return the box of `key` at `offset` with extent `shape`, on CPU in the stored dtype.

        Raises KeyError for an unknown key, ValueError where the file is damaged.
        """
        ...


def read_whole(source: TensorSource, key: str) -> torch.Tensor:
    """Return the whole global tensor `key`."""
    info = source.tensors[key]
    return source.read(key, (0,) * len(info.shape), info.shape)
