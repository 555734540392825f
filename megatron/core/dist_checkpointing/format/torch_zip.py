"""Archives of `torch.save`: zip files of uncompressed records, whose tensors are read on demand.

A tensor item of a checkpoint is a complete archive `prefix + raw bytes + suffix`, where prefix and
suffix depend on dtype and shape only. So a file can be laid out before any data exists, and the raw
bytes of any row can be read without the rest. Data records have no CRC (as with
`torch.serialization.set_crc32_options(False)`), because `checksums.bin` protects them at lower
cost.

The standard library's `zipfile` does not report where the data of a record begins, so half of the
reader would be needed anyway. Opening took 1.07 times as long with it for a file of 400 tensors,
and 1.24 times for `common.pt`.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from megatron.core.dist_checkpointing.format.schema import CheckpointError
from megatron.core.dist_checkpointing.mapping import Shape
from megatron.core.terminal import escape_control_chars

# Bytes. Raw data is aligned in its archive, and archives are aligned in files.
ALIGNMENT = 64
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")
_MAX32 = 0xFFFFFFFF
_UTF8_NAMES = 1 << 11
_ZIP64_VERSION = 45
_MAX_RECORD = 256 << 20  # bytes of a record that is read whole


class Envelope(NamedTuple):
    """The parts of a tensor's archive before and after its raw bytes."""

    prefix: bytes
    suffix: bytes


class Record(NamedTuple):
    """One file of an archive; `header` is the offset of its local header in the archive."""

    header: int
    size: int
    crc: int  # 0 if there is none


class TensorSlot:
    """Placeholder for a contiguous tensor whose bytes are written later, or are `content`."""

    def __init__(
        self, dtype: torch.dtype, shape: Shape, content: torch.Tensor | None = None
    ) -> None:
        self.dtype = dtype
        self.shape = shape
        self.content = content

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class ArchiveLayout(NamedTuple):
    """An archive without the bytes of its tensors, and the positions of these bytes."""

    fixed: list[tuple[int, bytes]]  # (position, content), in order
    places: list[tuple[TensorSlot, int]]  # in the order of the archive
    size: int


class _Storage:
    """The storage of a tensor slot while it is pickled."""

    def __init__(self, dtype: torch.dtype, numel: int, key: str) -> None:
        if dtype in torch.storage._new_dtypes():  # dtypes without a typed storage class
            kind = torch.UntypedStorage
            size = numel * dtype.itemsize
        else:
            kind = getattr(torch, torch.storage._dtype_to_storage_type_map()[dtype])
            size = numel
        self.persistent_id = ("storage", kind, key, "cpu", size)


class _Pickler(pickle.Pickler):
    """Pickles slots and tensors as contiguous tensors; `slots` collects them in order."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.slots: list[TensorSlot] = []

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            return obj.persistent_id
        return None  # pickled by value

    def reducer_override(self, obj: Any) -> Any:
        """Return the function that rebuilds a tensor and its arguments."""
        if isinstance(obj, torch.Tensor):
            obj = TensorSlot(obj.dtype, tuple(obj.shape), obj.detach().cpu().contiguous())
        if not isinstance(obj, TensorSlot):
            return NotImplemented
        storage = _Storage(obj.dtype, math.prod(obj.shape), str(len(self.slots)))
        self.slots.append(obj)
        offset = 0
        requires_grad = False
        hooks: OrderedDict[Any, Any] = OrderedDict()
        stride = _compute_row_major_stride(obj.shape)
        common = (storage, offset, obj.shape, stride, requires_grad, hooks)
        if obj.dtype in torch.storage._new_dtypes():
            return torch._utils._rebuild_tensor_v3, (*common, obj.dtype)
        return torch._utils._rebuild_tensor_v2, common


def _compute_row_major_stride(shape: Shape) -> Shape:
    """Return the strides of a contiguous tensor as in torch, which counts an extent of 0 as 1."""
    strides = []
    numel = 1
    for extent in reversed(shape):
        strides.append(numel)
        numel *= max(1, extent)
    return tuple(reversed(strides))


def lay_out_archive(value: Any) -> ArchiveLayout:
    """Lay out the archive that `torch.load` reads as `value`, with tensors for its slots."""
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    pickler.dump(value)

    # Records with known content.
    central = bytearray()  # the directory at the end of the archive
    head = bytearray()  # everything before the bytes of the next tensor
    known_records = (
        (b"archive/data.pkl", pickled.getvalue()),
        (b"archive/byteorder", b"little"),
        (b"archive/version", b"3\n"),
    )
    for name, content in known_records:
        local, entry = _encode_known_record(name, content, len(head))
        head += local
        central += entry

    # Records of tensors.
    fixed = []
    places = []
    start = 0  # of `head` in the archive
    for number, slot in enumerate(pickler.slots):
        name = b"archive/data/%d" % number
        local, entry = _encode_data_record(name, slot.nbytes, start + len(head))
        head += local
        central += entry
        fixed.append((start, bytes(head)))
        data = start + len(head)
        places.append((slot, data))
        start = data + slot.nbytes
        head = bytearray()

    # The directory.
    end = start + len(head)
    num_records = len(known_records) + len(places)
    tail = bytes(head + central) + _encode_end(num_records, len(central), end)
    fixed.append((start, tail))
    return ArchiveLayout(fixed, places, start + len(tail))


def _encode_local_header(
    name: bytes, version: int, crc: int, size: int, extra: bytes = b""
) -> bytes:
    """Return the header before a record's content. Its time is 0, and it is not compressed."""
    method = 0
    time = 0
    date = 0
    fields = (version, _UTF8_NAMES, method, time, date, crc, size, size, len(name), len(extra))
    return _LOCAL.pack(b"PK\3\4", *fields) + name + extra


