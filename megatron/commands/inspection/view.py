"""Named tensors of a checkpoint in any format, as the commands that read values need them."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from megatron.conversion.opening import open_checkpoint, require_checkpoint
from megatron.conversion.options import ReadOptions
from megatron.core.dist_checkpointing import Reader, StoredTensor
from megatron.core.dist_checkpointing.mapping import LazyTensor, Shape, TensorInfo, cut_rows

# Includes tensors that the model does not have.
READ_EVERYTHING = ReadOptions(keep_foreign=True)
SLICE = 64 << 20  # bytes of a tensor in memory at once


class View(NamedTuple):
    """Named tensors of a checkpoint in any format, with its path and format for messages.

    `tensors` are those of a `Source`, or of a `Reader` for a torch_dist directory that is not a
    model of ours: that has neither arguments nor a training state, so it is not a source. `view`
    returns one that can be read.
    """

    path: Path
    format: str
    tensors: Mapping[str, TensorInfo | StoredTensor]
    view: Callable[[str], LazyTensor]

    def iterate_slices(self, key: str) -> Iterator[tuple[Shape, torch.Tensor]]:
        """Yield (offset, rows) of a tensor in order."""
        tensor = self.view(key)
        for offset, shape in cut_rows(tensor.shape, tensor.dtype.itemsize, SLICE):
            yield offset, tensor.read(offset, shape)

    def select_keys(self, pattern: str) -> list[str]:
        """Return the keys that match a shell pattern, in stored order."""
        return fnmatch.filter(self.tensors, pattern)


def open_view(root: Path, step: int | None) -> View:
    """Open a checkpoint under the names of model space, which are the same for all formats.

    A torch_dist checkpoint that does not contain one of our models is opened under its own keys.
    """
    path, checkpoint_format, *_ = require_checkpoint(root, step)
    is_torch_dist = checkpoint_format == "torch_dist"
    try:
        source = open_checkpoint(path, checkpoint_format, read_options=READ_EVERYTHING)
    except ValueError:
        if not is_torch_dist:
            raise
        return open_stored_view(path)
    # Do not hide tensors that have no name in model space.
    if is_torch_dist and source.unused:
        return open_stored_view(path)
    return View(path, checkpoint_format, source.tensors, source.tensors.__getitem__)


def open_stored_view(path: Path) -> View:
    """Open a torch_dist directory under the keys in its files."""
    reader = Reader(path)
    return View(path, "torch_dist", reader.metadata.tensors, reader.view)


def format_shape(shape: Shape | list[int]) -> str:
    """Return the shape as text, e.g., 4096x1024."""
    sizes = map(str, shape)
    return "x".join(sizes) or "scalar"
