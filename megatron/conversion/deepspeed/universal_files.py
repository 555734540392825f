"""The files of a DeepSpeed universal checkpoint.

<root>/latest_universal: name of the directory
<root>/<tag>/mp_rank_XX_model_states.pt: arguments, schedule and counters, equal for all XX except
    for rank numbers; of ZeRO-3 zero_pp_rank_D_mp_rank_XX_model_states.pt
<root>/<tag>/zero/optimizer_state.pt: parameter groups (missing in BLOOM-era directories)
<root>/<tag>/zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt: parameter and moments; with SGD
    {fp32,momentum_buffer,step}.pt
<root>/<tag>/foreign.pt: tensors that the model does not have, by name, which DeepSpeed ignores
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from megatron.conversion.deepspeed.names import map_to_model_space
from megatron.conversion.model_space.lazy_tensors import view_tensor
from megatron.conversion.model_space.optimizer_states import OPTIMIZER_STATES
from megatron.conversion.model_space.pieces import find_archive_faults
from megatron.core.dist_checkpointing.mapping import LazyTensor, Shape
from megatron.core.optimizer import UPDATE_RULES, get_update_rule
from megatron.core.run_checkpoint.checks import (
    GRAD_SCALER,
    PARAM_GROUP,
    RANKS,
    SIZE,
    check_namespace,
    check_scalar,
    check_scheduler,
)
from megatron.core.run_checkpoint.keys import WORD_EMBEDDINGS, ZERO
from megatron.core.safe_files import safe_load
from megatron.core.safe_files.schema import (
    COUNT,
    anything,
    mapping,
    number,
    optional,
    record,
    sequence,
)
from megatron.core.safe_files.schema import key as check_key

_VOCABULARY = record({"original_vocab_size?": optional(SIZE)})
_SHAPES = mapping(anything, keys=check_key)  # of parameters by name
MODEL_STATE_SCHEMA = record(
    {
        "args?": check_namespace,
        "iteration?": optional(COUNT),
        "global_steps?": optional(COUNT),
        "global_samples?": optional(COUNT),
        "skipped_steps?": optional(COUNT),
        "num_floating_point_operations_so_far?": optional(number(0)),
        "lr_scheduler?": optional(check_scheduler),
        "megatron_param_groups?": optional(sequence(PARAM_GROUP)),
        "grad_scaler?": optional(GRAD_SCALER),
        "universal_checkpoint_info?": optional(_VOCABULARY),
        "checkpoint_info?": optional(_VOCABULARY),
        "checkpoint_parallel_dimensions?": optional(record({"tp_degree?": optional(RANKS)})),
        "param_shapes?": sequence(_SHAPES),
        "frozen_param_shapes?": optional(_SHAPES),
    }
)
OPTIMIZER_SCHEMA = record({"param_groups": sequence(PARAM_GROUP)})

MODEL_STATE = "mp_rank_00_model_states.pt"  # of the first rank
OPTIMIZER_STATE = "optimizer_state.pt"
FOREIGN_FILE = "foreign.pt"
STEP = "step.pt"
STATE_FILES = {"param": "fp32.pt"} | {name: f"{name}.pt" for name in OPTIMIZER_STATES[1:]}


def _find_model_states(directory: Path) -> list[Path]:
    """Return the model-state files. With ZeRO-3, every data-parallel rank has some."""
    for prefix in ("", "zero_pp_rank_*_"):
        paths = sorted(directory.glob(f"{prefix}mp_rank_*_model_states.pt"))
        if paths:
            return paths
    return []


def list_universal_damage(directory: Path) -> list[str]:
    """Return a line for each missing or truncated file; raise CheckpointError for other damage.

    If one parameter has a state (Adam's moments or the momentum of SGD), all must have it.
    """
    folders = _list_parameter_folders(directory)

    # Find the states that any parameter has.
    names = [STATE_FILES["param"]]
    for name in STATE_FILES.values():
        if any((folder / name).exists() for folder in folders):
            names.append(name)

    # Check these files of every parameter, and all other files that there are.
    files = set(directory.rglob("*.pt"))
    if not _find_model_states(directory):
        files.add(directory / MODEL_STATE)
    for folder in folders:
        for name in names:
            files.add(folder / name)
    return find_archive_faults(sorted(files), directory)


def _list_parameter_folders(directory: Path) -> list[Path]:
    """Return the directories of all parameters."""
    return sorted(path for path in (directory / ZERO).iterdir() if path.is_dir())


class NamedStates:
    """Parameters of a checkpoint of DeepSpeed under keys of model space, and its other state."""

    names: dict[str, str]  # key -> name in the files
    shapes: dict[str, Shape]  # by key

    def __init__(self, directory: Path, description: str) -> None:
        self.directory = directory
        self.description = description

    def set_state(self, content: Any, location: str) -> None:
        """Check and set arguments, schedule and counters, which all files of a model contain."""
        self.state: dict[str, Any] = dict(MODEL_STATE_SCHEMA(content, location))
        args = self.state.pop("args", argparse.Namespace())
        self.args: dict[str, Any] = vars(args)  # under the names of their programs

    def rename(self, old: str, new: str) -> None:
        """Change the model-space key of a parameter."""
        self.names[new] = self.names.pop(old)
        self.shapes[new] = self.shapes.pop(old)


class UniversalFiles(NamedStates):
    """The contents of the files. Tensors are mapped when they are read."""

    def __init__(self, directory: Path) -> None:
        if not (directory / ZERO).is_dir():
            raise ValueError(
                f"{directory} is not a DeepSpeed universal checkpoint: it has no {ZERO}/ directory"
            )
        super().__init__(directory, f"DeepSpeed universal checkpoint {directory}")
        paths = _find_model_states(directory)
        if not paths:
            raise ValueError(f"{self.description} is incomplete: it has no {MODEL_STATE}")
        path = paths[0]
        self.set_state(safe_load(path), str(path))

        # Parameters: model-space key -> folder
        if self.state.get("frozen_param_shapes"):
            first = next(iter(self.state["frozen_param_shapes"]))
            raise ValueError(
                f"{self.description}: DeepSpeed's converter leaves out frozen parameters "
                f"({first}): save a model of transformers in DeepSpeed, and convert that directory"
            )
        folders = [path.name for path in _list_parameter_folders(directory)]
        sequence(check_key)(folders, str(directory / ZERO))
        self.names = map_to_model_space(folders, self.description)
        self.shapes = {}
        for key in self.names:
            self.shapes[key] = tuple(self.read_tensor(key, "param").shape)

    def read_entry(self, key: str, state: str) -> Any:
        """Return the content of a file: a dict with `param`, or from ZeRO-3 the flat tensor.

        Raises ValueError if the file is missing.
        """
        path = self.directory / ZERO / self.names[key] / STATE_FILES[state]
        if not path.exists():
            raise ValueError(f"{self.description} is incomplete: {path} is missing")
        return safe_load(path)

    def read_tensor(self, key: str, state: str) -> torch.Tensor:
        """Return a state of a parameter.

        Raises ValueError if it is not a tensor of the parameter's shape.
        """
        location = f"{self.description}: {STATE_FILES[state]} of {self.names[key]}"
        entry = self.read_entry(key, state)
        tensor = entry
        if isinstance(entry, dict):
            tensor = entry.get("param")
            if entry.get("is_expert_param"):
                raise ValueError(
                    f"{self.description}: {self.names[key]} is an expert, which is not supported"
                )

        # Check the tensor: any shape for the parameter itself, and the same one for its states.
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{location} contains no tensor")
        shape = self.shapes.get(key, tensor.shape)
        if tensor.shape != shape or not tensor.is_floating_point():
            raise ValueError(
                f"{location} has {tensor.dtype} of shape {list(tensor.shape)}, but must have "
                f"floating-point numbers of shape {list(shape)}"
            )
        return tensor.detach()

    def open_tensor(self, key: str, state: str) -> LazyTensor:
        """Return a state of a parameter, in the shape of the file."""
        return view_tensor(self.read_tensor(key, state))

    def has_padding_marks(self) -> bool:
        """Return whether DeepSpeed's converter has removed the padding of the vocabulary."""
        entry = self.read_entry(WORD_EMBEDDINGS, "param")
        return isinstance(entry, dict) and bool(entry.get("vocab_tensor"))

    def read_optimizer_state(self) -> dict[str, Any] | None:
        """Return the content of `optimizer_state.pt`, if the file exists."""
        path = self.directory / ZERO / OPTIMIZER_STATE
        if not path.exists():
            return None
        return dict(OPTIMIZER_SCHEMA(safe_load(path), str(path)))

    def find_states(self) -> tuple[str, ...]:
        """Return the states that the optimizer has of each parameter."""
        optimizer = self.args.get("optimizer")
        rule = get_update_rule(optimizer if optimizer in UPDATE_RULES else "adam")
        # The word embedding has the same states as all other parameters.
        folder = self.directory / ZERO / self.names[WORD_EMBEDDINGS]
        for states in rule.STATE_SETS:
            if all((folder / STATE_FILES[name]).exists() for name in states):
                return ("param", *states)
        return ("param", *rule.STATE_SETS[0])  # reading them reports the missing file

    def read_step(self) -> int:
        """Return Adam's step, which is stored per parameter and must be equal for all.

        BLOOM-era directories do not have it: the steps that were not skipped are counted.
        """
        steps = set()
        for name in self.names.values():
            path = self.directory / ZERO / name / STEP
            if path.exists():
                step = check_scalar(safe_load(path), str(path))
                steps.add(int(step))
        if len(steps) > 1:
            raise ValueError(
                f"{self.description}: parameters are at different steps: {sorted(steps)}"
            )
        if steps:
            return steps.pop()
        num_steps = self.state.get("global_steps") or 0
        num_skipped = self.state.get("skipped_steps") or 0
        return num_steps - num_skipped
