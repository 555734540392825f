"""One pre-norm transformer layer."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.dist_checkpointing.mapping import ShardedStateDict, map_keys
from megatron.core.module import MegatronModule
from megatron.core.parallel_state import Axis, ExpertAxes
from megatron.core.tensor_parallel import TensorParallelRng, without_intermediate
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.context_parallel import WHOLE_SEQUENCES, ContextParallel
from megatron.core.transformer.layer_spec import layer_spec
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe import MoELayer
from megatron.core.transformer.norm import Norm
from megatron.core.transformer.transformer_config import TransformerConfig


class TransformerLayer(MegatronModule):
    """x + attention(norm(x)), then x + mlp(norm(x)), with dropout on both branches; `number` is the global one.

    The norms belong to the projections that they feed; the router and all experts share one that stands by itself.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        tp: Axis,
        rng: TensorParallelRng,
        cp: ContextParallel = WHOLE_SEQUENCES,
        sequence_parallel: bool = False,
        number: int = 0,
        experts: ExpertAxes | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.config, self.dropout, self.rng = config, config.hidden_dropout, rng
        self.sequence_parallel = sequence_parallel
        self.self_attention = SelfAttention(
            config, tp=tp, rng=rng, cp=cp, sequence_parallel=sequence_parallel, device=device
        )
        self.pre_mlp_layernorm: Norm | None = None
        self.mlp: MoELayer | MLP
        if config.moe_layer_pattern[number]:
            self.pre_mlp_layernorm = layer_spec(config).norm(
                config, config.hidden_size, partial_grad=sequence_parallel, device=device
            )
            axes = experts if experts is not None else ExpertAxes()
            self.mlp = MoELayer(
                config, layer_number=number, tp=tp, axes=axes, sequence_parallel=sequence_parallel, device=device
            )
        else:
            self.mlp = MLP(config, tp=tp, sequence_parallel=sequence_parallel, device=device)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """`[s, b, h]` (or `[s/tp, b, h]`) to the same."""
        hidden_states = hidden_states + self._dropped(self.self_attention(hidden_states, attention_mask))
        return hidden_states + self._dropped(self._normed_mlp(hidden_states))

    def _normed_mlp(self, hidden_states: Tensor) -> Tensor:
        if self.pre_mlp_layernorm is None:
            return self._mlp(hidden_states)
        if self.config.recomputes("layernorm") and self.training:
            return without_intermediate(self.pre_mlp_layernorm, self._mlp, hidden_states)
        return self._mlp(self.pre_mlp_layernorm(hidden_states))

    def _mlp(self, hidden_states: Tensor) -> Tensor:
        if self.config.recomputes("moe" if isinstance(self.mlp, MoELayer) else "mlp") and self.training:
            return layer_spec(self.config).checkpoint(self.mlp, self.rng, hidden_states)
        return self.mlp(hidden_states)

    def _dropped(self, branch: Tensor) -> Tensor:
        if self.dropout == 0.0 or not self.training:
            return branch
        with self.rng.fork() if self.sequence_parallel else nullcontext():
            return F.dropout(branch, self.dropout)

    def sharded_state_dict(self, prefix: str = "") -> ShardedStateDict:
        """The norm before the experts has the key that it would have in a dense layer, as in Megatron-core."""
        old, new = prefix + "pre_mlp_layernorm.", prefix + "mlp.linear_fc1.layer_norm_"
        return map_keys(super().sharded_state_dict(prefix), lambda key: key.replace(old, new))
