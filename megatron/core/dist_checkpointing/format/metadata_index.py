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

import struct
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from megatron.core.dist_checkpointing.box_table import BoxTable, Location
from megatron.core.dist_checkpointing.format.metadata import (
    CheckpointMetadata,
    StoredTensor,
    check_inside,
)
from megatron.core.safe_files import schema
from megatron.core.safe_files.errors import CheckpointError
from megatron.core.safe_files.reading import parse_json
from megatron.core.safe_files.safe_globals import DTYPE_NAME

# Opcodes, or opcode and dtype of a number that varies between entries.
Part = bytes | tuple[bytes, str]

FOOTER = struct.Struct("<QQQ8s")  # position, length and hash of the index, magic number
MAGIC = b"MGTNIDX1"

# Values that entries share are at the beginning of the pickle, with numbers 0, 1, ... in its memo.
NUM_CLASSES = 5
NAMES = (
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


def _encode_shared_get(number: int) -> bytes:
    """Return the opcode that pushes a shared value (BINGET)."""
    return b"h" + bytes([number])


_CLASS_GETS = [_encode_shared_get(number) for number in range(NUM_CLASSES)]
_SIZE, _CHUNK, INDEX_CLASS, INFO_CLASS, TENSOR_CLASS = _CLASS_GETS
_NAME = {name: _encode_shared_get(number) for number, name in enumerate(NAMES, NUM_CLASSES)}

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
        # The opcodes, with zeros in the positions of the numbers
        template = b""
        offsets = []
        dtypes = []
        for part in parts:
            if isinstance(part, bytes):
                template += part
                continue
            opcode, dtype = part
            template += opcode
            offsets.append(len(template))
            dtypes.append(dtype)
            template += bytes(np.dtype(dtype).itemsize)
        self._template = template
        self.size = len(template)  # bytes

        # A structured dtype of the same size, with a field for each number
        self._names = tuple(map(str, range(len(dtypes))))
        self._dtype = np.dtype(
            {"names": self._names, "formats": dtypes, "offsets": offsets, "itemsize": self.size}  # type: ignore[arg-type]
        )

    def encode(self, columns: Sequence[np.ndarray]) -> bytes:
        """Encode one entry per row; there is a column for each number."""
        rows = np.empty((len(columns[0]), self.size), dtype=np.uint8)
        rows[:] = np.frombuffer(self._template, dtype=np.uint8)
        numbers = rows.view(self._dtype)[:, 0]
        for name, column in zip(self._names, columns, strict=True):
            numbers[name] = column
        return rows.tobytes()

    def decode(self, data: bytes) -> list[np.ndarray]:
        """Decode entries. Returns a column for each number.

        Raises ValueError for bytes that `encode` would not have written.
        """
        numbers = np.frombuffer(data, dtype=self._dtype)
        columns = [numbers[name].astype(np.int64) for name in self._names]
        if self.encode(columns) != data:
            raise ValueError("entries that this program does not write")
        return columns


def encode_instance(kind: bytes, **fields: Sequence[Part]) -> list[Part]:
    """Return the opcodes of an object with these attributes, as in `object.__reduce_ex__`."""
    parts: list[Part] = [kind + b")\x81}("]  # EMPTY_TUPLE, NEWOBJ, EMPTY_DICT, MARK
    for name, value in fields.items():
        parts.append(_NAME[name])
        parts.extend(value)
    parts.append(b"ub")  # SETITEMS, BUILD
    return parts


def encode_size(extents: Iterable[Part]) -> list[Part]:
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
    offsets = encode_size(INTEGERS[width] for width in offset)
    sizes = encode_size(INTEGERS[width] for width in shape)
    chunk = encode_instance(_CHUNK, offsets=[*offsets, _PUT], sizes=sizes)
    return Entry(*chunk)


@lru_cache
def make_place_entry(position: int, length: int) -> Entry:
    """Return the template of the location of a box.

    Key, offset and file are memo numbers; `position` and `length` are widths of integers. The key
    is the same in all entries of a tensor, but a template per tensor would take longer to make
    than its entries.
    """
    index = encode_instance(INDEX_CLASS, fqn=[_GET], offset=[_GET], index=[b"N"])
    info = encode_instance(
        INFO_CLASS, relative_path=[_GET], offset=[INTEGERS[position]], length=[INTEGERS[length]]
    )
    return Entry(*index, *info)


def choose_widths(*columns: np.ndarray) -> tuple[int, ...]:
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


def encode_get(number: int) -> bytes:
    """Return the opcode that pushes a value of the memo (LONG_BINGET)."""
    return b"j" + struct.pack("<I", number)


def encode_number(value: int) -> bytes:
    """Return the opcode of an integer, in 8 bytes for any value (LONG1)."""
    return b"\x8a\x08" + struct.pack("<q", value)


def encode_text(value: str) -> bytes:
    """Return the opcode of a text (BINUNICODE)."""
    encoded = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(encoded)) + encoded


