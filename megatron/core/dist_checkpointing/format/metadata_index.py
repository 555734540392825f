"""Our `.metadata`: DCP's pickle, with an index for reading the entries of single tensors.

At 16,384 ranks a checkpoint has millions of stored boxes, of which a rank needs those of a few
tensors. So all entries of a tensor have the same length: the same opcodes with different numbers in
fixed positions, written and read as one array. DCP and Megatron-core unpickle the file like any
other. An index follows after the end of the pickle, where they do not look: JSON with the positions
of the entries of each tensor, then position, length and xxh3_64 of that JSON and a magic number.

A rank reads the index, and the entries of a tensor on first access. These must be byte for byte
those that this program would write, so that DCP cannot find anything in the file that this reader
does not. A file without an index is unpickled as a whole.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import xxhash

from megatron.core.dist_checkpointing.format import schema
from megatron.core.dist_checkpointing.format.checksums import split_into_blocks
from megatron.core.dist_checkpointing.format.metadata import (
    CheckpointMetadata,
    ChunkTable,
    Location,
    StoredTensor,
    check_inside,
)
from megatron.core.dist_checkpointing.format.safe_globals import DTYPE_NAME

# Opcodes, or opcode and dtype of a number that varies between entries.
Part = bytes | tuple[bytes, str]

FOOTER = struct.Struct("<QQQ8s")  # position, length and hash of the index, magic number
MAGIC = b"MGTNIDX1"

# Values that entries share are at the beginning of the pickle, with numbers 0, 1, ... in its memo.
_NUM_CLASSES = 5
_NAMES = (
    "offsets",
    "sizes",
    "fqn",
    "offset",
    "index",
    "relative_path",
    "length",
    "properties",
    "size",
    "chunks",
)
# BINGET of each shared value.
_SIZE, _CHUNK, _INDEX, _INFO, _TENSOR = (b"h" + bytes([i]) for i in range(_NUM_CLASSES))
_NAME = {name: b"h" + bytes([i]) for i, name in enumerate(_NAMES, _NUM_CLASSES)}

# Opcode and dtype of an integer, by width in bytes.
INTEGERS = {
    1: (b"K", "<u1"),
    2: (b"M", "<u2"),
    4: (b"J", "<i4"),
    8: (b"\x8a\x08", "<i8"),
}
# Opcodes that read and write the memo.
_GET = (b"j", "<u4")
_PUT = (b"r", "<u4")


class Entry:
    """Template of a piece of a pickle that repeats with different numbers in fixed positions."""

    def __init__(self, *parts: Part) -> None:
        # The opcodes, with zeros in the positions of the numbers.
        self._template = b""
        offsets = []
        kinds = []
        for part in parts:
            if isinstance(part, bytes):
                self._template += part
                continue
            opcode, kind = part
            self._template += opcode
            offsets.append(len(self._template))
            kinds.append(kind)
            self._template += bytes(np.dtype(kind).itemsize)
        self.size = len(self._template)

        # A structured dtype of the same size, with a field for each number.
        self._names = tuple(map(str, range(len(kinds))))
        self._dtype = np.dtype(
            {"names": self._names, "formats": kinds, "offsets": offsets, "itemsize": self.size}  # type: ignore[arg-type]
        )

    def encode(self, columns: Sequence[np.ndarray]) -> bytes:
        """Encode one entry per row; there is a column for each number."""
        result = bytearray(self._template * len(columns[0]))
        view = np.frombuffer(result, dtype=self._dtype)
        for name, column in zip(self._names, columns, strict=True):
            view[name] = column
        return bytes(result)

    def decode(self, data: bytes) -> list[np.ndarray]:
        """Decode entries. Raises ValueError for bytes that `encode` would not have written."""
        view = np.frombuffer(data, dtype=self._dtype)
        columns = [view[name].astype(np.int64) for name in self._names]
        if self.encode(columns) != data:
            raise ValueError("entries that this program does not write")
        return columns


def _encode_instance(kind: bytes, **fields: Sequence[Part]) -> list[Part]:
    """Return the opcodes of an object with these attributes, as in `object.__reduce_ex__`."""
    # EMPTY_TUPLE, NEWOBJ, EMPTY_DICT, MARK.
    parts: list[Part] = [kind + b")\x81}("]
    for name, value in fields.items():
        parts += [_NAME[name], *value]
    # SETITEMS, BUILD.
    return [*parts, b"ub"]


def _encode_size(extents: Iterable[Part]) -> list[Part]:
    """Return the opcodes of a torch.Size."""
    parts = list(extents)
    call = b"\x85R"  # TUPLE1 (the arguments), REDUCE
    if len(parts) > 3:
        return [_SIZE, b"(", *parts, b"t" + call]  # MARK, TUPLE
    make_tuple = (b")", b"\x85", b"\x86", b"\x87")[len(parts)]  # EMPTY_TUPLE, TUPLE1, 2, 3
    return [_SIZE, *parts, make_tuple + call]


@lru_cache
def make_box_entry(offset: tuple[int, ...], shape: tuple[int, ...]) -> Entry:
    """Return the template of a box in DCP's list of boxes of a tensor.

    `offset` and `shape` are widths of integers. The offset is stored in the memo.
    """
    offsets = _encode_size(INTEGERS[width] for width in offset)
    sizes = _encode_size(INTEGERS[width] for width in shape)
    return Entry(*_encode_instance(_CHUNK, offsets=[*offsets, _PUT], sizes=sizes))


def make_place_entry(key: int, position: int, length: int) -> Entry:
    """Return the template of the location of a box.

    Key, offset and file are memo numbers; `position` and `length` are widths of integers.
    """
    index = _encode_instance(_INDEX, fqn=[_encode_get(key)], offset=[_GET], index=[b"N"])
    info = _encode_instance(
        _INFO, relative_path=[_GET], offset=[INTEGERS[position]], length=[INTEGERS[length]]
    )
    return Entry(*index, *info)


def _choose_widths(*columns: np.ndarray) -> tuple[int, ...]:
    """Return the width of the shortest opcode for each column of non-negative integers."""
    widths = []
    for column in columns:
        largest = int(column.max(initial=0))
        # The opcodes of 1 and 2 bytes are unsigned, the others signed.
        if largest < 1 << 8:
            widths.append(1)
        elif largest < 1 << 16:
            widths.append(2)
        elif largest < 1 << 31:
            widths.append(4)
        else:
            widths.append(8)
    return tuple(widths)


def _encode_get(number: int) -> bytes:
    """Return the opcode that pushes a value of the memo (LONG_BINGET)."""
    return b"j" + struct.pack("<I", number)


def _encode_number(value: int) -> bytes:
    """Return the opcode of an integer, in 8 bytes for any value (LONG1)."""
    return b"\x8a\x08" + struct.pack("<q", value)


def _encode_text(value: str) -> bytes:
    """Return the opcode of a text (BINUNICODE)."""
    encoded = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(encoded)) + encoded


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
assert len(_CLASSES) == _NUM_CLASSES
BYTES = _dcp("BytesStorageMetadata") + b")\x81"
STORAGE_META = _dcp("StorageMeta") + b")\x81}("
STORAGE_META += b"".join(
    _encode_text(name) + b"N" for name in ("checkpoint_id", "save_id", "load_id")
)
STORAGE_META += _encode_text("modules") + b"]ub"


def encode_tensor_properties(dtype: str) -> bytes:
    """Encode DCP's TensorProperties of a dtype.

    Their state is (dtype, layout, requires_grad, memory format, pin_memory).
    """
    layout = (
        _encode_global("torch.serialization", "_get_layout")
        + _encode_text("torch.strided")
        + b"\x85R"
    )
    contiguous = _dcp("_MEM_FORMAT_ENCODING") + b"K\0\x85R"
    state = b"(" + _encode_global("torch", dtype) + layout + b"\x89" + contiguous + b"\x89t"
    return _dcp("TensorProperties") + b")\x81" + state + b"b"


class BoxList(NamedTuple):
    """A list of boxes in the pickle, shared by tensors with the same boxes (e.g., moments)."""

    position: int
    number: int
    offset: tuple[int, ...]  # widths
    shape: tuple[int, ...]
    first: int  # memo number of the first offset


class PlaceList(NamedTuple):
    """A tensor in the index: the number of its box list, and the position of their locations."""

    key: str
    shape: Sequence[int]
    dtype: str
    boxes: int
    position: int
    widths: Sequence[int]


class _PickleWriter:
    """Writes the pickle, and counts the memo entries of its reader."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0
        self.memo = 0
        self.boxes: list[BoxList] = []
        self._lists: dict[Any, tuple[int, int]] = {}  # boxes -> number in `boxes`, memo number

    def add(self, *parts: Part) -> int:
        """Append opcodes and return the position after them."""
        for part in parts:
            assert isinstance(part, bytes)
            self.parts.append(part)
            self.size += len(part)
        return self.size

    def remember(self, values: Iterable[bytes]) -> int:
        """Store values in the memo and return the number of the first one."""
        first = self.memo
        for value in values:
            if self.memo < 256:
                put = b"q" + bytes([self.memo])  # BINPUT
            else:
                put = b"r" + struct.pack("<I", self.memo)  # LONG_BINPUT
            self.add(value, put, b"0")  # POP
            self.memo += 1
        return first

    def add_boxes(self, table: ChunkTable) -> int:
        """Append DCP's list of the boxes of a tensor; return its number in `boxes`."""
        # A parameter and its optimizer state have the same boxes. One list for the four of them
        # keeps the file small.
        content = (table.offset.shape, table.offset.tobytes(), table.shape.tobytes())
        if content in self._lists:
            number, memo = self._lists[content]
            self.add(_encode_get(memo))
            return number
        number = len(self.boxes)
        memo = self.memo
        self._lists[content] = (number, memo)

        # EMPTY_LIST, LONG_BINPUT, MARK, the boxes, APPENDS. The memo contains the list, followed by
        # the offset of each box.
        start = self.add(b"]r", struct.pack("<I", memo), b"(")
        offset = table.offset.T  # [dims, boxes]
        shape = table.shape.T
        boxes = BoxList(
            position=start,
            number=len(table),
            offset=_choose_widths(*offset),
            shape=_choose_widths(*shape),
            first=memo + 1,
        )
        self.boxes.append(boxes)
        memos = np.arange(len(table)) + boxes.first
        entry = make_box_entry(boxes.offset, boxes.shape)
        self.add(entry.encode([*offset, memos, *shape]), b"e")
        self.memo += 1 + len(table)
        return number


