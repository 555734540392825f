"""MegatronModule: a module whose parameters are parts of named global tensors."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.dist_checkpointing.mapping import Box, Shape, ShardedStateDict, ShardedTensor
from megatron.core.sharding import REPLICATED, Sharding

# Number of elements drawn from one generator. Initial values depend on it: it must never change.
_INIT_BLOCK = 1 << 20


class Init(Protocol):
    """Initialization of a global tensor."""

    def __call__(self, box: Box, key: str, global_shape: Shape, seed: int) -> None:
        """Fill the part `box` of the tensor `key`."""


@dataclass(frozen=True)
class Normal:
    """N(0, std^2), as a function of seed, key and position in the global tensor only.

    Values are the same in every layout. The rows are drawn in blocks of about a million elements,
    each from its own CPU generator, in fp32. A rank draws only the blocks that its box overlaps,
    and the values do not depend on device or dtype (except for rounding).
    """

    std: float

    def __call__(self, box: Box, key: str, global_shape: Shape, seed: int) -> None:
        if len(global_shape) == 3:
            self._fill_stacked_matrices(box, key, global_shape, seed)
            return
        num_rows, *row_shape = global_shape
        row_size = max(1, math.prod(row_shape))
        rows_per_block = max(1, _INIT_BLOCK // row_size)

        # The box as a range of rows and a slice of each other dimension
        start = box.offset[0]
        stop = start + box.shape[0]
        columns = []
        for offset, size in zip(box.offset[1:], box.shape[1:], strict=True):
            columns.append(slice(offset, offset + size))

        # Draw each block that overlaps the box, and copy the overlap.
        first_block = start // rows_per_block
        end_block = -(-stop // rows_per_block)
        for block in range(first_block, end_block):
            block_start = block * rows_per_block
            block_stop = min(block_start + rows_per_block, num_rows)
            generator = torch.Generator().manual_seed(_compute_block_seed(seed, key, block))
            values = torch.empty(block_stop - block_start, *row_shape)
            values.normal_(0.0, self.std, generator=generator)
            low = max(start, block_start)
            high = min(stop, block_stop)
            rows = slice(low - block_start, high - block_start)
            box.tensor[low - start : high - start].copy_(values[(rows, *columns)])

    def _fill_stacked_matrices(self, box: Box, key: str, global_shape: Shape, seed: int) -> None:
        """Fill `[matrices, rows, columns]` as one tall matrix."""
        num_matrices, num_rows, num_columns = global_shape
        # Experts, [E, rows, columns], draw the values of E matrices one after the other.
        tall_shape = (num_matrices * num_rows, num_columns)
        first_matrix, first_row, first_column = box.offset
        for index, matrix in enumerate(box.tensor):
            row = (first_matrix + index) * num_rows + first_row
            self(Box((row, first_column), matrix), key, tall_shape, seed)


@dataclass(frozen=True)
class Constant:
    """One value for all elements."""

    value: float

    def __call__(self, box: Box, key: str, global_shape: Shape, seed: int) -> None:
        box.tensor.fill_(self.value)


def _compute_block_seed(seed: int, key: str, block: int) -> int:
    """Return a seed of 63 bits, the nonnegative ones that generators accept."""
    identity = f"{seed}\0{key}\0{block}"
    digest = hashlib.sha256(identity.encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class Fp8Tensors(Protocol):
    """The values of a parameter in fp8, in tensors of a backend."""

    tensors: Sequence[torch.Tensor]
    """Concatenated they are the parameter; empty before `quantize`."""

    def quantize(self, memory: torch.Tensor) -> None:
        """Move the values to `memory`, uint8, one per element.

        The parameter keeps its shape and its gradient.
        """

    def cast(
        self,
        tensors: Sequence[torch.Tensor],
        main: Sequence[torch.Tensor | None],
        starts: Sequence[int | None],
        group: dist.ProcessGroup,
        rescale: bool,
    ) -> None:
        """Fill fp8 `tensors` of any parameters from their main parameters. Collective over `group`.

        `main` contains this rank's shard of each tensor, which begins at the element in `starts`;
        None if the rank has no part of it. The ranks of `group` have all shards. `rescale`: no
        scale of these values is known yet.
        """


@dataclass(frozen=True)
class ParamInfo:
    """Properties of a parameter that initialization, optimizer and gradient reductions need."""

    init: Init
    sharding: Sharding = REPLICATED
    partial_grad: bool = False
    """Each TP rank computes the gradient of its part of the sequence: sum it over TP."""
    shared_embedding: bool = False
    """Word embedding that the first and the last pipeline stage have a copy of each."""
    counted: bool = True
    """Included in norms of the model; False for the copy of the last stage."""
    trained: bool = True
    """Changed by gradients."""
    decayed: bool = False
    """Has weight decay although it is a vector."""
    width_mult: float = 1.0
    """Width of the model relative to the base model of muP."""
    is_hidden: bool = False
    """Matrix of a layer, both of whose sizes grow with the width; only set with muP."""
    fp8: Fp8Tensors | None = None
    """The fp8 tensors that layers compute with, if any."""


def make_parameter(
    shape: Shape, dtype: torch.dtype, device: torch.device | None, info: ParamInfo
) -> nn.Parameter:
    """Return this rank's part of a parameter of the global `shape`, with its `ParamInfo`.

    The values are uninitialized; `MegatronModule.initialize` fills them.
    """
    local_shape = info.sharding.local_shape(shape)
    values = torch.empty(local_shape, dtype=dtype, device=device)
    param = nn.Parameter(values, requires_grad=info.trained)
    # An attribute of the tensor, because buffers replace `param.data` but keep the parameter.
    set_param_info(param, info)
    return param


def param_info(param: nn.Parameter) -> ParamInfo:
    """Return the properties of a parameter made by `make_parameter`."""
    return param.megatron_info  # type: ignore[attr-defined, no-any-return]


def set_param_info(param: nn.Parameter, info: ParamInfo) -> None:
    """Replace the properties of a parameter."""
    param.megatron_info = info  # type: ignore[attr-defined]


class MegatronModule(nn.Module):
    """Module whose parameters know which boxes of global tensors they hold.

    A class overrides `sharded_state_dict` only to store parameters under other keys.
    """

    def sharded_state_dict(self, prefix: str = "") -> ShardedStateDict:
        """Return this rank's part of every parameter, by the key of its global tensor."""
        state: ShardedStateDict = {}
        for name, param in self._parameters.items():
            if param is not None:
                key = prefix + name
                state[key] = param_info(param).sharding.describe(key, param)
        for name, child in self.named_children():
            state.update(child_sharded_state_dict(child, f"{prefix}{name}."))
        return state

    def initialize(self, seed: int | None) -> None:
        """Fill every parameter with values that depend on `seed` and on its key."""
        initialize_parameters(self.sharded_state_dict(), seed)


@torch.no_grad()
def initialize_parameters(state: ShardedStateDict, seed: int | None) -> None:
    """Fill the parameters in a sharded state dict with values that depend on `seed` and their keys.

    Padding becomes zero. Without a seed all values do, for weights that are about to be loaded.
    """
    for key, entry in state.items():
        assert isinstance(entry, ShardedTensor) and isinstance(entry.local, nn.Parameter), key
        # Boxes cover the elements of the global tensor; the remaining ones are padding.
        entry.local.zero_()
        if seed is None:
            continue
        fill = param_info(entry.local).init
        for box in entry.boxes:
            fill(box, key, entry.global_shape, seed)


def child_sharded_state_dict(child: nn.Module, prefix: str) -> ShardedStateDict:
    """Return the parameters of a child, which may be a plain container such as ModuleList."""
    if isinstance(child, MegatronModule):
        return child.sharded_state_dict(prefix)
    assert not child._parameters, (
        f"{prefix}: {type(child).__name__} has parameters but is not a MegatronModule"
    )
    state: ShardedStateDict = {}
    for name, grandchild in child.named_children():
        state.update(child_sharded_state_dict(grandchild, f"{prefix}{name}."))
    return state