def _encode_directory_entry(
    name: bytes, version: int, crc: int, size: int, header: int, extra: bytes = b""
) -> bytes:
    """Return the entry of a record in the directory; `header` is the offset of its header."""
    method = 0
    time = 0
    date = 0
    fields = (version, version, _UTF8_NAMES, method, time, date, crc, size, size)
    # No comment, on the first disk, no attributes.
    return (
        _CENTRAL.pack(b"PK\1\2", *fields, len(name), len(extra), 0, 0, 0, 0, header) + name + extra
    )


def _encode_known_record(name: bytes, content: bytes, header: int) -> tuple[bytes, bytes]:
    """Return a record, and its directory entry."""
    crc = zlib.crc32(content)
    local = _encode_local_header(name, 0, crc, len(content))
    entry = _encode_directory_entry(name, 0, crc, len(content), header)
    return local + content, entry


def _encode_data_record(name: bytes, nbytes: int, header: int) -> tuple[bytes, bytes]:
    """Return local header and directory entry of tensor data, in zip64 form for any size.

    A field with the maximum is replaced by an entry of the zip64 extra field (kind 1).
    """
    # Align the data, as torch does.
    sizes = struct.pack("<2H2Q", 1, 16, nbytes, nbytes)
    padding_header_size = 4
    unaligned = header + _LOCAL.size + len(name) + len(sizes) + padding_header_size
    padding = -unaligned % ALIGNMENT
    extra = sizes + struct.pack("<2s H", b"FB", padding) + bytes(padding)
    local = _encode_local_header(name, _ZIP64_VERSION, 0, _MAX32, extra)

    # The offset is the third, optional entry of the zip64 field.
    place = b""
    if header >= _MAX32:
        place = struct.pack("<Q", header)
    wide = struct.pack("<2H2Q", 1, 16 + len(place), nbytes, nbytes) + place
    entry = _encode_directory_entry(
        name, _ZIP64_VERSION, 0, _MAX32, min(header, _MAX32), extra=wide
    )
    return local, entry


@lru_cache(maxsize=65536)
def make_tensor_envelope(dtype: torch.dtype, shape: Shape) -> Envelope:
    """Return prefix and suffix of the archive of a contiguous tensor."""
    (_, prefix), (_, suffix) = lay_out_archive(TensorSlot(dtype, shape)).fixed
    return Envelope(prefix, suffix)


def _encode_end(entries: int, central_size: int, central_offset: int) -> bytes:
    """Return the end record of the directory, with its zip64 form and the locator of that."""
    end64 = _END64.pack(
        b"PK\6\6",
        44,
        _ZIP64_VERSION,
        _ZIP64_VERSION,
        0,
        0,
        entries,
        entries,
        central_size,
        central_offset,
    )
    locator = _LOCATOR64.pack(b"PK\6\7", 0, central_offset + central_size, 1)
    # Values that do not fit the old record are its maxima; readers then use the zip64 record.
    few = min(entries, 0xFFFF)
    end = _END.pack(
        b"PK\5\6", 0, 0, few, few, min(central_size, _MAX32), min(central_offset, _MAX32), 0
    )
    return end64 + locator + end


def encode_object(value: Any, in_list: bool = True) -> bytes:
    """Return the archive of a bytes entry.

    It contains a list with the object (Megatron-core), or the object itself (plain DCP).
    """
    if in_list:
        value = [value]
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def pad_archive(archive: bytes, length: int) -> bytes:
    """Return the archive in exactly `length` bytes: the padding is the zip comment at its end.

    The padding has at most 4000 bytes: torch's reader looks for the end record in the last 4 KiB,
    and fails on some files beyond.
    """
    padding = length - len(archive)
    assert 0 <= padding <= 4000 and archive[-2:] == b"\0\0", (length, len(archive))
    return archive[:-2] + struct.pack("<H", padding) + bytes(padding)


