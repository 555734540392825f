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

from megatron.checkpointer.tensors import copy_layout, is_dtensor, make_sharded_tensor
from megatron.core.dist_checkpointing.box_table import CheckpointMetadata, StoredTensor
from megatron.core.dist_checkpointing.generators import (
    GeneratorStates,
    check_generator_states,
    get_generator_states,
)
from megatron.core.dist_checkpointing.loading.load import fill
from megatron.core.dist_checkpointing.loading.reader import Reader
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.safe_files.errors import CheckpointError
from megatron.core.safe_files.schema import abbreviate
from megatron.core.terminal import escape_control_chars

logger = logging.getLogger(__name__)

_MODEL = "model."
_STATE = "optimizer.state."
_GROUPS = "optimizer.param_groups."
_RNG = "rng"
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
        if key.startswith(_STATE):
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
        names = self.objects.keys() | self.per_rank.keys()
        reserved = sorted({"model", "optimizer", _RNG} & names)
        if reserved:
            raise ValueError(f"an object is called {reserved[0]}, a name with another meaning")

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
            elif id(value) in parameters:
                state[key] = make_sharded_tensor(key, value)
            else:
                # Forward passes change buffers (e.g., running means) before the optimizer waits for
                # staging, so that a copy is saved. They are small.
                state[key] = make_sharded_tensor(key, copy_layout(value, value.detach().clone()))
        # Optimizer
        for parameter in self._parameters():
            # An optimizer creates state with the first gradient of a parameter.
            for state_name, value in parameter.optimizer.state.get(parameter.tensor, {}).items():
                key = f"{_STATE}{parameter.name}.{state_name}"
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
            key = _key_of_rank(name)
            state[key] = ShardedObject(key, stateful.state_dict(), in_list=False)
        key = _key_of_rank(_RNG)
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
            for option, value in group.items():
                keys = [f"{_GROUPS}{index}.{option}"]
                if self._flat_groups:
                    # Parameters of a group share the value, which is stored once.
                    names = group["params"] if option != "params" else []
                    keys = [f"{_GROUPS}{name}.{option}" for name in names]
                for key in keys:
                    state[key] = ShardedObject(key, value, in_list=False)
        return state

    def _named_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups of all optimizers with names instead of parameters."""
        names = {id(parameter): name for name, parameter in self._named_parameters()}
        groups = []
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                options = {option: group[option] for option in group if option != "params"}
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
            skipped |= {"optimizer", _RNG, *self.objects, *self.per_rank}

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
        with_optimizer = bool(self.optimizers) and "optimizer" not in skipped
        prefix = self._find_model_prefix(reader.metadata, context)
        plan = _LoadPlan(prefix, with_optimizer)
        self._plan_model(plan, reader, context)
        if with_optimizer:
            self._plan_optimizer(plan, reader)
            self._plan_groups(plan, reader, context)
        for name, stateful in self.objects.items():
            if name not in skipped:
                plan.objects.append((stateful, _read_object(reader, name, name, context)))
        for name, stateful in self.per_rank.items():
            if name not in skipped:
                _check_rank_count(name, reader.metadata, context)
                key = _key_of_rank(name)
                if key not in reader.metadata.objects:
                    key = name  # plain DCP: one state for all ranks
                value = _read_object(reader, key, name, context)
                plan.objects.append((stateful, value))
        if _RNG not in skipped:
            plan.generators = _read_generators(reader, context)
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
        raise CheckpointError(
            f"{context}: contains no tensor of this model (expected e.g. {_MODEL}{names[0]}). It "
            f"contains {abbreviate(stored_keys, 5, ', ') or 'no tensors'}"
        )

    def _plan_model(self, plan: _LoadPlan, reader: Reader, context: str) -> None:
        model_tensor_ids = {
            id(tensor) for tensor in (*self.model.parameters(), *self.model.buffers())
        }
        filled: set[int] = set()
        for raw_name, value in self.model.state_dict(keep_vars=True).items():
            key = plan.prefix + _clean(raw_name)
            if _is_extra_state(raw_name):
                path = raw_name.removesuffix(_EXTRA_STATE).removesuffix(".")
                plan.extra_state[path] = _read_object(reader, key, key, context)
                plan.handled.add(key)
            # Tied weights are stored once, under the first name.
            elif id(value) in filled:
                plan.handled.add(key)  # the same tensor under another name
            else:
                filled.add(id(value))
                plan.tensors[key] = copy_layout(value, value.detach())
                if id(value) not in model_tensor_ids:
                    plan.made_by_hooks[raw_name] = plan.tensors[key]

    def _plan_optimizer(self, plan: _LoadPlan, reader: Reader) -> None:
        """Plan to fill the optimizer state of every parameter that the checkpoint has state of."""
        state_names_of = _list_state_names(reader.metadata)
        for parameter in self._parameters():
            state_names = state_names_of.get(parameter.name)
            if state_names is None:  # e.g., a parameter that never had a gradient
                continue
            weight = reader.metadata.tensors.get(plan.prefix + parameter.name)
            existing = parameter.optimizer.state.get(parameter.tensor, {})
            state: dict[str, Any] = {}
            for state_name in state_names:
                key = f"{_STATE}{parameter.name}.{state_name}"
                stored_tensor = reader.metadata.tensors.get(key)
                if stored_tensor is None:
                    state[state_name] = reader.read_object(key)
                    continue
                tensor = existing.get(state_name)
                if not isinstance(tensor, torch.Tensor):
                    tensor = _allocate_state(key, parameter, stored_tensor, weight)
                state[state_name] = tensor
                plan.tensors[key] = copy_layout(parameter.tensor, tensor.detach())
            plan.optimizer_state.append((parameter, state))

    def _plan_groups(self, plan: _LoadPlan, reader: Reader, context: str) -> None:
        """Find the stored options of every parameter group."""
        options_of = self._read_options(reader, context)
        names = {id(parameter): name for name, parameter in self._named_parameters()}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                # All parameters of a group had the same options, unless it is a new group.
                for parameter in group["params"]:
                    options = options_of.get(names[id(parameter)])
                    if options is not None:
                        plan.group_options.append((group, options))
                        break

    def _read_options(self, reader: Reader, context: str) -> dict[str, dict[str, Any]]:
        """Return the stored options of the optimizer by parameter."""
        stored_keys = {
            key.removeprefix(_GROUPS) for key in reader.metadata.objects if key.startswith(_GROUPS)
        }
        options_of: dict[str, dict[str, Any]] = {}

        # One object for each group and option
        # Groups are numbered over all optimizers.
        index = 0
        while f"{index}.params" in stored_keys:
            start = f"{index}."
            options: dict[str, Any] = {}
            for key in stored_keys:
                if key.startswith(start):
                    options[key.removeprefix(start)] = reader.read_object(_GROUPS + key)
            params = options.pop("params")
            names = [params] if isinstance(params, str) else params
            options_of |= dict.fromkeys(names, options)
            index += 1
        if options_of:
            return options_of

        # One object for each parameter and option
        parameter_names = {parameter.name for parameter in self._parameters()}
        for key in stored_keys:
            name, _, option = key.rpartition(".")
            if name in parameter_names:
                options_of.setdefault(name, {})[option] = reader.read_object(_GROUPS + key)
        if options_of:
            return options_of

        # One object for all groups, as in DCP before torch 2.4
        groups = _read_object(reader, _GROUPS.removesuffix("."), "optimizer", context)
        for group in [groups] if isinstance(groups, dict) else groups:
            options = {option: value for option, value in group.items() if option != "params"}
            options_of |= dict.fromkeys(group["params"], options)
        return options_of

    # ---- Names ----

    def _model_entries(self) -> Iterator[tuple[str, Any]]:
        """Yield key and value of parameters, buffers and extra state."""
        for name, value in self.model.state_dict(keep_vars=True).items():
            yield _MODEL + _clean(name), value

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.model.named_parameters():
            yield _clean(name), parameter

    def _parameters(self) -> Iterator[_Parameter]:
        """Yield the parameters that an optimizer updates, in the order of the model."""
        owners: dict[int, tuple[Optimizer, dict[str, Any]]] = {}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    owners[id(parameter)] = optimizer, group
        for name, parameter in self._named_parameters():
            if id(parameter) in owners:
                yield _Parameter(name, parameter, *owners[id(parameter)])


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
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
            raise ValueError(
                "ZeroRedundancyOptimizer is not supported: use fully_shard (FSDP2) to shard "
                "optimizer state"
            )
        for index, group in enumerate(optimizer.param_groups):
            unnamed = [parameter for parameter in group["params"] if id(parameter) not in names]
            if unnamed:
                raise ValueError(
                    f"parameter group {index} of the optimizer contains a parameter of shape "
                    f"{tuple(unnamed[0].shape)} that is not a parameter of the model: create the "
                    "optimizer after wrapping the model (fully_shard, parallelize_module)"
                )


def _is_extra_state(name: str) -> bool:
    return name == _EXTRA_STATE or name.endswith("." + _EXTRA_STATE)


def _list_state_names(metadata: CheckpointMetadata) -> dict[str, list[str]]:
    """Return the names of optimizer state (e.g. exp_avg) by parameter."""
    state_names: dict[str, list[str]] = {}
    for key in (*metadata.tensors, *metadata.objects):
        if key.startswith(_STATE):
            name, _, state_name = key.removeprefix(_STATE).rpartition(".")
            state_names.setdefault(name, []).append(state_name)
    return state_names


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


def _key_of_rank(name: str) -> str:
    ranks = Coordination.of(None)
    return f"{name}.rank_{ranks.rank}_of_{ranks.size}"


def _check_rank_count(name: str, metadata: CheckpointMetadata, context: str) -> None:
    """Raise CheckpointError if the states of `name` were saved by another number of ranks."""
    size = Coordination.of(None).size
    start = f"{name}.rank_0_of_"
    counts = [key.removeprefix(start) for key in metadata.objects if key.startswith(start)]
    if counts and str(size) not in counts:
        raise CheckpointError(
            f"{context}: {name} was saved by {escape_control_chars(counts[0])} ranks, one state "
            f'each, which cannot be distributed over {size}: load with skip=["{name}"], and set '
            "its position yourself"
        )


def _read_generators(reader: Reader, context: str) -> GeneratorStates | None:
    """Return the generators of this rank; None if another number of ranks has saved them."""
    key = _key_of_rank(_RNG)
    if key not in reader.metadata.objects:
        logger.info(
            f"{context}: contains no random number generators of {Coordination.of(None).size} "
            "ranks; those of the program are left as they are"
        )
        return None
    try:
        return check_generator_states(reader.read_object(key))
    except CheckpointError as error:
        raise CheckpointError(
            f"{context}: {key} cannot be restored: {error}. To leave the generators alone, load "
            f'with skip=["{_RNG}"]'
        ) from error


def _read_object(reader: Reader, key: str, name: str, context: str) -> Any:
    if key in reader.metadata.objects:
        return reader.read_object(key)
    value = _read_nested(reader, key)
    if not value:
        raise CheckpointError(
            f'{context}: contains no {key}. To leave it as it is, load with skip=["{name}"]'
        )
    return value


def _read_nested(reader: Reader, key: str) -> dict[str, Any]:
    """Return a dictionary whose entries plain DCP stores one by one, as `<key>.<name>`."""
    value: dict[str, Any] = {}
    for stored_key in (*reader.metadata.tensors, *reader.metadata.objects):
        if not stored_key.startswith(f"{key}."):
            continue
        *outer_names, name = stored_key.removeprefix(f"{key}.").split(".")
        inner = value
        for outer_name in outer_names:
            inner = inner.setdefault(outer_name, {})
        if stored_key in reader.metadata.objects:
            inner[name] = reader.read_object(stored_key)
        else:
            tensor = reader.metadata.tensors[stored_key]
            inner[name] = reader.read(stored_key, (0,) * len(tensor.shape), tensor.shape)
    return value
