"""Weights and optimizers in DCP directories of other programs.

These programs save the state dictionaries of torch (`get_optimizer_state_dict`), whose nested keys
DCP joins with dots.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from megatron.conversion.training_folders.folder_source import (
    DROP_OPTIMIZER,
    OptimizerContents,
    check_group_list,
)
from megatron.core.dist_checkpointing import CheckpointError, Reader
from megatron.core.dist_checkpointing.mapping import LazyTensor

_NUMBERED_FIELD = re.compile(r"(\d+)\.(\w+)")


def read_tensors(reader: Reader, prefix: str) -> dict[str, LazyTensor]:
    """Return the tensors whose keys begin with `prefix`, under their names without it."""
    tensors = {}
    for key in reader.metadata.tensors:
        if key.startswith(prefix):
            tensors[key.removeprefix(prefix)] = reader.view(key)
    return tensors


def read_optimizer(
    reader: Reader, prefix: str, rename: Callable[[str], str], _: Sequence[str]
) -> OptimizerContents:
    """Return the optimizer under the keys with `prefix`: `state.NAME.exp_avg`, and its groups.

    `rename` returns the name in transformers.
    """
    states: dict[str, dict[str, LazyTensor]] = defaultdict(dict)
    for name, tensor in read_tensors(reader, f"{prefix}state.").items():
        parameter, _, state = name.rpartition(".")
        states[rename(parameter)][state] = tensor

    # Groups name their parameters.
    groups = _read_groups(reader, f"{prefix}param_groups")
    members = []
    for group in groups:
        members.append([rename(name) for name in group["params"]])
    return OptimizerContents(states, groups, members)


def _read_groups(reader: Reader, key: str) -> list[dict[str, Any]]:
    """Return the parameter groups, with the names of their parameters.

    They are one object, or an object per field of a group, `0.lr`, or of a parameter, `NAME.lr`.
    """
    location = f"{reader.directory}: {key}"
    groups: Any
    if key in reader.metadata.objects:
        groups = reader.read_object(key)
    else:
        groups = _join_fields(reader, f"{key}.")
    if not groups:
        raise CheckpointError(f"{location} is missing: {DROP_OPTIMIZER}")
    checked: list[dict[str, Any]] = check_group_list(groups, location)
    return checked


def _join_fields(reader: Reader, prefix: str) -> list[dict[str, Any]]:
    """Return the groups whose fields are objects of their own, under keys with `prefix`."""
    by_number: dict[int, dict[str, Any]] = defaultdict(dict)
    by_parameter: dict[str, dict[str, Any]] = defaultdict(dict)
    for key in reader.metadata.objects:
        if not key.startswith(prefix):
            continue
        value = reader.read_object(key)
        name = key.removeprefix(prefix)
        match = _NUMBERED_FIELD.fullmatch(name)
        if match is not None:
            index = int(match[1])
            by_number[index][match[2]] = value
        else:
            parameter, _, field_name = name.rpartition(".")
            by_parameter[parameter][field_name] = value
    numbered = [by_number[index] for index in sorted(by_number)]
    return numbered + _group_parameters(by_parameter)


def _group_parameters(by_parameter: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a group for the parameters with the same hyperparameters."""
    groups: list[dict[str, Any]] = []
    for parameter, fields in by_parameter.items():
        # Find the group with the same values.
        for group in groups:
            values = {name: group.get(name) for name in fields}
            if values == fields:
                group["params"].append(parameter)
                break
        else:
            new_group = {**fields, "params": [parameter]}
            groups.append(new_group)
    return groups
