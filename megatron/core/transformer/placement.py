"""Where the layers of a model compute, and how context parallelism splits sequences over the ranks
of an axis.

A sequence is cut into 2 CP chunks; rank r holds chunks r and 2 CP - 1 - r, in this order ("zigzag",
as in Megatron-LM), so that under causal order all ranks compute equally much attention. All else
works on single tokens and only needs to know their positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.arithmetic import divide
from megatron.core.parallel_state import Axis, ExpertAxes, ParallelState
from megatron.core.tensor_parallel import TensorParallelRng
from megatron.core.tensor_parallel.mappings import (
    exchange_heads_for_sequence,
    exchange_sequence_for_heads,
)


def compute_local_positions(length: int, rank: int, size: int) -> Tensor:
    """Which of the `length` positions of a sequence rank `rank` of `size` holds, in its order:
    `[length / size]`.
    """
    if size == 1:
        return torch.arange(length)
    chunk = divide(length, 2 * size, "sequence length over twice the context-parallel ranks")
    both = torch.tensor([rank, 2 * size - 1 - rank])
    return (both.unsqueeze(1) * chunk + torch.arange(chunk)).flatten()


@dataclass(frozen=True)
class ContextParallel:
    """Over which ranks sequences are split, and how their attention is brought together
    (--cp-comm-type).

    "a2a": the ranks exchange positions for heads, so that each has whole sequences of a CP-th of
    the heads (Jacobs et al. 2023, "DeepSpeed Ulysses"); "all_gather", "p2p": see
    `blockwise_attention`.
    """

    axis: Axis = Axis()
    comm_type: str = "p2p"
    """Of the layer that it is given to."""
    of_layers: Callable[[int], str] | None = None
    """That of layer n, where there are several."""

    @classmethod
    def from_parallel_state(cls, ps: ParallelState) -> ContextParallel:
        return cls(ps.cp, of_layers=ps.config.cp_comm_type_of)

    def layer(self, number: int) -> ContextParallel:
        """As layer `number` has it."""
        return (
            self if self.of_layers is None else ContextParallel(self.axis, self.of_layers(number))
        )

    @property
    def attention_axis(self) -> Axis:
        """Over which attention sees a sequence split: none with a2a."""
        return Axis() if self.comm_type == "a2a" else self.axis

    @property
    def head_axis(self) -> Axis:
        """Over which attention sees its heads split besides TP: none but with a2a."""
        return self.axis if self.comm_type == "a2a" else Axis()

    def select_local(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's positions of `[b, s]` tensors; `documents` stay whole, for the keys of all
        ranks.
        """
        if self.axis.size == 1:
            return dict(batch)
        positions = compute_local_positions(
            next(iter(batch.values())).shape[1], self.axis.rank, self.axis.size
        )
        return {
            key: x if key == "documents" else x.index_select(1, positions)
            for key, x in batch.items()
        }

    def to_heads(self, x: Tensor) -> Tensor:
        """`[s/cp, b, groups, ...]` of all heads to `[s, b, groups/cp, ...]` with a2a, positions in their order."""
        if self.head_axis.size == 1:
            return x
        by_rank = exchange_sequence_for_heads(x, self.head_axis)
        first, second = by_rank.unflatten(0, (self.head_axis.size, 2, -1)).unbind(1)
        return torch.cat((first, second.flip(0))).flatten(0, 1)

    def to_sequence(self, x: Tensor) -> Tensor:
        """The inverse of `to_heads`."""
        if self.head_axis.size == 1:
            return x
        first, second = x.unflatten(0, (2, self.head_axis.size, -1)).unbind(0)
        return exchange_heads_for_sequence(
            torch.stack((first, second.flip(0)), dim=1).flatten(0, 2), self.head_axis
        )


WHOLE_SEQUENCES = ContextParallel()  # no context parallelism


@dataclass(frozen=True)
class Placement:
    """The axes that a chunk of the model is split over, its random numbers, and its device, for its
    layers.
    """

    tp: Axis
    rng: TensorParallelRng
    cp: ContextParallel = WHOLE_SEQUENCES
    sequence_parallel: bool = False
    experts: ExpertAxes = ExpertAxes()
    device: torch.device | None = None
