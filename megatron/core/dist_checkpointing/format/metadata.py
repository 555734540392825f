"""What a checkpoint contains and where: tensors as tables of stored boxes, objects by place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron.core.dist_checkpointing.boxes import BoxTable, Shape
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.format.safe_globals import Placeholder
from megatron.core.dist_checkpointing.format.unpickler import safe_loads


class Location(NamedTuple):
    """An item: `length` bytes at `position` of `file`, a complete torch.save archive."""

    file: str
    position: int
    length: int


class StoredChunk(NamedTuple):
    """One stored box of a tensor."""

    offset: Shape
    shape: Shape
    location: Location


@dataclass(frozen=True)
class ChunkTable(BoxTable):
    """The stored boxes of a tensor: box `i` is `length[i]` bytes at `position[i]` of file `files[file[i]]`."""

    files: Sequence[str]  # of the whole checkpoint
    file: np.ndarray
    position: np.ndarray
    length: np.ndarray

    def __getitem__(self, number: int) -> StoredChunk:
        offset, shape = (tuple(array[number].tolist()) for array in (self.offset, self.shape))
        place = (int(array[number]) for array in (self.position, self.length))
        return StoredChunk(offset, shape, Location(self.files[self.file[number]], *place))

    def __iter__(self) -> Iterator[StoredChunk]:
        return map(self.__getitem__, range(len(self)))


class StoredTensor:
    """A global tensor and the chunks that tile it. `chunks` may be a function that fetches them when first needed."""

    def __init__(self, shape: Shape, dtype: torch.dtype, chunks: ChunkTable | Callable[[], ChunkTable]) -> None:
        self.shape, self.dtype, self._chunks = shape, dtype, chunks

    @property
    def chunks(self) -> ChunkTable:
        if not isinstance(self._chunks, ChunkTable):
            self._chunks = self._chunks()
        return self._chunks

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass
class CheckpointMetadata:
    """Tensors and objects by key; `extra` holds what other writers add (Megatron-core 0.12's `mcore_data`)."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    objects: dict[str, Location] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    tensor_sizes: dict[str, int] | None = None
    """`tensor_file_sizes`, where they are known without the tables."""

    def file_sizes(self) -> dict[str, int]:
        """The files of the checkpoint and how long each must be at least."""
        sizes = self.tensor_file_sizes()
        for file, position, length in self.objects.values():
            sizes[file] = max(sizes.get(file, 0), position + length)
        return sizes

    def tensor_file_sizes(self) -> dict[str, int]:
        """As `file_sizes`, for tensors alone."""
        if self.tensor_sizes is not None:
            return dict(self.tensor_sizes)
        tables = [tensor.chunks for tensor in self.tensors.values()]
        if not tables:
            return {}
        ends = np.zeros(len(tables[0].files), dtype=np.int64)
        for table in tables:
            np.maximum.at(ends, table.file, table.position + table.length)
        return {file: int(end) for file, end in zip(tables[0].files, ends, strict=True) if end}


def decode_dcp(data: bytes | memoryview, where: str) -> CheckpointMetadata:
    """The metadata that any version of DCP has pickled. Raises CheckpointError that names `where`."""
    root = safe_loads(data, where)
    try:
        return _decode(root.state, where)
    except CheckpointError:
        raise
    except Exception as error:  # the pickle is intact, its content is not
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{where}: not the metadata of a distributed checkpoint ({reason})") from error


def _decode(root: Mapping[str, Any], where: str) -> CheckpointMetadata:
    locations: dict[tuple[str, Shape | None], Location] = {}
    for index, info in root["storage_data"].items():
        if info.state.get("transform_descriptors"):
            raise CheckpointError(f"{where}: {index.state['fqn']} was written through DCP extensions (compression)")
        offset = index.state.get("offset")
        location = Location(info.state["relative_path"], info.state["offset"], info.state["length"])
        check_location(location, f"{where}: {index.state['fqn']}")
        locations[index.state["fqn"], None if offset is None else tuple(offset)] = location
    files = tuple(dict.fromkeys(location.file for location in locations.values()))
    numbers = {file: number for number, file in enumerate(files)}
    result = CheckpointMetadata()
    for key, entry in root["state_dict_metadata"].items():
        if type(entry).__qualname__ == "BytesStorageMetadata":
            result.objects[key] = locations[key, None]
            continue
        shape = tuple(entry.state["size"])
        chunks = []
        for chunk in entry.state["chunks"]:
            offset = tuple(chunk.state["offsets"])
            chunks.append(StoredChunk(offset, tuple(chunk.state["sizes"]), locations[key, offset]))
        boxes = BoxTable.of([chunk[:2] for chunk in chunks], len(shape))
        places = [(numbers[file], position, length) for _, _, (file, position, length) in chunks]
        columns = np.array(places, dtype=np.int64).reshape(-1, 3).T
        table = ChunkTable(boxes.offset, boxes.shape, files, *columns)
        check_inside(table, shape, f"{where}: {key}")
        result.tensors[key] = StoredTensor(shape, _dtype_of(entry.state["properties"]), table)
    known = {"state_dict_metadata", "storage_data", "storage_meta", "planner_data", "version", "all_local_plans"}
    result.extra = {name: value for name, value in root.items() if name not in known}
    return result


def check_location(location: Location, what: str) -> None:
    """Raises CheckpointError for a place that cannot be in the checkpoint's directory."""
    if location.file in ("", ".", "..") or "/" in location.file or min(location[1:]) < 0:
        raise CheckpointError(f"{what} is said to be at {tuple(location)}")


def check_inside(table: BoxTable, shape: Shape, what: str) -> None:
    """Raises CheckpointError for a box that does not lie in a tensor of `shape`."""
    end = np.array(shape, dtype=np.int64)
    wrong = ((table.offset < 0) | (table.shape < 0) | (table.offset > end) | (table.shape > end - table.offset)).any(
        axis=1
    )
    for number in np.flatnonzero(wrong)[:1]:
        offset, extent = (tuple(array[number].tolist()) for array in (table.offset, table.shape))
        raise CheckpointError(f"{what}: a chunk at {offset} of shape {extent} does not lie in {shape}")


def _dtype_of(properties: Placeholder) -> torch.dtype:
    state = properties.state
    dtype = state["dtype"] if isinstance(state, dict) else state[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype {dtype!r:.60}")
    return dtype
