"""Boxes as columns of numbers, from the state of every rank to the index of a checkpoint."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron.core.dist_checkpointing.mapping import Extent, Overlap, Shape
from megatron.core.safe_files.errors import CheckpointError
from megatron.core.safe_files.schema import format_value


class Location(NamedTuple):
    """Location of an item: `length` bytes at `position` of `file`, an archive of torch.save."""

    file: str
    position: int
    length: int


class StoredChunk(NamedTuple):
    """One stored box of a tensor."""

    offset: Shape
    shape: Shape
    location: Location


_MAX_TILED_DIMS = 8  # of a tensor in several boxes: each box has 2^dimensions corners
_EMPTY = np.empty(0, dtype=np.int64)


def _make_column() -> Any:
    """Return a field that is empty by default: one array, which a pickle contains once."""
    return field(default_factory=lambda: _EMPTY)


@dataclass(frozen=True)
class BoxTable:
    """Columns of integers with an entry per box: at 16,384 ranks there are millions of boxes.

    A save fills the columns step by step, and every step selects entries. A column that has not
    been filled yet is empty.

    * Every rank describes its boxes: `offset`, `shape`, and `tensor`, the index in its tensors.
    * Rank 0 collects them: `rank`, `box` (the index among the boxes of that rank), `nbytes`.
    * Rank 0 assigns them to files: `file` (an index in `files`), `position`, `length`. These are
      the columns of a stored tensor.
    * In a file of another format, the elements of a box are `strides` apart.

    The tensors of one table may differ in their number of dimensions. `offset` and `shape` have
    those of the tensor that has the most; missing dimensions at the end are 0 and 1.
    """

    offset: np.ndarray  # [boxes, dimensions]
    shape: np.ndarray  # [boxes, dimensions]
    tensor: np.ndarray = _make_column()  # [boxes], like all columns below
    rank: np.ndarray = _make_column()
    box: np.ndarray = _make_column()
    nbytes: np.ndarray = _make_column()  # raw data
    file: np.ndarray = _make_column()
    position: np.ndarray = _make_column()  # bytes from the beginning of the file
    length: np.ndarray = _make_column()  # bytes of raw data and envelope, without padding
    strides: np.ndarray = _make_column()  # bytes, [boxes, dimensions]
    files: Sequence[str] = ()  # names

    @classmethod
    def of(cls, boxes: Iterable[Extent], dims: int) -> BoxTable:
        """Return a table of boxes with `dims` dimensions."""
        extents = list(boxes)
        table = np.array(extents, dtype=np.int64).reshape(len(extents), 2, dims)
        return cls(table[:, 0], table[:, 1])

    def __len__(self) -> int:
        return len(self.offset)

    def __getitem__(self, index: int) -> StoredChunk:
        """Return a box and its location."""
        offset = tuple(self.offset[index].tolist())
        shape = tuple(self.shape[index].tolist())
        file = self.files[self.file[index]]
        location = Location(file, int(self.position[index]), int(self.length[index]))
        return StoredChunk(offset, shape, location)

    def __iter__(self) -> Iterator[StoredChunk]:
        return map(self.__getitem__, range(len(self)))

    # ---- Selections ----

    def take(self, selected: np.ndarray | slice) -> BoxTable:
        """Return the entries with the given indices (as copies), or of a slice (as views)."""
        columns = {}
        for name in _COLUMNS:
            column = getattr(self, name)
            if not len(column):
                continue
            # `take` needs a quarter of the time of an index.
            if isinstance(selected, slice):
                columns[name] = column[selected]
            else:
                columns[name] = column.take(selected, axis=0)
        return replace(self, **columns)

    def take_rows(self, selected: np.ndarray, first: np.ndarray, count: np.ndarray) -> BoxTable:
        """Return rows `[first, first + count)` of each of the selected boxes, which are whole."""
        boxes = self.take(selected)
        num_rows = boxes.count_rows()
        row_bytes = boxes.nbytes // num_rows

        # Most boxes are written as a whole: only the others are narrowed.
        narrowed = np.flatnonzero(count != num_rows)
        axis = _find_row_axes(boxes.shape[narrowed])
        boxes.offset[narrowed, axis] += first[narrowed]
        boxes.shape[narrowed, axis] = count[narrowed]
        return replace(boxes, nbytes=row_bytes * count)

    def count_rows(self) -> np.ndarray:
        """Return the number of rows of each box (see `find_row_axis`); at least one."""
        axis = _find_row_axes(self.shape)
        num_rows = self.shape[np.arange(len(self)), axis]
        return np.maximum(1, num_rows)

    def split_by_tensor(self, shapes: Sequence[Shape]) -> Iterator[BoxTable]:
        """Yield the boxes of each tensor, with its dimensions. Entries are sorted by tensor."""
        ends = np.searchsorted(self.tensor, np.arange(len(shapes) + 1)).tolist()
        for (start, stop), shape in zip(pairwise(ends), shapes, strict=True):
            boxes = self.take(slice(start, stop))
            dims = len(shape)
            yield replace(boxes, offset=boxes.offset[:, :dims], shape=boxes.shape[:, :dims])

    def compact(self) -> BoxTable:
        """Return the table with columns of 32 bits where these suffice: half the bytes to send."""
        columns = {}
        for name in _COLUMNS:
            column = getattr(self, name)
            if len(column) and column.max(initial=0) < 1 << 31:
                columns[name] = column.astype(np.int32)
        return replace(self, **columns)

    # ---- Geometry of the boxes of one tensor ----

    def overlaps(self, offset: Shape, shape: Shape) -> Iterator[tuple[int, Overlap]]:
        """Yield (number, overlap) of each box of the table that overlaps the given box.

        The given box is the second one of the overlap.
        """
        if 0 in shape:
            return
        # Common part with each box, [boxes, dimensions]; not positive without one.
        start = np.array(offset, dtype=np.int64)
        low = np.maximum(self.offset, start)
        extent = np.minimum(self.offset + self.shape, start + np.array(shape, dtype=np.int64)) - low
        hits = np.flatnonzero((extent > 0).all(axis=1))
        in_first = (low[hits] - self.offset[hits]).tolist()
        in_second = (low[hits] - start).tolist()
        shapes = extent[hits].tolist()
        for box_index, first, second, common in zip(
            hits.tolist(), in_first, in_second, shapes, strict=True
        ):
            yield box_index, Overlap(tuple(first), tuple(second), tuple(common))

    def find_gap_or_overlap(self, whole: Shape) -> str | None:
        """Return None if the boxes tile `whole`, else describe the first gap or overlap.

        Exact, and linear in the number of boxes. How often each element is covered is a function
        on the grid. Its mixed difference is nonzero only at corners of boxes, where it is +1 or -1
        per box. Two functions are equal if their differences are. At the first corner in row-major
        order where the differences are unequal, the functions differ by the same amount.
        """
        # Usual cases: an empty tensor, and one box that is the whole tensor.
        if 0 in whole:
            return None
        if len(self) == 1 and tuple(self.shape[0].tolist()) == whole and not self.offset.any():
            return None
        if len(whole) > _MAX_TILED_DIMS:
            return f"boxes of more than {_MAX_TILED_DIMS} dimensions cannot be compared"
        grid = tuple(extent + 1 for extent in whole)  # number of corners
        if math.prod(grid) >= 1 << 63:
            return "it has more elements than 64 bits can number"
        # Number the corners row-major, and add up the signs at each of them.
        strides = np.array(
            [math.prod(grid[axis + 1 :]) for axis in range(len(grid))], dtype=np.int64
        )
        offset = np.concatenate([self.offset, np.zeros((1, len(whole)), dtype=np.int64)])
        shape = np.concatenate([self.shape, np.array([whole], dtype=np.int64)])
        sign = np.append(np.ones(len(self)), -1)  # subtract the whole tensor
        corners = []
        signs = []
        for upper in product((0, 1), repeat=len(whole)):
            corners.append((offset + shape * np.array(upper, dtype=np.int64)) @ strides)
            # The mixed difference of a box is +1 at its lower corner, and alternates.
            signs.append(-sign if sum(upper) % 2 else sign)
        distinct, corner_indices = np.unique(np.concatenate(corners), return_inverse=True)
        counts = np.bincount(corner_indices, weights=np.concatenate(signs))
        # The first corner at which boxes and tensor differ shows the fault.
        wrong = np.flatnonzero(counts)
        if not len(wrong):
            return None
        coordinates = tuple(map(int, np.unravel_index(distinct[wrong[0]], grid)))
        if counts[wrong[0]] < 0:
            return f"element {coordinates} is held by no rank"
        return f"different boxes overlap at {coordinates}"


_COLUMNS = [column.name for column in fields(BoxTable) if column.name != "files"]


def _find_row_axes(shape: np.ndarray) -> np.ndarray:
    """Return the axis along which the rows of each box are counted: the first longer than 1.

    `shape` is [boxes, dimensions]. A box without such an axis has axis 0.
    """
    is_longer = shape > 1
    return is_longer.argmax(axis=1)


# ---- The contents of a checkpoint: tensors as tables of stored boxes, objects by location ----


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
