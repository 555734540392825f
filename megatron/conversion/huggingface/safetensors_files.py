"""Safetensors files: tensors are read box by box, and written as a stream of rows.

Format (https://github.com/huggingface/safetensors): u64 length of the header, the header as JSON
`{name: {"dtype", "shape", "data_offsets"}}`, then the row-major data of each tensor.

The library of the format is not used, so that reading and writing need memory for one box of one
tensor: pages that the library maps count as resident memory, and its writer requires all tensors of
a file at once. Its `get_slice` read rows at a tenth of the speed of `_read_box`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch

from megatron.core.dist_checkpointing.mapping import LazyTensor, Shape, TensorInfo, narrow
from megatron.core.dist_checkpointing.saving.placed_file import write_at
from megatron.core.object_files import OrderedUpload
from megatron.core.object_path import ObjectPath
from megatron.core.safe_files import FileTensor, schema
from megatron.core.safe_files.reading import open_file, parse_json
from megatron.core.safe_files.torch_zip import view_bytes

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
if hasattr(torch, "float8_e8m0fnu"):  # torch 2.7
    _DTYPES["F8_E8M0"] = torch.float8_e8m0fnu
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ENTRY = schema.record(
    {
        "shape": schema.tensor_shape,
        "dtype": schema.one_of(*_DTYPES),
        "data_offsets": schema.sequence(schema.COUNT, 2, least=2),
    }
)
_HEADER = schema.mapping(_ENTRY, keys=schema.key)
_LENGTH_BYTES = 8
_MAX_HEADER = 100 << 20  # the limit of the reference implementation
_METADATA = "__metadata__"
_TEXTS = schema.mapping(schema.text(_MAX_HEADER), keys=schema.key)
_MAX_READ = 16 << 20  # bytes that are read at once if only some columns are needed


def open_safetensors(path: Path) -> dict[str, LazyTensor]:
    """Return the tensors of one file. Raises ValueError if it is truncated or damaged."""
    header = _read_header(path)
    entries = sorted(header.entries.items(), key=lambda item: item[1]["data_offsets"])
    tensors: dict[str, LazyTensor] = {}
    end = header.data_start
    for name, entry in entries:
        info = TensorInfo(tuple(entry["shape"]), _DTYPES[entry["dtype"]])
        first, last = entry["data_offsets"]
        start = header.data_start + first
        num_bytes = last - first
        if num_bytes != info.nbytes:
            raise ValueError(
                f"{path}: {name!r} has {num_bytes} bytes, shape {info.shape} needs {info.nbytes}"
            )
        if start != end:  # tensors are contiguous
            raise ValueError(
                f"{path}: {name!r} begins at byte {start}, the one before ends at {end}"
            )
        content = FileTensor(path, start, info.dtype, info.shape)
        read = partial(_read_box, content)
        tensors[name] = LazyTensor(info.shape, info.dtype, read)
        end = start + num_bytes
    if end != header.file_size:
        raise ValueError(
            f"{path} has {header.file_size} bytes, its header describes {end}: it is truncated or "
            "damaged"
        )
    return tensors


def read_text_metadata(path: Path) -> dict[str, str]:
    """Return the texts that the program has stored in the header of a file, by name.

    Raises ValueError for anything but texts.
    """
    header = _read_header(path)
    texts: dict[str, str] = _TEXTS(header.metadata, f"{path}: {_METADATA}")
    return texts


class _Header(NamedTuple):
    """The checked header of a file."""

    entries: dict[str, Any]  # name of a tensor -> its dtype, shape and data_offsets
    data_start: int  # byte of the file that data_offsets count from
    file_size: int
    metadata: Any  # texts of the program that wrote the file, not checked


def _read_header(path: Path) -> _Header:
    """Return the header of a file. Raises ValueError if there is none."""
    with open_file(path) as file:
        size = file.size
        length = int.from_bytes(file.read(0, _LENGTH_BYTES), "little")
        max_length = min(_MAX_HEADER, size - _LENGTH_BYTES)
        if size < _LENGTH_BYTES or length > max_length:
            raise ValueError(
                f"{path} is truncated or not a safetensors file: header of {length} bytes in {size}"
            )
        content = file.read(_LENGTH_BYTES, length)
    fields = parse_json(content, f"{path}: the header", object_pairs_hook=_make_unique)
    metadata = {}
    if isinstance(fields, dict):
        metadata = fields.pop(_METADATA, {})
    entries = _HEADER(fields, str(path))
    return _Header(entries, _LENGTH_BYTES + length, size, metadata)


def _make_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dictionary. Raises ValueError for a repeated name."""
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _read_box(tensor: FileTensor, offset: Shape, shape: Shape) -> torch.Tensor:
    """Return a box of a tensor.

    The file is opened for each read: a model may have more shards than a process may have open
    files.
    """
    # Whole rows are contiguous.
    first_row = offset[0] if offset else 0
    row_shape = tensor.shape[1:]
    row_elements = math.prod(row_shape)
    if shape[1:] == row_shape:
        return tensor.read_flat(first_row * row_elements, math.prod(shape)).view(shape)

    # Read blocks of whole rows and keep the columns: one large read is faster than many small ones.
    result = torch.empty(shape, dtype=tensor.dtype)
    row_bytes = row_elements * tensor.dtype.itemsize
    rows_per_block = max(1, _MAX_READ // row_bytes)
    for rows in result.split(rows_per_block):
        num_rows = len(rows)
        start = first_row * row_elements
        block = tensor.read_flat(start, num_rows * row_elements).view(num_rows, *row_shape)
        columns = narrow(block, (0, *offset[1:]), (num_rows, *shape[1:]))
        rows.copy_(columns)
        first_row += num_rows
    return result


class SafetensorsLayout(NamedTuple):
    """The header of a file that is written, and the positions of its tensors."""

    header: bytes  # with its length and its padding
    starts: dict[str, int]  # name of a tensor -> its first byte in the file
    size: int  # of the file, in bytes


def lay_out_safetensors(
    tensors: Mapping[str, TensorInfo], texts: Mapping[str, str] | None = None
) -> SafetensorsLayout:
    """Return the layout of a file with these tensors, in this order.

    `texts` are stored as metadata. Data begins at a multiple of eight bytes, and tensors are
    contiguous.
    """
    # Older releases of transformers require the metadata "format".
    entries: dict[str, Any] = {_METADATA: {"format": "pt", **(texts or {})}}
    offsets: dict[str, int] = {}
    end = 0
    for name, info in tensors.items():
        start = end
        end += info.nbytes
        offsets[name] = start
        entries[name] = {
            "dtype": _DTYPE_NAMES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [start, end],
        }

    content = json.dumps(entries, separators=(",", ":")).encode()
    padding = -len(content) % 8
    content += b" " * padding
    header = len(content).to_bytes(_LENGTH_BYTES, "little") + content
    data_start = len(header)
    starts = {name: data_start + offset for name, offset in offsets.items()}
    return SafetensorsLayout(header, starts, data_start + end)


class SafetensorsWriter:
    """A file or object whose header is written first, and then rows of its tensors in any order.

    Threads may share it. Closing it raises AssertionError if bytes were not written. An object
    becomes visible when it is closed. Its bytes are uploaded in order: rows that are written too
    early are kept in memory until it is their turn.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, TensorInfo],
        texts: Mapping[str, str] | None = None,
    ) -> None:
        self._path = path
        self._tensors = dict(tensors)
        layout = lay_out_safetensors(tensors, texts)
        self._starts = layout.starts
        self._upload: OrderedUpload | None = None
        if isinstance(path, ObjectPath):
            self._upload = OrderedUpload(path, layout.size)
            self._upload.write(0, memoryview(layout.header))
        else:
            path.write_bytes(layout.header)
        self._missing_bytes = layout.size - len(layout.header)
        self._lock = Lock()

    def write(self, name: str, rows: torch.Tensor, first: int = 0) -> None:
        """Write rows of `name`, starting at row `first`.

        A tensor without dimensions is written as a whole.
        """
        info = self._tensors[name]
        assert rows.dtype == info.dtype, (name, rows.dtype)
        assert tuple(rows.shape[1:]) == info.shape[1:], (name, rows.shape)
        start = 0  # byte of the tensor
        if rows.dim() > 0:
            row_bytes = rows[:1].nbytes
            start = first * row_bytes
        assert start + rows.nbytes <= info.nbytes, (name, first, rows.shape)

        position = self._starts[name] + start
        content = rows.contiguous()
        if self._upload is not None:
            self._upload.write(position, view_bytes(content.reshape(-1)))
        else:
            write_at(self._path, content, position)
        with self._lock:
            self._missing_bytes -= rows.nbytes

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, error_type: object, *details: object) -> None:
        if error_type is not None:
            return
        assert self._missing_bytes == 0, (
            f"{self._missing_bytes} bytes of {self._path} were not written"
        )
        if self._upload is not None:
            self._upload.close()
