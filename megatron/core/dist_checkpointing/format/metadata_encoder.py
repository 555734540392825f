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

from megatron.core.dist_checkpointing.box_table import BoxTable, Location
from megatron.core.dist_checkpointing.format.checksums import split_into_blocks
from megatron.core.dist_checkpointing.format.metadata import CheckpointMetadata
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
BYTES = _dcp("BytesStorageMetadata") + b")\x81"  # EMPTY_TUPLE, NEWOBJ


def _encode_storage_meta() -> bytes:
    """Encode DCP's StorageMeta without values."""
    encoded = _dcp("StorageMeta") + b")\x81}("  # EMPTY_TUPLE, NEWOBJ, EMPTY_DICT, MARK
    for name in ("checkpoint_id", "save_id", "load_id"):
        encoded += encode_text(name) + b"N"
    encoded += encode_text("modules") + b"]"
    return encoded + b"ub"  # SETITEMS, BUILD


STORAGE_META = _encode_storage_meta()


def encode_tensor_properties(dtype: str) -> bytes:
    """Encode DCP's TensorProperties of a dtype.

    Their state is (dtype, layout, requires_grad, memory format, pin_memory).
    """
    call = b"\x85R"  # TUPLE1 (the arguments), REDUCE
    false = b"\x89"
    layout = _encode_global("torch.serialization", "_get_layout")
    layout += encode_text("torch.strided") + call
    contiguous = _dcp("_MEM_FORMAT_ENCODING") + b"K\0" + call
    fields = (_encode_global("torch", dtype), layout, false, contiguous, false)
    state = b"(" + b"".join(fields) + b"t"  # MARK, TUPLE
    instance = _dcp("TensorProperties") + b")\x81"  # EMPTY_TUPLE, NEWOBJ
    return instance + state + b"b"  # BUILD


