"""Decodes the `.metadata` of other writers: the pickle of any version of DCP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from megatron.core.dist_checkpointing.box_table import (
    BoxTable,
    CheckpointMetadata,
    Location,
    StoredTensor,
    check_inside,
)
from megatron.core.dist_checkpointing.mapping import Shape
from megatron.core.safe_files.errors import CheckpointError
from megatron.core.safe_files.safe_globals import DtypeName, Placeholder
from megatron.core.safe_files.schema import (
    MAX_COUNT,
    MAX_RANK,
    file_name,
    format_value,
    refuse,
    tensor_shape,
)
from megatron.core.safe_files.schema import key as key_name
from megatron.core.safe_files.unpickler import check_bounded, unpickle
from megatron.core.terminal import escape_control_chars

# Fields of DCP's Metadata.
_KNOWN_FIELDS = (
    "state_dict_metadata",
    "storage_data",
    "storage_meta",
    "planner_data",
    "version",
    "all_local_plans",
)


def decode_dcp(data: bytes, location: str) -> CheckpointMetadata:
    """Decode the pickle of any version of DCP. Raises CheckpointError that names `location`."""
    root = unpickle(data, location, names=True)
    try:
        return _decode(root.state, location)
    except CheckpointError:
        raise
    except Exception as error:  # the pickle is intact, its content is not
        reason = escape_control_chars(f"{type(error).__name__}: {error}")
        raise CheckpointError(
            f"{location}: not the metadata of a distributed checkpoint ({reason[:300]})"
        ) from error


_Place = tuple[int, int, int]  # (number of the file, position, length) of a stored item


_Places = dict[tuple[str, Shape | None], _Place]  # by key and offset; None for an object


def _decode(root: Mapping[str, Any], location: str) -> CheckpointMetadata:
    """Convert the fields of DCP's Metadata. Any exception means that its content is damaged."""
    # Locations of all items
    numbers_of_files: dict[str, int] = {}
    storage_locations = _decode_places(root["storage_data"], numbers_of_files, location)
    files = tuple(numbers_of_files)

    # Tensors and objects
    result = CheckpointMetadata()
    for key, entry in root["state_dict_metadata"].items():
        key_name(key, f"{location}: a key")
        if type(entry).__qualname__ == "BytesStorageMetadata":
            file_index, position, length = storage_locations[key, None]
            result.objects[key] = Location(files[file_index], position, length)
        else:
            result.tensors[key] = _decode_tensor(
                key, entry.state, storage_locations, files, location
            )

    # Additions of other writers
    result.extra = {name: value for name, value in root.items() if name not in _KNOWN_FIELDS}
    check_bounded(result.extra, location)
    return result


def _decode_tensor(
    key: str,
    entry: Mapping[str, Any],
    storage_locations: _Places,
    files: tuple[str, ...],
    location: str,
) -> StoredTensor:
    """Convert DCP's TensorStorageMetadata.

    `files` are the names for the file numbers in `storage_locations`.
    """
    what = f"{location}: {format_value(key)}"
    shape = _check_shape(entry["size"], key, location)
    tensor_shape(shape, f"{what}: its shape")
    dims = len(shape)

    # Collect the boxes and their locations.
    boxes = []
    locations = []
    for chunk in entry["chunks"]:
        offset = _check_shape(chunk.state["offsets"], key, location)
        extent = _check_shape(chunk.state["sizes"], key, location)
        if len(offset) != dims or len(extent) != dims:
            raise CheckpointError(f"{what} of shape {shape} has a chunk at {offset} of {extent}")
        boxes.append((offset, extent))
        locations.append(storage_locations[key, offset])

    # Convert them to columns.
    rows = np.array(locations, dtype=np.int64).reshape(-1, 3)  # file, position, length
    file, position, length = rows.T
    table = replace(
        BoxTable.of(boxes, dims), file=file, position=position, length=length, files=files
    )
    check_inside(table, shape, what)
    dtype = _get_dtype(entry["properties"])
    return StoredTensor(shape, dtype, table)


def _decode_places(
    storage_data: Mapping[Any, Any], files: dict[str, int], location: str
) -> _Places:
    """Return the location of each item by key and offset. Adds the numbers of files to `files`."""
    storage_locations: _Places = {}
    for index, info in storage_data.items():
        key = index.state["fqn"]
        fields = info.state
        if fields.get("transform_descriptors"):
            raise CheckpointError(
                f"{location}: {format_value(key)} was written through DCP extensions (compression)"
            )

        # Check each file name once: a file contains many items.
        file = fields["relative_path"]
        if file not in files:
            file_name(file, f"{location}: {format_value(key)}: its file")
            files[file] = len(files)

        position = fields["offset"]
        length = fields["length"]
        if not _is_count(position) or not _is_count(length):
            refuse(
                f"{location}: {format_value(key)}: its location",
                (position, length),
                f"two whole numbers from 0 to {MAX_COUNT}",
            )

        offset = index.state.get("offset")
        if offset is not None:
            offset = _check_shape(offset, key, location)
        storage_locations[key, offset] = (files[file], position, length)
    return storage_locations


def _is_count(value: Any) -> bool:
    """Return whether a value is a whole number of plausible size (True and False are not)."""
    return type(value) is int and 0 <= value <= MAX_COUNT


def _check_shape(value: Any, key: str, location: str) -> Shape:
    """Return a shape or an offset; raise CheckpointError for any other value."""
    is_shape = (
        type(value) is tuple
        and len(value) <= MAX_RANK
        and {int}.issuperset(map(type, value))  # faster than a loop
        and min(value, default=0) >= 0
    )
    if not is_shape:
        raise CheckpointError(
            f"{location}: {format_value(key)} has a shape or an offset {format_value(value)}"
        )
    shape: Shape = value
    return shape


def _get_dtype(properties: Placeholder) -> str:
    """Return the name of the dtype in DCP's TensorProperties.

    Its state is a tuple or a dictionary, depending on the version of torch.
    """
    state: Any = properties.state
    dtype = state["dtype"] if isinstance(state, dict) else state[0]
    if not isinstance(dtype, DtypeName):
        raise TypeError(f"dtype {format_value(dtype)}")
    return dtype
