"""The container of `torch.save`: a zip archive of uncompressed records.

A tensor item of a checkpoint is a complete archive `prefix + raw bytes + suffix`, where prefix and suffix depend on
dtype and shape alone. So a file can be laid out before any data exists, and the raw bytes of any row can be read back
without touching the rest. Records of data carry no CRC (as `torch.serialization.set_crc32_options(False)`):
`checksums.json` protects them, and faster.
"""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.mapping import Shape

ALIGNMENT = 64  # of raw data relative to the start of its archive; archives start at multiples of it, too
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")
_MAX32 = 0xFFFFFFFF
_UTF8_NAMES = 1 << 11
_ZIP64_VERSION = 45


class Envelope(NamedTuple):
    """Everything of a tensor's archive but its raw bytes."""

    prefix: bytes
    suffix: bytes


class Record(NamedTuple):
    """One file of an archive; `header` is the place of its local header relative to the archive."""

    header: int
    size: int


class _Storage:
    """Stands for the storage while a tensor's pickle is written."""

    def __init__(self, dtype: torch.dtype, numel: int) -> None:
        in_v3 = dtype in torch.storage._new_dtypes()  # dtypes that have no typed storage class of their own
        kind = torch.UntypedStorage if in_v3 else getattr(torch, torch.storage._dtype_to_storage_type_map()[dtype])
        self.persistent_id = ("storage", kind, "0", "cpu", numel * (dtype.itemsize if in_v3 else 1))


class _Tensor:
    """Pickles as a contiguous tensor does."""

    def __init__(self, dtype: torch.dtype, shape: Shape) -> None:
        strides, numel = [], 1
        for extent in reversed(shape):
            strides.append(numel)
            numel *= max(1, extent)
        storage = _Storage(dtype, torch.Size(shape).numel())
        common: tuple[Any, ...] = (storage, 0, shape, tuple(reversed(strides)), False, OrderedDict())
        if dtype in torch.storage._new_dtypes():
            self.reduced: tuple[Any, ...] = (torch._utils._rebuild_tensor_v3, (*common, dtype))
        else:
            self.reduced = (torch._utils._rebuild_tensor_v2, common)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.persistent_id if isinstance(obj, _Storage) else None


@lru_cache(maxsize=65536)
def tensor_envelope(dtype: torch.dtype, shape: Shape) -> Envelope:
    """Prefix and suffix of the archive that `torch.load` reads as a contiguous tensor of `dtype` and `shape`."""
    pickled = io.BytesIO()
    _Pickler(pickled, protocol=2).dump(_Tensor(dtype, shape))
    prefix, central = bytearray(), bytearray()
    for name, content in ((b"data.pkl", pickled.getvalue()), (b"byteorder", b"little"), (b"version", b"3\n")):
        name, crc, size = b"archive/" + name, zlib.crc32(content), len(content)
        central += _CENTRAL.pack(
            b"PK\1\2", 0, 0, _UTF8_NAMES, 0, 0, 0, crc, size, size, len(name), 0, 0, 0, 0, 0, len(prefix)
        )
        central += name
        prefix += _LOCAL.pack(b"PK\3\4", 0, _UTF8_NAMES, 0, 0, 0, crc, size, size, len(name), 0) + name + content

    # Data comes last and always in zip64 form, so that its size may be anything.
    name, nbytes = b"archive/data/0", torch.Size(shape).numel() * dtype.itemsize
    sizes = struct.pack("<2H2Q", 1, 16, nbytes, nbytes)
    header = len(prefix)
    padding = -(header + _LOCAL.size + len(name) + len(sizes) + 4) % ALIGNMENT
    extra = sizes + struct.pack("<2s H", b"FB", padding) + bytes(padding)
    local = (b"PK\3\4", _ZIP64_VERSION, _UTF8_NAMES, 0, 0, 0, 0, _MAX32, _MAX32, len(name), len(extra))
    prefix += _LOCAL.pack(*local) + name + extra
    entry = (b"PK\1\2", _ZIP64_VERSION, _ZIP64_VERSION, _UTF8_NAMES, 0, 0, 0, 0, _MAX32, _MAX32, len(name), len(sizes))
    central += _CENTRAL.pack(*entry, 0, 0, 0, 0, header) + name + sizes
    return Envelope(bytes(prefix), bytes(central) + _end_of_archive(4, len(central), len(prefix) + nbytes))


def _end_of_archive(entries: int, central_size: int, central_offset: int) -> bytes:
    end64 = _END64.pack(
        b"PK\6\6", 44, _ZIP64_VERSION, _ZIP64_VERSION, 0, 0, entries, entries, central_size, central_offset
    )
    locator = _LOCATOR64.pack(b"PK\6\7", 0, central_offset + central_size, 1)
    end = _END.pack(b"PK\5\6", 0, 0, entries, entries, central_size, min(central_offset, _MAX32), 0)
    return end64 + locator + end


