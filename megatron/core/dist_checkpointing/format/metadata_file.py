"""The `.metadata` of a checkpoint directory: with our index behind the pickle, or as any version of DCP wrote it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash

from megatron.core.dist_checkpointing.boxes import BoxTable, Shape
from megatron.core.dist_checkpointing.files import METADATA
from megatron.core.dist_checkpointing.format.metadata import (
    CheckpointMetadata,
    ChunkTable,
    Location,
    StoredChunk,
    StoredTensor,
    check_inside,
    check_location,
)
from megatron.core.dist_checkpointing.format.metadata_index import FOOTER, MAGIC, MetadataIndex, Read
from megatron.core.dist_checkpointing.format.safe_globals import DtypeName, Placeholder
from megatron.core.dist_checkpointing.format.schema import MAX_RANK, CheckpointError, open_file, printable, shown
from megatron.core.dist_checkpointing.format.schema import key as key_name
from megatron.core.dist_checkpointing.format.unpickler import check_bounded, safe_loads
from megatron.core.object_storage import path_of


def open_metadata(read: Read, size: int, where: str) -> CheckpointMetadata:
    """The `.metadata` of `size` bytes that `read` reads, now or later. Raises CheckpointError that names `where`."""
    footer = read(size - FOOTER.size, FOOTER.size) if size >= FOOTER.size else b""
    if footer[-len(MAGIC) :] != MAGIC:
        return decode_dcp(read(0, size), where)
    position, length, digest, _ = FOOTER.unpack(footer)
    content = read(position, length) if position + length <= size else b""
    if xxhash.xxh3_64_intdigest(content) != digest:
        raise CheckpointError(f"{where}: damaged: its index does not have the checksum that it ends with")
    return MetadataIndex(read, content, size, where).metadata()


def read_metadata(directory: str | os.PathLike[str]) -> CheckpointMetadata:
    """What the checkpoint contains and where. Raises CheckpointError naming the file if it is missing or damaged."""
    path = path_of(directory) / METADATA
    try:
        file = open_file(path)
        if file.descriptor is None:  # an object: one request instead of two for every tensor
            return decode_metadata(file.read(0, file.size), str(path))
        weakref.finalize(file, os.close, file.descriptor)  # open for as long as a tensor may ask for its entries
        return open_metadata(file.read, file.size, str(path))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing, so {path.parent} holds no complete checkpoint") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def decode_metadata(data: bytes, where: str) -> CheckpointMetadata:
    """As `open_metadata`, for a file in memory."""
    return open_metadata(lambda position, length: data[position : position + length], len(data), where)


_KNOWN_FIELDS = ("state_dict_metadata", "storage_data", "storage_meta", "planner_data", "version", "all_local_plans")


def decode_dcp(data: bytes | memoryview, where: str) -> CheckpointMetadata:
    """The metadata that any version of DCP has pickled. Raises CheckpointError that names `where`."""
    root = safe_loads(data, where)
    try:
        return _decode(root.state, where)
    except CheckpointError:
        raise
    except Exception as error:  # the pickle is intact, its content is not
        reason = printable(f"{type(error).__name__}: {error}")[:300]
        raise CheckpointError(f"{where}: not the metadata of a distributed checkpoint ({reason})") from error


def _decode(root: Mapping[str, Any], where: str) -> CheckpointMetadata:
    locations = _decode_locations(root["storage_data"], where)
    files = tuple(dict.fromkeys(location.file for location in locations.values()))
    numbers = {file: number for number, file in enumerate(files)}
    result = CheckpointMetadata()
    for key, entry in root["state_dict_metadata"].items():
        key_name(key, f"{where}: a key")
        if type(entry).__qualname__ == "BytesStorageMetadata":
            result.objects[key] = locations[key, None]
            continue
        shape, what = _shape(entry.state["size"], key, where), f"{where}: {shown(key)}"
        chunks = []
        for chunk in entry.state["chunks"]:
            offset, extent = _shape(chunk.state["offsets"], key, where), _shape(chunk.state["sizes"], key, where)
            if len(offset) != len(shape) or len(extent) != len(shape):
                raise CheckpointError(f"{what} of shape {shape} has a chunk at {offset} of {extent}")
            chunks.append(StoredChunk(offset, extent, locations[key, offset]))
        boxes = BoxTable.of([chunk[:2] for chunk in chunks], len(shape))
        places = [(numbers[file], position, length) for _, _, (file, position, length) in chunks]
        columns = np.array(places, dtype=np.int64).reshape(-1, 3).T
        table = ChunkTable(boxes.offset, boxes.shape, files, *columns)
        check_inside(table, shape, what)
        result.tensors[key] = StoredTensor(shape, _dtype_of(entry.state["properties"]), table)
    result.extra = {name: value for name, value in root.items() if name not in _KNOWN_FIELDS}
    check_bounded(result.extra, where)
    return result


def _decode_locations(stored: Mapping[Any, Any], where: str) -> dict[tuple[str, Shape | None], Location]:
    """By key and offset; None for objects."""
    locations: dict[tuple[str, Shape | None], Location] = {}
    for index, info in stored.items():
        key = index.state["fqn"]
        if info.state.get("transform_descriptors"):
            raise CheckpointError(f"{where}: {shown(key)} was written through DCP extensions (compression)")
        location = Location(info.state["relative_path"], info.state["offset"], info.state["length"])
        check_location(location, f"{where}: {shown(key)}")
        offset = index.state.get("offset")
        locations[key, None if offset is None else _shape(offset, key, where)] = location
    return locations


def _shape(value: Any, key: str, where: str) -> Shape:
    extents = value if isinstance(value, list | tuple) and len(value) <= MAX_RANK else (None,)
    if not all(type(n) is int and n >= 0 for n in extents):
        raise CheckpointError(f"{where}: {shown(key)} has a shape or an offset {shown(value)}")
    return tuple(value)


def _dtype_of(properties: Placeholder) -> str:
    state = properties.state
    dtype = state["dtype"] if isinstance(state, dict) else state[0]
    if not isinstance(dtype, DtypeName):
        raise TypeError(f"dtype {shown(dtype)}")
    return dtype
