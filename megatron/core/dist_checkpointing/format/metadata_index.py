"""`.metadata` as we write it: DCP's pickle, in which the entries of one tensor are found and read without the others.

At 16,384 ranks a checkpoint has millions of stored boxes, and a rank needs those of a few tensors.
So all entries of a tensor have one length: the same opcodes with other numbers in fixed places,
written and read as one array. DCP and Megatron-core unpickle the file like any other. Behind the
end of the pickle, where they do not look, follows an index: JSON that says where the entries of
each tensor are, then position, length and xxh3_64 of that JSON and a magic number.

A rank reads the index, and the entries of a tensor when it first looks at that. These must be, byte
by byte, what would be written for them, so that DCP cannot find anything else in the file than we
do. A file without an index is unpickled as a whole.
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

Part = (
    bytes | tuple[bytes, str]
)  # opcodes, or opcode and dtype of a number that differs from entry to entry

FOOTER = struct.Struct("<QQQ8s")  # position, length and hash of the index, magic number
MAGIC = b"MGTNIDX1"

# What entries name again and again stands at the beginning of the pickle and has the numbers 0, 1,
# ... in its memo.
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
_SIZE, _CHUNK, _INDEX, _INFO, _TENSOR = (b"h" + bytes([i]) for i in range(_NUM_CLASSES))
_NAME = {name: b"h" + bytes([_NUM_CLASSES + i]) for i, name in enumerate(_NAMES)}

INTEGERS = {
    1: (b"K", "<u1"),
    2: (b"M", "<u2"),
    4: (b"J", "<i4"),
    8: (b"\x8a\x08", "<i8"),
}  # by width in bytes
# opcodes that read and write the memo
_GET = (b"j", "<u4")
_PUT = (b"r", "<u4")


class Entry:
    """One piece of a pickle, many times with other numbers in the same places."""

    def __init__(self, *parts: Part) -> None:
        self._template = b""
        offsets = []
        kinds = []
        for part in parts:
            if isinstance(part, bytes):
                self._template += part
                continue
            opcode, kind = part
            offsets.append(len(self._template) + len(opcode))
            kinds.append(kind)
            self._template += opcode + bytes(np.dtype(kind).itemsize)
        self.size = len(self._template)
        self._names = tuple(map(str, range(len(kinds))))
        self._dtype = np.dtype(
            {"names": self._names, "formats": kinds, "offsets": offsets, "itemsize": self.size}  # type: ignore[arg-type]
        )

    def encode(self, columns: Sequence[np.ndarray]) -> bytes:
        """One entry per row; a column for each number."""
        result = bytearray(self._template * len(columns[0]))
        view = np.frombuffer(result, dtype=self._dtype)
        for name, column in zip(self._names, columns, strict=True):
            view[name] = column
        return bytes(result)

    def decode(self, data: bytes) -> list[np.ndarray]:
        """The inverse. Raises ValueError for bytes that `encode` would not have written."""
        view = np.frombuffer(data, dtype=self._dtype)
        columns = [view[name].astype(np.int64) for name in self._names]
        if self.encode(columns) != data:
            raise ValueError("entries that this program does not write")
        return columns


def _instance(kind: bytes, **fields: Sequence[Part]) -> list[Part]:
    """An object of class `kind` with these attributes, as `object.__reduce_ex__` writes it."""
    parts: list[Part] = [kind + b")\x81}("]
    for name, value in fields.items():
        parts += [_NAME[name], *value]
    return [*parts, b"ub"]


def _torch_size(extents: Iterable[Part]) -> list[Part]:
    parts = list(extents)
    if len(parts) > 3:
        return [_SIZE, b"(", *parts, b"t\x85R"]
    return [_SIZE, *parts, (b")", b"\x85", b"\x86", b"\x87")[len(parts)] + b"\x85R"]


@lru_cache
def box_entry(offset: tuple[int, ...], shape: tuple[int, ...]) -> Entry:
    """A box in DCP's list of a tensor's boxes, its numbers of these widths; the memo keeps its
    offset.
    """
    offsets = _torch_size(INTEGERS[width] for width in offset)
    return Entry(
        *_instance(
            _CHUNK, offsets=[*offsets, _PUT], sizes=_torch_size(INTEGERS[width] for width in shape)
        )
    )


def place_entry(key: int, position: int, length: int) -> Entry:
    """Where a box is: the key, its offset and the file by memo number, two numbers of these widths."""
    index = _instance(_INDEX, fqn=[_memo(key)], offset=[_GET], index=[b"N"])
    return Entry(
        *index,
        *_instance(
            _INFO, relative_path=[_GET], offset=[INTEGERS[position]], length=[INTEGERS[length]]
        ),
    )


def _widths(*columns: np.ndarray) -> tuple[int, ...]:
    """Bytes of the shortest opcode that holds all numbers of a column, none of them negative."""
    limits = ((1, 1 << 8), (2, 1 << 16), (4, 1 << 31), (8, 1 << 63))
    return tuple(next(w for w, limit in limits if int(c.max(initial=0)) < limit) for c in columns)


def _memo(number: int) -> bytes:
    return b"j" + struct.pack("<I", number)


def _number(value: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", value)


def _text(value: str) -> bytes:
    encoded = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


# DCP's classes by name: to import them brings DTensor and sympy along, which takes a third as long
# as torch itself.
_dcp = partial(_global, "torch.distributed.checkpoint.metadata")
_CLASSES = (  # those that entries name again and again
    _global("torch", "Size"),
    _dcp("ChunkStorageMetadata"),
    _dcp("MetadataIndex"),
    _global("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    _dcp("TensorStorageMetadata"),
)
assert len(_CLASSES) == _NUM_CLASSES
BYTES = _dcp("BytesStorageMetadata") + b")\x81"
STORAGE_META = _dcp("StorageMeta") + b")\x81}("
STORAGE_META += b"".join(_text(name) + b"N" for name in ("checkpoint_id", "save_id", "load_id"))
STORAGE_META += _text("modules") + b"]ub"


def tensor_properties(dtype: str) -> bytes:
    """DCP's TensorProperties of a dtype: its state is (dtype, layout, requires_grad, memory format,
    pin_memory).
    """
    layout = _global("torch.serialization", "_get_layout") + _text("torch.strided") + b"\x85R"
    contiguous = _dcp("_MEM_FORMAT_ENCODING") + b"K\0\x85R"
    state = b"(" + _global("torch", dtype) + layout + b"\x89" + contiguous + b"\x89t"
    return _dcp("TensorProperties") + b")\x81" + state + b"b"


class BoxList(NamedTuple):
    """A list of boxes in the pickle; tensors that are cut alike, as parameter and moments are,
    share one.
    """

    position: int
    number: int
    offset: tuple[int, ...]  # widths
    shape: tuple[int, ...]
    first: int  # memo number of the first offset


class PlaceList(NamedTuple):
    """A tensor in the index: which list its boxes are, and where the places of these are."""

    key: str
    shape: Sequence[int]
    dtype: str
    boxes: int
    position: int
    widths: Sequence[int]


class _PickleWriter:
    """The pickle as it grows, and the memo of who reads it."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = self.memo = 0
        self.boxes: list[BoxList] = []
        self._lists: dict[Any, tuple[int, int]] = {}  # number in `boxes` and in the memo

    def add(self, *parts: Part) -> int:
        """Returns the position behind them."""
        for part in parts:
            assert isinstance(part, bytes)
            self.parts.append(part)
            self.size += len(part)
        return self.size

    def remember(self, values: Iterable[bytes]) -> int:
        """Put values into the memo, in turn; returns the number of the first."""
        first = self.memo
        for value in values:
            put = (
                b"q" + bytes([self.memo])
                if self.memo < 256
                else b"r" + struct.pack("<I", self.memo)
            )
            self.add(value, put, b"0")  # off the stack again
            self.memo += 1
        return first

    def add_boxes(self, table: ChunkTable) -> int:
        """DCP's list of the boxes of a tensor; returns its number in `boxes`."""
        # A parameter and its optimizer state are cut alike: one list for the four of them keeps the
        # file small.
        cut = table.offset.shape, table.offset.tobytes(), table.shape.tobytes()
        if cut in self._lists:
            number, memo = self._lists[cut]
            self.add(_memo(memo))
            return number
        number, memo = self._lists[cut] = len(self.boxes), self.memo
        offset = table.offset.T
        shape = table.shape.T
        boxes = BoxList(0, len(table), _widths(*offset), _widths(*shape), memo + 1)
        memos = np.arange(len(table)) + boxes.first
        start = self.add(b"]r", struct.pack("<I", memo), b"(")
        self.boxes.append(boxes._replace(position=start))
        self.add(box_entry(boxes.offset, boxes.shape).encode([*offset, memos, *shape]), b"e")
        self.memo += 1 + len(table)
        return number


