"""A model of transformers in the checkpoint of a program that trains it, as a `Source`."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from megatron.conversion.deepspeed.training_state import (
    check_groups,
    decays_all,
    read_training,
)
from megatron.conversion.huggingface.directory import HuggingFaceSource
from megatron.conversion.model_space.lazy_tensors import cast
from megatron.conversion.model_space.model import check_optimizer_complete, model_parameters
from megatron.conversion.model_space.optimizer_states import OPTIMIZER_STATES, optimizer_key
from megatron.conversion.options import DROP_OPTIMIZER, ReadOptions
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.dist_checkpointing.mapping import LazyTensor
from megatron.core.run_checkpoint.keys import is_trained
from megatron.core.run_checkpoint.source import TrainingState
from megatron.core.safe_files import schema

logger = logging.getLogger(__name__)

_STEP = "step"
_STEP_VALUE = schema.number(0, schema.MAX_COUNT)

ParamGroup = dict[str, Any]  # of an optimizer of torch

# Fields of a parameter group that are read
HYPERPARAMETERS: dict[str, schema.Check] = {
    "lr": schema.number(0, 1e6),
    "betas": schema.sequence(schema.number(0, 1), 3),
    "eps": schema.number(0, 1),
    "weight_decay": schema.number(0, 1e6),
}


def build_group_check(check_parameter: schema.Check) -> schema.Check:
    """Return a check of a list of parameter groups."""
    fields = {"params": schema.sequence(check_parameter)}
    for name, check in HYPERPARAMETERS.items():
        fields[f"{name}?"] = check
    group = schema.record(fields)
    return schema.sequence(group, least=1)


check_named_groups = build_group_check(schema.key)


@dataclass
class OptimizerContents:
    """State of an optimizer of torch, by the names of the parameters."""

    states: Mapping[str, Mapping[str, LazyTensor]]
    """Tensors by parameter and state, `step` among them."""
    groups: list[ParamGroup]
    """Hyperparameters of each parameter group."""
    members: list[list[str]]
    """Parameters of each group."""


@dataclass
class FolderContents:
    """Weights under the names of transformers, and how to read the optimizer."""

    description: str
    config_dir: Path  # with the config.json of the model, unless there is a `config_json`
    weights: Mapping[str, LazyTensor]
    # Returns the optimizer for the names of the parameters that are trained, in the order of
    # `weights`. None without an optimizer.
    read_optimizer: Callable[[Sequence[str]], OptimizerContents] | None = None
    config_json: Mapping[str, Any] | None = None
    iteration: int | None = None  # default: the optimizer's step
    # The program decays other parameters than runs here do, which is reported. Otherwise, it is an
    # error.
    has_own_decay: bool = False
    unused: list[str] = field(default_factory=list)


class FolderSource:
    """A model of transformers, with the optimizer that trains it."""

    def __init__(self, contents: FolderContents, read_options: ReadOptions) -> None:
        self.description = contents.description
        self._contents = contents
        self._read_options = replace(read_options, no_optim=True)

        # Weights
        model = self._open(contents.weights)
        self.args: dict[str, Any] = model.args
        self.unused = [*model.unused, *contents.unused]
        self.tensors: dict[str, LazyTensor] = dict(model.tensors)

        # Optimizer and step
        optimizer = None
        step = 0
        has_full_decay = False
        if not read_options.no_optim and contents.read_optimizer is not None:
            stored = contents.read_optimizer(self._list_trained(model))
            step = self._add_optimizer(model, stored)
            optimizer = {"param_groups": stored.groups}
            has_full_decay = decays_all(stored.groups, stored.members)
        iteration = step if contents.iteration is None else contents.iteration
        self.training: TrainingState | None = read_training(
            {"iteration": iteration}, optimizer, step, self.args, has_full_decay
        )
        if optimizer is None:
            self.training.param_groups = None

    def _list_trained(self, model: HuggingFaceSource) -> list[str]:
        """Return the names of the parameters that are trained, in the order of the weights."""
        keys = model.map_names()
        trained = []
        for name in self._contents.weights:
            key = keys.get(name)
            if key is not None and is_trained(key):
                trained.append(name)
        return trained

    def _open(self, weights: Mapping[str, LazyTensor]) -> HuggingFaceSource:
        """Return the tensors of the model, converted from those that transformers names.

        `weights` may also be moments, which are converted like the weights.
        """
        contents = self._contents
        return HuggingFaceSource(
            contents.config_dir, self._read_options, weights, contents.config_json
        )

    def _add_optimizer(self, model: HuggingFaceSource, stored: OptimizerContents) -> int:
        """Add main parameters and moments; return the optimizer's step."""
        states, step = _sort_states(stored.states, self.description)

        # The weights are the main parameters. Moments have the names and the layout of weights.
        for key, tensor in model.tensors.items():
            if is_trained(key):
                self.tensors[optimizer_key("param", key)] = cast(tensor, torch.float32)
        for state, tensors in states.items():
            moments = self._open(tensors).tensors
            for key, tensor in moments.items():
                self.tensors[optimizer_key(state, key)] = cast(tensor, torch.float32)
        check_optimizer_complete(self.tensors, self.args, self.description)

        # Compare which parameters have weight decay.
        decays = {}
        for spec in model_parameters(model.config):
            decays[spec.name] = spec.group.weight_decay
        decays_by_name = {}
        for name, key in model.map_names().items():
            if is_trained(key):
                decays_by_name[name] = decays[key]
        members = stored.members
        if self._contents.has_own_decay and not decays_all(stored.groups, members):
            self._report_decay(stored, decays_by_name)
            members = []
        check_groups(stored.groups, members, decays_by_name, self.description)
        return step

    def _report_decay(self, stored: OptimizerContents, decays: Mapping[str, bool]) -> None:
        """Log the parameters that have weight decay either there or here."""
        differing = []
        for group, names in zip(stored.groups, stored.members, strict=True):
            has_decay = bool(group.get("weight_decay"))
            for name in names:
                if decays.get(name, has_decay) != has_decay:
                    differing.append(name)
        if differing and any(group.get("weight_decay") for group in stored.groups):
            note = (
                f"weight decay of {len(differing)} parameters, e.g. {differing[0]}: runs here "
                "decay matrices and embeddings, not biases and norms"
            )
            self.unused.append(f"state: {note}")
            logger.warning(f"{self.description} has another {note}")


