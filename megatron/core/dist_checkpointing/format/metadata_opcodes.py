"""Opcodes of pickle for the values of DCP's metadata, see `metadata_codec.py`."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

# Opcodes, or opcode and dtype of a number that varies between entries.
Part = bytes | tuple[bytes, str]

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
SETITEM = b"s"
_CALL = b"\x85R"  # TUPLE1 (the arguments), REDUCE


def _encode_global(module: str, name: str) -> bytes:
    """Return the opcode of a class or function (GLOBAL)."""
    return f"c{module}\n{name}\n".encode()


def encode_dcp_class(name: str) -> bytes:
    """Return the opcode of a class of DCP's metadata, by name.

    Importing it would import DTensor and sympy, which takes a third as long as importing torch.
    """
    return _encode_global("torch.distributed.checkpoint.metadata", name)


# Values that entries share are at the beginning of the pickle, with numbers 0, 1, ... in its memo:
# these classes and names, then the names of files, the keys of tensors, and the dtypes.
CLASSES = (
    _encode_global("torch", "Size"),
    encode_dcp_class("ChunkStorageMetadata"),
    encode_dcp_class("MetadataIndex"),
    _encode_global("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    encode_dcp_class("TensorStorageMetadata"),
)
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
FIRST_FILE = len(CLASSES) + len(NAMES)
_SHARED_GETS = [b"h" + bytes([memo_index]) for memo_index in range(FIRST_FILE)]  # BINGET
_SIZE_CLASS, _CHUNK_CLASS, INDEX_CLASS, INFO_CLASS, TENSOR_CLASS = _SHARED_GETS[: len(CLASSES)]
_NAME = dict(zip(NAMES, _SHARED_GETS[len(CLASSES) :], strict=True))


def encode_get(memo_index: int) -> bytes:
    """Return the opcode that pushes a value of the memo (LONG_BINGET)."""
    return b"j" + struct.pack("<I", memo_index)


def encode_put(memo_index: int) -> bytes:
    """Return the opcode that stores a value in the memo (BINPUT or LONG_BINPUT)."""
    if memo_index < 256:
        return b"q" + bytes([memo_index])
    return b"r" + struct.pack("<I", memo_index)


def encode_integer(value: int) -> bytes:
    """Return the opcode of an integer, in 8 bytes for any value (LONG1)."""
    return b"\x8a\x08" + struct.pack("<q", value)


def encode_text(value: str) -> bytes:
    """Return the opcode of a text (BINUNICODE)."""
    encoded = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def encode_instance(class_get: bytes, **fields: Sequence[Part]) -> list[Part]:
    """Return the opcodes of an object with these attributes, as in `object.__reduce_ex__`."""
    opcodes: list[Part] = [class_get + b")\x81}("]  # EMPTY_TUPLE, NEWOBJ, EMPTY_DICT, MARK
    for name, value in fields.items():
        opcodes.append(_NAME[name])
        opcodes.extend(value)
    opcodes.append(b"ub")  # SETITEMS, BUILD
    return opcodes


def encode_size(extents: Iterable[Part]) -> list[Part]:
    """Return the opcodes of a torch.Size."""
    encoded_extents = list(extents)
    if len(encoded_extents) > 3:
        return [_SIZE_CLASS, b"(", *encoded_extents, b"t" + _CALL]  # MARK, TUPLE
    tuple_opcodes = (b")", b"\x85", b"\x86", b"\x87")  # EMPTY_TUPLE, TUPLE1, 2, 3
    make_tuple = tuple_opcodes[len(encoded_extents)]
    return [_SIZE_CLASS, *encoded_extents, make_tuple + _CALL]


BYTES_METADATA = encode_dcp_class("BytesStorageMetadata") + b")\x81"  # EMPTY_TUPLE, NEWOBJ


def encode_storage_meta() -> bytes:
    """Encode DCP's StorageMeta without values."""
    encoded = encode_dcp_class("StorageMeta") + b")\x81}("  # EMPTY_TUPLE, NEWOBJ, EMPTY_DICT, MARK
    for name in ("checkpoint_id", "save_id", "load_id"):
        encoded += encode_text(name) + b"N"
    return encoded + encode_text("modules") + b"]ub"  # EMPTY_LIST, SETITEMS, BUILD