def encode_metadata(metadata: CheckpointMetadata) -> list[bytes]:
    """Encode the pickle that DCP and Megatron-core read, and our index; return blocks."""
    writer = _PickleWriter()
    writer.add(b"\x80\4")  # PROTO 4
    shared = _write_shared_values(writer, metadata)

    # DCP's Metadata, field by field.
    writer.add(_dcp("Metadata"), b")\x81}(")
    lists = _write_state_dict_metadata(writer, metadata, shared)
    _write_planner_data(writer, metadata)
    places = _write_storage_data(writer, metadata, shared, lists)
    writer.add(_encode_text("storage_meta"), STORAGE_META)
    writer.add(_encode_text("version"), _encode_text("1.0.0"))
    end = writer.add(b"ub.")  # SETITEMS, BUILD, STOP

    # The index after the pickle, for our own reader.
    index = _encode_index(metadata, shared, writer.boxes, places)
    writer.add(index, FOOTER.pack(end, len(index), xxhash.xxh3_64_intdigest(index), MAGIC))
    return list(split_into_blocks(writer.parts))


class _SharedValues(NamedTuple):
    """Values in the memo that entries share, so that every entry is short and of fixed length."""

    files: Sequence[str]
    first_file: int  # memo number of the first file name
    first_key: int  # memo number of the first key of a tensor
    properties: dict[str, int]  # name of a dtype -> memo number of its TensorProperties


