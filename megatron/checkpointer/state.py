"""The state of a PyTorch program as named global tensors and objects.

Names follow `torch.distributed.checkpoint.state_dict`, so that plain DCP reads and writes the same
checkpoints:

* `model.<name>`: parameters and persistent buffers.
* `optimizer.state.<name>.<kind>`: optimizer state by parameter, e.g. `exp_avg`.
* `optimizer.param_groups.<i>.<option>`: options of the groups; `params` are names of parameters.
  Where ranks have different parameters (pipeline stages), `optimizer.param_groups.<name>.<option>`
  instead, as with `StateDictOptions(flatten_optimizer_state_dict=True)`.
* `rng.rank_<r>_of_<n>`: the random number generators of each rank.
* `<object>`: the state of an additional object such as a scheduler, stored once;
  `<object>.rank_<r>_of_<n>` for an object whose state differs between ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from megatron.checkpointer.stored_objects import GROUPS, RNG, STATE, StoredObjects, make_rank_key
from megatron.checkpointer.tensors import copy_layout, is_dtensor, make_sharded_tensor
from megatron.core.dist_checkpointing.box_table import CheckpointMetadata, StoredTensor
from megatron.core.dist_checkpointing.generators import GeneratorStates, get_generator_states
from megatron.core.dist_checkpointing.loading.load import fill
from megatron.core.dist_checkpointing.loading.reader import Reader
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.safe_files.errors import CheckpointError
from megatron.core.safe_files.schema import abbreviate
from megatron.core.terminal import escape_control_chars

logger = logging.getLogger(__name__)

_MODEL = "model."
_EXTRA_STATE = "_extra_state"  # torch's suffix for the state of `Module.get_extra_state`
# Options of a parameter group that select an implementation. The program decides on these.
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
# Inserted into the names of parameters by torch.compile and activation checkpointing.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


class Stateful(Protocol):
    """Anything with a state dictionary, e.g. a scheduler or a data loader."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain types and tensors."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore a result of `state_dict`."""
        ...


class _Parameter(NamedTuple):
    """A parameter with the optimizer that updates it, and the group that it belongs to."""

    name: str
    tensor: nn.Parameter
    optimizer: Optimizer
    group: dict[str, Any]

    def get_state(self) -> dict[str, Any]:
        """Return the state of the optimizer, empty before the first gradient."""
        state: dict[str, Any] = self.optimizer.state.get(self.tensor, {})
        return state


@dataclass
class _LoadPlan:
    """Everything that a load fills or hands over, on this rank."""

    prefix: str  # of the model's keys
    with_optimizer: bool
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    # Keys of all ranks that are not filled: second names of tied weights, and extra state.
    handled: set[str] = field(default_factory=set)
    extra_state: dict[str, Any] = field(default_factory=dict)  # by path of the module
    # Tensors that a hook of `state_dict` has made, e.g. parts of a fused weight, by name.
    made_by_hooks: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizer_state: list[tuple[_Parameter, dict[str, Any]]] = field(default_factory=list)
    group_options: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    objects: list[tuple[Stateful, Any]] = field(default_factory=list)
    generators: GeneratorStates | None = None

    def may_leave_out(self, key: str) -> bool:
        """Return whether a stored key need not be requested by any rank."""
        if key.startswith(STATE):
            return not self.with_optimizer
        if key in self.handled:
            return True
        # Without a prefix, entries of the model cannot be distinguished from others.
        return not self.prefix or not key.startswith(self.prefix)


@dataclass
class ProgramState:
    """Model, optimizers and additional objects of a program.

    `objects` are stored once, by rank 0; the state of `per_rank` objects is stored for every rank.
    All ranks have the same objects. Model and optimizer may differ between ranks.
    """

    model: nn.Module
    optimizers: Sequence[Optimizer] = ()
    objects: Mapping[str, Stateful] = field(default_factory=dict)
    per_rank: Mapping[str, Stateful] = field(default_factory=dict)
    _flat_groups: bool | None = None

    def __post_init__(self) -> None:
        self.model = _unwrap(self.model)
        _check_supported(self.model, self.optimizers)
        for name in ("model", "optimizer", RNG):
            if name in self.objects or name in self.per_rank:
                raise ValueError(f"an object is called {name}, a name with another meaning")

    # ---- Saving ----

    def to_sharded(self) -> ShardedStateDict:
        """Return everything to save. Views of parameters and optimizer state are not copied.

        The first call is collective.
        """
        state: ShardedStateDict = {}
        # Model
        parameters = {id(parameter) for parameter in self.model.parameters()}
        for key, value in self._model_entries():
            if key.endswith(_EXTRA_STATE):
                state[key] = ShardedObject(key, value, in_list=False)
                continue
            if id(value) not in parameters:
                # Forward passes change buffers (e.g., running means) before the optimizer waits for
                # staging, so that a copy is saved. They are small.
                value = copy_layout(value, value.detach().clone())
            state[key] = make_sharded_tensor(key, value)
        # Optimizer
        for parameter in self._parameters():
            # An optimizer creates state with the first gradient of a parameter.
            for state_name, value in parameter.get_state().items():
                key = f"{STATE}{parameter.name}.{state_name}"
                if isinstance(value, torch.Tensor):
                    value = copy_layout(parameter.tensor, value)
                    state[key] = make_sharded_tensor(key, value)
                else:
                    state[key] = ShardedObject(key, value, in_list=False)
        if self.optimizers:
            state |= self._describe_groups()
        # Additional objects, and the generators of this rank
        for name, stateful in self.objects.items():
            state[name] = ShardedObject(name, stateful.state_dict(), in_list=False)
        for name, stateful in self.per_rank.items():
            key = make_rank_key(name)
            state[key] = ShardedObject(key, stateful.state_dict(), in_list=False)
        key = make_rank_key(RNG)
        state[key] = ShardedObject(key, get_generator_states(), in_list=False, is_constant=True)
        return state

    def _describe_groups(self) -> ShardedStateDict:
        # If ranks have different parameters (pipeline stages), the number of a group differs
        # between ranks: options are then stored per parameter.
        if self._flat_groups is None:
            names = [parameter.name for parameter in self._parameters()]
            everywhere = Coordination.of(None).all_gather(names)
            self._flat_groups = any(names_of_rank != names for names_of_rank in everywhere)
        state: ShardedStateDict = {}
        for index, group in enumerate(self._named_groups()):
            prefixes = [str(index)]
            if self._flat_groups:
                # Parameters of a group share the values, which are stored once.
                prefixes = group.pop("params")
            for option, value in group.items():
                for prefix in prefixes:
                    key = f"{GROUPS}{prefix}.{option}"
                    state[key] = ShardedObject(key, value, in_list=False)
        return state

    def _named_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups of all optimizers with names instead of parameters."""
        names = self._index_names()
        groups = []
        for _, group in self._iterate_groups():
            options = dict(group)
            options["params"] = [names[id(parameter)] for parameter in group["params"]]
            groups.append(options)
        return groups

    # ---- Loading ----

    def load(
        self,
        reader: Reader,
        context: str,
        *,
        weights_only: bool = False,
        skip: Collection[str] = (),
    ) -> None:
        """Fill model, optimizers and objects from a checkpoint, in place. Collective.

        With `weights_only` everything but the model is left alone; `skip` are names of objects,
        or "optimizer", to leave alone. Raises CheckpointError on every rank if anything is missing
        or does not fit, before any tensor changes.
        """
        skipped = set(skip)
        if weights_only:
            skipped |= {"optimizer", RNG, *self.objects, *self.per_rank}

        # Read the objects, and create optimizer state that does not exist yet.
        ranks = Coordination.of(None)
        plan = ranks.run_on_all(lambda: self._plan_load(reader, context, skipped))
        # Rank 0 compares the keys of all ranks, e.g., of other pipeline stages.
        plan.handled.update(*ranks.all_gather(plan.handled))

        # Fill all tensors.
        requested_state: ShardedStateDict = {
            key: make_sharded_tensor(key, tensor) for key, tensor in plan.tensors.items()
        }
        fill(requested_state, reader, context, skip=plan.may_leave_out)

        # Hand over the rest.
        if plan.made_by_hooks:
            self.model.load_state_dict(plan.made_by_hooks, strict=False)
        for path, value in plan.extra_state.items():
            self.model.get_submodule(path).set_extra_state(value)
        # New tensors replace missing state; existing ones were filled in place.
        for parameter, state in plan.optimizer_state:
            parameter.optimizer.state[parameter.tensor] = state
        for group, options in plan.group_options:
            _update_group(group, options)
        for stateful, value in plan.objects:
            stateful.load_state_dict(value)
        if plan.generators is not None:
            plan.generators.restore()

    def _plan_load(self, reader: Reader, context: str, skipped: Collection[str]) -> _LoadPlan:
        stored_objects = StoredObjects(reader, context)
        with_optimizer = bool(self.optimizers) and "optimizer" not in skipped
        prefix = self._find_model_prefix(reader.metadata, context)
        plan = _LoadPlan(prefix, with_optimizer)
        self._plan_model(plan, stored_objects)
        if with_optimizer:
            self._plan_optimizer(plan, reader, stored_objects)
            self._plan_groups(plan, stored_objects)
        for name, stateful in self.objects.items():
            if name not in skipped:
                value = stored_objects.read(name, name)
                plan.objects.append((stateful, value))
        for name, stateful in self.per_rank.items():
            if name not in skipped:
                value = stored_objects.read_of_rank(name)
                plan.objects.append((stateful, value))
        if RNG not in skipped:
            plan.generators = stored_objects.read_generators()
        return plan

    def _find_model_prefix(self, metadata: CheckpointMetadata, context: str) -> str:
        """Return the prefix of the model's keys: "model.", or "" as torchtitan stores it."""
        names = [key.removeprefix(_MODEL) for key, _ in self._model_entries()]
        if not names:
            return _MODEL
        # One tensor suffices: missing ones are reported with their names later.
        for prefix in (_MODEL, ""):
            if any(prefix + name in metadata.tensors for name in names):
                return prefix
        stored_keys = [escape_control_chars(key) for key in sorted(metadata.tensors)]
        listed = abbreviate(stored_keys, 5, ", ")
        raise CheckpointError(
            f"{context}: contains no tensor of this model (expected e.g. {_MODEL}{names[0]}). It "
            f"contains {listed or 'no tensors'}"
        )

    def _plan_model(self, plan: _LoadPlan, stored_objects: StoredObjects) -> None:
        model_tensors = (*self.model.parameters(), *self.model.buffers())
        model_tensor_ids = set(map(id, model_tensors))
        filled: set[int] = set()
        for raw_name, value in self.model.state_dict(keep_vars=True).items():
            key = plan.prefix + _clean(raw_name)
            tensor_id = id(value)
            if _is_extra_state(raw_name):
                path = raw_name.removesuffix(_EXTRA_STATE).removesuffix(".")
                plan.extra_state[path] = stored_objects.read(key, key)
                plan.handled.add(key)
            # Tied weights are stored once, under the first name.
            elif tensor_id in filled:
                plan.handled.add(key)  # the same tensor under another name
            else:
                filled.add(tensor_id)
                tensor = copy_layout(value, value.detach())
                plan.tensors[key] = tensor
                if tensor_id not in model_tensor_ids:
                    plan.made_by_hooks[raw_name] = tensor

    def _plan_optimizer(
        self, plan: _LoadPlan, reader: Reader, stored_objects: StoredObjects
    ) -> None:
        """Plan to fill the optimizer state of every parameter that the checkpoint has state of."""
        stored_tensors = reader.metadata.tensors
        state_names_of = stored_objects.list_state_names()
        for parameter in self._parameters():
            state_names = state_names_of.get(parameter.name)
            if state_names is None:  # e.g., a parameter that never had a gradient
                continue
            weight = stored_tensors.get(plan.prefix + parameter.name)
            existing = parameter.get_state()
            state: dict[str, Any] = {}
            for state_name in state_names:
                key = f"{STATE}{parameter.name}.{state_name}"
                stored_tensor = stored_tensors.get(key)
                if stored_tensor is None:
                    state[state_name] = reader.read_object(key)
                    continue
                tensor = existing.get(state_name)
                if not isinstance(tensor, torch.Tensor):
                    tensor = _allocate_state(key, parameter, stored_tensor, weight)
                state[state_name] = tensor
                plan.tensors[key] = copy_layout(parameter.tensor, tensor.detach())
            plan.optimizer_state.append((parameter, state))

    def _plan_groups(self, plan: _LoadPlan, stored_objects: StoredObjects) -> None:
        """Find the stored options of every parameter group."""
        parameter_names = {parameter.name for parameter in self._parameters()}
        options_of = stored_objects.read_options(parameter_names)
        names = self._index_names()
        for _, group in self._iterate_groups():
            # All parameters of a group had the same options, unless it is a new group.
            for parameter in group["params"]:
                name = names[id(parameter)]
                if name in options_of:
                    plan.group_options.append((group, options_of[name]))
                    break

    # ---- Names ----

    def _model_entries(self) -> Iterator[tuple[str, Any]]:
        """Yield key and value of parameters, buffers and extra state."""
        for name, value in self.model.state_dict(keep_vars=True).items():
            yield _MODEL + _clean(name), value

    def _index_names(self) -> dict[int, str]:
        """Return the names of the parameters by their id."""
        names = {}
        for name, parameter in self.model.named_parameters():
            names[id(parameter)] = _clean(name)
        return names

    def _iterate_groups(self) -> Iterator[tuple[Optimizer, dict[str, Any]]]:
        """Yield the parameter groups of all optimizers."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield optimizer, group

    def _parameters(self) -> Iterator[_Parameter]:
        """Yield the parameters that an optimizer updates, in the order of the model."""
        owners: dict[int, tuple[Optimizer, dict[str, Any]]] = {}
        for optimizer, group in self._iterate_groups():
            for parameter in group["params"]:
                owners[id(parameter)] = optimizer, group
        for name, parameter in self.model.named_parameters():
            owner = owners.get(id(parameter))
            if owner is not None:
                yield _Parameter(_clean(name), parameter, *owner)


def _clean(name: str) -> str:
    """Return the name of a parameter without the names of wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside of DistributedDataParallel and torch.compile."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else None
        inner = getattr(model, "_orig_mod", inner)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _check_supported(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    for module in model.modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ValueError(
                "FullyShardedDataParallel (FSDP1) is not supported: use fully_shard (FSDP2), whose "
                "parameters are DTensors"
            )
    # Optimizer state is stored by parameter name, so each parameter must have one.
    names = set(map(id, model.parameters()))
    for optimizer in optimizers:
        if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
            raise ValueError(
                "ZeroRedundancyOptimizer is not supported: use fully_shard (FSDP2) to shard "
                "optimizer state"
            )
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) in names:
                    continue
                raise ValueError(
                    f"parameter group {index} of the optimizer contains a parameter of shape "
                    f"{tuple(parameter.shape)} that is not a parameter of the model: create the "
                    "optimizer after wrapping the model (fully_shard, parallelize_module)"
                )