def encode_properties(dtype: str) -> bytes:
    """Encode DCP's TensorProperties of a dtype.

    Their state is (dtype, layout, requires_grad, memory format, pin_memory).
    """
    false = b"\x89"
    layout = _encode_global("torch.serialization", "_get_layout")
    layout += encode_text("torch.strided") + _CALL
    contiguous = encode_dcp_class("_MEM_FORMAT_ENCODING") + b"K\0" + _CALL
    fields = (_encode_global("torch", dtype), layout, false, contiguous, false)
    state = b"(" + b"".join(fields) + b"t"  # MARK, TUPLE
    return (
        encode_dcp_class("TensorProperties") + b")\x81" + state + b"b"
    )  # EMPTY_TUPLE, NEWOBJ, BUILD


class Template:
    """A piece of a pickle that repeats with different numbers in fixed positions."""

    def __init__(self, elements: Iterable[Part]) -> None:
        # The opcodes, with zeros in the positions of the numbers
        content = b""
        offsets = []
        dtypes = []
        for element in elements:
            if isinstance(element, bytes):
                content += element
                continue
            opcode, dtype = element
            content += opcode
            offsets.append(len(content))
            dtypes.append(dtype)
            content += bytes(np.dtype(dtype).itemsize)
        self._content = content
        self.size = len(content)  # bytes

        # A structured dtype of the same size, with a field for each number
        self._fields = tuple(map(str, range(len(dtypes))))
        self._dtype = np.dtype(
            {"names": self._fields, "formats": dtypes, "offsets": offsets, "itemsize": self.size}  # type: ignore[arg-type]
        )

    def encode(self, columns: Sequence[np.ndarray]) -> bytes:
        """Encode one entry per row; there is a column for each number."""
        rows = np.empty((len(columns[0]), self.size), dtype=np.uint8)
        rows[:] = np.frombuffer(self._content, dtype=np.uint8)
        records = rows.view(self._dtype)[:, 0]
        for name, column in zip(self._fields, columns, strict=True):
            records[name] = column
        return rows.tobytes()

    def decode(self, data: bytes) -> list[np.ndarray]:
        """Decode entries. Returns a column for each number.

        Raises ValueError for bytes that `encode` would not have written.
        """
        records = np.frombuffer(data, dtype=self._dtype)
        columns = [records[name].astype(np.int64) for name in self._fields]
        if self.encode(columns) != data:
            raise ValueError("entries that this program does not write")
        return columns


@lru_cache
def make_box_template(offset: tuple[int, ...], shape: tuple[int, ...]) -> Template:
    """Return the template of a box in DCP's list of boxes of a tensor.

    `offset` and `shape` are widths of integers. The offset is stored in the memo.
    """
    offsets = encode_size(INTEGERS[width] for width in offset)
    sizes = encode_size(INTEGERS[width] for width in shape)
    return Template(encode_instance(_CHUNK_CLASS, offsets=[*offsets, _PUT], sizes=sizes))


@lru_cache
def make_location_template(position: int, length: int) -> Template:
    """Return the template of the location of a box.

    Key, offset and file are memo numbers; `position` and `length` are widths of integers. The key
    is the same in all entries of a tensor, but a template per tensor would take longer to make
    than its entries.
    """
    index = encode_instance(INDEX_CLASS, fqn=[_GET], offset=[_GET], index=[b"N"])
    info = encode_instance(
        INFO_CLASS, relative_path=[_GET], offset=[INTEGERS[position]], length=[INTEGERS[length]]
    )
    return Template([*index, *info])


def choose_widths(columns: Iterable[np.ndarray]) -> tuple[int, ...]:
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
