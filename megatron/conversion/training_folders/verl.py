"""Folders of verl's FSDP workers, of FSDP 1 and 2.

<directory>/model_world_size_N_rank_R.pt: the weights as DTensors under the names of transformers
<directory>/optim_world_size_N_rank_R.pt: the optimizer's state by the number of the parameter
<directory>/huggingface/config.json: the model

The state is that of DTensors with FSDP 2. FSDP 1 trains a flat parameter per module that it wraps,
each split evenly over the ranks: the layers, and the module around them. (Source: verl 0.9.1,
`utils/checkpoint/fsdp_checkpoint_manager.py`; `fsdp/_flat_param.py` of torch 2.13.)
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron.conversion.huggingface.directory import find_config
from megatron.conversion.model_space.foreign import check_stored_tensor
from megatron.conversion.model_space.lazy_tensors import (
    concatenate,
    unflatten,
    view_elements,
    view_stored,
)
from megatron.conversion.options import DROP_OPTIMIZER, ReadOptions
from megatron.conversion.training_folders.dtensor_files import (
    is_shard,
    join_named,
    read_named,
)
from megatron.conversion.training_folders.folder_source import (
    FolderContents,
    FolderSource,
    OptimizerContents,
    build_group_check,
)
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.dist_checkpointing.mapping import LazyTensor
from megatron.core.run_checkpoint.checks import RANKS
from megatron.core.safe_files import safe_open, schema

_MODEL_FILE = re.compile(r"model_world_size_([1-9]\d{0,5})_rank_\d{1,6}\.pt")
_STEP_FOLDER = re.compile(r"global_step_(\d{1,15})")
_LAYER = re.compile(r".*\blayers\.(\d+)\..+")
_STATE = schema.record(
    {
        "state": schema.mapping(
            schema.mapping(schema.anything, keys=schema.key), keys=schema.COUNT
        ),
        "param_groups": build_group_check(schema.COUNT),
    }
)


def open_verl(directory: Path, read_options: ReadOptions | None = None) -> FolderSource:
    """Open a folder. Raises ValueError if the file of a rank is missing."""
    read_options = read_options or ReadOptions()
    description = f"verl folder {directory}"
    world_size = _find_world_size(directory)
    config_dir = find_config(
        description, (directory / "huggingface", directory), read_options.hf_config
    )
    files = [read_named(path) for path in _list_files(directory, "model", world_size)]
    contents = FolderContents(description, config_dir, join_named(files, description))
    if (directory / f"optim_world_size_{world_size}_rank_0.pt").exists():
        paths = _list_files(directory, "optim", world_size)
        contents.read_optimizer = partial(_read_optimizer, paths, contents.weights)
    for folder in (directory, directory.parent):
        match = _STEP_FOLDER.fullmatch(folder.name)
        if match is not None:
            contents.iteration = int(match[1])
    if (directory / f"extra_state_world_size_{world_size}_rank_0.pt").exists():
        contents.unused.append("state: lr_scheduler, rng")
    return FolderSource(contents, read_options)


def _find_world_size(directory: Path) -> int:
    """Return the number of ranks in the names of the files."""
    sizes = set()
    for path in directory.iterdir():
        match = _MODEL_FILE.fullmatch(path.name)
        if match is not None:
            sizes.add(int(match[1]))
    if len(sizes) != 1:
        raise CheckpointError(
            f"{directory} has the weights of {sorted(sizes)} ranks (model_world_size_*): remove "
            "the files of all but one save"
        )
    return sizes.pop()


def _list_files(directory: Path, name: str, world_size: int) -> list[Path]:
    """Return the files of the ranks in order. Raises CheckpointError if some are missing."""
    RANKS(world_size, f"{directory}: the number of ranks")
    names = []
    for rank in range(world_size):
        names.append(f"{name}_world_size_{world_size}_rank_{rank}.pt")
    existing = set(os.listdir(directory))
    missing = [file_name for file_name in names if file_name not in existing]
    if missing:
        raise CheckpointError(
            f"{directory} lacks {len(missing)} of {world_size} files, e.g. {missing[0]}: copy the "
            "files of all nodes into one directory"
        )
    return [directory / file_name for file_name in names]


def _read_optimizer(
    paths: Sequence[Path],
    weights: Mapping[str, LazyTensor],
    parameters: Sequence[str],
) -> OptimizerContents:
    """Return the optimizer of the parameters, which are numbered in the order of the model."""
    location = str(paths[0])
    ranks = [_STATE(safe_open(path), str(path)) for path in paths]
    first = ranks[0]
    groups = first["param_groups"]
    moments: list[Any] = []
    for state in first["state"].values():
        moments += state.values()
    if not any(map(is_shard, moments)):
        return _read_flat_optimizer(ranks, weights, parameters, location)
    _check_numbers(groups, first["state"], len(parameters), location)
    states = {}
    for index in first["state"]:
        name = parameters[index]
        values = [rank["state"].get(index, {}) for rank in ranks]
        states[name] = join_named(values, f"{location}: {name}")
    members = [[parameters[index] for index in group["params"]] for group in groups]
    return OptimizerContents(states, groups, members)


def _check_numbers(
    groups: Sequence[Mapping[str, Any]], states: Mapping[int, Any], count: int, location: str
) -> None:
    """Raise CheckpointError unless the groups and the states have `count` parameters."""
    numbers: list[int] = []
    for group in groups:
        numbers += group["params"]
    expected = list(range(count))
    if sorted(numbers) != expected or sorted(states) != expected:
        raise CheckpointError(
            f"{location}: the {len(states)} states and {len(numbers)} parameters of the optimizer "
            f"are not numbered like the {count} parameters of the model: {DROP_OPTIMIZER}"
        )


def _read_flat_optimizer(
    ranks: Sequence[Mapping[str, Any]],
    weights: Mapping[str, LazyTensor],
    parameters: Sequence[str],
    location: str,
) -> OptimizerContents:
    """Return the optimizer of FSDP 1, whose states are ranges of flat parameters.

    They are those of wrapped modules or, with `use_orig_params`, each of one parameter.
    """
    groups = ranks[0]["param_groups"]
    units = [[name] for name in parameters]
    if sum(len(group["params"]) for group in groups) != len(units):
        units = _list_wrapped(parameters)
    # A rank without elements of a parameter has no state of it.
    flat_states: dict[int, Mapping[str, Any]] = {}
    for rank in ranks:
        for index, values in rank["state"].items():
            flat_states.setdefault(index, values)
    _check_numbers(groups, flat_states, len(units), location)
    states: dict[str, dict[str, LazyTensor]] = {name: {} for name in parameters}
    for index, names in enumerate(units):
        for state, value in flat_states[index].items():
            if state == "step":
                step = view_stored(check_stored_tensor(value, location))
                for name in names:
                    states[name][state] = step
                continue

            # Cut the parameters out of the flat one.
            flat = _join_flat(ranks, index, state, location)
            start = 0
            for name in names:
                shape = weights[name].shape
                if start + math.prod(shape) <= flat.shape[0]:
                    states[name][state] = unflatten(flat, start, shape)
                start += math.prod(shape)

            # The last rank has up to one element per rank more.
            if not 0 <= flat.shape[0] - start < len(ranks):
                raise CheckpointError(
                    f"{location}: {state} of parameter {index} has {flat.shape[0]} elements, but "
                    f"{names[0]} to {names[-1]} have {start}: the modules are not wrapped by layer "
                    f"(or are replicated), {DROP_OPTIMIZER}"
                )

    # Groups number the flat parameters.
    members = []
    for group in groups:
        names = []
        for index in group["params"]:
            names += units[index]
        members.append(names)
    return OptimizerContents(states, groups, members)


def _list_wrapped(parameters: Sequence[str]) -> list[list[str]]:
    """Return the parameters outside of layers, then those of each layer."""
    units: dict[int, list[str]] = {-1: []}
    for name in parameters:
        match = _LAYER.fullmatch(name)
        layer = -1 if match is None else int(match[1])
        units.setdefault(layer, []).append(name)
    return [units[layer] for layer in sorted(units)]


def _join_flat(
    ranks: Sequence[Mapping[str, Any]], index: int, state: str, location: str
) -> LazyTensor:
    """Return the elements of a flat state, which the ranks have in order."""
    pieces = []
    for rank in ranks:
        value = rank["state"].get(index, {}).get(state)
        if value is not None:
            pieces.append(view_elements(check_stored_tensor(value, location)))
    return concatenate(pieces, 0)
