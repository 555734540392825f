"""GGUF files: metadata, and positions of tensors.

Format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), little-endian: magic, u32
version, u64 number of tensors, u64 number of metadata entries, the entries (name, type, value), the
descriptions of tensors (name, dimensions with the fastest first, type, offset), padding, and data.
A string is its u64 length and its bytes.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron.conversion.gguf.blocks import ENCODINGS, BlockEncoding
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.dist_checkpointing.mapping import Shape
from megatron.core.safe_files import schema
from megatron.core.safe_files.reading import OpenFile, open_file
from megatron.core.terminal import escape_control_chars

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # which differ in the byte order that they allow
_MAX_HEADER = 128 << 20  # a vocabulary of 256,000 tokens and its merges has less than 20 MB
_CHUNK = 1 << 20
_MAX_DIMENSIONS = 4
_MAX_NAME = 1 << 16
_MAX_LISTED = 4096  # elements of an array of numbers that is kept, e.g. one per layer
_DEFAULT_ALIGNMENT = 32
_MIN_ENTRY = 8 + 4 + 1  # bytes of a metadata entry: length of the name, type, value
_MIN_TENSOR = 8 + 4 + 8 + 4 + 8  # bytes of the description of a tensor

# Type of a metadata value -> its type in numpy.
_NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_STRING = 8
_ARRAY = 9

_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class GGUFTensor(NamedTuple):
    """Position and encoding of a tensor in a file."""

    path: Path
    position: int  # first byte in the file
    encoding: BlockEncoding
    shape: Shape  # [..., rows, columns]


class GGUFModel(NamedTuple):
    """The metadata and the tensors of a model in one or several files."""

    metadata: dict[str, Any]  # None for arrays that are not kept
    tensors: dict[str, GGUFTensor]


def open_model(path: Path) -> GGUFModel:
    """Return the model in a file or in the shards that it belongs to.

    Raises ValueError if a file is missing, truncated or damaged.
    """
    shards = _list_shards(path)
    first = _open_file(shards[0])
    tensors = dict(first.tensors)
    for shard in shards[1:]:
        for name, tensor in _open_file(shard).tensors.items():
            if name in tensors:
                raise CheckpointError(
                    f"{shard}: {name} is also in {tensors[name].path.name}: the shards are of "
                    "different models"
                )
            tensors[name] = tensor
    expected = first.metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise CheckpointError(
            f"{path}: the shards have {len(tensors)} tensors, but the first one announces "
            f"{expected}: they are of different models, or damaged"
        )
    return GGUFModel(first.metadata, tensors)


def read_arrays(path: Path) -> dict[str, Any]:
    """Return the metadata of the model that a file belongs to, with all arrays.

    Raises ValueError for a damaged file.
    """
    return _open_file(_list_shards(path)[0], keeps_arrays=True).metadata


def _list_shards(path: Path) -> list[Path]:
    """Return the files of a model of which `path` is one."""
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match[3])
    shards = []
    for index in range(1, count + 1):
        shard = path.with_name(f"{match[1]}-{index:05d}-of-{match[3]}.gguf")
        if not shard.is_file():
            raise CheckpointError(
                f"{shard} is missing: {path.name} is one of {count} files of a model"
            )
        shards.append(shard)
    if not shards:
        raise CheckpointError(f"{path}: its name announces 0 files")
    return shards


class _GGUFHeader:
    """The bytes of a file from its beginning, read as they are needed."""

    def __init__(self, file: OpenFile, path: Path, keeps_arrays: bool) -> None:
        self._file = file
        self.path = path
        self._keeps_arrays = keeps_arrays
        self._end = min(file.size, _MAX_HEADER)
        self._chunk = b""
        self._chunk_start = 0
        self.position = 0

    def fail(self, cause: str) -> CheckpointError:
        """Return the error for a file that cannot be read."""
        return CheckpointError(
            f"{self.path}: {cause}: the file is damaged, or its download is incomplete"
        )

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes. Raises CheckpointError if the header ends before them."""
        stop = self.position + size
        if stop > self._end:
            raise self.fail(
                f"its header requires {stop} bytes, but only {self._end} of {self._file.size} can "
                "belong to it"
            )
        first = self.position - self._chunk_start
        if first + size > len(self._chunk):
            length = min(max(size, _CHUNK), self._end - self.position)
            self._chunk = self._file.read(self.position, length)
            self._chunk_start = self.position
            first = 0
        self.position = stop
        return self._chunk[first : first + size]

    def read_number(self, value_type: int) -> Any:
        """Return one number."""
        dtype = np.dtype(_NUMBERS[value_type])
        return _to_number(np.frombuffer(self.read(dtype.itemsize), dtype)[0])

    def read_u32(self) -> int:
        return int.from_bytes(self.read(4), "little")

    def read_u64(self) -> int:
        return int.from_bytes(self.read(8), "little")

    def read_string(self, limit: int = _MAX_HEADER) -> str:
        """Return a string; bytes that are not UTF-8 are replaced."""
        length = self.read_u64()
        if length > limit:
            raise self.fail(f"a string at byte {self.position} has {length} bytes")
        return self.read(length).decode(errors="replace")

    def read_name(self) -> str:
        name = self.read_string(_MAX_NAME)
        schema.key(name, f"{self.path}: a name")
        return name

    def read_count(self, entries: str, min_bytes: int) -> int:
        """Return a number of `entries` of at least `min_bytes` each, which the header can hold."""
        count = self.read_u64()
        if count * min_bytes > self._end - self.position:
            raise self.fail(f"it announces {count} {entries}, more than it has room for")
        return count

    def read_value(self, value_type: int, name: str) -> Any:
        """Return a metadata value; None for an array that is not kept."""
        if value_type in _NUMBERS:
            return self.read_number(value_type)
        if value_type == _STRING:
            return self.read_string()
        if value_type != _ARRAY:
            raise self.fail(f"{escape_control_chars(name)} has the unknown type {value_type}")
        return self._read_array(name)

    def _read_array(self, name: str) -> list[Any] | None:
        """Return the elements of a short array of numbers, or of any array if arrays are kept.

        Other arrays are skipped.
        """
        element_type = self.read_u32()
        if element_type == _STRING:
            count = self.read_count(f"elements of {escape_control_chars(name)}", 8)
            if self._keeps_arrays:
                return [self.read_string() for _ in range(count)]
            for _ in range(count):
                self.read(self.read_u64())
            return None
        if element_type not in _NUMBERS:
            raise self.fail(
                f"{escape_control_chars(name)} is an array of the unknown type {element_type}"
            )
        dtype = np.dtype(_NUMBERS[element_type])
        count = self.read_count(f"elements of {escape_control_chars(name)}", dtype.itemsize)
        content = self.read(count * dtype.itemsize)
        if count > _MAX_LISTED and not self._keeps_arrays:
            return None
        return [_to_number(value) for value in np.frombuffer(content, dtype)]


