"""Reads the `.metadata` of a checkpoint, with our index or as written by any version of DCP."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megatron.core.dist_checkpointing.files import METADATA
from megatron.core.dist_checkpointing.format.metadata import (
    CheckpointMetadata,
    ChunkTable,
    Location,
    StoredTensor,
    check_inside,
)
from megatron.core.dist_checkpointing.format.metadata_index import (
    FOOTER,
    MAGIC,
    MetadataIndex,
    Read,
)
from megatron.core.dist_checkpointing.format.safe_globals import DtypeName, Placeholder
from megatron.core.dist_checkpointing.format.schema import (
    MAX_COUNT,
    MAX_JSON,
    MAX_RANK,
    CheckpointError,
    OpenFile,
    file_name,
    format_value,
    open_file,
    refuse,
)
from megatron.core.dist_checkpointing.format.schema import key as key_name
from megatron.core.dist_checkpointing.format.unpickler import check_bounded, unpickle
from megatron.core.dist_checkpointing.mapping import BoxTable, Shape
from megatron.core.object_storage import path_of
from megatron.core.terminal import escape_control_chars


def open_metadata(read: Read, size: int, where: str) -> CheckpointMetadata:
    """Open a `.metadata` of `size` bytes via `read`, which tensors may call later.

    Raises CheckpointError that names `where`.
    """
    footer = read(size - FOOTER.size, FOOTER.size) if size >= FOOTER.size else b""
    if footer[-len(MAGIC) :] != MAGIC:
        return decode_dcp(read(0, size), where)
    position, length, digest, _ = FOOTER.unpack(footer)
    if length > MAX_JSON:
        raise CheckpointError(f"{where}: damaged: its index has {length} bytes")
    content = read(position, length) if position + length <= size else b""
    if xxhash.xxh3_64_intdigest(content) != digest:
        raise CheckpointError(
            f"{where}: damaged: its index does not have the checksum that it ends with"
        )
    return MetadataIndex(read, content, size, where).metadata()


def read_metadata(
    directory: str | os.PathLike[str], open_path: Callable[[Path], OpenFile] = open_file
) -> CheckpointMetadata:
    """Return the tensors and objects of a checkpoint and their places in its files.

    `open_path` opens the file, e.g. with verification. A rank reads the index and the entries of
    its own tensors only. Raises CheckpointError that names the file if it is missing or damaged.
    """
    path = path_of(directory) / METADATA
    try:
        file = open_path(path)
        file.check_size()
        if file.descriptor is None:  # an object: one request instead of two for every tensor
            return decode_metadata(file.read(0, file.size), str(path))
        # Open as long as a tensor may read its entries.
        weakref.finalize(file, os.close, file.descriptor)
        return open_metadata(file.read, file.size, str(path))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path}: missing, so {path.parent} is not a complete checkpoint"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def decode_metadata(data: bytes, where: str) -> CheckpointMetadata:
    """Decode the content of a `.metadata`."""
    return open_metadata(
        lambda position, length: data[position : position + length], len(data), where
    )


_KNOWN_FIELDS = (
    "state_dict_metadata",
    "storage_data",
    "storage_meta",
    "planner_data",
    "version",
    "all_local_plans",
)


def decode_dcp(data: bytes, where: str) -> CheckpointMetadata:
    """Decode the pickle of any version of DCP. Raises CheckpointError that names `where`."""
    root = unpickle(data, where, names=True)
    try:
        return _decode(root.state, where)
    except CheckpointError:
        raise
    except Exception as error:  # the pickle is intact, its content is not
        reason = escape_control_chars(f"{type(error).__name__}: {error}")[:300]
        raise CheckpointError(
            f"{where}: not the metadata of a distributed checkpoint ({reason})"
        ) from error


def _decode(root: Mapping[str, Any], where: str) -> CheckpointMetadata:
    files: dict[str, int] = {}  # name -> number
    places = _decode_places(root["storage_data"], files, where)
    names = tuple(files)
    result = CheckpointMetadata()
    for key, entry in root["state_dict_metadata"].items():
        key_name(key, f"{where}: a key")
        if type(entry).__qualname__ == "BytesStorageMetadata":
            file, position, length = places[key, None]
            result.objects[key] = Location(names[file], position, length)
            continue
        shape = _check_shape(entry.state["size"], key, where)
        what = f"{where}: {format_value(key)}"
        boxes = []
        for chunk in entry.state["chunks"]:
            offset = _check_shape(chunk.state["offsets"], key, where)
            extent = _check_shape(chunk.state["sizes"], key, where)
            if not len(offset) == len(extent) == len(shape):
                raise CheckpointError(
                    f"{what} of shape {shape} has a chunk at {offset} of {extent}"
                )
            boxes.append((offset, extent))
        box_table = BoxTable.of(boxes, len(shape))
        columns = (
            np.array([places[key, offset] for offset, _ in boxes], dtype=np.int64).reshape(-1, 3).T
        )
        table = ChunkTable(box_table.offset, box_table.shape, names, *columns)
        check_inside(table, shape, what)
        result.tensors[key] = StoredTensor(shape, _get_dtype(entry.state["properties"]), table)
    result.extra = {name: value for name, value in root.items() if name not in _KNOWN_FIELDS}
    check_bounded(result.extra, where)
    return result


def _decode_places(
    stored: Mapping[Any, Any], files: dict[str, int], where: str
) -> dict[tuple[str, Shape | None], tuple[int, int, int]]:
    """Return (file, position, length) by key and offset; the offset of an object is None.

    Adds the numbers of the files to `files`.
    """
    places: dict[tuple[str, Shape | None], tuple[int, int, int]] = {}
    for index, info in stored.items():
        key = index.state["fqn"]
        offset = index.state.get("offset")
        place = info.state
        if place.get("transform_descriptors"):
            raise CheckpointError(
                f"{where}: {format_value(key)} was written through DCP extensions (compression)"
            )
        file = place["relative_path"]
        position = place["offset"]
        length = place["length"]
        if file not in files:
            files[file_name(file, f"{where}: {format_value(key)}: its file")] = len(files)
        if not (
            type(position) is type(length) is int
            and 0 <= position <= MAX_COUNT
            and 0 <= length <= MAX_COUNT
        ):
            refuse(
                f"{where}: {format_value(key)}: its location",
                (position, length),
                f"two whole numbers from 0 to {MAX_COUNT}",
            )
        places[key, None if offset is None else _check_shape(offset, key, where)] = (
            files[file],
            position,
            length,
        )
    return places


def _check_shape(value: Any, key: str, where: str) -> Shape:
    is_shape = type(value) is tuple and len(value) <= MAX_RANK
    if not is_shape or not {int}.issuperset(map(type, value)) or min(value, default=0) < 0:
        raise CheckpointError(
            f"{where}: {format_value(key)} has a shape or an offset {format_value(value)}"
        )
    shape: Shape = value
    return shape


def _get_dtype(properties: Placeholder) -> str:
    state: Any = properties.state
    dtype = state["dtype"] if isinstance(state, dict) else state[0]
    if not isinstance(dtype, DtypeName):
        raise TypeError(f"dtype {format_value(dtype)}")
    return dtype
