"""Encoding of our `.metadata`, once per structure of the state.

Everything about tensors is encoded when the structure is planned. A later save encodes the
locations of its objects, and patches names of files and positions where they have changed.
`metadata_index.py` describes the format.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import xxhash

from megatron.core.dist_checkpointing.format.checksums import split_into_blocks
from megatron.core.dist_checkpointing.format.metadata import (
    CheckpointMetadata,
    ChunkTable,
    Location,
)
from megatron.core.dist_checkpointing.format.metadata_index import (
    FOOTER,
    INDEX_CLASS,
    INFO_CLASS,
    MAGIC,
    NAMES,
    NUM_CLASSES,
    TENSOR_CLASS,
    BoxList,
    Part,
    PlaceList,
    choose_widths,
    encode_get,
    encode_instance,
    encode_number,
    encode_size,
    encode_text,
    make_box_entry,
    make_place_entry,
)


def _encode_global(module: str, name: str) -> bytes:
    """Return the opcode of a class or function (GLOBAL)."""
    return f"c{module}\n{name}\n".encode()


# DCP's classes by name: importing them would import DTensor and sympy, which takes a third as long
# as importing torch.
_dcp = partial(_encode_global, "torch.distributed.checkpoint.metadata")
_CLASSES = (  # shared by the entries
    _encode_global("torch", "Size"),
    _dcp("ChunkStorageMetadata"),
    _dcp("MetadataIndex"),
    _encode_global("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    _dcp("TensorStorageMetadata"),
)
assert len(_CLASSES) == NUM_CLASSES
BYTES = _dcp("BytesStorageMetadata") + b")\x81"
STORAGE_META = _dcp("StorageMeta") + b")\x81}("
STORAGE_META += b"".join(
    encode_text(name) + b"N" for name in ("checkpoint_id", "save_id", "load_id")
)
STORAGE_META += encode_text("modules") + b"]ub"


def encode_tensor_properties(dtype: str) -> bytes:
    """Encode DCP's TensorProperties of a dtype.

    Their state is (dtype, layout, requires_grad, memory format, pin_memory).
    """
    layout = (
        _encode_global("torch.serialization", "_get_layout")
        + encode_text("torch.strided")
        + b"\x85R"
    )
    contiguous = _dcp("_MEM_FORMAT_ENCODING") + b"K\0\x85R"
    state = b"(" + _encode_global("torch", dtype) + layout + b"\x89" + contiguous + b"\x89t"
    return _dcp("TensorProperties") + b")\x81" + state + b"b"


class _Stream:
    """Parts of the file, and their size."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0

    def add(self, *parts: Part) -> int:
        """Append opcodes and return the position after them."""
        for part in parts:
            assert isinstance(part, bytes)
            self.parts.append(part)
            self.size += len(part)
        return self.size

    def extend(self, other: _Stream) -> None:
        self.parts += other.parts
        self.size += other.size


class _SharedValues(NamedTuple):
    """Values in the memo that entries share, so that every entry is short and of fixed length."""

    first_file: int  # memo number of the first file name
    first_key: int  # memo number of the first key of a tensor
    properties: dict[str, int]  # name of a dtype -> memo number of its TensorProperties
    number: int  # of all shared values: the next memo number


class _FileNames(NamedTuple):
    """The names of all files with tensors, encoded."""

    names: Sequence[str]
    head: _Stream  # the pickle up to and including all shared values
    sizes: bytes  # names and sizes, for the index


class _Positions(NamedTuple):
    """The part of the index with the positions of the entries of tensors."""

    starts: tuple[int, int]  # of the sections with boxes and with places
    boxes: bytes
    tensors: bytes


