"""The files of a DeepSpeed universal checkpoint.

<root>/latest_universal                            name of the directory
<root>/<tag>/mp_rank_XX_model_states.pt            arguments, schedule, counters; equal for all XX but rank numbers
<root>/<tag>/zero/optimizer_state.pt               parameter groups (not in BLOOM-era directories)
<root>/<tag>/zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt; of SGD {fp32,momentum_buffer,step}.pt
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron.conversion.deepspeed.args import read_args
from megatron.conversion.deepspeed.names import model_space_names
from megatron.conversion.files import archive_faults
from megatron.conversion.model_space.model import WORD_EMBEDDINGS
from megatron.conversion.model_space.source import (
    ADAM,
    GRAD_SCALER,
    PARAM_GROUP,
    RANKS,
    SCHEDULER,
    SGD,
    SIZE,
    Shape,
    namespace,
    scalar,
)
from megatron.core.dist_checkpointing.format.input_files import read_regular
from megatron.core.dist_checkpointing.format.schema import COUNT, file_name, number, optional, record, sequence
from megatron.core.dist_checkpointing.format.schema import key as check_key
from megatron.core.dist_checkpointing.format.unpickler import safe_load

_VOCABULARY = record({"original_vocab_size?": optional(SIZE)})
_STATE = record(
    {
        "args?": namespace,
        "iteration?": optional(COUNT),
        "global_steps?": optional(COUNT),
        "global_samples?": optional(COUNT),
        "skipped_steps?": optional(COUNT),
        "num_floating_point_operations_so_far?": optional(number(0)),
        "lr_scheduler?": optional(SCHEDULER),
        "megatron_param_groups?": optional(sequence(PARAM_GROUP)),
        "grad_scaler?": optional(GRAD_SCALER),
        "universal_checkpoint_info?": optional(_VOCABULARY),
        "checkpoint_info?": optional(_VOCABULARY),
        "checkpoint_parallel_dimensions?": optional(record({"tp_degree?": optional(RANKS)})),
    }
)
_OPTIMIZER = record({"param_groups": sequence(PARAM_GROUP)})

LATEST = "latest_universal"
ZERO = "zero"
OPTIMIZER_STATE = "optimizer_state.pt"
STEP = "step.pt"
STATE_FILES = {"param": "fp32.pt", "exp_avg": "exp_avg.pt", "exp_avg_sq": "exp_avg_sq.pt"}
STATE_FILES["momentum_buffer"] = "momentum_buffer.pt"  # of SGD, in place of the moments


def model_state_name(rank: int) -> str:
    return f"mp_rank_{rank:02d}_model_states.pt"


def read_latest(root: Path) -> str | None:
    """The directory that `latest_universal` in `root` names; None without that file, CheckpointError for a bad name."""
    path = root / LATEST
    if not path.is_file():
        return None
    name = read_regular(path, limit=4096).decode(errors="replace").strip()
    return file_name(name, f"{path}: the name in it")


def find_universal(directory: Path) -> Path | None:
    """The universal directory at, or named in, `directory`; None where there is none."""
    tag = read_latest(directory)
    found = directory if tag is None else directory / tag
    return found if (found / ZERO).is_dir() else None


def universal_faults(directory: Path) -> list[str]:
    """Files that are missing or truncated. Raises CheckpointError for other damage.

    A state that one parameter has (Adam's moments or the momentum of SGD) all must have.
    """
    folders = _parameter_folders(directory)
    names = [name for name in STATE_FILES.values() if any((folder / name).exists() for folder in folders)]
    required = {folder / name for folder in folders for name in {*names, STATE_FILES["param"]}}
    files = required | {directory / model_state_name(0)} | set(directory.rglob("*.pt"))
    return archive_faults(sorted(files), directory)


def _parameter_folders(directory: Path) -> list[Path]:
    return sorted(path for path in (directory / ZERO).iterdir() if path.is_dir())


class UniversalFiles:
    """What is in the files; tensors are mapped when they are asked for."""

    def __init__(self, directory: Path) -> None:
        found = find_universal(directory)
        if found is None:
            raise ValueError(f"{directory} is no DeepSpeed universal checkpoint: it has no {ZERO}/ directory")
        self.directory = found
        self.description = f"DeepSpeed universal checkpoint {found}"
        states = sorted(found.glob("mp_rank_*_model_states.pt"))
        if not states:
            raise ValueError(f"{self.description} is incomplete: it has no {model_state_name(0)}")
        self.state: dict[str, Any] = dict(_STATE(safe_load(states[0]), str(states[0])))
        args = vars(self.state.pop("args")) if "args" in self.state else {}
        self.arguments = read_args(args, self.description) if args else {}
        folders = [path.name for path in _parameter_folders(found)]
        sequence(check_key)(folders, str(found / ZERO))
        self.names = model_space_names(folders, self.description)  # model-space key -> parameter
        self.shapes: dict[str, Shape] = {}
        self.shapes |= {key: tuple(self.tensor(key, "param").shape) for key in self.names}

    def entry(self, key: str, state: str) -> Any:
        """One file: a dict with `param`, or from ZeRO-3 the flat tensor itself."""
        path = self.directory / ZERO / self.names[key] / STATE_FILES[state]
        if not path.exists():
            raise ValueError(f"{self.description} is incomplete: {path} is missing")
        return safe_load(path)

    def tensor(self, key: str, state: str) -> torch.Tensor:
        entry = self.entry(key, state)
        if isinstance(entry, dict) and entry.get("is_expert_param"):
            raise ValueError(f"{self.description}: {self.names[key]} is an expert, which is not supported")
        tensor = entry.get("param") if isinstance(entry, dict) else entry
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{self.description}: {STATE_FILES[state]} of {self.names[key]} holds no tensor")
        shape = self.shapes.get(key, tensor.shape)  # of its parameter, which is looked at first
        if tensor.shape != shape or not tensor.is_floating_point():
            raise ValueError(
                f"{self.description}: {STATE_FILES[state]} of {self.names[key]} has {tensor.dtype} of shape "
                f"{list(tensor.shape)}, but must have floating-point numbers of shape {list(shape)}"
            )
        return tensor.detach()

    def optimizer_state(self) -> dict[str, Any] | None:
        path = self.directory / ZERO / OPTIMIZER_STATE
        return dict(_OPTIMIZER(safe_load(path), str(path))) if path.exists() else None

    def states(self) -> tuple[str, ...]:
        """Those that the optimizer has of every parameter."""
        if self.arguments.get("optimizer") != "sgd":
            return ADAM
        folder = self.directory / ZERO / self.names[WORD_EMBEDDINGS]
        return SGD if (folder / STATE_FILES["momentum_buffer"]).exists() else SGD[:1]

    def step(self) -> int:
        """Of Adam: stored per parameter, all equal; BLOOM-era directories count the steps that were not skipped."""
        paths = [self.directory / ZERO / name / STEP for name in self.names.values()]
        steps = {int(scalar(safe_load(path), str(path))) for path in paths if path.exists()}
        if len(steps) > 1:
            raise ValueError(f"{self.description}: parameters are at different steps: {sorted(steps)}")
        if steps:
            return steps.pop()
        return (self.state.get("global_steps") or 0) - (self.state.get("skipped_steps") or 0)
