"""One transformer layer."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from megatron.core.module import MegatronModule
from megatron.core.tensor_parallel import without_intermediate
from megatron.core.transformer.attention.multi_head import Attention, SelfAttention
from megatron.core.transformer.attention.multi_latent import MultiLatentAttention
from megatron.core.transformer.layer_spec import layer_spec
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe import MoELayer
from megatron.core.transformer.placement import Placement
from megatron.core.transformer.transformer_config import TransformerConfig


class TransformerLayer(MegatronModule):
    """x + attention(norm(x)), then x + mlp(norm(x)), with dropout on both branches; `number` is the global one.

    The norms belong to the projections that they feed or follow (--norm-placement); one that several share stands by
    itself: that of the router and all experts, and of what latent attention begins with. Keys on disk are the same.
    """

    def __init__(self, config: TransformerConfig, place: Placement, *, number: int = 0) -> None:
        super().__init__()
        place = replace(place, cp=place.cp.layer(number))
        spec, latent = layer_spec(config), config.multi_latent_attention
        self.config, self.place = config, place
        self.input_layernorm = spec.hidden_norm(config, place) if latent else None
        attention = MultiLatentAttention if latent else SelfAttention
        self.self_attention: Attention = attention(config, place, number=number)
        has_experts = bool(config.moe_layer_pattern[number])
        self.pre_mlp_layernorm = spec.hidden_norm(config, place) if has_experts else None
        self.mlp = MoELayer(config, place, layer_number=number) if has_experts else MLP(config, place)

    def forward(self, hidden_states: Tensor, documents: Tensor | None = None) -> Tensor:
        """`[s, b, h]` (or `[s/tp, b, h]`) to the same."""
        # The branches in statements of their own, and not by one method that is given norm and branch: --compile cuts
        # the graph within them, and torch before 2.8 compiles anew for every bound method that lies across a cut.
        attention = self._attend(hidden_states, documents)
        hidden_states = hidden_states + self._dropped(attention)
        fed_forward = self._feed_forward(hidden_states)
        return hidden_states + self._dropped(fed_forward)

    def _attend(self, hidden_states: Tensor, documents: Tensor | None) -> Tensor:
        norm = self.input_layernorm
        if norm is None:
            return self.self_attention(hidden_states, documents)
        if self._recomputes_norms():
            return without_intermediate(norm, partial(self.self_attention, documents=documents), hidden_states)
        return self.self_attention(norm(hidden_states), documents)

    def _feed_forward(self, hidden_states: Tensor) -> Tensor:
        norm = self.pre_mlp_layernorm
        if norm is None:
            return self._mlp(hidden_states)
        if self._recomputes_norms():
            return without_intermediate(norm, self._mlp, hidden_states)
        return self._mlp(norm(hidden_states))

    def _recomputes_norms(self) -> bool:
        return self.config.recomputes("layernorm") and self.training

    def _mlp(self, hidden_states: Tensor) -> Tensor:
        if self.config.recomputes("moe" if isinstance(self.mlp, MoELayer) else "mlp") and self.training:
            return layer_spec(self.config).checkpoint(self.mlp, self.place.rng, hidden_states)
        return self.mlp(hidden_states)

    def _dropped(self, branch: Tensor) -> Tensor:
        if self.config.hidden_dropout == 0.0 or not self.training:
            return branch
        with self.place.rng.fork() if self.place.sequence_parallel else nullcontext():
            return F.dropout(branch, self.config.hidden_dropout)