def _write_shared_values(writer: _PickleWriter, metadata: CheckpointMetadata) -> _SharedValues:
    """Store shared values in the memo: classes and names, files, keys, and dtypes."""
    tensors = metadata.tensors
    writer.remember([*_CLASSES, *map(_encode_text, _NAMES)])
    files = next((tensor.chunks.files for tensor in tensors.values()), ())
    first_file = writer.remember(map(_encode_text, files))
    first_key = writer.remember(map(_encode_text, tensors))
    properties: dict[str, int] = {}
    for tensor in tensors.values():
        dtype = tensor.dtype_name
        if dtype not in properties:
            properties[dtype] = writer.remember([encode_tensor_properties(dtype)])
    return _SharedValues(files, first_file, first_key, properties)


def _write_state_dict_metadata(
    writer: _PickleWriter, metadata: CheckpointMetadata, shared: _SharedValues
) -> list[int]:
    """Write shape, dtype and boxes of each tensor, and the names of objects.

    Returns the number of each tensor's box list.
    """
    writer.add(_encode_text("state_dict_metadata"), b"}")
    lists = []
    for key_memo, tensor in enumerate(metadata.tensors.values(), shared.first_key):
        size = _encode_size(map(_encode_number, tensor.shape))
        properties = _encode_get(shared.properties[tensor.dtype_name])
        *head, end = _encode_instance(_TENSOR, properties=[properties], size=size, chunks=[])
        writer.add(_encode_get(key_memo), *head)
        lists.append(writer.add_boxes(tensor.chunks))
        writer.add(end, b"s")  # SETITEM
    for key in metadata.objects:
        writer.add(_encode_text(key), BYTES, b"s")
    return lists