def encode_metadata(metadata: CheckpointMetadata) -> list[bytes]:
    """The pickle that every version of DCP (and Megatron-core through it) reads, and our index; in
    blocks.
    """
    writer = _PickleWriter()
    tensors = metadata.tensors
    # Phase 1: what entries name again and again goes into the memo, so that every entry is short
    # and of fixed length.
    writer.add(b"\x80\4")
    writer.remember([*_CLASSES, *map(_text, _NAMES)])
    files = next((tensor.chunks.files for tensor in tensors.values()), ())
    first_file = writer.remember(map(_text, files))
    first_key = writer.remember(map(_text, tensors))
    dtypes = {tensor.dtype_name: 0 for tensor in tensors.values()}
    for dtype in dtypes:
        dtypes[dtype] = writer.remember([tensor_properties(dtype)])

    # Phase 2: DCP's Metadata, field by field. The boxes of each tensor are one array of entries.
    writer.add(_dcp("Metadata"), b")\x81}(", _text("state_dict_metadata"), b"}")
    lists = []
    for number, tensor in enumerate(tensors.values(), first_key):
        size = _torch_size(map(_number, tensor.shape))
        *head, end = _instance(
            _TENSOR, properties=[_memo(dtypes[tensor.dtype_name])], size=size, chunks=[]
        )
        writer.add(_memo(number), *head)
        lists.append(writer.add_boxes(tensor.chunks))
        writer.add(end, b"s")
    for key in metadata.objects:
        writer.add(_text(key), BYTES, b"s")
    writer.add(
        _text("planner_data"), b"}"
    )  # a flat dictionary; older versions of torch insist on it
    for key in [*tensors, *metadata.objects]:
        writer.add(_text(key), _text(key), b"\x85s")
    writer.add(_text("storage_data"), b"}")
    index = []
    for number, (key, tensor) in enumerate(tensors.items()):
        table = tensor.chunks
        widths = _widths(tensor.chunks.position, tensor.chunks.length)
        memos = np.arange(len(table)) + writer.boxes[lists[number]].first
        index.append(
            PlaceList(key, tensor.shape, tensor.dtype_name, lists[number], writer.add(b"("), widths)
        )
        columns = [memos, table.file + first_file, table.position, table.length]
        writer.add(place_entry(first_key + number, *widths).encode(columns), b"u")
    for key, (file, position, length) in metadata.objects.items():
        writer.add(*_instance(_INDEX, fqn=[_text(key)], index=[b"N"]))
        place = {"offset": [_number(position)], "length": [_number(length)]}
        writer.add(*_instance(_INFO, relative_path=[_text(file)], **place), b"s")
    start = writer.add(
        _text("storage_meta"), STORAGE_META, _text("version"), _text("1.0.0"), b"ub."
    )

    # Phase 3: the index behind the pickle, for our own reader.
    sizes = metadata.tensor_file_sizes()
    content = _json_object(
        files=_json_list((file, sizes.get(file, 0)) for file in files),
        memo=_json((first_file, first_key)),
        boxes=_json_list(writer.boxes),
        tensors=_json_list(index),
        objects=_json_object(**{key: _json(place) for key, place in metadata.objects.items()}),
    )
    writer.add(content, FOOTER.pack(start, len(content), xxhash.xxh3_64_intdigest(content), MAGIC))
    return list(split_into_blocks(writer.parts))


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


