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

from megatron.core.safe_files.errors import CheckpointError
from megatron.core.safe_files.schema import Shape
from megatron.core.terminal import escape_control_chars

# Bytes. Raw data is aligned in its archive, and archives are aligned in files.
ALIGNMENT = 64
# Structures of zip files, which PKWARE's APPNOTE.TXT specifies. Each begins with its signature.
_LOCAL = struct.Struct("<4s5H3I2H")  # header before a record
LOCAL_SIGNATURE = b"PK\3\4"
_CENTRAL = struct.Struct("<4s6H3I5H2I")  # entry of a record in the directory
_CENTRAL_SIGNATURE = b"PK\1\2"
_END = struct.Struct("<4s4H2IH")  # end record of the directory
_END_SIGNATURE = b"PK\5\6"
_END64 = struct.Struct("<4sQ2H2I4Q")  # its form for large files
_END64_SIGNATURE = b"PK\6\6"
_LOCATOR64 = struct.Struct("<4sIQI")  # position of the latter
_LOCATOR64_SIGNATURE = b"PK\6\7"
_ZIP64_KIND = 1  # of the extra field with 64-bit numbers
_MAX32 = 0xFFFFFFFF
_UTF8_NAMES = 1 << 11
_ZIP64_VERSION = 45
_MAX_RECORD = 256 << 20  # bytes of a record that is read whole


class Envelope(NamedTuple):
    """The parts of a tensor's archive before and after its raw bytes."""

    prefix: bytes
    suffix: bytes


class Record(NamedTuple):
    """One file of an archive."""

    header: int  # offset of its local header in the archive
    size: int  # bytes of the content
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
    slot_offsets: list[tuple[TensorSlot, int]]  # in the order of the archive
    size: int


class _Storage:
    """The storage of a tensor slot while it is pickled."""

    def __init__(self, dtype: torch.dtype, numel: int, key: str) -> None:
        if dtype in torch.storage._new_dtypes():  # dtypes without a typed storage class
            storage_class = torch.UntypedStorage
            size = numel * dtype.itemsize
        else:
            storage_class = getattr(torch, torch.storage._dtype_to_storage_type_map()[dtype])
            size = numel
        self.persistent_id = ("storage", storage_class, key, "cpu", size)


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
        if isinstance(obj, TensorSlot):
            slot = obj
        elif isinstance(obj, torch.Tensor):
            content = obj.detach().cpu().contiguous()
            slot = TensorSlot(obj.dtype, tuple(obj.shape), content)
        else:
            return NotImplemented

        # The record of a tensor is named by its number.
        record = str(len(self.slots))
        self.slots.append(slot)
        storage = _Storage(slot.dtype, math.prod(slot.shape), record)

        offset = 0
        stride = _compute_row_major_stride(slot.shape)
        requires_grad = False
        hooks: OrderedDict[Any, Any] = OrderedDict()
        arguments = (storage, offset, slot.shape, stride, requires_grad, hooks)
        if slot.dtype in torch.storage._new_dtypes():
            return torch._utils._rebuild_tensor_v3, (*arguments, slot.dtype)
        return torch._utils._rebuild_tensor_v2, arguments


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

    # Records with known content
    central = bytearray()  # the directory at the end of the archive
    head = bytearray()  # everything between the bytes of the previous and of the next tensor
    known_records = (
        (b"archive/data.pkl", pickled.getvalue()),
        (b"archive/byteorder", b"little"),
        (b"archive/version", b"3\n"),
    )
    for name, content in known_records:
        local, entry = _encode_known_record(name, content, len(head))
        head += local
        central += entry

    # Records of tensors
    fixed = []
    slot_offsets = []
    start = 0  # of `head` in the archive
    for slot_index, slot in enumerate(pickler.slots):
        name = b"archive/data/%d" % slot_index
        header_offset = start + len(head)
        local, entry = _encode_data_record(name, slot.nbytes, header_offset)
        head += local
        central += entry
        fixed.append((start, bytes(head)))

        data_offset = start + len(head)
        slot_offsets.append((slot, data_offset))
        start = data_offset + slot.nbytes
        head = bytearray()

    # The directory
    central_offset = start + len(head)
    num_records = len(known_records) + len(slot_offsets)
    end = _encode_end(num_records, len(central), central_offset)
    tail = bytes(head + central) + end
    fixed.append((start, tail))
    return ArchiveLayout(fixed, slot_offsets, start + len(tail))