class BoxList(NamedTuple):
    """A list of boxes in the pickle, shared by tensors with the same boxes (e.g., moments)."""

    position: int  # of the first entry, bytes
    number: int  # boxes
    offset: tuple[int, ...]  # widths of integers
    shape: tuple[int, ...]  # widths of integers
    first: int  # memo number of the first offset


class PlaceList(NamedTuple):
    """A tensor in the index, with the locations of its boxes."""

    key: str
    shape: Sequence[int]
    dtype: str
    boxes: int  # number of its `BoxList`
    position: int  # of the first location, bytes
    widths: Sequence[int]  # widths of position and length


def _check_tuple(*checks: schema.Check) -> schema.Check:
    """Accept a list with one entry per check."""

    def check(value: Any, where: str) -> Any:
        schema.sequence(schema.anything, len(checks), len(checks))(value, where)
        for item, check_item in zip(value, checks, strict=True):
            check_item(item, where)
        return value

    return check


def _check_dtype_name(value: Any, where: str) -> Any:
    """Accept the name of a dtype, such as bfloat16."""
    schema.text(64)(value, where)
    if not DTYPE_NAME.fullmatch(value):
        schema.refuse(where, value, "the name of a dtype")
    return value


_WIDTH = schema.one_of(*INTEGERS)
_WIDTHS = schema.sequence(_WIDTH, schema.MAX_RANK)

_FILE = _check_tuple(schema.file_name, schema.COUNT)  # name, end of the last box in it
_BOX_LIST = _check_tuple(schema.COUNT, schema.COUNT, _WIDTHS, _WIDTHS, schema.COUNT)
_PLACE_LIST = _check_tuple(
    schema.key,
    schema.SHAPE,
    _check_dtype_name,
    schema.COUNT,
    schema.COUNT,
    _check_tuple(_WIDTH, _WIDTH),
)
_LOCATION = _check_tuple(schema.file_name, schema.COUNT, schema.COUNT)

_INDEX_FIELDS = schema.record(
    {
        "files": schema.sequence(_FILE),
        "memo": _check_tuple(schema.COUNT, schema.COUNT),  # numbers of the first file and key
        "boxes": schema.sequence(_BOX_LIST),
        "tensors": schema.sequence(_PLACE_LIST),
        "objects": schema.mapping(_LOCATION, schema.key),
    }
)


Read = Callable[[int, int], bytes]  # (position, length) -> bytes, fewer at the end of the file