class MetadataEncoder:
    """Encodes `.metadata` for saves with the same tensors; not safe for several threads at once.

    The entries of tensors refer to files by their memo numbers, so they do not depend on the names
    of the files, and neither names nor objects change their length.
    """

    def __init__(self, metadata: CheckpointMetadata) -> None:
        tensors = metadata.tensors
        self._keys = list(tensors)
        self.files: Sequence[str] = ()
        if tensors:
            self.files = next(iter(tensors.values())).chunks.files
        self._dtypes = list(dict.fromkeys(tensor.dtype_name for tensor in tensors.values()))
        sizes = metadata.tensor_file_sizes()
        self._file_sizes = [sizes.get(file, 0) for file in self.files]

        # The sections of the pickle with the entries of tensors. Positions are relative to them.
        self._shared = self._number_shared_values()
        self._box_lists: list[BoxList] = []
        lists, self._boxes = self._encode_boxes(metadata)
        self._planner_data = _Stream()
        for key in tensors:
            _write_planner_data(self._planner_data, key)
        self._place_lists, self._places = self._encode_places(metadata, lists)

        # The parts that depend on names and positions, as encoded last
        self._names: _FileNames | None = None
        self._positions: _Positions | None = None

    def encode(
        self, objects: Mapping[str, Location], files: Sequence[str] | None = None
    ) -> list[bytes]:
        """Return the pickle that DCP and Megatron-core read, and our index, in blocks.

        `files` are the new names of `self.files`, if they are renamed.
        """
        names = self._encode_file_names(self.files if files is None else files)
        stream = _Stream()
        stream.extend(names.head)

        # DCP's Metadata, field by field.
        boxes_start = stream.add(
            _dcp("Metadata"), b")\x81}(", encode_text("state_dict_metadata"), b"}"
        )
        stream.extend(self._boxes)
        for key in objects:
            stream.add(encode_text(key), BYTES, b"s")
        # A flat dictionary of all keys, which older versions of torch require.
        stream.add(encode_text("planner_data"), b"}")
        stream.extend(self._planner_data)
        for key in objects:
            _write_planner_data(stream, key)
        places_start = stream.add(encode_text("storage_data"), b"}")
        stream.extend(self._places)
        for key, location in objects.items():
            stream.add(_encode_object_location(key, location))
        stream.add(encode_text("storage_meta"), STORAGE_META)
        stream.add(encode_text("version"), encode_text("1.0.0"))
        end = stream.add(b"ub.")  # SETITEMS, BUILD, STOP

        # The index after the pickle, for our own reader.
        positions = self._encode_positions(boxes_start, places_start)
        index = _encode_json_object(
            files=names.sizes,
            memo=_encode_json((self._shared.first_file, self._shared.first_key)),
            boxes=positions.boxes,
            tensors=positions.tensors,
            objects=_encode_json_object(
                **{key: _encode_json(location) for key, location in objects.items()}
            ),
        )
        footer = FOOTER.pack(end, len(index), xxhash.xxh3_64_intdigest(index), MAGIC)
        stream.add(index, footer)
        return list(split_into_blocks(stream.parts))

    def _number_shared_values(self) -> _SharedValues:
        """Number the values that `_encode_file_names` stores in the memo, in the same order."""
        first_file = NUM_CLASSES + len(NAMES)
        first_key = first_file + len(self.files)
        number = first_key + len(self._keys)
        properties = {}
        for dtype in self._dtypes:
            properties[dtype] = number
            number += 1
        return _SharedValues(first_file, first_key, properties, number)

    def _encode_file_names(self, names: Sequence[str]) -> _FileNames:
        """Encode the head of the pickle: classes and names, files, keys, and dtypes."""
        if self._names is not None and self._names.names == names:
            return self._names
        assert len(names) == len(self.files), (len(names), len(self.files))
        values = [*_CLASSES, *map(encode_text, NAMES), *map(encode_text, names)]
        values += map(encode_text, self._keys)
        values += map(encode_tensor_properties, self._dtypes)
        assert len(values) == self._shared.number
        head = _Stream()
        head.add(b"\x80\4")  # PROTO 4
        for number, value in enumerate(values):
            # BINPUT or LONG_BINPUT, and POP
            put = b"q" + bytes([number]) if number < 256 else b"r" + struct.pack("<I", number)
            head.add(value, put, b"0")
        sizes = zip(names, self._file_sizes, strict=True)
        self._names = _FileNames(names, head, _encode_json_list(sizes))
        return self._names

    def _encode_boxes(self, metadata: CheckpointMetadata) -> tuple[list[int], _Stream]:
        """Encode shape, dtype and boxes of each tensor.

        Returns the number of each tensor's box list, and the section.
        """
        section = _Stream()
        memo = self._shared.number
        known: dict[Any, tuple[int, int]] = {}  # boxes -> number of the list, memo number
        lists = []
        for key_memo, tensor in enumerate(metadata.tensors.values(), self._shared.first_key):
            table = tensor.chunks
            size = encode_size(map(encode_number, tensor.shape))
            properties = encode_get(self._shared.properties[tensor.dtype_name])
            *head, end = encode_instance(
                TENSOR_CLASS, properties=[properties], size=size, chunks=[]
            )
            section.add(encode_get(key_memo), *head)
            # A parameter and its optimizer state have the same boxes. One list for the four of
            # them keeps the file small.
            content = (table.offset.shape, table.offset.tobytes(), table.shape.tobytes())
            if content in known:
                number, list_memo = known[content]
                section.add(encode_get(list_memo))
            else:
                number = len(self._box_lists)
                known[content] = (number, memo)
                self._box_lists.append(_write_boxes(section, table, memo))
                # The memo contains the list, followed by the offset of each box.
                memo += 1 + len(table)
            lists.append(number)
            section.add(end, b"s")  # SETITEM
        return lists, section

    def _encode_places(
        self, metadata: CheckpointMetadata, lists: list[int]
    ) -> tuple[list[PlaceList], _Stream]:
        """Encode the location of each box."""
        section = _Stream()
        places = []
        shared = self._shared
        for number, (key, tensor) in enumerate(metadata.tensors.items()):
            table = tensor.chunks
            widths = choose_widths(table.position, table.length)
            start = section.add(b"(")  # MARK
            places.append(
                PlaceList(key, tensor.shape, tensor.dtype_name, lists[number], start, widths)
            )
            # A row per box: memo numbers of key, offset and file, position, length.
            keys = np.full(len(table), shared.first_key + number)
            memos = np.arange(len(table)) + self._box_lists[lists[number]].first
            columns = [keys, memos, table.file + shared.first_file, table.position, table.length]
            entry = make_place_entry(*widths)
            section.add(entry.encode(columns), b"u")  # SETITEMS
        return places, section

    def _encode_positions(self, boxes_start: int, places_start: int) -> _Positions:
        """Encode the lists of the index with positions in the file."""
        starts = (boxes_start, places_start)
        if self._positions is None or self._positions.starts != starts:
            boxes = [
                boxes._replace(position=boxes_start + boxes.position) for boxes in self._box_lists
            ]
            places = [
                places._replace(position=places_start + places.position)
                for places in self._place_lists
            ]
            self._positions = _Positions(
                starts, _encode_json_list(boxes), _encode_json_list(places)
            )
        return self._positions