def _encode_local_header(
    name: bytes, version: int, crc: int, size: int, extra: bytes = b""
) -> bytes:
    """Return the header before a record's content. Its time is 0, and it is not compressed."""
    method = 0
    time = 0
    date = 0
    fields = (version, _UTF8_NAMES, method, time, date, crc, size, size, len(name), len(extra))
    return _LOCAL.pack(LOCAL_SIGNATURE, *fields) + name + extra


def _encode_directory_entry(
    name: bytes, version: int, crc: int, size: int, header: int, extra: bytes = b""
) -> bytes:
    """Return the entry of a record in the directory; `header` is the offset of its header."""
    method = 0
    time = 0
    date = 0
    comment_size = 0
    disk = 0
    attributes = (0, 0)
    entry = _CENTRAL.pack(
        _CENTRAL_SIGNATURE,
        version,
        version,
        _UTF8_NAMES,
        method,
        time,
        date,
        crc,
        size,
        size,
        len(name),
        len(extra),
        comment_size,
        disk,
        *attributes,
        header,
    )
    return entry + name + extra


def _encode_known_record(name: bytes, content: bytes, header: int) -> tuple[bytes, bytes]:
    """Return a record with its header, and its directory entry."""
    crc = zlib.crc32(content)
    local = _encode_local_header(name, 0, crc, len(content))
    entry = _encode_directory_entry(name, 0, crc, len(content), header)
    return local + content, entry


def _encode_data_record(name: bytes, nbytes: int, header: int) -> tuple[bytes, bytes]:
    """Return local header and directory entry of tensor data, in zip64 form for any size.

    `header` is the offset of the header. A field with the maximum is replaced by a number of the
    zip64 extra field.
    """
    # A second extra field aligns the data, as torch does.
    sizes = _encode_zip64_field(nbytes, nbytes)
    padding_head_size = 4
    unaligned = header + _LOCAL.size + len(name) + len(sizes) + padding_head_size
    padding = -unaligned % ALIGNMENT
    padding_head = struct.pack("<2sH", b"FB", padding)
    extra = sizes + padding_head + bytes(padding)
    local = _encode_local_header(name, _ZIP64_VERSION, crc=0, size=_MAX32, extra=extra)

    # The offset is the third, optional number of the zip64 field.
    wide = sizes
    if header >= _MAX32:
        wide = _encode_zip64_field(nbytes, nbytes, header)
    short_header = min(header, _MAX32)
    entry = _encode_directory_entry(
        name, _ZIP64_VERSION, crc=0, size=_MAX32, header=short_header, extra=wide
    )
    return local, entry


def _encode_zip64_field(*values: int) -> bytes:
    """Return the extra field with 64-bit numbers for fields that have the maximum."""
    head = struct.pack("<2H", _ZIP64_KIND, 8 * len(values))
    return head + struct.pack(f"<{len(values)}Q", *values)


@lru_cache(maxsize=65536)
def make_tensor_envelope(dtype: torch.dtype, shape: Shape) -> Envelope:
    """Return prefix and suffix of the archive of a contiguous tensor."""
    layout = lay_out_archive(TensorSlot(dtype, shape))
    (_, prefix), (_, suffix) = layout.fixed
    return Envelope(prefix, suffix)


