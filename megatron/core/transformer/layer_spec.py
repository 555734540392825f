"""The building blocks of a layer, one table for each backend (--transformer-impl).

Layers take what they are made of from here and do not know which backend it is. Parameters, their
boxes and initial values are those of the local classes in either case; a backend only computes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.module import Normal
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    checkpoint,
    linear_cross_entropy,
)
from megatron.core.transformer.attention.core import CoreAttention
from megatron.core.transformer.grouped_linear import GroupedLinear
from megatron.core.transformer.norm import Norm, NormColumnParallelLinear
from megatron.core.transformer.placement import Placement
from megatron.core.transformer.transformer_config import TransformerConfig


class Precision:
    """What surrounds the layers of a chunk: nothing, their precision is that of their tensors."""

    def __init__(
        self,
        config: TransformerConfig,
        group: dist.ProcessGroup | None,
        layers: Mapping[int, nn.Module] | None = None,
    ) -> None:
        """`group`: the ranks of this pipeline stage; None is the world. `layers`: those of the chunk, by number."""
        self.config = config
        self.group = group

    def chunk(self) -> AbstractContextManager[None]:
        """Around the whole forward pass."""
        return nullcontext()

    def layer(self, number: int) -> AbstractContextManager[None]:
        """Around layer `number` of the model."""
        return nullcontext()


class Quantized:
    """A module whose scales belong to a checkpoint: those that follow from earlier steps."""

    def scales(self) -> dict[str, Any] | None:
        """Tensors on the host, and the recipe that they are of; None where there are none."""
        raise NotImplementedError

    def restore_scales(self, state: dict[str, Any], config: TransformerConfig) -> bool:
        """Go on with what `scales` gave; False, and nothing is changed, where it is of another
        recipe or shape.
        """
        raise NotImplementedError


def nothing(*_: Any) -> None:
    """There is nothing to do."""


_NATIVE = {"native": linear_cross_entropy}


@dataclass(frozen=True)
class LayerSpec:
    """The class of each block, and what is done around them."""

    norm: type[Norm] = Norm
    column: type[ColumnParallelLinear] = ColumnParallelLinear
    norm_column: type[NormColumnParallelLinear] = NormColumnParallelLinear
    row: type[RowParallelLinear] = RowParallelLinear
    core_attention: type[CoreAttention] = CoreAttention
    grouped: type[GroupedLinear] = GroupedLinear
    precision: type[Precision] = Precision
    checkpoint: Callable[..., Any] = checkpoint
    rope: Callable[..., Tensor] | None = None
    """--apply-rope-fusion: `[s, b, g, heads, d]` turned by angles `[s, 1, 1, pairs]`, interleaved or not.
    """
    cross_entropies: Mapping[str, Callable[..., Tensor]] = field(default_factory=lambda: _NATIVE)
    """By --cross-entropy-fusion-impl; all are called as `linear_cross_entropy` is."""
    set_up: Callable[[TransformerConfig, int, int], None] = nothing
    """Before a model is built: for so many tokens of a micro-batch, over so many tensor-parallel
    ranks. Collective.
    """
    start_step: Callable[[], None] = nothing
    """Before the first micro-batch of a step: the weights may have changed."""

    def projection_in(
        self,
        config: TransformerConfig,
        place: Placement,
        inputs: int,
        outputs: int,
        *,
        bias: bool,
        normed: bool,
        num_blocks: int = 1,
        row_blocks: tuple[int, ...] = (),
        replicated: bool = False,
    ) -> ColumnParallelLinear:
        """Make the first projection of a branch, with the norm of its input if `normed`.

        Its outputs are split over TP unless it is `replicated`. See `ColumnParallelLinear`.
        """
        column = (
            partial(self.norm_column, config)
            if normed
            else partial(self.column, dtype=config.params_dtype)
        )
        return column(
            inputs,
            outputs,
            init=Normal(config.init_method_std),
            tp=place.tp,
            sequence_parallel=place.sequence_parallel,
            bias=bias,
            num_blocks=num_blocks,
            row_blocks=row_blocks,
            replicated=replicated,
            device=place.device,
        )

    def projection_out(
        self, config: TransformerConfig, place: Placement, inputs: int, *, normed: bool = True
    ) -> RowParallelLinear:
        """The last projection of a branch, back to the residual stream; `normed`: with the norm
        behind it, if any.
        """
        return self.row(
            inputs,
            config.hidden_size,
            init=Normal(config.output_init_std),
            tp=place.tp,
            sequence_parallel=place.sequence_parallel,
            bias=config.add_bias_linear,
            output_norm=self.hidden_norm(config, place)
            if normed and config.norm_placement != "pre"
            else None,
            dtype=config.params_dtype,
            device=place.device,
        )

    def hidden_norm(self, config: TransformerConfig, place: Placement) -> Norm:
        """A norm of the residual stream, of which each TP rank has a part under sequence
        parallelism.
        """
        return self.norm(
            config, config.hidden_size, partial_grad=place.sequence_parallel, device=place.device
        )

    def cross_entropy(self, config: TransformerConfig) -> Callable[..., Tensor]:
        """The output layer and the loss."""
        return self.cross_entropies[
            config.cross_entropy_fusion_impl if config.cross_entropy_loss_fusion else "native"
        ]


LOCAL = LayerSpec()


def layer_spec(config: TransformerConfig) -> LayerSpec:
    """The backend of a configuration.

    Raises ValueError where it is not installed.
    """
    return LOCAL if config.transformer_impl == "local" else _transformer_engine()


def _transformer_engine() -> LayerSpec:
    """Imported here, since it is not installed everywhere and takes seconds."""
    try:
        module = importlib.import_module("megatron.core.transformer.transformer_engine.layers")
    except (
        ImportError,
        OSError,
        RuntimeError,
    ) as error:  # not there, without its libraries, or of another torch
        raise ValueError(
            f"--transformer-impl transformer_engine: Transformer Engine cannot be imported ({error}). Install it with "
            "pip install --no-build-isolation '.[te]' (docs/gpu.md), or take --transformer-impl local"
        ) from error
    spec: LayerSpec = module.TRANSFORMER_ENGINE
    return spec
