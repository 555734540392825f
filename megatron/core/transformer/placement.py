"""What the layers of a model must know of where they compute."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.core.parallel_state import Axis, ExpertAxes
from megatron.core.tensor_parallel import TensorParallelRng
from megatron.core.transformer.attention.context_parallel import WHOLE_SEQUENCES, ContextParallel


@dataclass(frozen=True)
class Placement:
    """The axes that a chunk of the model is split over, its random numbers, and its device."""

    tp: Axis
    rng: TensorParallelRng
    cp: ContextParallel = WHOLE_SEQUENCES
    sequence_parallel: bool = False
    experts: ExpertAxes = ExpertAxes()
    device: torch.device | None = None