# At scale the index is megabytes of many small values. Encoded one by one, they neither hold the
# interpreter's lock for long nor keep the garbage collector busy, which holds it, too.
def _json_list(values: Iterable[Any]) -> bytes:
    return b"[" + b",".join(map(_json, values)) + b"]"


def _json_object(**encoded: bytes) -> bytes:
    return b"{" + b",".join(_json(name) + b":" + value for name, value in encoded.items()) + b"}"


def _tuple_of(*checks: schema.Check) -> schema.Check:
    def check(value: Any, where: str) -> Any:
        schema.sequence(lambda item, _: item, len(checks), len(checks))(value, where)
        for item, check_item in zip(value, checks, strict=True):
            check_item(item, where)
        return value

    return check


def _dtype_name(value: Any, where: str) -> Any:
    schema.text(64)(value, where)
    return (
        value if DTYPE_NAME.fullmatch(value) else schema.refuse(where, value, "the name of a dtype")
    )


_WIDTH = schema.one_of(*INTEGERS)

_WIDTHS = schema.sequence(_WIDTH, schema.MAX_RANK)

_INDEX_FIELDS = schema.record(
    {
        "files": schema.sequence(_tuple_of(schema.file_name, schema.COUNT)),
        "memo": _tuple_of(schema.COUNT, schema.COUNT),
        "boxes": schema.sequence(
            _tuple_of(schema.COUNT, schema.COUNT, _WIDTHS, _WIDTHS, schema.COUNT)
        ),
        "tensors": schema.sequence(
            _tuple_of(
                schema.key,
                schema.SHAPE,
                _dtype_name,
                schema.COUNT,
                schema.COUNT,
                _tuple_of(_WIDTH, _WIDTH),
            )
        ),
        "objects": schema.mapping(
            _tuple_of(schema.file_name, schema.COUNT, schema.COUNT), schema.key
        ),
    }
)