class Archive:
    """The records of an archive of `length` bytes.

    `read(offset, size)` reads from it, and `where` names it in error messages.
    """

    def __init__(
        self, read: Callable[[int, int], bytes | memoryview], length: int, where: str
    ) -> None:
        self._source = read
        self._length = length
        self._where = where
        self.records: dict[str, Record] = {}  # by name, without the top folder
        try:
            self._read_directory()
        except (struct.error, UnicodeDecodeError) as error:
            raise self._make_error(str(error)) from error

    def find_data(self, name: str) -> int:
        """Return the offset of the content of record `name` in the archive."""
        record = self.records[name]
        header = bytes(self._read(record.header, _LOCAL.size))
        if len(header) < _LOCAL.size or header[:4] != b"PK\3\4":
            raise self._make_error(f"no record header at byte {record.header}")
        # The name and the extra field follow.
        *_, name_size, extra_size = _LOCAL.unpack(header)
        offset = record.header + _LOCAL.size + name_size + extra_size
        if offset + record.size > self._length:
            raise self._make_error(f"record {name} ends after the archive")
        return offset

    def read(self, name: str) -> bytes:
        """Return a record that is small in any checkpoint: the pickle, not the data of a tensor."""
        if name not in self.records:
            raise self._make_error(f"no record {name}")
        size = self.records[name].size
        self._check_size(f"record {name}", size)
        data = bytes(self._read(self.find_data(name), size))
        if len(data) != size:
            raise self._make_error(f"record {name} is truncated")
        self.check_crc(name, data)
        return data

    def check_crc(self, name: str, data: bytes | memoryview) -> None:
        """Raise CheckpointError if record `name` has a CRC and `data` does not match it."""
        if self.records[name].crc not in (0, zlib.crc32(data)):
            raise self._make_error(f"record {escape_control_chars(name)} does not have its CRC-32")

    def _read(self, offset: int, size: int) -> bytes | memoryview:
        """Return up to `size` bytes, fewer at the end of the archive."""
        if offset > self._length:
            raise self._make_error(f"it refers to byte {offset} of {self._length}")
        return self._source(offset, min(size, self._length - offset))

    def _check_size(self, what: str, size: int) -> None:
        if size > _MAX_RECORD:
            raise self._make_error(f"{what} has {size} bytes, at most {_MAX_RECORD} are plausible")

    def _make_error(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self._where}: not an intact torch.save archive: {reason}")

    def _read_directory(self) -> None:
        """Fill `records`."""
        # The end record, which a comment of up to 64 kB may follow.
        for tail_size in (min(self._length, 4096), min(self._length, 1 << 17)):
            tail = bytes(self._read(self._length - tail_size, tail_size))
            end = tail.rfind(b"PK\5\6")
            if end >= 0:
                break
        else:
            raise self._make_error("no end record (the file is truncated or of another format)")
        _, _, _, _, entries, size, offset, _ = _END.unpack_from(tail, end)
        # Its zip64 form, if there is one.
        locator = end - _LOCATOR64.size
        if locator >= 0 and tail[locator : locator + 4] == b"PK\6\7":
            _, _, end64_offset, _ = _LOCATOR64.unpack_from(tail, locator)
            end64 = bytes(self._read(end64_offset, _END64.size))
            *_, entries, size, offset = _END64.unpack(end64)
        # The entries.
        if offset + size > self._length:
            raise self._make_error("its directory exceeds its end")
        self._check_size("its directory", size)
        directory = bytes(self._read(offset, size))
        position = 0
        for _ in range(entries):
            position = self._read_entry(directory, position)

    def _read_entry(self, directory: bytes, position: int) -> int:
        """Add the record at `position` of the directory; return the position after its entry."""
        signature, _, _, _, method, _, _, crc, packed_size, size, *rest = _CENTRAL.unpack_from(
            directory, position
        )
        name_size, extra_size, comment_size, _, _, _, header = rest
        position += _CENTRAL.size
        extra_start = position + name_size
        extra_stop = extra_start + extra_size
        name = directory[position:extra_start].decode()
        extra = directory[extra_start:extra_stop]
        if signature != b"PK\1\2":
            raise self._make_error("its directory is garbled")
        if method != 0:
            raise self._make_error(
                f"record {escape_control_chars(name)} is compressed; torch.save never compresses"
            )
        wide = _read_zip64_values(extra)
        # A field with the maximum is replaced by the next number of the zip64 field: size,
        # compressed size (the same number), offset.
        if size == _MAX32 and wide:
            size = wide.pop(0)
            if packed_size == _MAX32:
                wide = wide[1:]
        if header == _MAX32 and wide:
            header = wide.pop(0)
        name = name.partition("/")[2]
        if name in self.records:
            raise self._make_error(f"it has two records {escape_control_chars(name)}")
        self.records[name] = Record(header, size, crc)
        return extra_stop + comment_size


def _read_zip64_values(extra: bytes) -> list[int]:
    """Return the numbers of the zip64 extra field, in the order of the fields they replace."""
    position = 0
    while position + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, position)
        position += 4
        if kind == 1:
            return list(struct.unpack_from(f"<{size // 8}Q", extra, position))
        position += size
    return []


def view_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous one-dimensional CPU tensor."""
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array)
