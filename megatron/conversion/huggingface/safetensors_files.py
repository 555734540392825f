"""Safetensors files: tensors are read box by box, and written as a stream of rows.

Format (https://github.com/huggingface/safetensors): u64 length of the header, the header as JSON
`{name: {"dtype", "shape", "data_offsets"}}`, then the row-major data of each tensor.

The library is not used, so that memory is one piece of one tensor both ways: pages that it maps
count as resident, its writer needs all tensors of a file at once, and its `get_slice` read rows at
a tenth of the speed measured here.
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
_BLOCK = 16 << 20  # bytes read at once where only some columns are needed


def open_safetensors(path: Path) -> dict[str, LazyTensor]:
    """Return the tensors of one file. Raises ValueError if it is truncated or damaged."""
    header, data_start, size = _read_header(path)
    tensors: dict[str, LazyTensor] = {}
    end = data_start
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        info = TensorInfo(tuple(entry["shape"]), _DTYPES[entry["dtype"]])
        first, last = entry["data_offsets"]
        start = data_start + first
        stop = data_start + last
        if stop - start != info.nbytes:
            raise ValueError(
                f"{path}: {name!r} has {stop - start} bytes, shape {info.shape} needs {info.nbytes}"
            )
        if start != end:  # tensors are contiguous
            raise ValueError(
                f"{path}: {name!r} begins at byte {start}, the one before ends at {end}"
            )
        content = FileTensor(path, start, info.dtype, info.shape)
        tensors[name] = LazyTensor(info.shape, info.dtype, partial(_read_box, content))
        end = stop
    if end != size:
        raise ValueError(
            f"{path} has {size} bytes, its header describes {end}: it is truncated or damaged"
        )
    return tensors


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """Return the checked header, the position of the data, and the size of the file."""
    with open_file(path) as file:
        size = file.size
        length = int.from_bytes(file.read(0, _LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > min(_MAX_HEADER, size - _LENGTH_BYTES):
            raise ValueError(
                f"{path} is truncated or not a safetensors file: header of {length} bytes in {size}"
            )
        content = file.read(_LENGTH_BYTES, length)
    header = parse_json(content, f"{path}: the header", object_pairs_hook=_make_unique)
    return _HEADER(header, str(path)), _LENGTH_BYTES + length, size


def _make_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dictionary without metadata. Raises ValueError for a repeated name."""
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a name occurs twice")
    result.pop("__metadata__", None)
    return result


def _read_box(tensor: FileTensor, offset: Shape, shape: Shape) -> torch.Tensor:
    """Return a box of a tensor.

    The file is opened for each read: a model may have more shards than a process may have open
    files.
    """
    # Whole rows are contiguous.
    first = offset[0] if offset else 0
    row_shape = tensor.shape[1:]
    row_size = math.prod(row_shape)
    if shape[1:] == row_shape:
        return tensor.read_flat(first * row_size, math.prod(shape)).view(shape)

    # Read blocks of whole rows and keep the columns: one large read beats many small ones.
    result = torch.empty(shape, dtype=tensor.dtype)
    rows_per_block = max(1, _BLOCK // (row_size * tensor.dtype.itemsize))
    for rows in result.split(rows_per_block):
        num_rows = len(rows)
        block = tensor.read_flat(first * row_size, num_rows * row_size).view(num_rows, *row_shape)
        rows.copy_(narrow(block, (0, *offset[1:]), (num_rows, *shape[1:])))
        first += num_rows
    return result


class SafetensorsLayout(NamedTuple):
    """The header of a file, the position of each tensor, and the size of the file."""

    header: bytes
    starts: dict[str, int]
    size: int


def lay_out_safetensors(tensors: Mapping[str, TensorInfo]) -> SafetensorsLayout:
    """Return the layout of a file with these tensors, in this order."""
    # Older releases of transformers require the format.
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    for name, info in tensors.items():
        offsets[name] = end
        end += info.nbytes
        entries[name] = {
            "dtype": _DTYPE_NAMES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [offsets[name], end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts at a multiple of eight
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    starts = {name: len(header) + offset for name, offset in offsets.items()}
    return SafetensorsLayout(header, starts, len(header) + end)


class SafetensorsWriter:
    """A file or object whose header is written first, and then rows of its tensors in any order.

    Threads may share it. Closing it raises AssertionError if bytes were not written. An object
    appears when it is closed; rows before their turn wait in memory until then.
    """

    def __init__(self, path: Path, tensors: Mapping[str, TensorInfo]) -> None:
        self._path = path
        self._tensors = dict(tensors)
        layout = lay_out_safetensors(tensors)
        self._starts = layout.starts
        self._upload: OrderedUpload | None = None
        if isinstance(path, ObjectPath):
            self._upload = OrderedUpload(path, layout.size)
            self._upload.write(0, memoryview(layout.header))
        else:
            path.write_bytes(layout.header)
        self._missing = layout.size - len(layout.header)
        self._lock = Lock()

    def write(self, name: str, rows: torch.Tensor, first: int = 0) -> None:
        """Write rows of `name`, starting at row `first`."""
        info = self._tensors[name]
        assert rows.dtype == info.dtype, (name, rows.dtype)
        assert tuple(rows.shape[1:]) == info.shape[1:], (name, rows.shape)
        start = 0  # byte of the tensor
        if rows.dim() > 0:
            start = first * rows[:1].nbytes
        assert start + rows.nbytes <= info.nbytes, (name, first, rows.shape)
        position = self._starts[name] + start
        content = rows.contiguous()
        if self._upload is not None:
            self._upload.write(position, view_bytes(content.reshape(-1)))
        else:
            write_at(self._path, content, position)
        with self._lock:
            self._missing -= rows.nbytes

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, error_type: object, *details: object) -> None:
        is_complete = not self._missing
        assert error_type is not None or is_complete, (
            f"{self._missing} bytes of {self._path} were not written"
        )
        if error_type is None and self._upload is not None:
            self._upload.close()
