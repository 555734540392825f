"""Tensors of an archive that stay in their file until they are read: opening a checkpoint costs no memory."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.core.dist_checkpointing.boxes import Shape
from megatron.core.dist_checkpointing.format.input_files import open_descriptor
from megatron.core.dist_checkpointing.format.schema import CheckpointError, UnsafePickleError


@dataclass(frozen=True)
class FileTensor:
    """A tensor whose elements lie in row-major order from byte `position` of a file."""

    path: Path
    position: int
    dtype: torch.dtype
    shape: Shape

    def numel(self) -> int:
        return math.prod(self.shape)

    def read_flat(self, start: int, count: int) -> torch.Tensor:
        """Elements `[start, start + count)`, 1-D. Raises CheckpointError if the file ends before them."""
        assert 0 <= start <= start + count <= self.numel(), (start, count, self.shape)
        result = torch.empty(count, dtype=self.dtype)
        if count:
            _read_into(self.path, memoryview(_bytes_of(result)), self.position + start * self.dtype.itemsize)
        return result

    def read(self) -> torch.Tensor:
        """All of it."""
        return self.read_flat(0, self.numel()).view(self.shape)


class Budget:
    """How much may be copied while a file of `nbytes` is opened: else many views of one value fill the memory."""

    def __init__(self, nbytes: int) -> None:
        self._left = 65536 + 4 * nbytes

    def charge(self, amount: int) -> None:
        self._left -= amount
        if self._left < 0:
            raise UnsafePickleError("it copies far more than it holds")


class FileStorage(NamedTuple):
    """What a tensor views: `nbytes` from byte `position` of a file."""

    path: Path
    position: int
    nbytes: int
    budget: Budget

    def tensor(self, dtype: torch.dtype, offset: int, shape: Shape, stride: Shape) -> FileTensor | torch.Tensor:
        """The view of this storage; read at once if it is not row-major, which no checkpoint of a model needs."""
        whole = FileTensor(self.path, self.position, dtype, (self.nbytes // dtype.itemsize,))
        if stride == torch.empty(shape, device="meta").stride() or math.prod(shape) <= 1:
            return FileTensor(self.path, self.position + offset * dtype.itemsize, dtype, shape)
        span = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        self.budget.charge(span * dtype.itemsize)
        return whole.read_flat(offset, span).as_strided(shape, stride)


def in_memory(value: Any) -> Any:
    """The same containers with every FileTensor read."""
    if isinstance(value, FileTensor):
        return value.read()
    if type(value) is dict:
        return {key: in_memory(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(in_memory(item) for item in value)
    return value


def _bytes_of(tensor: torch.Tensor) -> Any:
    return tensor.view(torch.uint8).numpy()


def _read_into(path: Path, view: memoryview, position: int) -> None:
    try:
        descriptor = open_descriptor(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from error
    try:
        while view:
            count = os.preadv(descriptor, [view], position)
            if count == 0:
                raise CheckpointError(f"{path}: truncated: {len(view)} bytes are missing at byte {position}")
            view, position = view[count:], position + count
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read at byte {position}: {error.strerror}") from error
    finally:
        os.close(descriptor)