def _encode_end(entries: int, central_size: int, central_offset: int) -> bytes:
    """Return the end record of the directory, with its zip64 form and the locator of that."""
    disk = 0
    size_after_this_field = _END64.size - 12
    end64 = _END64.pack(
        _END64_SIGNATURE,
        size_after_this_field,
        _ZIP64_VERSION,
        _ZIP64_VERSION,
        disk,
        disk,
        entries,
        entries,
        central_size,
        central_offset,
    )
    num_disks = 1
    end64_offset = central_offset + central_size
    locator = _LOCATOR64.pack(_LOCATOR64_SIGNATURE, disk, end64_offset, num_disks)

    # Values that do not fit the old record are its maxima; readers then use the zip64 record.
    short_entries = min(entries, 0xFFFF)
    short_size = min(central_size, _MAX32)
    short_offset = min(central_offset, _MAX32)
    comment_size = 0
    end = _END.pack(
        _END_SIGNATURE,
        disk,
        disk,
        short_entries,
        short_entries,
        short_size,
        short_offset,
        comment_size,
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

    `read(offset, size)` reads from it, and `location` names it in error messages.
    """

    def __init__(
        self, read: Callable[[int, int], bytes | memoryview], length: int, location: str
    ) -> None:
        self._source = read
        self._length = length
        self._location = location
        self.records: dict[str, Record] = {}  # by name, without the top folder
        try:
            self._read_directory()
        except (struct.error, UnicodeDecodeError) as error:
            raise self._make_error(str(error)) from error

    def find_data(self, name: str) -> int:
        """Return the offset of the content of record `name` in the archive."""
        record = self.records[name]
        header = bytes(self._read(record.header, _LOCAL.size))
        if len(header) < _LOCAL.size or not header.startswith(LOCAL_SIGNATURE):
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
        """Raise CheckpointError for a part that is too large to be read whole."""
        if size > _MAX_RECORD:
            raise self._make_error(f"{what} has {size} bytes, at most {_MAX_RECORD} are plausible")

    def _make_error(self, reason: str) -> CheckpointError:
        """Return an error that names the archive."""
        return CheckpointError(f"{self._location}: not an intact torch.save archive: {reason}")

    def _read_directory(self) -> None:
        """Fill `records`."""
        entries, size, offset = self._find_directory()
        if offset + size > self._length:
            raise self._make_error("its directory exceeds its end")
        self._check_size("its directory", size)
        directory = bytes(self._read(offset, size))
        position = 0
        for _ in range(entries):
            position = self._read_entry(directory, position)

    def _find_directory(self) -> tuple[int, int, int]:
        """Return the number of entries, the size and the offset of the directory."""
        # Find the end record, which a comment of up to 64 kB may follow. Most have no comment.
        end = -1
        for tail_size in (4096, 1 << 17):
            tail_size = min(self._length, tail_size)
            tail = bytes(self._read(self._length - tail_size, tail_size))
            end = tail.rfind(_END_SIGNATURE)
            if end >= 0:
                break
        if end < 0:
            raise self._make_error("no end record (the file is truncated or of another format)")
        _, _, _, _, entries, size, offset, _ = _END.unpack_from(tail, end)

        # Its zip64 form, if there is one, is found via the locator before it.
        locator = end - _LOCATOR64.size
        if locator >= 0 and tail.startswith(_LOCATOR64_SIGNATURE, locator):
            _, _, end64_offset, _ = _LOCATOR64.unpack_from(tail, locator)
            end64 = bytes(self._read(end64_offset, _END64.size))
            *_, entries, size, offset = _END64.unpack(end64)
        return entries, size, offset

    def _read_entry(self, directory: bytes, position: int) -> int:
        """Add the record at `position` of the directory; return the position after its entry."""
        fields = _CENTRAL.unpack_from(directory, position)
        signature, _, _, _, method, _, _, crc, packed_size, size, *trailing_fields = fields
        name_size, extra_size, comment_size, _, _, _, header = trailing_fields

        # The name and the extra field follow.
        name_start = position + _CENTRAL.size
        extra_start = name_start + name_size
        extra_stop = extra_start + extra_size
        path = directory[name_start:extra_start].decode()
        extra = directory[extra_start:extra_stop]
        if signature != _CENTRAL_SIGNATURE:
            raise self._make_error("its directory is garbled")
        if method != 0:
            raise self._make_error(
                f"record {escape_control_chars(path)} is compressed; torch.save never compresses"
            )

        # A field with the maximum is replaced by the next number of the zip64 field: size,
        # compressed size (the same number), offset.
        wide = _read_zip64_values(extra)
        if size == _MAX32 and wide:
            size = wide.pop(0)
            if packed_size == _MAX32:
                wide = wide[1:]
        if header == _MAX32 and wide:
            header = wide.pop(0)

        _, _, name = path.partition("/")  # without the top folder
        if name in self.records:
            raise self._make_error(f"it has two records {escape_control_chars(name)}")
        self.records[name] = Record(header, size, crc)
        return extra_stop + comment_size


def _read_zip64_values(extra: bytes) -> list[int]:
    """Return the numbers of the zip64 extra field, in the order of the fields they replace."""
    position = 0
    while position + 4 <= len(extra):
        field_id, size = struct.unpack_from("<2H", extra, position)
        position += 4
        if field_id == _ZIP64_KIND:
            values = struct.unpack_from(f"<{size // 8}Q", extra, position)
            return list(values)
        position += size
    return []


def view_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous one-dimensional CPU tensor."""
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array)