def _sort_states(
    states_by_parameter: Mapping[str, Mapping[str, LazyTensor]], location: str
) -> tuple[dict[str, dict[str, LazyTensor]], int]:
    """Return the moments by optimizer state and name of the parameter, and the optimizer's step.

    Raises CheckpointError for states that optimizers here do not have, or for several steps.
    """
    states: dict[str, dict[str, LazyTensor]] = {}
    for parameter, tensors in states_by_parameter.items():
        for state, tensor in tensors.items():
            states.setdefault(state, {})[parameter] = tensor

    # The step is a state of each parameter.
    steps = set()
    for parameter, tensor in states.pop(_STEP, {}).items():
        step_location = f"{location}: the step of {parameter}"
        if math.prod(tensor.shape) != 1:
            schema.refuse(step_location, tensor.shape, "one number")
        step = _STEP_VALUE(tensor.read_all().item(), step_location)
        steps.add(int(step))

    unknown = sorted(states.keys() - set(OPTIMIZER_STATES))
    if unknown or not states or len(steps) != 1:
        raise CheckpointError(
            f"{location}: its optimizer has the states {', '.join(unknown) or sorted(states)} at "
            f"the steps {sorted(steps)}, unlike one step of an optimizer here: {DROP_OPTIMIZER}"
        )
    return states, steps.pop()