Read = Callable[[int, int], bytes]  # (position, length) -> bytes, fewer at the end of the file


class MetadataIndex:
    """What stands behind the pickle. Raises CheckpointError that names `where`."""

    def __init__(self, read: Read, content: bytes, size: int, where: str) -> None:
        fields = _INDEX_FIELDS(
            schema.parse_json(content, f"{where}: its index"), f"{where}: its index"
        )
        self._read = read
        self._size = size
        self._where = where
        self._files = tuple(dict(fields["files"]))
        self._first_file, self._first_key = fields["memo"]
        self._boxes = [BoxList(*boxes) for boxes in fields["boxes"]]
        self._known: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._fields = fields

    def metadata(self) -> CheckpointMetadata:
        """Not kept here: its tensors refer to this index, which closes the file when the last of
        them is gone.
        """
        result = CheckpointMetadata(
            tensor_sizes={file: end for file, end in self._fields["files"] if end}
        )
        for number, entry in enumerate(self._fields["tensors"]):
            places = PlaceList(*entry)
            table = partial(self._table, number, places)
            result.tensors[places.key] = StoredTensor(tuple(places.shape), places.dtype, table)
        result.objects = {key: Location(*place) for key, place in self._fields["objects"].items()}
        return result

    def _table(self, number: int, places: PlaceList) -> ChunkTable:
        what = f"{self._where}: {schema.format_value(places.key)}"
        try:
            boxes = self._boxes[places.boxes]
            offset, shape = self._read_boxes(places.boxes)
            if not offset.shape[1] == shape.shape[1] == len(places.shape):
                raise ValueError("boxes of another number of dimensions")
            entry = place_entry(self._first_key + number, *places.widths)
            memos, file, position, length = self._entries(
                entry, places.position, boxes.number, b"u"
            )
            file -= self._first_file
            if not np.array_equal(memos, np.arange(boxes.number) + boxes.first):
                raise ValueError("places in another order than its boxes")
            if boxes.number and not (file.min() >= 0 and file.max() < len(self._files)):
                raise ValueError("a file that the index does not name")
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
        """Offsets and shapes; parameter and moments share one list, which is read once."""
        if number not in self._known:
            boxes = self._boxes[number]
            dims = len(boxes.offset)
            columns = self._entries(
                box_entry(tuple(boxes.offset), tuple(boxes.shape)), *boxes[:2], b"e"
            )
            if not np.array_equal(columns.pop(dims), np.arange(boxes.number) + boxes.first):
                raise ValueError("boxes in another order")
            table = (
                np.stack(columns, axis=1)
                if columns
                else np.empty((boxes.number, 0), dtype=np.int64)
            )
            self._known[number] = table[:, :dims], table[:, dims:]
        return self._known[number]

    def _entries(self, entry: Entry, position: int, count: int, end: bytes) -> list[np.ndarray]:
        """All between a MARK and the opcode `end`, which takes what is above the mark."""
        length = entry.size * count
        if not 0 < position <= position + length < self._size:
            raise ValueError("entries outside of the file")
        # With the opcodes around them: they prove that DCP's list begins and ends here, too.
        data = self._read(position - 1, length + 2)
        if data[:1] != b"(" or data[-1:] != end:
            raise ValueError("entries that begin or end elsewhere")
        return entry.decode(data[1:-1])
