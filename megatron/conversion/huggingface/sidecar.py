"""The sidecar of an exported model: what transformers has no place for, so that the way back loses nothing.

`megatron_state/` in the model's directory (a subdirectory, so that no loader takes its files for weights) holds the
optimizer state in model space as safetensors, and run arguments and training state as JSON.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.conversion.huggingface.weight_files import SafetensorsFile
from megatron.conversion.model_space.model import plain_args
from megatron.conversion.model_space.source import (
    ADAM,
    ARGUMENTS,
    TRAINING_STATE,
    Shape,
    Source,
    TensorInfo,
    TrainingState,
    full_precision_key,
    optimizer_key,
    optimizer_states,
)
from megatron.core.dist_checkpointing.format.schema import file_name, named_file, read_json, record, sequence
from megatron.core.durable_files import write_json

DIRECTORY = "megatron_state"
_STATE = "state.json"  # written last: without it there is no sidecar
_TUPLES = ("window_size", "betas")  # JSON has lists only
_SCHEMA = record({"files": sequence(file_name), "training": TRAINING_STATE, "args": ARGUMENTS})


@dataclasses.dataclass
class Sidecar:
    directory: Path
    args: dict[str, Any]
    training: TrainingState
    tensors: dict[str, TensorInfo]
    _files: dict[str, SafetensorsFile]

    @classmethod
    def open(cls, model_directory: Path) -> Sidecar | None:
        """The sidecar of a model, if it has one; raises ValueError where it is incomplete."""
        directory = model_directory / DIRECTORY
        if not (directory / _STATE).exists():
            return None
        where = str(directory / _STATE)
        state = _SCHEMA(read_json(directory / _STATE), where)
        paths = [named_file(directory, name, where) for name in state["files"]]
        missing = [path.name for path in paths if not path.exists()]
        if missing:
            raise ValueError(
                f"{directory} lacks {', '.join(missing)}: copy it again, or leave the optimizer out (--no-optim)"
            )
        files = {name: file for file in map(SafetensorsFile, paths) for name in file.tensors}
        training = TrainingState(**state["training"])
        training.param_groups = training.param_groups and [_with_tuples(group) for group in training.param_groups]
        tensors = {name: file.tensors[name] for name, file in files.items()}
        return cls(directory, _with_tuples(state["args"]), training, tensors, files)

    def read(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        return self._files[key].read(key, offset, shape)


def sidecar_tensors(source: Source, parameters: Mapping[str, Shape]) -> dict[str, tuple[str, TensorInfo]]:
    """Sidecar key -> (key to read, how to store it), for the model's parameters.

    Without main parameters the weights are the fp32 values that the optimizer works on; they are stored as such, since
    the exported weights may be rounded.
    """
    states = {"param": None} | dict.fromkeys(optimizer_states(source.tensors) or ADAM)
    tensors = {}
    for parameter, shape in parameters.items():
        for state in states:
            key = optimizer_key(state, parameter)
            read = full_precision_key(parameter, source.tensors) if state == "param" else key
            if read not in source.tensors:
                raise ValueError(f"{source.description} has no {key}: --save-optim-sidecar needs the optimizer state")
            tensors[key] = (read, TensorInfo(shape, torch.float32))
    return tensors


def write_state(directory: Path, source: Source, files: list[str]) -> None:
    """The JSON part; RNG state is left out: it belongs to one layout."""
    training = dataclasses.asdict(source.training or TrainingState()) | {"rng": {}}
    try:
        json.dumps(training)
    except TypeError as error:
        raise ValueError(f"{source.description}: its training state is not plain data ({error})") from error
    write_json(directory / _STATE, {"files": files, "training": training, "args": plain_args(source.args)})


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if k in _TUPLES and isinstance(v, list) else v for k, v in values.items()}
