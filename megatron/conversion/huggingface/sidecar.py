"""The sidecar of an exported model: optimizer state and run, which transformers does not store.

It is the directory `megatron_state/` in the model's directory, so that no loader takes its files
for weights. It contains the optimizer state in model space as safetensors, and run arguments and
training state as JSON. With them, an imported export is complete.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.conversion.huggingface.safetensors_files import open_safetensors
from megatron.conversion.model_space.foreign_arguments import plain_args
from megatron.conversion.model_space.lazy_tensors import cast
from megatron.conversion.model_space.optimizer_states import (
    ADAM,
    OPTIMIZER_STATES,
    full_precision_key,
    has_mixed_states,
    list_parameter_states,
    optimizer_key,
    optimizer_states,
)
from megatron.core.dist_checkpointing.mapping import LazyTensor, Shape
from megatron.core.durable_files import write_json
from megatron.core.run_checkpoint.checks import ARGUMENTS, TRAINING_STATE
from megatron.core.run_checkpoint.keys import is_trained
from megatron.core.run_checkpoint.source import Source, TrainingState
from megatron.core.safe_files import schema
from megatron.core.safe_files.named_files import find_named_file
from megatron.core.safe_files.reading import read_json

DIRECTORY = "megatron_state"
_STATE = "state.json"  # written last: a directory without it is not a sidecar
_TUPLES = ("window_size", "betas")  # JSON has only lists
_SCHEMA = schema.record(
    {"files": schema.sequence(schema.file_name), "training": TRAINING_STATE, "args": ARGUMENTS}
)


class Sidecar(NamedTuple):
    """Arguments, training state and optimizer tensors of the run that was exported."""

    args: dict[str, Any]
    training: TrainingState
    tensors: dict[str, LazyTensor]


def open_sidecar(directory: Path) -> Sidecar | None:
    """Return the sidecar in `directory`, if any. Raises ValueError if it is incomplete."""
    if not (directory / _STATE).exists():
        return None
    # Read the JSON part, which names the other files.
    location = str(directory / _STATE)
    state = _SCHEMA(read_json(directory / _STATE), location)
    paths = [find_named_file(directory, name, location) for name in state["files"]]
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        raise ValueError(
            f"{directory} lacks {', '.join(missing)}: copy it again, or leave the optimizer out "
            "(--no-optim)"
        )
    training = TrainingState(**state["training"])
    if training.param_groups is not None:
        training.param_groups = [_restore_tuples(group) for group in training.param_groups]
    tensors: dict[str, LazyTensor] = {}
    for path in paths:
        tensors |= open_safetensors(path)
    return Sidecar(_restore_tuples(state["args"]), training, tensors)


def collect_optimizer_tensors(
    source: Source, parameters: Mapping[str, Shape]
) -> dict[str, LazyTensor]:
    """Return the optimizer state of the model's parameters, to be stored under its own keys.

    Without main parameters the weights are the fp32 values that the optimizer works on. They are
    stored as such, since the exported weights may be rounded.
    """
    all_states = {"param", *(optimizer_states(source.tensors) or ADAM)}
    is_mixed = has_mixed_states(source.args)
    tensors = {}
    # One fp32 tensor for each state of each parameter.
    for parameter, shape in parameters.items():
        if not is_trained(parameter):
            continue
        states = all_states
        if is_mixed:
            states = {"param", *list_parameter_states(parameter, source.tensors)}
        for state in OPTIMIZER_STATES:
            if state not in states:
                continue
            key = optimizer_key(state, parameter)
            source_key = key
            if state == "param":
                source_key = full_precision_key(parameter, source.tensors)
            if source_key not in source.tensors:
                raise ValueError(
                    f"{source.description} has no {key}: --save-optim-sidecar needs the optimizer "
                    "state"
                )
            state_tensor = cast(source.tensors[source_key], torch.float32)
            tensors[key] = dataclasses.replace(state_tensor, shape=shape)
    return tensors


def write_state(directory: Path, source: Source, files: list[str]) -> None:
    """Write the JSON part, without the state of generators, which belongs to one layout."""
    state = dataclasses.replace(source.training or TrainingState(), rng={})
    training = dataclasses.asdict(state)
    try:
        json.dumps(training)
    except TypeError as error:
        raise ValueError(
            f"{source.description}: its training state is not plain data ({error})"
        ) from error
    content = {"files": files, "training": training, "args": plain_args(source.args)}
    write_json(directory / _STATE, _SCHEMA(content, source.description))


def _restore_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with the lists that were tuples before they were written as JSON."""
    result = dict(values)
    for name in _TUPLES:
        if isinstance(result.get(name), list):
            result[name] = tuple(result[name])
    return result