class _Stream:
    """Parts of the file, and their size."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0

    def add(self, *parts: Part) -> int:
        """Append opcodes. Returns the position after them."""
        for part in parts:
            assert isinstance(part, bytes)
            self.parts.append(part)
            self.size += len(part)
        return self.size

    def extend(self, other: _Stream) -> None:
        """Append the parts of another stream, without copying them."""
        self.parts += other.parts
        self.size += other.size


class _SharedValues(NamedTuple):
    """Values in the memo that entries share, so that every entry is short and of fixed length."""

    first_file: int  # memo number of the first file name
    first_key: int  # memo number of the first key of a tensor
    properties: dict[str, int]  # name of a dtype -> memo number of its TensorProperties
    next_number: int  # the first memo number after all shared values


class _FileNames(NamedTuple):
    """The names of all files with tensors, encoded."""

    names: Sequence[str]
    head: _Stream  # the pickle up to and including all shared values
    sizes: bytes  # names and sizes, for the index


class _Positions(NamedTuple):
    """The part of the index with the positions of the entries of tensors."""

    starts: tuple[int, int]  # positions of the sections with boxes and with places
    boxes: bytes  # JSON list of `BoxList`
    tensors: bytes  # JSON list of `PlaceList`


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
        dtypes = [tensor.dtype_name for tensor in tensors.values()]
        self._dtypes = list(dict.fromkeys(dtypes))  # distinct, in order
        sizes = metadata.tensor_file_sizes()
        self._file_sizes = [sizes.get(file, 0) for file in self.files]

        # The sections of the pickle with the entries of tensors. Positions are relative to them.
        self._shared = self._number_shared_values()
        self._box_lists: list[BoxList] = []
        list_of_tensor, self._boxes = self._encode_boxes(metadata)
        self._planner_data = _Stream()
        for key in tensors:
            _write_planner_data(self._planner_data, key)
        self._place_lists, self._places = self._encode_places(metadata, list_of_tensor)

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
        stream.add(_dcp("Metadata"), b")\x81}(")  # EMPTY_TUPLE, NEWOBJ, EMPTY_DICT, MARK

        # state_dict_metadata: shape, dtype and boxes of tensors, and the kind of objects
        boxes_start = stream.add(encode_text("state_dict_metadata"), b"}")
        stream.extend(self._boxes)
        for key in objects:
            stream.add(encode_text(key), BYTES, b"s")  # SETITEM

        # planner_data: a flat dictionary of all keys, which older versions of torch require
        stream.add(encode_text("planner_data"), b"}")
        stream.extend(self._planner_data)
        for key in objects:
            _write_planner_data(stream, key)

        # storage_data: the location of each box and object
        places_start = stream.add(encode_text("storage_data"), b"}")
        stream.extend(self._places)
        for key, location in objects.items():
            stream.add(_encode_object_location(key, location))

        # The other fields
        stream.add(encode_text("storage_meta"), STORAGE_META)
        stream.add(encode_text("version"), encode_text("1.0.0"))
        end = stream.add(b"ub.")  # SETITEMS, BUILD, STOP

        # The index after the pickle, for our own reader
        positions = self._encode_positions(boxes_start, places_start)
        locations = {key: _encode_json(location) for key, location in objects.items()}
        index = _encode_json_object(
            files=names.sizes,
            memo=_encode_json((self._shared.first_file, self._shared.first_key)),
            boxes=positions.boxes,
            tensors=positions.tensors,
            objects=_encode_json_object(**locations),
        )
        digest = xxhash.xxh3_64_intdigest(index)
        stream.add(index, FOOTER.pack(end, len(index), digest, MAGIC))
        return list(split_into_blocks(stream.parts))

    def _number_shared_values(self) -> _SharedValues:
        """Number the values that `_encode_file_names` stores in the memo, in the same order."""
        first_file = NUM_CLASSES + len(NAMES)
        first_key = first_file + len(self.files)
        first_dtype = first_key + len(self._keys)
        next_number = first_dtype + len(self._dtypes)
        properties = dict(zip(self._dtypes, range(first_dtype, next_number), strict=True))
        return _SharedValues(first_file, first_key, properties, next_number)

    def _encode_file_names(self, names: Sequence[str]) -> _FileNames:
        """Encode the head of the pickle: classes and names, files, keys, and dtypes."""
        if self._names is not None and self._names.names == names:
            return self._names
        assert len(names) == len(self.files), (len(names), len(self.files))

        # The shared values, in the order of their memo numbers
        values = list(_CLASSES)
        values += map(encode_text, NAMES)
        values += map(encode_text, names)
        values += map(encode_text, self._keys)
        values += map(encode_tensor_properties, self._dtypes)
        assert len(values) == self._shared.next_number

        head = _Stream()
        head.add(b"\x80\4")  # PROTO 4
        for number, value in enumerate(values):
            head.add(value, _encode_put(number), b"0")  # POP
        names_and_sizes = zip(names, self._file_sizes, strict=True)
        self._names = _FileNames(names, head, _encode_json_list(names_and_sizes))
        return self._names

    def _encode_boxes(self, metadata: CheckpointMetadata) -> tuple[list[int], _Stream]:
        """Encode shape, dtype and boxes of each tensor.

        Returns the index of each tensor's list in `_box_lists`, and the section.
        """
        shared = self._shared
        section = _Stream()
        next_memo = shared.next_number
        # A parameter and its optimizer state have the same boxes. One list for the four of them
        # keeps the file small. Content of a table -> (index in `_box_lists`, memo number)
        known: dict[Any, tuple[int, int]] = {}
        list_of_tensor = []
        for key_memo, tensor in enumerate(metadata.tensors.values(), shared.first_key):
            # The head of the entry: everything before the boxes
            size = encode_size(map(encode_number, tensor.shape))
            properties = encode_get(shared.properties[tensor.dtype_name])
            *head, end = encode_instance(
                TENSOR_CLASS, properties=[properties], size=size, chunks=[]
            )
            section.add(encode_get(key_memo), *head)

            # The boxes, or a reference to the same ones
            table = tensor.chunks
            content = (table.offset.shape, table.offset.tobytes(), table.shape.tobytes())
            if content in known:
                index, list_memo = known[content]
                section.add(encode_get(list_memo))
            else:
                index = len(self._box_lists)
                known[content] = (index, next_memo)
                self._box_lists.append(_write_boxes(section, table, next_memo))
                # The memo contains the list, followed by the offset of each box.
                next_memo += 1 + len(table)
            list_of_tensor.append(index)
            section.add(end, b"s")  # SETITEM
        return list_of_tensor, section

    def _encode_places(
        self, metadata: CheckpointMetadata, list_of_tensor: list[int]
    ) -> tuple[list[PlaceList], _Stream]:
        """Encode the location of each box."""
        shared = self._shared
        section = _Stream()
        place_lists = []
        for number, (key, tensor) in enumerate(metadata.tensors.items()):
            table = tensor.chunks
            index = list_of_tensor[number]
            widths = choose_widths(table.position, table.length)
            start = section.add(b"(")  # MARK
            place_lists.append(
                PlaceList(key, tensor.shape, tensor.dtype_name, index, start, widths)
            )

            # A row per box: memo numbers of key, offset and file, then position and length
            num_boxes = len(table)
            keys = np.full(num_boxes, shared.first_key + number)
            offsets = np.arange(num_boxes) + self._box_lists[index].first
            files = table.file + shared.first_file
            entry = make_place_entry(*widths)
            rows = entry.encode([keys, offsets, files, table.position, table.length])
            section.add(rows, b"u")  # SETITEMS
        return place_lists, section

    def _encode_positions(self, boxes_start: int, places_start: int) -> _Positions:
        """Encode the lists of the index, with positions in the file."""
        starts = (boxes_start, places_start)
        if self._positions is not None and self._positions.starts == starts:
            return self._positions

        # The lists have positions in their sections.
        box_lists = []
        for boxes in self._box_lists:
            box_lists.append(boxes._replace(position=boxes_start + boxes.position))
        place_lists = []
        for places in self._place_lists:
            place_lists.append(places._replace(position=places_start + places.position))
        self._positions = _Positions(
            starts=starts,
            boxes=_encode_json_list(box_lists),
            tensors=_encode_json_list(place_lists),
        )
        return self._positions


def encode_metadata(metadata: CheckpointMetadata) -> list[bytes]:
    """Encode `.metadata`; return blocks."""
    return MetadataEncoder(metadata).encode(metadata.objects)


def _write_boxes(section: _Stream, table: BoxTable, memo: int) -> BoxList:
    """Append DCP's list of the boxes of a tensor, which gets number `memo` in the memo."""
    start = section.add(b"]r", struct.pack("<I", memo), b"(")  # EMPTY_LIST, LONG_BINPUT, MARK
    offset = table.offset.T  # [dims, boxes]
    shape = table.shape.T  # [dims, boxes]
    boxes = BoxList(
        position=start,
        number=len(table),
        offset=choose_widths(*offset),
        shape=choose_widths(*shape),
        first=memo + 1,
    )
    memos = np.arange(len(table)) + boxes.first
    entry = make_box_entry(boxes.offset, boxes.shape)
    rows = entry.encode([*offset, memos, *shape])
    section.add(rows, b"e")  # APPENDS
    return boxes


def _write_planner_data(stream: _Stream, key: str) -> None:
    """Append the entry `key: (key,)`."""
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


def _encode_put(number: int) -> bytes:
    """Return the opcode that stores a value in the memo (BINPUT or LONG_BINPUT)."""
    if number < 256:
        return b"q" + bytes([number])
    return b"r" + struct.pack("<I", number)


def _encode_json(value: Any) -> bytes:
    """Return JSON without spaces."""
    return json.dumps(value, separators=(",", ":")).encode()


def _encode_json_list(values: Iterable[Any]) -> bytes:
    """Return a list whose values are encoded one by one.

    At scale the index is megabytes of many small values. This way, neither the encoder nor the
    garbage collector holds the interpreter's lock for long.
    """
    return b"[" + b",".join(map(_encode_json, values)) + b"]"


def _encode_json_object(**encoded: bytes) -> bytes:
    """Return an object whose values are encoded already."""
    fields = []
    for name, value in encoded.items():
        fields.append(_encode_json(name) + b":" + value)
    return b"{" + b",".join(fields) + b"}"