def _to_number(value: np.generic) -> bool | int | float:
    """Return a number of Python.

    A 32-bit float becomes the shortest decimal number that is rounded to it, since the value in the
    original model was rounded: 1e-05 instead of 9.99999974e-06.
    """
    if isinstance(value, np.float32):
        return float(str(value))
    number: bool | int | float = value.item()
    return number


def _open_file(path: Path, keeps_arrays: bool = False) -> GGUFModel:
    """Return the metadata and the tensors of one file."""
    with open_file(path) as file:
        header = _GGUFHeader(file, path, keeps_arrays)
        _check_version(header)
        num_tensors = header.read_count("tensors", _MIN_TENSOR)
        num_entries = header.read_count("metadata entries", _MIN_ENTRY)

        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            name = header.read_name()
            if name in metadata:
                raise header.fail(f"{escape_control_chars(name)} occurs twice")
            metadata[name] = header.read_value(header.read_u32(), name)

        descriptions = [_read_description(header) for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0 or alignment % 8:
            raise header.fail(f"general.alignment is {schema.format_value(alignment)}")
        data_start = -(-header.position // alignment) * alignment
        tensors = _locate_tensors(header, descriptions, data_start, alignment, file.size)
    return GGUFModel(metadata, tensors)


def _check_version(header: _GGUFHeader) -> None:
    """Raise CheckpointError for a file of another format or version."""
    if header.read(len(_MAGIC)) != _MAGIC:
        raise header.fail("it does not begin with GGUF")
    version = header.read_u32()
    if version not in _VERSIONS:
        hint = ""
        if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
            hint = ", big-endian"
        raise header.fail(
            f"it has version {version}{hint}, only little-endian files of version "
            f"{' and '.join(map(str, _VERSIONS))} are read"
        )


def _read_description(header: _GGUFHeader) -> tuple[str, GGUFTensor]:
    """Return the name of a tensor, and the tensor with its position in the data of the file.

    Raises CheckpointError for an unknown encoding.
    """
    name = header.read_name()
    label = escape_control_chars(name)
    num_dimensions = header.read_u32()
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise header.fail(f"{label} has {num_dimensions} dimensions")
    dimensions = [header.read_u64() for _ in range(num_dimensions)]
    if min(dimensions) == 0 or math.prod(dimensions) >= 1 << 62:
        raise header.fail(f"{label} has the dimensions {dimensions}")

    type_id = header.read_u32()
    offset = header.read_u64()
    encoding = ENCODINGS.get(type_id)
    if encoding is None:
        supported = ", ".join(entry.name for entry in ENCODINGS.values())
        raise CheckpointError(
            f"{header.fail(f'{label} has the type {type_id}')}; or use a file with only the types "
            f"that are read, {supported}"
        )
    if dimensions[0] % encoding.block_size:
        raise header.fail(
            f"{label} has rows of {dimensions[0]} elements, which are not blocks of "
            f"{encoding.block_size} ({encoding.name})"
        )
    return name, GGUFTensor(header.path, offset, encoding, tuple(reversed(dimensions)))


def _locate_tensors(
    header: _GGUFHeader,
    descriptions: list[tuple[str, GGUFTensor]],
    data_start: int,
    alignment: int,
    file_size: int,
) -> dict[str, GGUFTensor]:
    """Return the tensors of a file. Raises CheckpointError if they overlap or are outside of it."""
    tensors: dict[str, GGUFTensor] = {}
    end = 0
    for name, tensor in sorted(descriptions, key=lambda description: description[1].position):
        label = escape_control_chars(name)
        offset = tensor.position
        if name in tensors:
            raise header.fail(f"{label} occurs twice")
        if offset % alignment or offset < end:
            raise header.fail(
                f"{label} begins at byte {offset} of the data, but the tensor before it ends at "
                f"{end}, and tensors begin at multiples of {alignment}"
            )
        num_blocks = math.prod(tensor.shape) // tensor.encoding.block_size
        end = offset + num_blocks * tensor.encoding.block_bytes
        position = data_start + offset
        if data_start + end > file_size:
            raise header.fail(
                f"{label} is at bytes {position} to {data_start + end}, but the file has "
                f"{file_size}"
            )
        tensors[name] = tensor._replace(position=position)
    return tensors
