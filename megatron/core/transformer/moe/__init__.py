"""Mixture of experts: router, token dispatch, grouped experts."""

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter

__all__ = ["MoELayer", "TopKRouter"]
