"""Deltas in the files of slime (`--update-weight-mode delta`), which its engines pull.

A delta is a directory of safetensors with an index. A changed tensor is stored under its name as
bytes: zstd of `new ^ base`, or of the number of changed bytes, their positions (4 bytes each) and
new values. The headers have a checksum of each new tensor, and the index has the version.
"""

from __future__ import annotations

from functools import partial
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from megatron.conversion.huggingface.safetensors_files import (
    SafetensorsWriter,
    read_text_metadata,
)
from megatron.conversion.huggingface.weight_files import open_weights
from megatron.conversion.model_space.lazy_tensors import cut_blocks
from megatron.conversion.options import WriteOptions
from megatron.conversion.output_directory import new_directory
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.dist_checkpointing.mapping import LazyTensor, Shape, TensorInfo, narrow
from megatron.core.durable_files import write_json
from megatron.core.safe_files import schema
from megatron.core.safe_files.reading import read_json
from megatron.core.safe_files.torch_zip import view_bytes
from megatron.transfer.models import (
    BLOCK_ELEMENTS,
    DeltaReport,
    Tensors,
    Weights,
    check_same_model,
    open_model,
    read_flat,
    to_local,
)

ENCODINGS = ("xor", "overwrite")
_INDEX = "model.safetensors.index.json"
_CHECKSUM = "xxh3-128"
_LEVEL = 1  # of zstd, as slime's
_POSITION_BYTES = 4
_MAX_POSITIONS = 1 << 32

_METADATA = schema.record(
    {
        "version": schema.text(),
        "base_version": schema.text(),
        "delta_encoding": schema.one_of(*ENCODINGS),
        "compression_format": schema.one_of("zstd"),
        "checksum_format": schema.one_of(_CHECKSUM),
    }
)
_INDEX_FILE = schema.record(
    {"metadata": _METADATA, "weight_map": schema.mapping(schema.file_name, keys=schema.key)}
)


def _import_zstandard() -> ModuleType:
    try:
        import zstandard
    except ImportError:
        raise ValueError(
            "deltas of slime need the package zstandard: pip install zstandard"
        ) from None
    return zstandard


# ---- Writing ----


def write_slime_delta(
    base: Weights,
    new: Weights,
    directory: str | PathLike[str],
    *,
    version: int,
    encoding: str = "xor",
    max_shard_size: int = WriteOptions.max_shard_size,
) -> DeltaReport:
    """Write the changes from `base`, of version `version - 1`, to `new` for slime's engines.

    They read `directory` if it is called `weight_vNNNNNN`, with the version in six digits. `base`
    and `new` are those of `write_delta`. `encoding` is "xor", or "overwrite", which may be applied
    twice. Memory contains one changed tensor and a shard of compressed ones. Raises ValueError as
    `write_delta` does.
    """
    if encoding not in ENCODINGS:
        raise ValueError(f"encoding {encoding!r} is none of {', '.join(ENCODINGS)}")
    if version < 1:
        raise ValueError(f"version {version} must be at least 1: version 0 is the base")
    zstandard = _import_zstandard()
    base_tensors = open_model(base)
    new_tensors = open_model(new)
    check_same_model(base_tensors, new_tensors)

    changed_elements = 0
    delta_bytes = 0
    weight_map: dict[str, str] = {}
    with new_directory(to_local(directory)) as pending:
        shard = _Shard(pending, 0)
        for name, tensor in sorted(new_tensors.items()):
            old_bytes = _read_bytes(base_tensors[name])
            new_bytes = _read_bytes(tensor)
            is_changed = old_bytes != new_bytes
            if not is_changed.any():
                continue
            itemsize = tensor.dtype.itemsize
            changed_elements += int(is_changed.reshape(-1, itemsize).any(axis=1).sum())
            content = _encode(name, old_bytes, new_bytes, is_changed, encoding)
            compressed = zstandard.ZstdCompressor(level=_LEVEL).compress(content)
            delta_bytes += len(compressed)
            if shard.tensors and shard.num_bytes + len(compressed) > max_shard_size:
                shard.write()
                shard = _Shard(pending, shard.number + 1)
            shard.add(name, compressed, _compute_checksum(new_bytes))
            weight_map[name] = shard.file_name
        if shard.tensors:
            shard.write()

        metadata = {
            "version": f"{version:06d}",
            "base_version": f"{version - 1:06d}",
            "delta_encoding": encoding,
            "compression_format": "zstd",
            "checksum_format": _CHECKSUM,
        }
        write_json(pending / _INDEX, {"metadata": metadata, "weight_map": weight_map})
    return DeltaReport(
        changed_tensors=len(weight_map),
        changed_elements=changed_elements,
        delta_bytes=delta_bytes,
        model_bytes=sum(tensor.nbytes for tensor in new_tensors.values()),
    )


class _Shard:
    """Compressed tensors of one file."""

    def __init__(self, directory: Path, number: int) -> None:
        self.number = number
        self.file_name = f"model-{number:05d}.safetensors"
        self.tensors: dict[str, torch.Tensor] = {}
        self.num_bytes = 0
        self._checksums: dict[str, str] = {}
        self._path = directory / self.file_name

    def add(self, name: str, compressed: bytes, checksum: str) -> None:
        """Add a tensor."""
        self.tensors[name] = torch.frombuffer(bytearray(compressed), dtype=torch.uint8)
        self.num_bytes += len(compressed)
        self._checksums[name] = checksum

    def write(self) -> None:
        """Write the file."""
        infos = {}
        for name, tensor in self.tensors.items():
            infos[name] = TensorInfo(tuple(tensor.shape), tensor.dtype)
        with SafetensorsWriter(self._path, infos, self._checksums) as file:
            for name, tensor in self.tensors.items():
                file.write(name, tensor)