def _is_extra_state(name: str) -> bool:
    _, _, attribute = name.rpartition(".")
    return attribute == _EXTRA_STATE


def _allocate_state(
    key: str, parameter: _Parameter, stored_tensor: StoredTensor, weight: StoredTensor | None
) -> torch.Tensor:
    """Create a tensor for optimizer state that the optimizer has not created yet.

    Like `Optimizer.load_state_dict`, state has the dtype of its parameter, unless the checkpoint
    keeps it in another dtype than that of the same parameter.
    """
    tensor = parameter.tensor
    if stored_tensor.shape == ():  # e.g., the number of steps
        on_device = parameter.group.get("capturable") or parameter.group.get("fused")
        device = tensor.device if on_device else "cpu"
        return torch.zeros((), dtype=stored_tensor.dtype, device=device)
    is_converted = weight is not None and weight.dtype != tensor.dtype
    dtype = tensor.dtype if is_converted else stored_tensor.dtype
    global_shape = getattr(tensor, "global_shape", tensor.shape)
    if stored_tensor.shape == tuple(global_shape):
        return torch.zeros_like(tensor, dtype=dtype, requires_grad=False)
    if is_dtensor(tensor):
        if weight is not None and weight.shape != tuple(tensor.shape):
            raise CheckpointError(
                f"model.{parameter.name}: {weight.shape} in the checkpoint, but "
                f"{tuple(tensor.shape)} in the model: build the model with the sizes of the "
                "checkpoint"
            )
        raise CheckpointError(
            f"{key}: shape {stored_tensor.shape} in the checkpoint differs from the sharded "
            f"parameter's {tuple(tensor.shape)}: run one step of the optimizer before loading, "
            "so that the state exists"
        )
    return torch.zeros(stored_tensor.shape, dtype=dtype, device=tensor.device)


def _update_group(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for option, value in options.items():
        if option in _IMPLEMENTATION:
            continue
        current = group.get(option)
        if isinstance(current, torch.Tensor):  # e.g., a learning rate on the device
            current.fill_(float(value))
        else:
            group[option] = value
