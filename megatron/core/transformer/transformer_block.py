"""One transformer layer, and the layers of one pipeline chunk."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.module import MegatronModule, child_sharded_state_dict
from megatron.core.tensor_parallel import recompute_intermediate
from megatron.core.transformer.attention.multi_head import (
    Attention,
    MultiLatentAttention,
    SelfAttention,
)
from megatron.core.transformer.backends import select_layer_spec
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe import MoELayer
from megatron.core.transformer.placement import Placement
from megatron.core.transformer.transformer_config import TransformerConfig


class TransformerLayer(MegatronModule):
    """x + attention(norm(x)), then x + mlp(norm(x)), with dropout on both branches; `number` is the
    global one.

    The norms belong to the projections that they feed or follow (--norm-placement); one that
    several share stands by itself: that of the router and all experts, and of what latent attention
    begins with. Keys on disk are the same.
    """

    def __init__(self, config: TransformerConfig, place: Placement, *, number: int = 0) -> None:
        super().__init__()
        place = replace(place, cp=place.cp.layer(number))
        spec = select_layer_spec(config)
        latent = config.multi_latent_attention
        self.config = config
        self.place = place
        self.input_layernorm = spec.hidden_norm(config, place) if latent else None
        attention = MultiLatentAttention if latent else SelfAttention
        self.self_attention: Attention = attention(config, place, number=number)
        has_experts = bool(config.moe_layer_pattern[number])
        self.pre_mlp_layernorm = spec.hidden_norm(config, place) if has_experts else None
        self.mlp = (
            MoELayer(config, place, layer_number=number) if has_experts else MLP(config, place)
        )

    def forward(self, hidden_states: Tensor, documents: Tensor | None = None) -> Tensor:
        """`[s, b, h]` (or `[s/tp, b, h]`) to the same."""
        # The branches in statements of their own, and not by one method that is given norm and
        # branch: --compile cuts the graph within them, and torch before 2.8 compiles anew for every
        # bound method that lies across a cut.
        attention = self._attend(hidden_states, documents)
        hidden_states = hidden_states + self._dropped(attention)
        fed_forward = self._feed_forward(hidden_states)
        return hidden_states + self._dropped(fed_forward)

    def _attend(self, hidden_states: Tensor, documents: Tensor | None) -> Tensor:
        norm = self.input_layernorm
        if norm is None:
            return self.self_attention(hidden_states, documents)
        if self._recomputes_norms():
            return recompute_intermediate(
                norm, partial(self.self_attention, documents=documents), hidden_states
            )
        return self.self_attention(norm(hidden_states), documents)

    def _feed_forward(self, hidden_states: Tensor) -> Tensor:
        norm = self.pre_mlp_layernorm
        if norm is None:
            return self._mlp(hidden_states)
        if self._recomputes_norms():
            return recompute_intermediate(norm, self._mlp, hidden_states)
        return self._mlp(norm(hidden_states))

    def _recomputes_norms(self) -> bool:
        return self.config.recomputes("layernorm") and self.training

    def _mlp(self, hidden_states: Tensor) -> Tensor:
        if (
            self.config.recomputes("moe" if isinstance(self.mlp, MoELayer) else "mlp")
            and self.training
        ):
            return select_layer_spec(self.config).checkpoint(
                self.mlp, self.place.rng, hidden_states
            )
        return self.mlp(hidden_states)

    def _dropped(self, branch: Tensor) -> Tensor:
        if self.config.hidden_dropout == 0.0 or not self.training:
            return branch
        with self.place.rng.fork() if self.place.sequence_parallel else nullcontext():
            return F.dropout(branch, self.config.hidden_dropout)


class TransformerBlock(MegatronModule):
    """Layers `layers` (global numbers) of the model; the last chunk also has the final norm.

    Keys carry the global number, so a checkpoint does not know which stage or chunk held a layer.
    """

    def __init__(
        self,
        config: TransformerConfig,
        place: Placement,
        *,
        layers: range,
        post_process: bool,
        stage: dist.ProcessGroup | None = None,
    ) -> None:
        """`stage`: the ranks of this pipeline stage, which must agree on the scales of fp8; None is the world."""
        super().__init__()
        self.spec = select_layer_spec(config)
        self.config = config
        self.rng = place.rng
        self.layer_numbers = layers
        by_number = {number: TransformerLayer(config, place, number=number) for number in layers}
        kinds: dict[object, TransformerLayer] = {}
        for number, layer in by_number.items():
            alike = kinds.setdefault(
                (config.get_window(number), layer.place.cp.head_axis.size), layer
            )
            layer.self_attention.share_tables(alike.self_attention)
        self.layers = nn.ModuleList(by_number.values())
        self.precision = self.spec.precision(config, stage, by_number)
        self.final_layernorm = self.spec.hidden_norm(config, place) if post_process else None

    def forward(self, hidden_states: Tensor, documents: Tensor | None = None) -> Tensor:
        """`[s, b, h]` (or `[s/tp, b, h]`) to the same."""
        with self.precision.chunk():
            for start, stop, recompute in self._groups():
                group = (hidden_states, documents, start, stop)
                hidden_states = (
                    self.spec.checkpoint(self._run, self.rng, *group)
                    if recompute
                    else self._run(*group)
                )
        return (
            hidden_states if self.final_layernorm is None else self.final_layernorm(hidden_states)
        )

    def _run(
        self, hidden_states: Tensor, documents: Tensor | None, start: int, stop: int
    ) -> Tensor:
        for index in range(start, stop):
            with self.precision.layer(self.layer_numbers[index]):
                hidden_states = self.layers[index](hidden_states, documents)
        return hidden_states

    def _groups(self) -> list[tuple[int, int, bool]]:
        """(start, stop, recompute) of consecutive local layers."""
        count = len(self.layers)
        if self.config.recompute_granularity != "full" or not self.training:
            return [(0, count, False)]
        size = self.config.recompute_num_layers
        assert size is not None
        if self.config.recompute_method == "uniform":
            return [(start, min(start + size, count), True) for start in range(0, count, size)]
        size = min(size, count)
        return [(index, index + 1, True) for index in range(size)] + [(size, count, False)]

    def sharded_state_dict(self, prefix: str = "") -> ShardedStateDict:
        state: ShardedStateDict = {}
        for number, layer in zip(self.layer_numbers, self.layers, strict=True):
            state.update(child_sharded_state_dict(layer, f"{prefix}layers.{number}."))
        if self.final_layernorm is not None:
            state.update(self.final_layernorm.sharded_state_dict(f"{prefix}final_layernorm."))
        return state
