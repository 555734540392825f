"""The contents of a checkpoint: tensors as tables of stored boxes, objects by location."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from megatron.core.dist_checkpointing.box_table import BoxTable, Location
from megatron.core.dist_checkpointing.mapping import Shape
from megatron.core.safe_files.errors import CheckpointError
from megatron.core.safe_files.schema import format_value


class StoredTensor:
    """A global tensor and the chunks that tile it.

    `chunks` may be a function that reads them when they are first needed. `dtype` may be a name
    such as bfloat16, so that dtypes that this version of torch lacks can be listed.
    """

    def __init__(
        self, shape: Shape, dtype: torch.dtype | str, chunks: BoxTable | Callable[[], BoxTable]
    ) -> None:
        self.shape = shape
        self._chunks = chunks
        self.dtype_name = str(dtype).removeprefix("torch.")

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype. Raises CheckpointError if this version of torch lacks it."""
        dtype = getattr(torch, self.dtype_name, None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(
                f"a tensor of dtype {format_value(self.dtype_name)}, "
                "which this version of torch lacks"
            )
        return dtype

    @property
    def chunks(self) -> BoxTable:
        """Return the stored boxes, which are read on first access."""
        if not isinstance(self._chunks, BoxTable):
            self._chunks = self._chunks()
        return self._chunks

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * get_itemsize(self.dtype_name)


def get_itemsize(dtype_name: str) -> int:
    """Return the bytes of an element: the first number in the name is its size in bits."""
    bits = re.search(r"\d+", dtype_name)
    if bits is None:  # bool
        return 1
    return max(1, int(bits[0]) // 8)


@dataclass
class CheckpointMetadata:
    """Tensors and objects by key.

    `extra` contains additions of other writers (e.g., `mcore_data` of Megatron-core 0.12).
    """

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    objects: dict[str, Location] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    tensor_sizes: dict[str, int] | None = None
    """The result of `tensor_file_sizes`, if it is known without the tables."""

    def file_sizes(self) -> dict[str, int]:
        """Return the files of the checkpoint and the minimum size of each."""
        sizes = self.tensor_file_sizes()
        for file, position, length in self.objects.values():
            end = position + length
            sizes[file] = max(sizes.get(file, 0), end)
        return sizes

    def tensor_file_sizes(self) -> dict[str, int]:
        """Return the files that contain tensors and the minimum size of each."""
        if self.tensor_sizes is not None:
            return dict(self.tensor_sizes)
        if not self.tensors:
            return {}

        # All tables number the files in the same way. The end of a file is that of its last box.
        tables = [tensor.chunks for tensor in self.tensors.values()]
        files = tables[0].files
        ends = np.zeros(len(files), dtype=np.int64)  # [files]
        for table in tables:
            end_of_box = table.position + table.length
            np.maximum.at(ends, table.file, end_of_box)
        sizes = {}
        for file, end in zip(files, ends.tolist(), strict=True):
            if end > 0:
                sizes[file] = end
        return sizes


def check_inside(table: BoxTable, shape: Shape, what: str) -> None:
    """Raise CheckpointError for a box outside of a tensor of `shape`.

    `what` names the tensor in the error.
    """
    # Compare along each axis: [boxes, dims]. The sum of offset and size could overflow.
    end = np.array(shape, dtype=np.int64)
    available = end - table.offset
    starts_outside = (table.offset < 0) | (table.offset > end)
    ends_outside = (table.shape < 0) | (table.shape > available)

    is_outside = (starts_outside | ends_outside).any(axis=1)
    box_indices = np.flatnonzero(is_outside)
    if not len(box_indices):
        return
    first = box_indices[0]
    offset = tuple(table.offset[first].tolist())
    extent = tuple(table.shape[first].tolist())
    raise CheckpointError(f"{what}: a chunk at {offset} of shape {extent} is not inside of {shape}")
