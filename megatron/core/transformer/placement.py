"""Placement of a model's layers on parallel axes, and the split of sequences over CP ranks.

A sequence is cut into 2 CP chunks, and rank r has the chunks r and 2 CP - 1 - r in this order
("zigzag", as in Megatron-LM). Under causal order all ranks then compute the same amount of
attention. All other computations are per token and only need to know the positions.
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
    """Return the positions of a sequence of `length` that a CP rank has, in its order.

    The result is `[length / size]`.
    """
    # Not the general case: with one rank the length may be odd.
    if size == 1:
        return torch.arange(length)
    chunk_length = divide(length, 2 * size, "sequence length over twice the context-parallel ranks")
    # One chunk from each half: together they have the mean number of visible keys.
    chunks = torch.tensor([rank, 2 * size - 1 - rank])
    starts = chunks.unsqueeze(1) * chunk_length  # [2, 1]
    return (starts + torch.arange(chunk_length)).flatten()


@dataclass(frozen=True)
class ContextParallel:
    """The ranks over which sequences are split, and their communication in attention.

    --cp-comm-type "a2a" exchanges positions for heads, so that each rank has whole sequences of
    1/CP of the heads (Jacobs et al. 2023, "DeepSpeed Ulysses"). For "all_gather" and "p2p" see
    `blockwise_attention`.
    """

    axis: Axis = Axis()
    comm_type: str = "p2p"
    """Kind of communication of the current layer."""
    comm_type_of_layer: Callable[[int], str] | None = None
    """Kind of communication by the number of the layer, if layers differ."""

    @classmethod
    def from_parallel_state(cls, ps: ParallelState) -> ContextParallel:
        return cls(ps.cp, comm_type_of_layer=ps.config.cp_comm_type_of)

    def layer(self, layer_number: int) -> ContextParallel:
        """Return the settings of layer `layer_number`."""
        if self.comm_type_of_layer is None:
            return self
        return ContextParallel(self.axis, self.comm_type_of_layer(layer_number))

    @property
    def attention_axis(self) -> Axis:
        """Axis over which core attention sees sequences split; of size 1 with a2a."""
        if self.comm_type == "a2a":
            return Axis()
        return self.axis

    @property
    def head_axis(self) -> Axis:
        """Axis over which core attention sees heads split besides TP; of size 1 except with a2a."""
        if self.comm_type == "a2a":
            return self.axis
        return Axis()

    def select_local(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's positions of `[b, s]` tensors.

        `documents` stay whole, because attention needs them for the keys of all ranks.
        """
        if self.axis.size == 1:
            return dict(batch)
        # All tensors of a batch have the same shape, [b, s].
        length = next(iter(batch.values())).shape[1]
        positions = compute_local_positions(length, self.axis.rank, self.axis.size)
        local = {}
        for key, tensor in batch.items():
            if key != "documents":
                tensor = tensor.index_select(1, positions)
            local[key] = tensor
        return local

    def to_heads(self, x: Tensor) -> Tensor:
        """Exchange positions for heads with a2a, otherwise return `x`.

        `[s/cp, b, groups, ...]` becomes `[s, b, groups/cp, ...]`, with positions in their original
        order.
        """
        size = self.head_axis.size
        if size == 1:
            return x
        by_rank = exchange_sequence_for_heads(x, self.head_axis)
        # The first chunks of the ranks are 0 to CP - 1, the second ones 2 CP - 1 down to CP.
        by_chunk = by_rank.unflatten(0, (size, 2, -1))  # [cp, 2, positions, ...]
        first, second = by_chunk.unbind(1)
        return torch.cat((first, second.flip(0))).flatten(0, 1)

    def to_sequence(self, x: Tensor) -> Tensor:
        """Exchange heads for positions, the inverse of `to_heads`."""
        size = self.head_axis.size
        if size == 1:
            return x
        by_chunk = x.unflatten(0, (2, size, -1))  # [2, cp, positions, ...]
        first, second = by_chunk.unbind(0)
        by_rank = torch.stack((first, second.flip(0)), dim=1)  # [cp, 2, positions, ...]
        return exchange_heads_for_sequence(by_rank.flatten(0, 2), self.head_axis)


WHOLE_SEQUENCES = ContextParallel()
"""No context parallelism."""


@dataclass(frozen=True)
class Placement:
    """The axes over which the layers of a chunk are split, their random numbers and device."""

    tp: Axis
    rng: TensorParallelRng
    cp: ContextParallel = WHOLE_SEQUENCES
    sequence_parallel: bool = False
    experts: ExpertAxes = ExpertAxes()
    device: torch.device | None = None
