"""Loading of `torch.save` files without executing code: mapped, whole, or the structure only."""

from __future__ import annotations

import math
import mmap as mmap_module
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.core.object_path import path_of
from megatron.core.safe_files.errors import CheckpointError
from megatron.core.safe_files.reading import OpenFile, open_file
from megatron.core.safe_files.safe_globals import Storage
from megatron.core.safe_files.schema import Shape
from megatron.core.safe_files.torch_zip import LOCAL_SIGNATURE, Archive, view_bytes
from megatron.core.safe_files.unpickler import Budget, check_bounded, unpickle
from megatron.core.terminal import escape_control_chars


@dataclass(frozen=True)
class FileTensor:
    """A tensor stored in row-major order from byte `position` of a file."""

    path: Path
    position: int
    dtype: torch.dtype
    shape: Shape

    def numel(self) -> int:
        return math.prod(self.shape)

    def read_flat(self, start: int, count: int) -> torch.Tensor:
        """Return elements `[start, start + count)` as a one-dimensional tensor.

        Raises CheckpointError if the file is too short.
        """
        assert 0 <= start <= start + count <= self.numel(), (start, count, self.shape)
        result = torch.empty(count, dtype=self.dtype)
        if count == 0:
            return result
        position = self.position + start * self.dtype.itemsize
        try:
            with open_file(self.path) as file:
                file.read_into(view_bytes(result), position)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be opened: {error.strerror}") from error
        return result

    def read(self) -> torch.Tensor:
        """Return the whole tensor."""
        return self.read_flat(0, self.numel()).view(self.shape)


