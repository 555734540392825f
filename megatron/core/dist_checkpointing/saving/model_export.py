"""Exports of a model next to a checkpoint: the same staged bytes in files of another format.

An `ExportPlan` states where the elements of global tensors are stored in the files of an export; it
comes from above and knows the format. Here every rank writes the elements that it has staged for
the checkpoint to these places: nothing is gathered or copied to host memory twice.
"""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from megatron.core.dist_checkpointing.background import Slot
from megatron.core.dist_checkpointing.box_table import BoxTable
from megatron.core.dist_checkpointing.files import pending_directory
from megatron.core.dist_checkpointing.mapping import (
    Extent,
    Shape,
    narrow,
    split_flat_range,
    to_absolute,
)
from megatron.core.dist_checkpointing.planning.rank_plan import FileChunk, WriteItem
from megatron.core.dist_checkpointing.saving.pending_export import (
    Check,
    ExportTarget,
    PendingExport,
)
from megatron.core.dist_checkpointing.saving.placed_file import DIRECT_SIZE, PlacedFile
from megatron.core.durable_files import (
    check_free_space,
    create_file,
    discard,
    fsync_tree,
    naming,
    put_in_place,
)
from megatron.core.safe_files.torch_zip import view_bytes

logger = logging.getLogger(__name__)


def locate_boxes(
    extents: Sequence[Extent],
    starts: Sequence[tuple[int, int]],
    strides: Sequence[Shape],
    files: Sequence[str],
) -> BoxTable:
    """Return a table of boxes that begin at these (file, position), for an `ExportPlan`."""
    file, position = np.array(starts, dtype=np.int64).T
    table = BoxTable.of(extents, len(strides[0]))
    return replace(table, file=file, position=position, strides=np.array(strides), files=files)


class ExportFile(NamedTuple):
    """A file of an export: `header`, then the elements of tensors up to `size` bytes."""

    header: bytes
    size: int