def _read_bytes(tensor: LazyTensor) -> np.ndarray:
    """Return the bytes of a tensor."""
    content = np.empty(tensor.nbytes, dtype=np.uint8)
    start = 0
    for box in cut_blocks(tensor, BLOCK_ELEMENTS):
        block = np.frombuffer(view_bytes(read_flat(tensor, box)), dtype=np.uint8)
        content[start : start + block.size] = block
        start += block.size
    return content


def _compute_checksum(content: np.ndarray) -> str:
    return xxhash.xxh3_128(content.data).hexdigest()


def _encode(
    name: str, old: np.ndarray, new: np.ndarray, is_changed: np.ndarray, encoding: str
) -> bytes:
    """Return the changes of a tensor before compression."""
    if encoding == "xor":
        return (new ^ old).tobytes()
    if new.size > _MAX_POSITIONS:
        raise ValueError(
            f"{name} has {new.size} bytes, and positions of the encoding overwrite have "
            f"{_POSITION_BYTES} bytes: use the encoding xor"
        )
    positions = np.flatnonzero(is_changed).astype("<u4")
    count = np.array([positions.size], dtype="<u4")
    return count.tobytes() + positions.tobytes() + new[is_changed].tobytes()


# ---- Reading ----


def is_slime_delta(directory: Path) -> bool:
    """Return whether a directory has an index with an encoding of changes."""
    path = directory / _INDEX
    if not path.is_file():
        return False
    index = read_json(path)
    metadata = index.get("metadata") if isinstance(index, dict) else None
    return isinstance(metadata, dict) and "delta_encoding" in metadata


def open_slime_delta(base: Tensors, directory: Path) -> Tensors:
    """Return the tensors of the new model, verified.

    Raises CheckpointError for a damaged delta, or one of another base.
    """
    index = _INDEX_FILE(read_json(directory / _INDEX), str(directory / _INDEX))
    patched = dict(base)
    if not index["weight_map"]:
        return patched
    checksums: dict[str, str] = {}
    for file_name in sorted(set(index["weight_map"].values())):
        checksums |= read_text_metadata(directory / file_name)
    for name, compressed in open_weights(directory).items():
        if name not in base or name not in checksums:
            raise CheckpointError(f"{directory} changes {name}: it is not in the base, or damaged")
        change = _Change(
            base[name], compressed, index["metadata"]["delta_encoding"], checksums[name], directory
        )
        change.apply(name)
        patched[name] = change.view(name)
    return patched


class _Change(NamedTuple):
    """A changed tensor."""

    base: LazyTensor
    compressed: LazyTensor
    encoding: str
    checksum: str
    directory: Path

    def view(self, name: str) -> LazyTensor:
        """Return the new tensor. All rows are decoded for any of them."""
        num_rows = self.base.shape[0] if self.base.shape else 1
        read = partial(self._read, name)
        return LazyTensor(self.base.shape, self.base.dtype, read, min_rows=max(1, num_rows))

    def _read(self, name: str, offset: Shape, shape: Shape) -> torch.Tensor:
        elements = torch.from_numpy(self.apply(name)).view(self.base.dtype)
        return narrow(elements.view(self.base.shape), offset, shape)

    def apply(self, name: str) -> np.ndarray:
        """Return the bytes of the new tensor. Raises CheckpointError for a wrong checksum."""
        content = _read_bytes(self.base)
        if self.encoding == "xor":
            difference = self._decompress(name, content.size)
            is_valid = difference.size == content.size
            if is_valid:
                content ^= difference
        else:
            is_valid = self._overwrite(name, content)
        if not is_valid or _compute_checksum(content) != self.checksum:
            raise CheckpointError(
                f"{self.directory}: {name} has another checksum after the delta than "
                f"{self.checksum}: start from the right version, or copy the delta again"
            )
        return content

    def _overwrite(self, name: str, content: np.ndarray) -> bool:
        """Write the new values to the bytes of the base, and return whether the delta is valid."""
        max_size = _POSITION_BYTES + (_POSITION_BYTES + 1) * content.size
        delta = self._decompress(name, max_size)
        if delta.size < _POSITION_BYTES:
            return False
        count = int.from_bytes(delta[:_POSITION_BYTES].tobytes(), "little")
        values_start = _POSITION_BYTES * (1 + count)
        if delta.size != values_start + count:
            return False
        positions = delta[_POSITION_BYTES:values_start].view("<u4")
        if count > 0 and positions.max() >= content.size:
            return False
        content[positions] = delta[values_start:]
        return True

    def _decompress(self, name: str, max_size: int) -> np.ndarray:
        """Return at most `max_size` bytes, or one more if the delta has more."""
        zstandard = _import_zstandard()
        compressed = self.compressed.read_all().reshape(-1).view(torch.uint8)
        try:
            with zstandard.ZstdDecompressor().stream_reader(compressed.numpy()) as reader:
                return np.frombuffer(reader.read(max_size + 1), dtype=np.uint8)
        except zstandard.ZstdError as error:
            raise CheckpointError(f"{self.directory}: {name} is damaged: {error}") from None