def load_file_tensors(value: Any) -> Any:
    """Return the same containers with every FileTensor read."""
    if isinstance(value, FileTensor):
        return value.read()
    if type(value) is dict:
        return {key: load_file_tensors(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        items = [load_file_tensors(item) for item in value]
        return type(value)(items)
    return value


def safe_load(
    source: str | os.PathLike[str] | bytes,
    *,
    mmap: bool = True,
    location: str | None = None,
    placeholders: bool = True,
) -> Any:
    """Load a file like `torch.load(source, weights_only=False, map_location="cpu")`.

    No code of the file is executed. `source` is a path or the bytes of an archive.

    With `mmap`, the tensors of a path are views of the mapped file: they are read when they are
    used, and writing to them changes memory only. Otherwise the file is read at once. Classes of
    other projects become `Placeholder`s or, without `placeholders`, an error.

    Raises CheckpointError that names `location` (default: the path), and UnsafePickleError for a
    refused global.
    """
    if isinstance(source, bytes):
        return _load_archive(bytearray(source), location or "pickle", placeholders, check_crc=True)
    path = path_of(source)
    location = location or str(path)
    try:
        with open_file(path) as file:
            # Objects and empty files cannot be mapped.
            if mmap and file.size > 0 and file.descriptor is not None:
                # Copy on write: changes of the tensors do not reach the file.
                mapped = mmap_module.mmap(file.descriptor, 0, access=mmap_module.ACCESS_COPY)
                return _load_archive(mapped, location, placeholders)
            content = bytearray(file.read_whole())
            return _load_archive(content, location, placeholders, check_crc=True)
    except OSError as error:
        raise CheckpointError(f"{location}: cannot be read: {error.strerror}") from error


def safe_open(source: str | os.PathLike[str], *, placeholders: bool = True) -> Any:
    """Load like `safe_load`, but read only the structure: tensors become `FileTensor`s."""
    path = path_of(source)
    try:
        with open_file(path) as file:
            return open_archive(file, 0, file.size, str(path), placeholders)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def open_archive(
    file: OpenFile, start: int, length: int, location: str, placeholders: bool = True
) -> Any:
    """Open an archive of `length` bytes at byte `start` of a file like `safe_open`."""
    # Strided views may refer to the same bytes repeatedly: bound their copies by the file's size.
    copies = Budget(65536 + 4 * length)

    def read(offset: int, size: int) -> bytes:
        rest_of_archive = length - offset
        return file.read(start + offset, min(size, rest_of_archive))

    def find_storage(position: int, nbytes: int) -> Storage:
        view = partial(_view_in_file, file.path, start + position, nbytes, copies)
        return Storage(nbytes, view)

    return _load(read, length, location, find_storage, placeholders)


def _view_in_file(
    path: Path,
    position: int,
    nbytes: int,
    copies: Budget,
    dtype: torch.dtype,
    offset: int,
    shape: Shape,
    stride: Shape,
) -> FileTensor | torch.Tensor:
    """Return a FileTensor, or a tensor if it is not row-major, which checkpoints do not need.

    `position` and `nbytes` locate the storage in the file; `offset` is in elements.
    """
    row_major_stride = torch.empty(shape, device="meta").stride()
    if stride == row_major_stride or math.prod(shape) <= 1:
        return FileTensor(path, position + offset * dtype.itemsize, dtype, shape)

    # Read all elements from the first to the last, and view them with the strides.
    span = 1
    for extent, step in zip(shape, stride, strict=True):
        span += (extent - 1) * step
    copies.charge(span * dtype.itemsize)
    whole = FileTensor(path, position, dtype, (nbytes // dtype.itemsize,))
    return whole.read_flat(offset, span).as_strided(shape, stride)


def _load_archive(
    buffer: bytearray | mmap_module.mmap,
    location: str,
    placeholders: bool,
    check_crc: bool = False,
) -> Any:
    """Load an archive in memory or mapped; `check_crc` reads all bytes, so not for mapped ones."""
    view = memoryview(buffer)

    def find_storage(position: int, nbytes: int) -> Storage:
        if not nbytes:  # `frombuffer` does not accept it
            empty = torch.empty(0, dtype=torch.uint8)
            return Storage(0, partial(_view_in_memory, empty))
        data = torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes, offset=position)
        if data.data_ptr() % 16 != 0:
            data = data.clone()  # is aligned for every dtype
        return Storage(nbytes, partial(_view_in_memory, data))

    def read(offset: int, size: int) -> memoryview:
        return view[offset : offset + size]

    return _load(read, len(buffer), location, find_storage, placeholders, check_crc)


def _view_in_memory(
    data: torch.Tensor, dtype: torch.dtype, offset: int, shape: Shape, stride: Shape
) -> torch.Tensor:
    """Return a tensor over the bytes of a storage. Offset and strides are in elements."""
    # A storage may end in the middle of an element of another dtype.
    numel = len(data) // dtype.itemsize
    whole_elements = data[: numel * dtype.itemsize]
    typed = whole_elements.view(dtype)
    return typed.as_strided(shape, stride, typed.storage_offset() + offset)


def _load(
    read: Callable[[int, int], bytes | memoryview],
    length: int,
    location: str,
    find_storage: Callable[[int, int], Storage],
    placeholders: bool,
    check_crc: bool = False,
) -> Any:
    """Load the object of an archive of `length` bytes.

    `find_storage(position, nbytes)` returns the storage of tensor data in it.
    """
    # Check the format.
    if not length:
        raise CheckpointError(f"{location}: the file is empty")
    start = bytes(read(0, 8))
    if not start.startswith(LOCAL_SIGNATURE):
        raise CheckpointError(
            f"{location}: not a torch.save archive (zip), it starts with {start!r}. "
            "Files of torch < 1.6 must be saved again with a newer torch."
        )
    archive = Archive(read, length, location)
    if "byteorder" in archive.records and archive.read("byteorder") != b"little":
        raise CheckpointError(
            f"{location}: written on a big-endian machine, which is not supported"
        )

    # Unpickle. Tensors that share a record share its storage.
    storages: dict[str, Storage] = {}

    def find_record(name: str) -> Storage:
        """Return the storage of a record. Raises CheckpointError if it is missing or damaged."""
        if name not in archive.records:
            raise CheckpointError(
                f"{location}: tensor data {escape_control_chars(name)} is missing"
            )
        if name not in storages:
            position = archive.find_data(name)
            nbytes = archive.records[name].size
            if check_crc:
                archive.check_crc(name, read(position, nbytes))
            storages[name] = find_storage(position, nbytes)
        return storages[name]

    result = unpickle(archive.read("data.pkl"), location, find_record, placeholders)
    check_bounded(result, location)
    return result