@dataclass(frozen=True)
class ExportPlan:
    """All files of an export."""

    dtypes: Mapping[str, torch.dtype]  # of elements in the export, by key
    tables: Mapping[str, BoxTable]
    """Boxes of global tensors by key, with the columns `file`, `position` and `strides`. They cover
    every element, copies several times. The element at `index` inside of a box is at byte
    `position` + sum(index * strides) of `file`.
    """
    files: Mapping[str, ExportFile]
    add_small_files: Callable[[Path], None]
    """Adds the files that contain no tensors; called on rank 0, in the background."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(file.size - len(file.header) for file in self.files.values())


@dataclass(frozen=True, kw_only=True)
class ConvertedTarget(ExportTarget):
    """Exports that rank 0 makes by `convert`, of a committed checkpoint to a directory."""

    convert: Callable[[Path, Path], object]

    def start(self, iteration: int, check: Check, save_id: str) -> PendingExport:
        return ConvertedExport(self, self.convert, iteration, check)


@dataclass(frozen=True, kw_only=True)
class StagedTarget(ExportTarget):
    """Exports that all ranks write."""

    plan: ExportPlan

    def start(self, iteration: int, check: Check, save_id: str) -> PendingExport:
        return StagedExport(self, self.plan, iteration, save_id)


class ConvertedExport(PendingExport):
    """An export that rank 0 makes of the committed checkpoint, in the background."""

    def __init__(
        self,
        target: ExportTarget,
        convert: Callable[[Path, Path], object],
        iteration: int,
        check: Check,
    ) -> None:
        super().__init__(target, iteration)
        self._convert = convert
        self._check = check

    def _complete(self, nbytes: int, checkpoint: Path) -> None:
        self._check()
        self._convert(checkpoint, self.directory)


class StagedExport(PendingExport):
    """An export that all ranks write while they write the checkpoint.

    It grows under another name and is committed by a rename.
    """

    def __init__(
        self, target: ExportTarget, plan: ExportPlan, iteration: int, save_id: str
    ) -> None:
        super().__init__(target, iteration)
        self._plan = plan
        self._pending = pending_directory(self.directory, save_id)
        self._files: dict[str, PlacedFile] = {}
        self._written = 0
        self._has_no_files = False  # rank 0 could not create them

    def begin(self) -> None:
        """Create the directory and its files, with their headers and sizes."""
        try:
            self._target.root.mkdir(parents=True, exist_ok=True)
            self._pending.mkdir()
            check_free_space(self._pending, self._plan.nbytes)
            for name, content in self._plan.files.items():
                path = self._pending / name
                with naming(path), create_file(path) as file:
                    file.write(content.header)
                    file.truncate(content.size)
        except Exception as error:
            self._fail(error)
            self.abandon()

    def write(self, items: Sequence[WriteItem], chunk: FileChunk, slot: Slot) -> None:
        """Write the elements of exported tensors in a staged chunk of the checkpoint's `items`."""
        if self.failure is not None:
            return
        try:
            for at, index, data in chunk.list_parts(items):
                item = items[index]
                if isinstance(data, bytes) or item.key not in self._plan.tables:
                    continue  # not the raw data of an exported tensor
                itemsize = item.dtype.itemsize
                assert data.start % itemsize == len(data) % itemsize == 0, data
                staged = slot.tensor[at : at + len(data)].view(item.dtype)
                for offset, values in split_flat_range(item.shape, data.start // itemsize, staged):
                    self._write_box(item.key, to_absolute(item.offset, offset), values)
        except Exception as error:
            self._fail(error)

    @property
    def warnings(self) -> list[str]:
        if self._has_no_files:
            return []
        return super().warnings

    def close(self) -> int:
        files = list(self._files.values())
        self._files = {}
        for file in files:
            try:
                # A network file system may report a failed write only here.
                file.close(durable=True)
            except OSError as error:
                self._fail(error)
        if self.failure is not None:
            return 0
        return self._written

    def _complete(self, nbytes: int, checkpoint: Path) -> None:
        # Every byte of every tensor exactly once: a gap would be zeros in the model.
        if nbytes != self._plan.nbytes:
            raise OSError(f"the ranks have written {nbytes} of {self._plan.nbytes} bytes")
        self._plan.add_small_files(self._pending)
        fsync_tree(self._pending)
        put_in_place(self._pending, self.directory)

    def abandon(self) -> None:
        discard(self._pending)

    def _write_box(self, key: str, offset: Shape, values: torch.Tensor) -> None:
        """Write a box of the tensor `key` to all places that overlap it."""
        dtype = self._plan.dtypes[key]
        table = self._plan.tables[key]
        for box_index, common in table.overlaps(offset, tuple(values.shape)):
            file = self._open(table.files[table.file[box_index]])
            strides: list[int] = table.strides[box_index].tolist()
            position = int(table.position[box_index])
            position += sum(map(operator.mul, common.in_first, strides))
            box_values = narrow(values, common.in_second, common.shape)
            self._write_strided(file, position, strides, box_values, dtype)
            with self._lock:
                self._written += box_values.numel() * dtype.itemsize

    def _write_strided(
        self,
        file: PlacedFile,
        position: int,
        strides: Sequence[int],
        values: torch.Tensor,
        dtype: torch.dtype,
    ) -> None:
        """Write `values` as `dtype` so that neighbors along axis a are `strides[a]` bytes apart."""
        # The axes in the order of the file, the outermost first; those of one index do not matter.
        axes = [axis for axis in range(values.dim()) if values.shape[axis] > 1]
        axes.sort(key=lambda axis: -strides[axis])
        unit_axes = [axis for axis in range(values.dim()) if values.shape[axis] == 1]
        elements = values.permute(*unit_axes, *axes).contiguous().view(-1)

        # Inner axes that are contiguous in the file make up a run, which is written at once.
        length = dtype.itemsize
        while axes and strides[axes[-1]] == length:
            length *= values.shape[axes.pop()]
        counts = [values.shape[axis] for axis in axes]
        positions = _list_positions(position, counts, [strides[axis] for axis in axes])
        if length >= DIRECT_SIZE:
            count = length // dtype.itemsize
            for run_index, start in enumerate(positions):
                file.write_elements(start, elements[run_index * count :][:count], dtype)
        else:
            data = view_bytes(elements.to(dtype))
            for run_index, start in enumerate(positions):
                file.write(start, data[run_index * length :][:length])

    def _open(self, name: str) -> PlacedFile:
        """Return a file that rank 0 has created."""
        with self._lock:
            if name not in self._files:
                try:
                    self._files[name] = PlacedFile(self._pending / name)
                except FileNotFoundError:
                    self._has_no_files = not self._pending.exists()
                    raise
            return self._files[name]


def _list_positions(first: int, counts: Sequence[int], strides: Sequence[int]) -> Iterator[int]:
    """Yield the positions of runs that are `strides` bytes apart along axes of `counts` runs."""
    for index in itertools.product(*map(range, counts)):
        yield first + sum(map(operator.mul, index, strides))
