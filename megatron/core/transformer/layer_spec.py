"""The building blocks of a layer: one table of classes per backend (--transformer-impl).

Layers take their blocks from the table and do not depend on the backend. Every backend has the
parameters, shardings and initial values of the local classes; only the computation differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.module import MegatronModule, Normal
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    checkpoint,
    linear_cross_entropy,
)
from megatron.core.transformer.attention.core import CoreAttention
from megatron.core.transformer.norm import Norm, NormColumnParallelLinear
from megatron.core.transformer.placement import Placement
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.wings import resolve

_TRANSFORMER_ENGINE = (
    "megatron.core.transformer.transformer_engine.building_blocks:TRANSFORMER_ENGINE"
)


class Precision:
    """Precision contexts of a pipeline chunk; the local backend does not need any."""

    def __init__(
        self,
        config: TransformerConfig,
        group: dist.ProcessGroup | None,
        layers: Mapping[int, nn.Module] | None = None,
    ) -> None:
        """Initialize for the ranks of a pipeline stage.

        `group`: the ranks of the stage; None is the world. `layers`: the layers of the chunk by
        their number in the model.
        """
        self.config = config
        self.group = group

    def chunk(self) -> AbstractContextManager[None]:
        """Return the context of the forward pass of the chunk."""
        return nullcontext()

    def layer(self, layer_number: int) -> AbstractContextManager[None]:
        """Return the context of layer `layer_number` of the model."""
        return nullcontext()


class FP8StateMixin:
    """Module with fp8 scales that depend on earlier steps, and therefore belong to checkpoints."""

    def get_fp8_state(self) -> dict[str, Any] | None:
        """Return the recipe and copies of its tensors in host memory; None without a state."""
        raise NotImplementedError

    def restore_fp8_state(self, state: dict[str, Any], config: TransformerConfig) -> bool:
        """Restore a result of `get_fp8_state`.

        Returns False, without any change, if the recipe or the shapes of the module differ.
        """
        raise NotImplementedError


def noop(*_: Any) -> None:
    """Return without any effect."""


_LOCAL_CROSS_ENTROPIES = {"native": linear_cross_entropy}


@dataclass(frozen=True)
class LayerSpec:
    """The class of each building block, and the hooks of a backend."""

    # Building blocks
    norm: type[Norm] = Norm
    column: type[ColumnParallelLinear] = ColumnParallelLinear
    norm_column: type[NormColumnParallelLinear] = NormColumnParallelLinear
    row: type[RowParallelLinear] = RowParallelLinear
    core_attention: type[CoreAttention] = CoreAttention
    grouped: type[MegatronModule] | None = None
    """Of experts; None is `GroupedLinear`."""
    # Hooks
    precision: type[Precision] = Precision
    checkpoint: Callable[..., Any] = checkpoint
    """Activation checkpointing."""
    cross_entropies: Mapping[str, Callable[..., Tensor]] = field(
        default_factory=lambda: _LOCAL_CROSS_ENTROPIES
    )
    """Loss functions by --cross-entropy-fusion-impl, with the signature of `linear_cross_entropy`.
    """
    set_up: Callable[[TransformerConfig, int, int], None] = noop
    """Called before a model is built, with the tokens of a micro-batch and the number of TP ranks.
    Collective.
    """
    start_step: Callable[[], None] = noop
    """Called before the first micro-batch of a step, since the weights may have changed."""

    def make_input_projection(
        self,
        config: TransformerConfig,
        placement: Placement,
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
        # With a norm, the layer takes its dtype from the configuration.
        make_linear: Callable[..., ColumnParallelLinear] = self.column
        make_linear = partial(make_linear, dtype=config.params_dtype)
        if normed:
            make_linear = partial(self.norm_column, config)
        return make_linear(
            inputs,
            outputs,
            init=Normal(config.hidden_init_std),
            tp=placement.tp,
            sequence_parallel=placement.sequence_parallel,
            bias=bias,
            num_blocks=num_blocks,
            row_blocks=row_blocks,
            replicated=replicated,
            device=placement.device,
        )

    def make_output_projection(
        self, config: TransformerConfig, placement: Placement, inputs: int, *, normed: bool = True
    ) -> RowParallelLinear:
        """Make the last projection of a branch, which returns to the residual stream.

        With `normed` it includes the norm of its output, if --norm-placement requires one.
        """
        # The norm is applied to the sum over TP, so the projection calls it after its reduction.
        output_norm = None
        if normed and config.norm_placement != "pre":
            output_norm = self.make_hidden_norm(config, placement)
        return self.row(
            inputs,
            config.hidden_size,
            init=Normal(config.output_init_std),
            tp=placement.tp,
            sequence_parallel=placement.sequence_parallel,
            bias=config.add_bias_linear,
            output_norm=output_norm,
            dtype=config.params_dtype,
            device=placement.device,
        )

    def make_hidden_norm(self, config: TransformerConfig, placement: Placement) -> Norm:
        """Make a norm of the residual stream.

        Under sequence parallelism each TP rank normalizes a part of the sequence.
        """
        # The gradient of the norm's weight is then a partial sum, which is reduced over TP.
        return self.norm(
            config,
            config.hidden_size,
            partial_grad=placement.sequence_parallel,
            device=placement.device,
        )

    def select_cross_entropy(self, config: TransformerConfig) -> Callable[..., Tensor]:
        """Return the function that computes output layer and loss."""
        # Without fusion the local implementation is used for every backend.
        if config.cross_entropy_loss_fusion:
            return self.cross_entropies[config.cross_entropy_fusion_impl]
        return self.cross_entropies["native"]


LOCAL = LayerSpec()


def select_layer_spec(config: TransformerConfig) -> LayerSpec:
    """Return the building blocks of --transformer-impl.

    Raises ValueError if Transformer Engine is required but cannot be imported.
    """
    if config.transformer_impl == "local":
        return LOCAL
    try:
        # It is an optional dependency and takes seconds to import.
        spec: LayerSpec = resolve(_TRANSFORMER_ENGINE)
    except (ImportError, OSError, RuntimeError) as error:
        # It is not installed, lacks a library, or was built for another version of torch.
        raise ValueError(
            "--transformer-impl transformer_engine: Transformer Engine cannot be imported "
            f"({error}). Install it with pip install --no-build-isolation '.[te]' (docs/gpu.md), "
            "or use --transformer-impl local"
        ) from error
    return spec
