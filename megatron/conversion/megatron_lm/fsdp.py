"""Checkpoints of Megatron-FSDP (`--ckpt-format fsdp_dtensor`): plain DCP directories.

Every parameter is a tensor of its global shape under the name of its module, after the names of the
wrappers around the model: `model.module.decoder.layers.0...`. Gate and up of a gated linear layer
are two tensors (`weight_w`, `weight_v`), and so is every expert. Optimizer state is stored as
`optimizer.state.<wrappers>.<parameter>.<state>`. Arguments, parameter groups and schedules are
objects; nested dictionaries are flattened, one object per value.

Version 1 stores the arguments of the run. Version 2 stores only the model and the optimizer. With
mixed precision, both store the fp32 main parameters as the weights of the model. (Source:
Megatron-LM 0.20 and megatron-fsdp 0.6; checked against files of Megatron-LM's converter.)
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.conversion.megatron_lm.args import read_arguments
from megatron.conversion.megatron_lm.optimizer_state import (
    PieceTable,
    has_optimizer,
    refuse_unknown_optimizer,
)
from megatron.conversion.model_space.foreign import foreign_key
from megatron.conversion.model_space.layouts import rename_prediction_layer
from megatron.conversion.model_space.lazy_tensors import cast, stack
from megatron.conversion.model_space.model import (
    check_optimizer_complete,
    model_config,
    model_parameters,
    read_vocabulary_rows,
)
from megatron.conversion.model_space.optimizer_states import optimizer_key
from megatron.conversion.options import ReadOptions, rename_tensors
from megatron.conversion.stored_tokenizer import find_stored_tokenizer
from megatron.core.dist_checkpointing import CheckpointError, Reader
from megatron.core.dist_checkpointing.mapping import LazyTensor, Shape, TensorInfo
from megatron.core.distributed.param_and_grad_buffer import ParamSpec
from megatron.core.run_checkpoint.checks import plain_numbers
from megatron.core.run_checkpoint.common_state import find_param_groups, read_training_state
from megatron.core.run_checkpoint.keys import WORD_EMBEDDINGS, find_norm_key, is_trained
from megatron.core.run_checkpoint.source import TrainingState

# Names of wrappers around the model. Their number depends on the precision and the version.
_WRAPPERS = re.compile(r"(?:model|module|)\.")
_OURS = ("embedding.", "decoder.", "output_layer.", "mtp.")
_STATE = "optimizer.state."
_RENAMED_STATES = {"fp32_param": "param", "master_param": "param"}
_GROUP_OF_PARAMETER = "optimizer.param_to_group_meta."
_GROUP = re.compile(r"optimizer\.(?:optimizer\.)?param_groups\.(\d{1,2})\.(\w+)")
_SCHEDULE = "opt_param_scheduler."
_COMMON = ("args", "checkpoint_version", "iteration", "num_floating_point_operations_so_far")
_GATED = ("_w", "_v")  # gate, up
_EXPERTS = re.compile(r"(.+\.experts)\.experts\.(linear_fc[12])\.(\w+)")
_IGNORED_OBJECTS = (
    "common_state/",
    "rng_state",
    "rerun_state_machine",
    "content_metadata.",
    "optimizer.",
    _SCHEDULE,
)


class StoredPart(NamedTuple):
    """A stored tensor that is a parameter, or one expert of it, or a half of either.

    The parts of a gated layer are the gate (the first half of the rows) and up (the second half).
    """

    name: str  # in the files, without wrappers
    expert: int | None  # None for a part of all experts, or of a layer without experts


def is_megatron_fsdp(keys: Iterable[str]) -> bool:
    """Return whether the keys of a DCP directory are those of Megatron-FSDP."""
    names = [_strip_wrappers(key) for key in keys if key.startswith("model.")]
    return any(name.startswith(_OURS) for name in names)


def _strip_wrappers(key: str) -> str:
    """Return the name of a parameter without those of the wrappers."""
    start = 0
    while match := _WRAPPERS.match(key, start):
        start = match.end()
    return key[start:]


def _find_parameter(key: str) -> str:
    """Return the name of a parameter in the model."""
    return rename_prediction_layer(_strip_wrappers(key))


class MegatronFsdpSource:
    """An iteration directory of Megatron-FSDP."""

    def __init__(self, directory: Path, read_options: ReadOptions) -> None:
        location = str(directory)
        self.description = f"Megatron-FSDP checkpoint {directory}"
        self._reader = Reader(directory, verify=read_options.verify_source is not False)

        # Keys in the files: of the weight of each parameter, and of each (parameter, state).
        self._weights: dict[str, str] = {}
        self._states: dict[tuple[str, str], str] = {}
        self.unused: list[str] = []
        self._index_tensors(read_options)

        # Arguments
        self._objects = self._index_objects()
        common = self._read_common(read_options.args)
        self.args = read_arguments(common, location)
        self.args |= find_stored_tokenizer(self.args, directory) | dict(read_options.args)
        self.args.pop("use_megatron_fsdp", None)

        # The model, whose vocabulary has the stored rows
        rows = read_vocabulary_rows(self._describe_embedding(), location)
        self.args["model_vocab_size"] = rows
        self.config = model_config(self.args, rows, self.description)
        parameters = model_parameters(self.config)

        # Weights and optimizer state
        states: list[str] = []
        groups = None
        if not read_options.no_optim:
            states = self._list_states()
            groups = self._read_groups(common, parameters)
        is_optimizer_stored = bool(states) or has_optimizer(self.args, (), groups)
        self._table = PieceTable(self.description)
        for parameter in parameters:
            self._add_parameter(parameter, states, is_optimizer_stored)
        self._table.complete(is_optimizer_stored)
        self.tensors: dict[str, LazyTensor] = dict(self._table.tensors)
        check_optimizer_complete(self.tensors, self.args, location)

        # The remaining tensors
        if read_options.keep_foreign:
            self._add_foreign()
        else:
            self.unused += sorted(self._weights.values())
        if not read_options.no_optim:
            self.unused += sorted(self._states.values())

        self.training: TrainingState | None = read_training_state(common, self.args, groups)

    # ---- Keys ----

    def _index_tensors(self, read_options: ReadOptions) -> None:
        """Find the keys of all weights and optimizer states."""
        stored_names = {key: key for key in self._reader.metadata.tensors}
        names = rename_tensors(stored_names, read_options.renames, self.description)
        for name, key in names.items():
            self._sort_key(name, key)
        self._rename_norms()

    def _sort_key(self, name: str, key: str) -> None:
        """Add a key of the files to the weights or the optimizer state."""
        if name.startswith(_STATE):
            path = _find_parameter(name.removeprefix(_STATE))
            parameter, _, state = path.rpartition(".")
            state = _RENAMED_STATES.get(state, state)
            self._states[parameter, state] = key
        elif name.startswith("model."):
            self._weights[_find_parameter(name)] = key
        else:
            self.unused.append(key)

    def _rename_norms(self) -> None:
        """Give norms the names of the model, which depend on the layer that follows."""
        # Names without the suffix of gated halves, which norms are named after.
        modules = {name.removesuffix(_GATED[0]) for name in self._weights}
        self._weights = {find_norm_key(name, modules): key for name, key in self._weights.items()}
        states = {}
        for (name, state), key in self._states.items():
            states[find_norm_key(name, modules), state] = key
        self._states = states

    def _index_objects(self) -> set[str]:
        """Return the keys of the objects that are read, and record the others as unused."""
        objects = set()
        for key in self._reader.metadata.objects:
            if key in _COMMON or key.startswith(_IGNORED_OBJECTS):
                objects.add(key)
            elif not key.endswith("._extra_state"):
                self.unused.append(key)
        return objects

    def _find_parts(self, parameter: ParamSpec) -> list[StoredPart]:
        """Return the stored parts of the weight of `parameter`; empty if there are none."""
        stored_parts = self._find_whole_or_pair(parameter.name)
        match = _EXPERTS.fullmatch(parameter.name)
        if stored_parts or match is None:
            return stored_parts

        # The experts may be stored one by one, under the names of either kind of module.
        module, linear, suffix = match.groups()
        for expert in range(parameter.shape[0]):
            grouped = f"{module}.{linear}.{suffix}{expert}"
            sequential = f"{module}.local_experts.{expert}.{linear}.{suffix}"
            stored_parts += self._find_whole_or_pair(grouped, expert)
            stored_parts += self._find_whole_or_pair(sequential, expert)
        return stored_parts

    def _find_whole_or_pair(self, name: str, expert: int | None = None) -> list[StoredPart]:
        """Return the stored weight `name`, or the gate and up that it consists of."""
        if name in self._weights:
            return [StoredPart(name, expert)]
        pair = [name + suffix for suffix in _GATED]
        if all(half in self._weights for half in pair):
            return [StoredPart(half, expert) for half in pair]
        return []

    def _describe_embedding(self) -> dict[str, TensorInfo]:
        """Return shape and dtype of the word embedding, if it is stored."""
        key = self._weights.get(WORD_EMBEDDINGS)
        if key is None:
            return {}
        return {WORD_EMBEDDINGS: self._reader.view(key)}

    # ---- Arguments and training state ----

    def _read_common(self, user_args: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of a `common.pt`. `user_args` replaces arguments not stored in it."""
        common: dict[str, Any] = {}
        for key in _COMMON:
            if key in self._objects:
                common[key] = self._reader.read_object(key)

        # The arguments may be missing: then the command line defines the model.
        if "args" not in common:
            if not user_args.get("num_layers"):
                raise CheckpointError(
                    f"{self.description}: no arguments are stored, so its model is unknown: give "
                    "the training flags that define it (--num-layers, --hidden-size, ...)"
                )
            common["args"] = argparse.Namespace(**user_args)

        # Fields of the schedule are stored one by one.
        schedule = {}
        for key in sorted(self._objects):
            if key.startswith(_SCHEDULE):
                schedule[key.removeprefix(_SCHEDULE)] = self._reader.read_object(key)
        if schedule:
            common["opt_param_scheduler"] = plain_numbers(schedule)
        return common

    def _list_states(self) -> list[str]:
        """Return the optimizer states in the files. Raises CheckpointError for unknown ones."""
        names = {state for _, state in self._states}
        names.discard("step")
        states = sorted(names)
        if states:
            refuse_unknown_optimizer(self.args, states, self.description)
        return states

    def _read_groups(
        self, common: dict[str, Any], parameters: Iterable[ParamSpec]
    ) -> list[dict[str, Any]] | None:
        """Return the parameter groups: with weight decay, and without.

        Adds them to `common`, and removes the steps from the optimizer states.
        """
        # They are stored by group, or by parameter.
        groups = self._read_numbered_groups()
        if not groups:
            groups = self._read_groups_of_parameters(parameters)

        # torch's optimizers store the step as a tensor of each parameter: all are equal.
        step: int | None = None
        for parameter, state in list(self._states):
            if state == "step":
                key = self._states.pop((parameter, state))
                if step is None:
                    step = int(self._reader.view(key).read_all())
        if step is not None:
            for group in groups:
                group.setdefault("step", step)
        common["optimizer"] = {"param_groups": groups}
        return find_param_groups(common["optimizer"]) or None

    def _read_numbered_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups that are stored by number, one object per field."""
        groups: dict[int, dict[str, Any]] = {}
        for key in sorted(self._objects):
            match = _GROUP.fullmatch(key)
            if match is None:
                continue
            index, field = match.groups()
            if field != "params":
                group = groups.setdefault(int(index), {})
                group[field] = self._reader.read_object(key)
        return [plain_numbers(groups[index]) for index in sorted(groups)]

    def _read_groups_of_parameters(self, parameters: Iterable[ParamSpec]) -> list[dict[str, Any]]:
        """Return the fields of one parameter of each group, which are stored by parameter."""
        # Parameter -> field -> key of the object
        fields: dict[str, dict[str, str]] = {}
        for key in self._objects:
            if key.startswith(_GROUP_OF_PARAMETER):
                path = key.removeprefix(_GROUP_OF_PARAMETER)
                name, _, field = path.rpartition(".")
                own_fields = fields.setdefault(_strip_wrappers(name), {})
                own_fields[field] = key

        # Read those of one parameter with weight decay, and of one without.
        groups: dict[bool, dict[str, Any]] = {}
        for parameter in parameters:
            has_weight_decay = parameter.group.weight_decay
            field_keys = fields.get(parameter.name)
            if field_keys is None or has_weight_decay in groups:
                continue
            group = {}
            for field, key in field_keys.items():
                group[field] = self._reader.read_object(key)
            groups[has_weight_decay] = plain_numbers(group)
        return list(groups.values())

    # ---- Tensors ----

    def _add_parameter(
        self, parameter: ParamSpec, states: Iterable[str], is_optimizer_stored: bool
    ) -> None:
        """Add the weight of a parameter, and its optimizer state.

        Removes them from the stored keys. Raises CheckpointError if the weight is missing.
        """
        name = parameter.name
        stored_parts = self._find_parts(parameter)
        keys = [self._weights.pop(stored_part.name) for stored_part in stored_parts]
        if not keys:
            raise CheckpointError(f"{self.description} lacks {name}, which its arguments call for")

        # The weight, in the dtype of the run
        stored_dtype = self._get_dtype(keys[0])
        dtype = stored_dtype
        params_dtype = self.args.get("params_dtype")
        if is_trained(name) and isinstance(params_dtype, torch.dtype):
            dtype = params_dtype
        self._add_parts(parameter, name, stored_parts, keys, dtype)
        if not is_trained(name):
            return

        # The optimizer states that are stored for all parts
        for state in states:
            state_keys = []
            for stored_part in stored_parts:
                key = self._states.pop((stored_part.name, state), None)
                if key is not None:
                    state_keys.append(key)
            if len(state_keys) == len(stored_parts):
                target = optimizer_key(state, name)
                state_dtype = self._get_dtype(state_keys[0])
                self._add_parts(parameter, target, stored_parts, state_keys, state_dtype)

        # Without main parameters of their own, the fp32 weights in the files are the main ones.
        main = optimizer_key("param", name)
        is_main_stored = main in self._table.tensors
        if is_optimizer_stored and not is_main_stored and stored_dtype == torch.float32:
            self._add_parts(parameter, main, stored_parts, keys, stored_dtype)

    def _get_dtype(self, key: str) -> torch.dtype:
        """Return the dtype of a stored tensor."""
        return self._reader.metadata.tensors[key].dtype

    def _add_foreign(self) -> None:
        """Add the tensors of the model that are not its parameters, as foreign tensors.

        Their optimizer state is not added.
        """
        for name, key in self._weights.items():
            self.tensors[foreign_key(name)] = self._reader.view(key)

    def _add_parts(
        self,
        parameter: ParamSpec,
        key: str,
        stored_parts: Sequence[StoredPart],
        stored_keys: Sequence[str],
        dtype: torch.dtype,
    ) -> None:
        """Add the stored tensors as the parts of the tensor `key`, converted to `dtype`.

        Raises CheckpointError unless they are exactly the elements of the parameter.
        """
        row = 0  # of the next part in its expert, or in the whole parameter
        expert: int | None = None
        num_elements = 0
        for stored_part, stored_key in zip(stored_parts, stored_keys, strict=True):
            # The rows of each expert are counted from 0.
            if stored_part.expert != expert:
                expert = stored_part.expert
                row = 0

            # Parts are joined along the rows. An expert's lacks the first axis of the parameter.
            stored_tensor = cast(self._reader.view(stored_key), dtype)
            stored_box = stored_tensor
            offset: Shape = (row,) + (0,) * len(stored_tensor.shape[1:])
            if expert is not None:
                offset = (expert, *offset)
                stored_box = stack([stored_tensor])
            _check_part(offset, stored_box.shape, parameter, f"{self.description}: {stored_key}")

            self._table.add(key, parameter.shape, offset, stored_box)
            row += stored_tensor.shape[0]
            num_elements += math.prod(stored_box.shape)
        if num_elements != parameter.numel:
            raise CheckpointError(
                f"{self.description}: the files contain {num_elements} of {parameter.numel} "
                f"elements of {key}"
            )


def _check_part(offset: Shape, shape: Shape, parameter: ParamSpec, location: str) -> None:
    """Raise CheckpointError unless the box is inside the parameter."""
    fits = len(shape) == len(parameter.shape)
    if fits:
        for start, length, size in zip(offset, shape, parameter.shape, strict=True):
            fits = fits and start + length <= size
    if not fits:
        raise CheckpointError(
            f"{location} has shape {shape}, which is not a part of {parameter.name} of shape "
            f"{parameter.shape}"
        )
