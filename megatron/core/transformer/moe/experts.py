"""The experts of a rank."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.module import MegatronModule, Normal, child_sharded_state_dict
from megatron.core.parallel_state import ExpertAxes
from megatron.core.transformer.layer_spec import layer_spec
from megatron.core.transformer.mlp import ACTIVATIONS
from megatron.core.transformer.transformer_config import TransformerConfig


class GroupedExperts(MegatronModule):
    """The MLPs of a rank's experts. A token's weight multiplies its inner activation."""

    def __init__(self, config: TransformerConfig, *, axes: ExpertAxes, device: torch.device | None = None) -> None:
        super().__init__()
        linear = layer_spec(config).grouped
        self.activation = ACTIVATIONS[config.activation]
        blocks, inner = 2 if config.gated else 1, config.moe_ffn_size
        first, last = Normal(config.init_method_std), Normal(config.output_init_std)
        sizes = (config.hidden_size, blocks * inner)
        self.linear_fc1 = linear(config, *sizes, init=first, split_dim=1, axes=axes, num_blocks=blocks, device=device)
        self.linear_fc2 = linear(config, inner, config.hidden_size, init=last, split_dim=2, axes=axes, device=device)

    def forward(self, rows: Tensor, probs: Tensor, counts: Tensor) -> Tensor:
        """`rows` `[n, h]` in the order of the experts, which have `counts` rows each; `probs` `[n, 1]`."""
        inner = self.activation(self.linear_fc1(rows, counts))
        return self.linear_fc2((inner * probs).to(inner.dtype), counts)

    def sharded_state_dict(self, prefix: str = "") -> ShardedStateDict:
        """Under Megatron-core's keys, which say `experts` twice."""
        state: ShardedStateDict = {}
        for name, child in self.named_children():
            state.update(child_sharded_state_dict(child, f"{prefix}experts.{name}."))
        return state
