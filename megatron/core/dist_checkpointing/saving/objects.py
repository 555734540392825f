"""Objects and `common` as bytes, made at the moment of the save call: later changes do not reach the checkpoint."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from megatron.core.dist_checkpointing.format.metadata import Location
from megatron.core.dist_checkpointing.format.torch_zip import object_archive, pad_archive
from megatron.core.dist_checkpointing.format.unpickler import safe_load
from megatron.core.dist_checkpointing.mapping import ShardedObject

_GRANULE = 1024  # objects are padded, so that a growing step count rarely changes a length


class ObjectFile(NamedTuple):
    """The file of one rank's objects; empty if it has none."""

    name: str
    content: bytes
    locations: dict[str, Location]


def object_file(objects: Sequence[ShardedObject], rank: int, workers: int) -> ObjectFile:
    """`__{rank}_{workers}.distcp`; one object under several keys is stored once.

    Raises CheckpointError for a value that could not be read back.
    """
    name = f"__{rank}_{workers}.distcp"
    content, locations = bytearray(), {}
    stored: dict[int, Location] = {}
    for entry in objects:
        if id(entry.value) in stored:
            locations[entry.key] = stored[id(entry.value)]
            continue
        archive = object_archive(entry.value)
        safe_load(archive, where=entry.key, placeholders=False)
        padded = pad_archive(archive, -(-len(archive) // _GRANULE) * _GRANULE)
        locations[entry.key] = stored[id(entry.value)] = Location(name, len(content), len(padded))
        content += padded
    return ObjectFile(name, bytes(content), locations)


def common_archive(common: dict[str, Any]) -> bytes:
    """The content of `common.pt`. Raises CheckpointError for a value that could not be read back."""
    buffer = io.BytesIO()
    torch.save(common, buffer)
    safe_load(buffer.getvalue(), where="common", placeholders=False)
    return buffer.getvalue()
