"""What a checkpoint contains and where: our view of DCP's `.metadata`, and both directions of its pickle."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.format.safe_globals import Placeholder
from megatron.core.dist_checkpointing.format.schema import COUNT, MAX_RANK, file_name, printable, shown
from megatron.core.dist_checkpointing.format.schema import key as check_key
from megatron.core.dist_checkpointing.format.unpickler import check_bounded, safe_loads
from megatron.core.dist_checkpointing.mapping import Shape


class Location(NamedTuple):
    """An item: `length` bytes at `position` of `file`, a complete torch.save archive."""

    file: str
    position: int
    length: int


class StoredChunk(NamedTuple):
    """One stored box of a tensor."""

    offset: Shape
    shape: Shape
    location: Location


@dataclass
class StoredTensor:
    """A global tensor and the chunks that tile it."""

    shape: Shape
    dtype: torch.dtype
    chunks: list[StoredChunk] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass
class CheckpointMetadata:
    """Tensors and objects by key; `extra` holds what other writers add (Megatron-core 0.12's `mcore_data`)."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    objects: dict[str, Location] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def locations(self) -> Iterable[Location]:
        for tensor in self.tensors.values():
            for chunk in tensor.chunks:
                yield chunk.location
        yield from self.objects.values()

    def file_sizes(self) -> dict[str, int]:
        """The files of the checkpoint and how long each must be at least."""
        sizes: dict[str, int] = {}
        for file, position, length in self.locations():
            sizes[file] = max(sizes.get(file, 0), position + length)
        return sizes


def encode_metadata(metadata: CheckpointMetadata) -> bytes:
    """The pickle that every version of DCP (and Megatron-core through it) reads."""
    state: dict[str, dcp.STORAGE_TYPES] = {}
    storage: dict[dcp.MetadataIndex, _StorageInfo] = {}
    for key, tensor in metadata.tensors.items():
        chunks = []
        for chunk in tensor.chunks:
            offset = torch.Size(chunk.offset)
            chunks.append(dcp.ChunkStorageMetadata(offset, torch.Size(chunk.shape)))
            storage[dcp.MetadataIndex(key, offset)] = _StorageInfo(*chunk.location)
        properties = dcp.TensorProperties(dtype=tensor.dtype)
        state[key] = dcp.TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
    for key, location in metadata.objects.items():
        state[key] = dcp.BytesStorageMetadata()
        storage[dcp.MetadataIndex(key)] = _StorageInfo(*location)
    names = {key: (key,) for key in state}  # a flat dictionary; older versions of torch insist on it
    result = dcp.Metadata(state, planner_data=names, storage_data=storage, storage_meta=dcp.StorageMeta())
    result.version = "1.0.0"  # older versions of torch have no such field
    buffer = io.BytesIO()
    pickle.dump(result, buffer, protocol=4)
    return buffer.getvalue()


def decode_metadata(data: bytes, where: str) -> CheckpointMetadata:
    """Raises CheckpointError that names `where` for anything but an intact `.metadata`."""
    root = safe_loads(data, where)
    try:
        return _decode(root.state, where)
    except CheckpointError:
        raise
    except Exception as error:  # the pickle is intact, its content is not
        reason = printable(f"{type(error).__name__}: {error}")[:300]
        raise CheckpointError(f"{where}: not the metadata of a distributed checkpoint ({reason})") from error


def _decode(root: Mapping[str, Any], where: str) -> CheckpointMetadata:
    locations: dict[tuple[str, Shape | None], Location] = {}
    files: set[str] = set()
    for index, info in root["storage_data"].items():
        key = index.state["fqn"]
        if info.state.get("transform_descriptors"):
            raise CheckpointError(f"{where}: {shown(key)} was written through DCP extensions (compression)")
        location = Location(info.state["relative_path"], info.state["offset"], info.state["length"])
        if location.file not in files:
            files.add(file_name(location.file, f"{where}: the file of {shown(key)}"))
        COUNT(location.position, f"{where}: the place of {shown(key)}")
        COUNT(location.length, f"{where}: the length of {shown(key)}")
        offset = index.state.get("offset")
        locations[key, None if offset is None else _shape(offset, key, where)] = location
    result = CheckpointMetadata()
    for key, entry in root["state_dict_metadata"].items():
        check_key(key, f"{where}: a key")
        if type(entry).__qualname__ == "BytesStorageMetadata":
            result.objects[key] = locations[key, None]
            continue
        tensor = StoredTensor(_shape(entry.state["size"], key, where), _dtype_of(entry.state["properties"]))
        for chunk in entry.state["chunks"]:
            offset, shape = _shape(chunk.state["offsets"], key, where), _shape(chunk.state["sizes"], key, where)
            if len(offset) != len(tensor.shape) or len(shape) != len(tensor.shape):
                raise CheckpointError(
                    f"{where}: {shown(key)} of shape {tensor.shape} has a chunk at {offset} of {shape}"
                )
            tensor.chunks.append(StoredChunk(offset, shape, locations[key, offset]))
        result.tensors[key] = tensor
    known = {"state_dict_metadata", "storage_data", "storage_meta", "planner_data", "version", "all_local_plans"}
    result.extra = {name: value for name, value in root.items() if name not in known}
    check_bounded(result.extra, where)
    return result


def _shape(value: Any, key: str, where: str) -> Shape:
    if (
        not isinstance(value, list | tuple)
        or len(value) > MAX_RANK
        or not all(type(n) is int and n >= 0 for n in value)
    ):
        raise CheckpointError(f"{where}: {shown(key)} has a shape or an offset {shown(value)}")
    return tuple(value)


def _dtype_of(properties: Placeholder) -> torch.dtype:
    state = properties.state
    dtype = state["dtype"] if isinstance(state, dict) else state[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype {shown(dtype)}")
    return dtype