def encode_metadata(metadata: CheckpointMetadata) -> list[bytes]:
    """Encode `.metadata`; return blocks."""
    return MetadataEncoder(metadata).encode(metadata.objects)


def _write_boxes(section: _Stream, table: ChunkTable, memo: int) -> BoxList:
    """Append DCP's list of the boxes of a tensor, which gets number `memo` in the memo."""
    # EMPTY_LIST, LONG_BINPUT, MARK, the boxes, APPENDS
    start = section.add(b"]r", struct.pack("<I", memo), b"(")
    offset = table.offset.T  # [dims, boxes]
    shape = table.shape.T
    boxes = BoxList(
        position=start,
        number=len(table),
        offset=choose_widths(*offset),
        shape=choose_widths(*shape),
        first=memo + 1,
    )
    memos = np.arange(len(table)) + boxes.first
    entry = make_box_entry(boxes.offset, boxes.shape)
    section.add(entry.encode([*offset, memos, *shape]), b"e")
    return boxes


def _write_planner_data(stream: _Stream, key: str) -> None:
    text = encode_text(key)
    stream.add(text, text, b"\x85s")  # TUPLE1, SETITEM


# The opcodes of an object's entry in DCP's storage data, around the four values that vary.
_HOLE = b"<value>"
_OBJECT_ENTRY: list[Any] = [
    *encode_instance(INDEX_CLASS, fqn=[_HOLE], index=[b"N"]),
    *encode_instance(INFO_CLASS, relative_path=[_HOLE], offset=[_HOLE], length=[_HOLE]),
    b"s",  # SETITEM
]
_OBJECT_PIECES = b"".join(_OBJECT_ENTRY).split(_HOLE)


def _encode_object_location(key: str, location: Location) -> bytes:
    """Return the entry of an object in DCP's storage data."""
    before_key, before_file, before_offset, before_length, end = _OBJECT_PIECES
    return b"".join(
        (
            before_key,
            encode_text(key),
            before_file,
            encode_text(location.file),
            before_offset,
            encode_number(location.position),
            before_length,
            encode_number(location.length),
            end,
        )
    )


def _encode_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


# At scale the index is megabytes of many small values. They are encoded one by one, so that neither
# the encoder nor the garbage collector holds the interpreter's lock for long.
def _encode_json_list(values: Iterable[Any]) -> bytes:
    return b"[" + b",".join(map(_encode_json, values)) + b"]"


def _encode_json_object(**encoded: bytes) -> bytes:
    """Return an object whose values are encoded already."""
    fields = []
    for name, value in encoded.items():
        fields.append(_encode_json(name) + b":" + value)
    return b"{" + b",".join(fields) + b"}"
