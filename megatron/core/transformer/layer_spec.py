"""The building blocks of a layer, one table for each back end (--transformer-impl).

Layers take what they are made of from here and do not know which back end it is. The parameters, their boxes and their
initial values are those of the local classes in either case; a back end only computes.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.core_attention import CoreAttention
from megatron.core.transformer.grouped_linear import GroupedLinear
from megatron.core.transformer.norm import Norm, NormColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class LayerSpec:
    """The class of each block."""

    norm: type[Norm] = Norm
    column: type[ColumnParallelLinear] = ColumnParallelLinear
    norm_column: type[NormColumnParallelLinear] = NormColumnParallelLinear
    row: type[RowParallelLinear] = RowParallelLinear
    core_attention: type[CoreAttention] = CoreAttention
    grouped: type[GroupedLinear] = GroupedLinear


LAYER_SPECS = {"local": LayerSpec(), "transformer_engine": LayerSpec()}


def layer_spec(config: TransformerConfig) -> LayerSpec:
    return LAYER_SPECS[config.transformer_impl]
