"""The protocol `Source`: a checkpoint of any format, seen in model space.

Every format has one reader, which presents it as a `Source`, and one writer, which reads from a
`Source`; so N formats need N adapters, and every pair works.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron.core.dist_checkpointing.mapping import LazyTensor
from megatron.core.run_checkpoint.checks import TRAINING_STATE


@dataclass
class TrainingState:
    """State of a run besides tensors. Raises CheckpointError for values that no run has.

    Counters are in iterations and samples.
    """

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    num_floating_point_operations_so_far: float = 0.0
    # Megatron-LM's: group 0 with weight decay, group 1 without.
    param_groups: list[dict[str, Any]] | None = None
    scheduler: dict[str, Any] | None = None  # Megatron-LM's opt_param_scheduler
    grad_scaler: dict[str, Any] | None = None
    # Key of the object in torch_dist -> function that reads it. Only the same layout can use it.
    rng: dict[str, Callable[[], Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        TRAINING_STATE(vars(self), "the training state")


class Source(Protocol):
    """A checkpoint of a run or a model. Only its tensors' `read` reads more than metadata."""

    description: str  # format and path, for messages
    args: dict[str, Any]  # known model and run arguments under Megatron-LM's names
    training: TrainingState | None  # None: the format (an HF directory) contains only weights
    unused: list[str]  # names in the files that have no key in model space

    @property
    def tensors(self) -> Mapping[str, LazyTensor]:
        """Every global tensor by its key of model space (see `keys`)."""
        ...
