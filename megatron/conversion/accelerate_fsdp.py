"""Folders of accelerate's FSDP plugin, and of the trainer of transformers with it, as a `Source`.

<directory>/pytorch_model_fsdp_0: the weights, a DCP directory with the names of transformers
<directory>/optimizer_0: the optimizer, a DCP directory: `state` by parameter, and its groups
<directory>/config.json: the model, which accelerate does not store: copy it there
<directory>/trainer_state.json: the step, from the trainer of transformers
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron.conversion.deepspeed.training_state import check_groups, read_training
from megatron.conversion.huggingface.directory import CONFIG, HuggingFaceSource
from megatron.conversion.model_space.lazy_tensors import cast
from megatron.conversion.model_space.model import check_optimizer_complete, model_parameters
from megatron.conversion.model_space.optimizer_states import OPTIMIZER_STATES, optimizer_key
from megatron.conversion.options import ReadOptions
from megatron.core.dist_checkpointing import CheckpointError, Reader
from megatron.core.dist_checkpointing.files import METADATA
from megatron.core.dist_checkpointing.mapping import LazyTensor
from megatron.core.run_checkpoint.keys import FSDP_MODEL
from megatron.core.run_checkpoint.source import TrainingState
from megatron.core.safe_files import schema
from megatron.core.safe_files.reading import read_json

_OPTIMIZER = "optimizer_0"
_TRAINER_STATE = "trainer_state.json"
_MODEL_KEY = "model."
_STATE_KEY = "optimizer.state."
_GROUP_KEY = "optimizer.param_groups"
_GROUP_FIELD = re.compile(r"optimizer\.param_groups\.(\d+)\.(\w+)")
_STEP = "step"
_COUNT = schema.integer(0, 2**53)
_TRAINER = schema.record({"global_step": _COUNT})
_GROUP = schema.record(
    {
        "params": schema.sequence(schema.key),
        "lr?": schema.number(0, 1e6),
        "betas?": schema.sequence(schema.number(0, 1)),
        "eps?": schema.number(0, 1),
        "weight_decay?": schema.number(0, 1e6),
    },
)
_GROUPS = schema.sequence(_GROUP)
_DROP_OPTIMIZER = "leave the optimizer out (--no-optim of convert.py, --no-load-optim of a run)"


def describe_model_folder(root: Path) -> str | None:
    """Return why sharded weights in `root` cannot be read as a model, None without such weights."""
    # `root` itself, or folders in it
    folders: list[Path] = []
    for pattern in (f"{FSDP_MODEL}/{METADATA}", f"*/{FSDP_MODEL}/{METADATA}"):
        for metadata in sorted(root.glob(pattern)):
            folders.append(metadata.parent.parent)
    if not folders:
        return None
    folder = folders[-1]
    config = folder / CONFIG
    if not config.is_file():
        return (
            f"{folder} has the weights of a model of transformers that accelerate's FSDP saved, "
            "but no config.json, which defines the model: copy it there and give this directory"
        )
    if folder == root:
        return f"{config} is not the configuration of a model of transformers"
    return f"{root} has folders of accelerate's FSDP: give one of them, e.g. {folder}"


class AccelerateSource:
    """A model of transformers in shards of FSDP, with its optimizer."""

    def __init__(self, directory: Path, read_options: ReadOptions | None = None) -> None:
        read_options = read_options or ReadOptions()
        self.description = f"FSDP folder {directory}"
        self._directory = directory
        self._read_options = replace(read_options, no_optim=True)

        # Weights
        weights = _read_tensors(Reader(directory / FSDP_MODEL), _MODEL_KEY)
        model = self._open(weights)
        self.args: dict[str, Any] = model.args
        self.unused = list(model.unused)
        self.tensors: dict[str, LazyTensor] = dict(model.tensors)

        # Optimizer and step
        optimizer = None
        step = 0
        if not read_options.no_optim and (directory / _OPTIMIZER).is_dir():
            optimizer, step = self._add_optimizer(model)
        state = {"iteration": _read_iteration(directory, step)}
        self.training: TrainingState | None = read_training(state, optimizer, step, self.args)
        if optimizer is None:
            self.training.param_groups = None

    def _open(self, weights: Mapping[str, LazyTensor]) -> HuggingFaceSource:
        """Return the tensors of the model, converted from those that transformers names.

        `weights` may also be moments, which are converted like the weights.
        """
        return HuggingFaceSource(self._directory, self._read_options, weights)

    def _add_optimizer(self, model: HuggingFaceSource) -> tuple[dict[str, Any], int]:
        """Add main parameters and moments; return the parameter groups and the step."""
        location = str(self._directory / _OPTIMIZER)
        reader = Reader(self._directory / _OPTIMIZER)
        states, step = _read_states(reader, location)

        # The weights are the main parameters. Moments have the names and the layout of weights.
        for key, tensor in model.tensors.items():
            self.tensors[optimizer_key("param", key)] = cast(tensor, torch.float32)
        for state, tensors in states.items():
            moments = self._open(tensors).tensors
            for key, tensor in moments.items():
                self.tensors[optimizer_key(state, key)] = cast(tensor, torch.float32)
        check_optimizer_complete(self.tensors, self.args, location)

        # Compare which parameters have weight decay.
        groups = _read_groups(reader, location)
        members = [group["params"] for group in groups]
        decays = {}
        for spec in model_parameters(model.config):
            decays[spec.name] = spec.group.weight_decay
        decays_by_name = {}
        for name, key in model.map_names().items():
            decays_by_name[name] = decays[key]
        check_groups(groups, members, decays_by_name, location)
        return {"param_groups": groups}, step


def _read_states(reader: Reader, location: str) -> tuple[dict[str, dict[str, LazyTensor]], int]:
    """Return the moments by optimizer state and name of the parameter, and the optimizer's step.

    Raises CheckpointError for states that optimizers here do not have, or for several steps.
    """
    states: dict[str, dict[str, LazyTensor]] = {}
    for name, tensor in _read_tensors(reader, _STATE_KEY).items():
        parameter, _, state = name.rpartition(".")
        states.setdefault(state, {})[parameter] = tensor
    steps = set()
    for tensor in states.pop(_STEP, {}).values():
        steps.add(int(tensor.read_all()))
    unknown = sorted(states.keys() - set(OPTIMIZER_STATES))
    if unknown or not states or len(steps) != 1:
        raise CheckpointError(
            f"{location}: it has the states {', '.join(unknown) or sorted(states)} at the "
            f"steps {sorted(steps)}, unlike one step of an optimizer here: {_DROP_OPTIMIZER}"
        )
    return states, steps.pop()


def _read_tensors(reader: Reader, prefix: str) -> dict[str, LazyTensor]:
    """Return the tensors whose keys begin with `prefix`.

    Names in the result do not have the prefix.
    """
    tensors = {}
    for key in reader.metadata.tensors:
        if key.startswith(prefix):
            tensors[key.removeprefix(prefix)] = reader.view(key)
    return tensors


def _read_groups(reader: Reader, location: str) -> list[dict[str, Any]]:
    """Return the parameter groups, with the names of their parameters.

    They are one object, or an object per field: `optimizer.param_groups.0.lr`.
    """
    if _GROUP_KEY in reader.metadata.objects:
        groups = reader.read_object(_GROUP_KEY)
    else:
        fields: dict[int, dict[str, Any]] = defaultdict(dict)
        for key in reader.metadata.objects:
            match = _GROUP_FIELD.fullmatch(key)
            if match is None:
                continue
            index = int(match[1])
            name = match[2]
            fields[index][name] = reader.read_object(key)
        groups = [fields[index] for index in sorted(fields)]
    if not groups:
        raise CheckpointError(f"{location} has no {_GROUP_KEY}: {_DROP_OPTIMIZER}")
    checked: list[dict[str, Any]] = _GROUPS(groups, location)
    return checked


def _read_iteration(directory: Path, step: int) -> int:
    """Return the trainer's step, or the optimizer's without one."""
    path = directory / _TRAINER_STATE
    if not path.is_file():
        return step
    iteration: int = _TRAINER(read_json(path), str(path))["global_step"]
    return iteration
