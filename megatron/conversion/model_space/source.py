"""A checkpoint of any format, seen in model space.

Every format has one reader that presents it as a `Source`, and one writer that pulls what it needs from a `Source`;
so N formats need N adapters and every pair works. Keys, shapes and conventions are those of `docs/architecture.md`:
one key per layer with its global number, TP-independent shapes, optimizer state under `optimizer.state.*`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from megatron.conversion.model_space.schemas import TRAINING_STATE

Shape = tuple[int, ...]

ADAM = ("param", "exp_avg", "exp_avg_sq")  # param is the fp32 main parameter
SGD = ("param", "momentum_buffer")
OPTIMIZER_STATES = (*ADAM, "momentum_buffer")


def optimizer_key(state: str, parameter: str) -> str:
    assert state in OPTIMIZER_STATES, state
    return f"optimizer.state.{state}.{parameter}"


def optimizer_states(keys: Iterable[str]) -> tuple[str, ...]:
    """The states that the optimizer of these keys keeps of a parameter; () where there is no optimizer."""
    found = {key.split(".", 3)[2] for key in keys if key.startswith("optimizer.state.")}
    return tuple(state for state in OPTIMIZER_STATES if state in found)


def full_precision_key(parameter: str, keys: Container[str]) -> str:
    """Where the values of `parameter` are in full: its fp32 main parameter if that is among `keys`, else itself."""
    main = optimizer_key("param", parameter)
    return main if main in keys else parameter


@dataclass(frozen=True)
class TensorInfo:
    """Global shape and dtype of one tensor."""

    shape: Shape
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class TrainingState:
    """What a run needs besides tensors. Counters are in iterations and samples; CheckpointError for any other value."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    num_floating_point_operations_so_far: float = 0.0
    param_groups: list[dict[str, Any]] | None = None  # Megatron-LM's: group 0 with weight decay, group 1 without
    scheduler: dict[str, Any] | None = None  # Megatron-LM's opt_param_scheduler
    grad_scaler: dict[str, Any] | None = None
    # Read when called, by the key that the object has in torch_dist. Only the same layout can use it.
    rng: dict[str, Callable[[], Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        TRAINING_STATE(vars(self), "the training state")


class Source(Protocol):
    """A checkpoint that can be read piece by piece; nothing is read before `read` but the metadata."""

    description: str  # format and path, for messages
    args: dict[str, Any]  # model and run arguments by Megatron-LM's names, as far as the files tell
    training: TrainingState | None  # None: the format (an HF directory) holds weights only
    unused: list[str]  # names in the files that have no place in model space

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Model-space key -> global shape and dtype."""
        ...

    def read(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        """The box of `key` at `offset` with extent `shape`, on CPU in the stored dtype.

        Raises KeyError for an unknown key, ValueError where the file is damaged.
        """
        ...


def read_whole(source: Source, key: str) -> torch.Tensor:
    """The whole global tensor `key`."""
    info = source.tensors[key]
    return source.read(key, (0,) * len(info.shape), info.shape)