def _write_planner_data(writer: _PickleWriter, metadata: CheckpointMetadata) -> None:
    """Write a flat dictionary of all keys, which older versions of torch require."""
    writer.add(_encode_text("planner_data"), b"}")
    for key in [*metadata.tensors, *metadata.objects]:
        writer.add(_encode_text(key), _encode_text(key), b"\x85s")  # TUPLE1, SETITEM


def _write_storage_data(
    writer: _PickleWriter, metadata: CheckpointMetadata, shared: _SharedValues, lists: list[int]
) -> list[PlaceList]:
    """Write the location of each box and of each object; return those of the boxes by tensor."""
    writer.add(_encode_text("storage_data"), b"}")
    places = []
    for number, (key, tensor) in enumerate(metadata.tensors.items()):
        table = tensor.chunks
        widths = _choose_widths(table.position, table.length)
        start = writer.add(b"(")  # MARK
        places.append(PlaceList(key, tensor.shape, tensor.dtype_name, lists[number], start, widths))
        # A row per box: memo number of its offset, memo number of its file, position, length.
        memos = np.arange(len(table)) + writer.boxes[lists[number]].first
        columns = [memos, table.file + shared.first_file, table.position, table.length]
        entry = make_place_entry(shared.first_key + number, *widths)
        writer.add(entry.encode(columns), b"u")  # SETITEMS
    for key, place in metadata.objects.items():
        writer.add(*_encode_instance(_INDEX, fqn=[_encode_text(key)], index=[b"N"]))
        info = _encode_instance(
            _INFO,
            relative_path=[_encode_text(place.file)],
            offset=[_encode_number(place.position)],
            length=[_encode_number(place.length)],
        )
        writer.add(*info, b"s")
    return places


