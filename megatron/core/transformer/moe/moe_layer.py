"""The MLP of a layer with experts, and the experts of a rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.module import MegatronModule, Normal, ParamInfo, child_sharded_state_dict, make_parameter
from megatron.core.parallel_state import ExpertAxes
from megatron.core.transformer.layer_spec import layer_spec
from megatron.core.transformer.mlp import MLP, activation_of
from megatron.core.transformer.moe.dispatcher import DISPATCHERS
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.placement import Placement
from megatron.core.transformer.transformer_config import TransformerConfig


class MoELayer(MegatronModule):
    """The sum of the chosen experts' outputs, weighted by the router, and of the shared expert's."""

    def __init__(self, config: TransformerConfig, place: Placement, *, layer_number: int) -> None:
        super().__init__()
        assert config.num_experts is not None
        axes, device = place.experts, place.device
        self.axes, self.num_local = axes, config.num_experts // axes.ep.size
        self.dispatch = DISPATCHERS[config.moe_token_dispatcher_type if axes.all.size > 1 else "alltoall"]
        self.router = TopKRouter(
            config, layer_number=layer_number, axes=axes, partial_grad=place.sequence_parallel, device=device
        )
        self.experts = GroupedExperts(config, axes=axes, device=device)
        self.shared_experts = SharedExperts(config, place) if config.moe_shared_expert_intermediate_size else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[s, b, h]` (or `[s/tp, b, h]`) to the same."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        routing = self.router(tokens, hidden_states.shape[1])
        output = self.dispatch(tokens, routing, self.experts, self.num_local, self.axes).view_as(hidden_states)
        return output if self.shared_experts is None else output + self.shared_experts(hidden_states)


class SharedExperts(MLP):
    """An expert that every token goes to, split over TP like any MLP; with a gate of its own (Qwen2-MoE) if wanted."""

    def __init__(self, config: TransformerConfig, place: Placement) -> None:
        super().__init__(config, place, ffn_size=config.moe_shared_expert_intermediate_size, shared_expert=True)
        gate = ParamInfo(Normal(config.init_method_std), partial_grad=place.sequence_parallel)
        self.gate_weight = (
            make_parameter((1, config.hidden_size), config.params_dtype, place.device, gate)
            if config.moe_shared_expert_gate
            else None
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        output = super().forward(hidden_states)
        if self.gate_weight is None:
            return output
        return torch.sigmoid(torch.nn.functional.linear(hidden_states, self.gate_weight)) * output


class GroupedExperts(MegatronModule):
    """The MLPs of a rank's experts. A token's weight multiplies its inner activation."""

    def __init__(self, config: TransformerConfig, *, axes: ExpertAxes, device: torch.device | None = None) -> None:
        super().__init__()
        linear = layer_spec(config).grouped
        self.activation = activation_of(config)
        blocks, inner = 2 if config.gated else 1, config.moe_ffn_size
        first, last = Normal(config.init_method_std), Normal(config.output_init_std)
        options: dict[str, Any] = {"axes": axes, "bias": config.add_bias_linear, "device": device}
        sizes = (config.hidden_size, blocks * inner)
        self.linear_fc1 = linear(config, *sizes, init=first, split_dim=1, num_blocks=blocks, **options)
        self.linear_fc2 = linear(config, inner, config.hidden_size, init=last, split_dim=2, **options)

    def forward(self, rows: Tensor, probs: Tensor, counts: Tensor) -> Tensor:
        """`rows` `[n, h]` in the order of the experts, which have `counts` rows each; `probs` `[n, 1]`."""
        inner = self.activation(self.linear_fc1(rows, counts))
        return self.linear_fc2((inner * probs).to(inner.dtype), counts, probs)

    def sharded_state_dict(self, prefix: str = "") -> ShardedStateDict:
        """Under Megatron-core's keys, which say `experts` twice."""
        state: ShardedStateDict = {}
        for name, child in self.named_children():
            state.update(child_sharded_state_dict(child, f"{prefix}experts.{name}."))
        return state
