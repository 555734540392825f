"""Folders of torch_checkpointing with a model and its optimizer, as state dictionaries of torch.

<directory>/metadata.pkl: how the tensors of each item are split, and the number of ranks
<directory>/model_R.pt, optimizer_R.pt: the items of rank R, with DTensors
<directory>/config.json: the model of transformers: copy it there

(Source: torch_checkpointing 0.1.1, `metadata_serialization.py`, `distributed_metadata.py`,
`checkpoint_layout.py`.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron.conversion.huggingface.directory import find_config
from megatron.conversion.options import ReadOptions
from megatron.conversion.training_folders.dtensor_files import join_named
from megatron.conversion.training_folders.folder_source import (
    FolderContents,
    FolderSource,
    OptimizerContents,
    check_named_groups,
)
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.safe_files import safe_open, schema
from megatron.core.safe_files.reading import read_regular
from megatron.core.safe_files.unpickler import check_bounded, unpickle

_MODEL = "model"
_OPTIMIZER = "optimizer"
_DTENSOR = "DTensorShardingMetadata"
_MAX_METADATA = 1 << 30
_GROUP = schema.record({"sharding_metadata": schema.record({"type": schema.text()})})
_ITEM = schema.record(
    {
        "nested_path_to_metadata": schema.mapping(schema.sequence(_GROUP), keys=schema.key),
        "rank_to_layout_info": schema.mapping(schema.anything, keys=schema.COUNT),
    }
)
_METADATA = schema.record(
    {
        "metadata": schema.mapping(_ITEM, keys=schema.key),
        "version": schema.one_of("2.0"),
    }
)
_NAMED = schema.mapping(schema.anything, keys=schema.key)
_STATE = schema.record(
    {"state": schema.mapping(_NAMED, keys=schema.key), "param_groups": check_named_groups}
)


def open_torch_checkpointing(
    directory: Path, read_options: ReadOptions | None = None
) -> FolderSource:
    """Open a folder. Raises CheckpointError for other layouts of files than the default."""
    read_options = read_options or ReadOptions()
    description = f"torch_checkpointing folder {directory}"
    items = _read_items(directory / "metadata.pkl")
    if _MODEL not in items:
        raise CheckpointError(
            f"{directory} has the items {', '.join(sorted(items))}, but no {_MODEL!r}: save the "
            "state dictionary of the model under this name"
        )
    files = _open_item(directory, _MODEL, items[_MODEL])
    weights = join_named([_NAMED(file, description) for file in files], description)
    contents = FolderContents(
        description, find_config(description, (directory,), read_options.hf_config), weights
    )
    if _OPTIMIZER in items:
        files = _open_item(directory, _OPTIMIZER, items[_OPTIMIZER])
        contents.read_optimizer = partial(_read_optimizer, files, description)
    return FolderSource(contents, read_options)


def _read_items(path: Path) -> dict[str, Any]:
    """Return the metadata of the items by name."""
    content = unpickle(read_regular(path, limit=_MAX_METADATA), str(path))
    check_bounded(content, str(path))
    items: dict[str, Any] = _METADATA(content, str(path))["metadata"]
    return items


def _open_item(directory: Path, name: str, item: Mapping[str, Any]) -> list[Any]:
    """Return the contents of the files of all ranks, in order."""
    location = f"{directory / 'metadata.pkl'}: {name}"
    for groups in item["nested_path_to_metadata"].values():
        for group in groups:
            tensor_type = group["sharding_metadata"]["type"]
            if tensor_type != _DTENSOR:
                schema.refuse(location, tensor_type, f"{_DTENSOR}: other shards are not read")
    layouts = item["rank_to_layout_info"]
    if not layouts:
        raise CheckpointError(f"{location} has no ranks: the file is damaged")
    if sorted(layouts) != list(range(len(layouts))) or any(layouts.values()):
        raise CheckpointError(f"{location} has files of its own names: only {name}_RANK.pt is read")
    return [safe_open(directory / f"{name}_{rank}.pt") for rank in range(len(layouts))]


def _read_optimizer(files: Sequence[Any], location: str, _: Sequence[str]) -> OptimizerContents:
    """Return the optimizer, which `get_optimizer_state_dict` names like the parameters."""
    ranks = [_STATE(file, location) for file in files]
    states = {}
    for name in ranks[0]["state"]:
        values = [rank["state"].get(name, {}) for rank in ranks]
        states[name] = join_named(values, f"{location}: {name}")
    groups = ranks[0]["param_groups"]
    return OptimizerContents(states, groups, [group["params"] for group in groups])
