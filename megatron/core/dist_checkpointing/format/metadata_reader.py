"""Reads `.metadata`, of this program or of any version of DCP.

Ours ends with an index (`metadata_writer.py`). A rank reads the index, and the entries of a tensor when it first looks
at that. These must be, byte by byte, what would be written for them, so that DCP cannot find anything else in the file
than we do. A file without an index is unpickled as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
import xxhash

from megatron.core.dist_checkpointing.boxes import BoxTable, Shape
from megatron.core.dist_checkpointing.format.metadata import (
    CheckpointMetadata,
    ChunkTable,
    Location,
    StoredChunk,
    StoredTensor,
    check_inside,
    check_location,
)
from megatron.core.dist_checkpointing.format.metadata_writer import (
    FOOTER,
    INTEGERS,
    MAGIC,
    BoxList,
    Entry,
    PlaceList,
    box_entry,
    place_entry,
)
from megatron.core.dist_checkpointing.format.safe_globals import Placeholder
from megatron.core.dist_checkpointing.format.schema import (
    COUNT,
    MAX_RANK,
    SHAPE,
    Check,
    CheckpointError,
    file_name,
    mapping,
    one_of,
    parse_json,
    printable,
    record,
    sequence,
    shown,
)
from megatron.core.dist_checkpointing.format.schema import key as key_name
from megatron.core.dist_checkpointing.format.unpickler import check_bounded, safe_loads

Read = Callable[[int, int], bytes]  # (position, length) -> bytes, fewer at the end of the file


def open_metadata(read: Read, size: int, where: str) -> CheckpointMetadata:
    """The `.metadata` of `size` bytes that `read` reads, now or later. Raises CheckpointError that names `where`."""
    footer = read(size - FOOTER.size, FOOTER.size) if size >= FOOTER.size else b""
    if footer[-len(MAGIC) :] != MAGIC:
        return decode_dcp(read(0, size), where)
    position, length, digest, _ = FOOTER.unpack(footer)
    content = read(position, length) if position + length <= size else b""
    if xxhash.xxh3_64_intdigest(content) != digest:
        raise CheckpointError(f"{where}: damaged: its index does not have the checksum that it ends with")
    return _Index(read, content, size, where).metadata()


def decode_metadata(data: bytes, where: str) -> CheckpointMetadata:
    """As `open_metadata`, for a file in memory."""
    return open_metadata(lambda position, length: data[position : position + length], len(data), where)


def _tuple_of(*checks: Check) -> Check:
    def check(value: Any, where: str) -> Any:
        sequence(lambda item, _: item, len(checks), len(checks))(value, where)
        for item, check_item in zip(value, checks, strict=True):
            check_item(item, where)
        return value

    return check


_DTYPES = {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
_WIDTH = one_of(*INTEGERS)
_WIDTHS = sequence(_WIDTH, MAX_RANK)
_INDEX_FIELDS = record(
    {
        "files": sequence(_tuple_of(file_name, COUNT)),
        "memo": _tuple_of(COUNT, COUNT),
        "boxes": sequence(_tuple_of(COUNT, COUNT, _WIDTHS, _WIDTHS, COUNT)),
        "tensors": sequence(_tuple_of(key_name, SHAPE, one_of(*_DTYPES), COUNT, COUNT, _tuple_of(_WIDTH, _WIDTH))),
        "objects": mapping(_tuple_of(file_name, COUNT, COUNT), key_name),
    }
)


class _Index:
    """What stands behind the pickle."""

    def __init__(self, read: Read, content: bytes, size: int, where: str) -> None:
        fields = _INDEX_FIELDS(parse_json(content, f"{where}: its index"), f"{where}: its index")
        self._read, self._size, self._where = read, size, where
        self._files = tuple(dict(fields["files"]))
        self._first_file, self._first_key = fields["memo"]
        self._boxes = [BoxList(*boxes) for boxes in fields["boxes"]]
        self._known: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._fields = fields

    def metadata(self) -> CheckpointMetadata:
        """Not kept here: its tensors refer to this index, which closes the file when the last of them is gone."""
        result = CheckpointMetadata(tensor_sizes={file: end for file, end in self._fields["files"] if end})
        for number, entry in enumerate(self._fields["tensors"]):
            places = PlaceList(*entry)
            table = partial(self._table, number, places)
            result.tensors[places.key] = StoredTensor(tuple(places.shape), _DTYPES[places.dtype], table)
        result.objects = {key: Location(*place) for key, place in self._fields["objects"].items()}
        return result

    def _table(self, number: int, places: PlaceList) -> ChunkTable:
        what = f"{self._where}: {shown(places.key)}"
        try:
            boxes = self._boxes[places.boxes]
            offset, shape = self._read_boxes(places.boxes)
            if not offset.shape[1] == shape.shape[1] == len(places.shape):
                raise ValueError("boxes of another number of dimensions")
            entry = place_entry(self._first_key + number, *places.widths)
            memos, file, position, length = self._entries(entry, places.position, boxes.number, b"u")
            file -= self._first_file
            if not np.array_equal(memos, np.arange(boxes.number) + boxes.first):
                raise ValueError("places in another order than its boxes")
            if boxes.number and not (file.min() >= 0 and file.max() < len(self._files)):
                raise ValueError("a file that the index does not name")
            if min(position.min(initial=0), length.min(initial=0)) < 0:
                raise ValueError("a negative position")
            table = ChunkTable(offset, shape, self._files, file, position, length)
        except Exception as error:
            raise CheckpointError(f"{what}: damaged or not written by this program ({error})") from error
        check_inside(table, tuple(places.shape), what)
        return table

    def _read_boxes(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Offsets and shapes; parameter and moments share one list, which is read once."""
        if number not in self._known:
            boxes = self._boxes[number]
            dims = len(boxes.offset)
            columns = self._entries(box_entry(tuple(boxes.offset), tuple(boxes.shape)), *boxes[:2], b"e")
            if not np.array_equal(columns.pop(dims), np.arange(boxes.number) + boxes.first):
                raise ValueError("boxes in another order")
            table = np.stack(columns, axis=1) if columns else np.empty((boxes.number, 0), dtype=np.int64)
            self._known[number] = table[:, :dims], table[:, dims:]
        return self._known[number]

    def _entries(self, entry: Entry, position: int, count: int, end: bytes) -> list[np.ndarray]:
        """All between a MARK and the opcode `end`, which takes what is above the mark."""
        length = entry.size * count
        if not 0 < position <= position + length < self._size:
            raise ValueError("entries outside of the file")
        data = self._read(position - 1, length + 2)
        if data[:1] != b"(" or data[-1:] != end:
            raise ValueError("entries that begin or end elsewhere")
        return entry.decode(data[1:-1])


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


def _dtype_of(properties: Placeholder) -> torch.dtype:
    state = properties.state
    dtype = state["dtype"] if isinstance(state, dict) else state[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype {shown(dtype)}")
    return dtype