def object_archive(value: Any) -> bytes:
    """A bytes entry as Megatron-core writes it: the archive of a list of length 1 that holds the object."""
    buffer = io.BytesIO()
    torch.save([value], buffer)
    return buffer.getvalue()


def pad_archive(archive: bytes, length: int) -> bytes:
    """The same archive in exactly `length` bytes: the padding is the zip comment at its end.

    At most 4000 bytes: torch's reader looks for the end record in the last 4 KiB, and fails on some files beyond.
    """
    padding = length - len(archive)
    assert 0 <= padding <= 4000 and archive[-2:] == b"\0\0", (length, len(archive))
    return archive[:-2] + struct.pack("<H", padding) + bytes(padding)


class Archive:
    """The records of an archive of `length` bytes; `read(offset, size)` reads from it, `where` names it in errors."""

    def __init__(self, read: Callable[[int, int], bytes | memoryview], length: int, where: str) -> None:
        self._read = read
        self._length = length
        self._where = where
        self.records: dict[str, Record] = {}  # by name without the archive's top folder
        try:
            self._read_directory()
        except (struct.error, UnicodeDecodeError) as error:
            raise self._damaged(str(error)) from error

    def data_offset(self, name: str) -> int:
        """Where the bytes of record `name` begin, relative to the archive."""
        record = self.records[name]
        header = bytes(self._read(record.header, _LOCAL.size))
        if len(header) < _LOCAL.size or header[:4] != b"PK\3\4":
            raise self._damaged(f"no record header at byte {record.header}")
        fields = _LOCAL.unpack(header)
        offset = record.header + _LOCAL.size + fields[9] + fields[10]
        if offset + record.size > self._length:
            raise self._damaged(f"record {name} ends behind the archive")
        return offset

    def read(self, name: str) -> bytes:
        if name not in self.records:
            raise self._damaged(f"no record {name}")
        data = bytes(self._read(self.data_offset(name), self.records[name].size))
        if len(data) != self.records[name].size:
            raise self._damaged(f"record {name} is truncated")
        return data

    def _damaged(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self._where}: not an intact torch.save archive: {reason}")

    def _read_directory(self) -> None:
        for tail_size in (min(self._length, 4096), min(self._length, 1 << 17)):  # a comment may follow the end record
            tail = bytes(self._read(self._length - tail_size, tail_size))
            end = tail.rfind(b"PK\5\6")
            if end >= 0:
                break
        else:
            raise self._damaged("no end record (the file is truncated or of another format)")
        _, _, _, _, entries, size, offset, _ = _END.unpack_from(tail, end)
        locator = end - _LOCATOR64.size
        if locator >= 0 and tail[locator : locator + 4] == b"PK\6\7":
            end64 = _LOCATOR64.unpack_from(tail, locator)[2]
            _, _, _, _, _, _, _, entries, size, offset = _END64.unpack(bytes(self._read(end64, _END64.size)))
        if offset + size > self._length:
            raise self._damaged("its directory lies behind its end")
        directory, position = bytes(self._read(offset, size)), 0
        for _ in range(entries):
            position = self._read_entry(directory, position)

    def _read_entry(self, directory: bytes, position: int) -> int:
        fields = _CENTRAL.unpack_from(directory, position)
        signature, method, size, (name_size, extra_size, comment_size) = fields[0], fields[4], fields[9], fields[10:13]
        header = fields[16]
        position += _CENTRAL.size
        name = directory[position : position + name_size].decode()
        extra = directory[position + name_size : position + name_size + extra_size]
        if signature != b"PK\1\2":
            raise self._damaged("its directory is garbled")
        if method != 0:
            raise self._damaged(f"record {name} is compressed; torch.save never compresses")
        wide = _zip64_values(extra)
        if size == _MAX32 and wide:
            size = wide.pop(0)
            wide = wide[1:] if fields[8] == _MAX32 else wide  # the compressed size is the same number
        if header == _MAX32 and wide:
            header = wide.pop(0)
        self.records[name.partition("/")[2]] = Record(header, size)
        return position + name_size + extra_size + comment_size


def _zip64_values(extra: bytes) -> list[int]:
    """The 64-bit numbers of the zip64 extra field, in the order of the 32-bit fields they replace."""
    position = 0
    while position + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, position)
        if kind == 1:
            return list(struct.unpack_from(f"<{size // 8}Q", extra, position + 4))
        position += 4 + size
    return []
