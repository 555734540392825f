"""Weights and optimizers in DCP directories of other programs.

These programs save the state dictionaries of torch (`get_optimizer_state_dict`), whose nested keys
DCP joins with dots.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from megatron.conversion.options import DROP_OPTIMIZER
from megatron.conversion.training_folders.folder_source import (
    HYPERPARAMETERS,
    OptimizerContents,
    ParamGroup,
    check_named_groups,
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


def _read_groups(reader: Reader, key: str) -> list[ParamGroup]:
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
    checked: list[ParamGroup] = check_named_groups(groups, location)
    return checked


def _join_fields(reader: Reader, prefix: str) -> list[ParamGroup]:
    """Return the groups whose fields are objects of their own, under keys with `prefix`."""
    by_number: dict[int, ParamGroup] = defaultdict(dict)
    by_parameter: dict[str, ParamGroup] = defaultdict(dict)
    for key in reader.metadata.objects:
        if not key.startswith(prefix):
            continue
        name = key.removeprefix(prefix)

        # A field of a numbered group, or of a parameter
        match = _NUMBERED_FIELD.fullmatch(name)
        if match is not None:
            index = int(match[1])
            by_number[index][match[2]] = reader.read_object(key)
            continue
        parameter, _, field_name = name.rpartition(".")
        if field_name in HYPERPARAMETERS:
            check = HYPERPARAMETERS[field_name]
            value = check(reader.read_object(key), f"{reader.directory}: {key}")
            by_parameter[parameter][field_name] = value
    numbered = [by_number[index] for index in sorted(by_number)]
    return numbered + _group_parameters(by_parameter)


def _group_parameters(by_parameter: dict[str, ParamGroup]) -> list[ParamGroup]:
    """Return a group for the parameters with the same hyperparameters, which have been checked.

    They are compared as text, in linear time: a file may have as many groups as parameters.
    """
    groups: dict[str, ParamGroup] = {}
    for parameter, fields in by_parameter.items():
        values = str(sorted(fields.items()))
        new_group = {**fields, "params": []}
        group = groups.setdefault(values, new_group)
        group["params"].append(parameter)
    return list(groups.values())