class MetadataIndex:
    """The index that follows the pickle. Errors are CheckpointErrors that name `where`."""

    def __init__(self, read: Read, content: bytes, size: int, where: str) -> None:
        what = f"{where}: its index"
        fields = _INDEX_FIELDS(parse_json(content, what), what)
        self._read = read
        self._size = size
        self._where = where
        self._files = tuple(dict(fields["files"]))
        self._first_file, self._first_key = fields["memo"]
        self._box_lists = [BoxList(*boxes) for boxes in fields["boxes"]]
        # Offsets and shapes of the box lists that have been read, by number.
        self._known: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._fields = fields

    def metadata(self) -> CheckpointMetadata:
        """Return tensors that refer to this index.

        The result is not stored here, so that the file is closed with the last of the tensors.
        """
        # An end of 0 means that the file contains no tensors.
        sizes = {file: end for file, end in self._fields["files"] if end}
        result = CheckpointMetadata(tensor_sizes=sizes)
        for number, fields in enumerate(self._fields["tensors"]):
            places = PlaceList(*fields)
            shape = tuple(places.shape)
            read_chunks = partial(self._read_table, number, places)
            result.tensors[places.key] = StoredTensor(shape, places.dtype, read_chunks)
        for key, fields in self._fields["objects"].items():
            result.objects[key] = Location(*fields)
        return result

    def _read_table(self, number: int, places: PlaceList) -> BoxTable:
        """Read the chunks of tensor `number`. Raises CheckpointError if they are damaged."""
        what = f"{self._where}: {schema.format_value(places.key)}"
        shape = tuple(places.shape)
        try:
            box_offset, box_shape = self._read_boxes(places.boxes)  # [boxes, dims]
            if not box_offset.shape[1] == box_shape.shape[1] == len(shape):
                raise ValueError("boxes with another number of dimensions")
            file, position, length = self._read_places(number, places)  # [boxes]
            table = BoxTable(
                box_offset,
                box_shape,
                file=file,
                position=position,
                length=length,
                files=self._files,
            )
        except Exception as error:
            raise CheckpointError(
                f"{what}: damaged or not written by this program ({error})"
            ) from error
        check_inside(table, shape, what)
        return table

    def _read_places(
        self, number: int, places: PlaceList
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (index of the file, position, length) of the boxes of tensor `number`.

        Raises ValueError for entries that this program would not write.
        """
        # Entries refer to key, offset and file by memo numbers.
        boxes = self._box_lists[places.boxes]
        entry = make_place_entry(*places.widths)
        keys, offsets, files, position, length = self._read_entries(
            entry, places.position, boxes.number, b"u"
        )
        if (keys != self._first_key + number).any():
            raise ValueError("places of another tensor")
        expected_offsets = np.arange(boxes.number) + boxes.first
        if not np.array_equal(offsets, expected_offsets):
            raise ValueError("places in another order than its boxes")
        file = files - self._first_file
        is_known_file = (file >= 0) & (file < len(self._files))
        if not is_known_file.all():
            raise ValueError("a file that is not in the index")
        if min(position.min(initial=0), length.min(initial=0)) < 0:
            raise ValueError("a negative position")
        return file, position, length

    def _read_boxes(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return offsets and shapes of a box list, read once for all tensors that share it.

        Both are [boxes, dims]. Raises ValueError for entries that this program would not write.
        """
        if number in self._known:
            return self._known[number]
        boxes = self._box_lists[number]
        dims = len(boxes.offset)
        entry = make_box_entry(tuple(boxes.offset), tuple(boxes.shape))
        # The columns are those of the offset, the memo number, and those of the shape.
        columns = self._read_entries(entry, boxes.position, boxes.number, b"e")
        memos = columns.pop(dims)
        expected_memos = np.arange(boxes.number) + boxes.first
        if not np.array_equal(memos, expected_memos):
            raise ValueError("boxes in another order")

        table = np.empty((boxes.number, 0), dtype=np.int64)  # the boxes of a scalar
        if columns:
            table = np.stack(columns, axis=1)
        offset = table[:, :dims]
        shape = table[:, dims:]
        self._known[number] = (offset, shape)
        return offset, shape

    def _read_entries(
        self, entry: Entry, position: int, count: int, end: bytes
    ) -> list[np.ndarray]:
        """Read entries between a MARK and the opcode `end`, which pops up to the mark.

        Returns a column for each number. Raises ValueError for anything else at `position`.
        """
        length = entry.size * count
        if not 0 < position <= position + length < self._size:
            raise ValueError("entries outside of the file")
        # The opcodes before and after prove that DCP's list has the same begin and end.
        data = self._read(position - 1, length + 2)
        if data[:1] != b"(" or data[-1:] != end:
            raise ValueError("entries that begin or end elsewhere")
        return entry.decode(data[1:-1])