def _encode_index(
    metadata: CheckpointMetadata,
    shared: _SharedValues,
    boxes: Iterable[BoxList],
    places: Iterable[PlaceList],
) -> bytes:
    """Encode the index: `_INDEX_FIELDS` is its schema."""
    sizes = metadata.tensor_file_sizes()
    objects = {key: _encode_json(place) for key, place in metadata.objects.items()}
    return _encode_json_object(
        files=_encode_json_list((file, sizes.get(file, 0)) for file in shared.files),
        memo=_encode_json((shared.first_file, shared.first_key)),
        boxes=_encode_json_list(boxes),
        tensors=_encode_json_list(places),
        objects=_encode_json_object(**objects),
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


def _check_tuple(*checks: schema.Check) -> schema.Check:
    """Accept a list with one entry per check."""

    def check(value: Any, where: str) -> Any:
        schema.sequence(schema.anything, len(checks), len(checks))(value, where)
        for item, check_item in zip(value, checks, strict=True):
            check_item(item, where)
        return value

    return check


def _check_dtype_name(value: Any, where: str) -> Any:
    schema.text(64)(value, where)
    if not DTYPE_NAME.fullmatch(value):
        schema.refuse(where, value, "the name of a dtype")
    return value


_WIDTH = schema.one_of(*INTEGERS)

_WIDTHS = schema.sequence(_WIDTH, schema.MAX_RANK)

_INDEX_FIELDS = schema.record(
    {
        "files": schema.sequence(_check_tuple(schema.file_name, schema.COUNT)),
        "memo": _check_tuple(schema.COUNT, schema.COUNT),
        "boxes": schema.sequence(
            _check_tuple(schema.COUNT, schema.COUNT, _WIDTHS, _WIDTHS, schema.COUNT)
        ),
        "tensors": schema.sequence(
            _check_tuple(
                schema.key,
                schema.SHAPE,
                _check_dtype_name,
                schema.COUNT,
                schema.COUNT,
                _check_tuple(_WIDTH, _WIDTH),
            )
        ),
        "objects": schema.mapping(
            _check_tuple(schema.file_name, schema.COUNT, schema.COUNT), schema.key
        ),
    }
)


Read = Callable[[int, int], bytes]  # (position, length) -> bytes, fewer at the end of the file


class MetadataIndex:
    """The index that follows the pickle. Errors are CheckpointErrors that name `where`."""

    def __init__(self, read: Read, content: bytes, size: int, where: str) -> None:
        what = f"{where}: its index"
        fields = _INDEX_FIELDS(schema.parse_json(content, what), what)
        self._read = read
        self._size = size
        self._where = where
        self._files = tuple(dict(fields["files"]))
        self._first_file, self._first_key = fields["memo"]
        self._boxes = [BoxList(*boxes) for boxes in fields["boxes"]]
        self._known: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._fields = fields

    def metadata(self) -> CheckpointMetadata:
        """Return tensors that refer to this index.

        The result is not stored here, so that the file is closed with the last of the tensors.
        """
        # An end of 0 means that the file contains no tensors.
        sizes = {file: end for file, end in self._fields["files"] if end}
        result = CheckpointMetadata(tensor_sizes=sizes)
        for number, entry in enumerate(self._fields["tensors"]):
            places = PlaceList(*entry)
            table = partial(self._read_table, number, places)
            result.tensors[places.key] = StoredTensor(tuple(places.shape), places.dtype, table)
        result.objects = {key: Location(*place) for key, place in self._fields["objects"].items()}
        return result

    def _read_table(self, number: int, places: PlaceList) -> ChunkTable:
        """Read the chunks of tensor `number`; raise CheckpointError if they are damaged."""
        what = f"{self._where}: {schema.format_value(places.key)}"
        try:
            # Offsets and shapes: [boxes, dims].
            boxes = self._boxes[places.boxes]
            offset, shape = self._read_boxes(places.boxes)
            if not offset.shape[1] == shape.shape[1] == len(places.shape):
                raise ValueError("boxes with another number of dimensions")

            # Locations, which refer to the offsets and the files by their memo numbers.
            entry = make_place_entry(self._first_key + number, *places.widths)
            memos, file, position, length = self._read_entries(
                entry, places.position, boxes.number, b"u"
            )
            file -= self._first_file
            if not np.array_equal(memos, np.arange(boxes.number) + boxes.first):
                raise ValueError("places in another order than its boxes")
            if boxes.number and not (file.min() >= 0 and file.max() < len(self._files)):
                raise ValueError("a file that is not in the index")
            if min(position.min(initial=0), length.min(initial=0)) < 0:
                raise ValueError("a negative position")
            table = ChunkTable(offset, shape, self._files, file, position, length)
        except Exception as error:
            raise schema.CheckpointError(
                f"{what}: damaged or not written by this program ({error})"
            ) from error
        check_inside(table, tuple(places.shape), what)
        return table

    def _read_boxes(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Read offsets and shapes of a box list, once for all tensors that share it."""
        if number in self._known:
            return self._known[number]
        boxes = self._boxes[number]
        dims = len(boxes.offset)
        entry = make_box_entry(tuple(boxes.offset), tuple(boxes.shape))
        # The columns are those of the offset, the memo number, and those of the shape.
        columns = self._read_entries(entry, boxes.position, boxes.number, b"e")
        memos = columns.pop(dims)
        if not np.array_equal(memos, np.arange(boxes.number) + boxes.first):
            raise ValueError("boxes in another order")
        table = np.empty((boxes.number, 0), dtype=np.int64)  # of a scalar
        if columns:
            table = np.stack(columns, axis=1)
        self._known[number] = (table[:, :dims], table[:, dims:])
        return self._known[number]

    def _read_entries(
        self, entry: Entry, position: int, count: int, end: bytes
    ) -> list[np.ndarray]:
        """Read entries between a MARK and the opcode `end`, which pops up to the mark."""
        length = entry.size * count
        if not 0 < position <= position + length < self._size:
            raise ValueError("entries outside of the file")
        # The opcodes before and after prove that DCP's list has the same begin and end.
        data = self._read(position - 1, length + 2)
        if data[:1] != b"(" or data[-1:] != end:
            raise ValueError("entries that begin or end elsewhere")
        return entry.decode(data[1:-1])
