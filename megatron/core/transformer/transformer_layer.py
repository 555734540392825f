"""One transformer layer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.module import MegatronModule
from megatron.core.parallel_state import Axis, ExpertAxes
from megatron.core.tensor_parallel import TensorParallelRng, without_intermediate
from megatron.core.transformer.attention import Attention, SelfAttention
from megatron.core.transformer.context_parallel import WHOLE_SEQUENCES, ContextParallel
from megatron.core.transformer.layer_spec import layer_spec
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe import MoELayer
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.transformer.norm import Norm
from megatron.core.transformer.transformer_config import TransformerConfig


class TransformerLayer(MegatronModule):
    """x + attention(norm(x)), then x + mlp(norm(x)), with dropout on both branches; `number` is the global one.

    The norms belong to the projections that they feed or follow (--norm-placement); one that several share stands by
    itself: that of the router and all experts, and of what latent attention begins with. Keys on disk are the same.
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
        self.input_layernorm = self._norm(device) if config.multi_latent_attention else None
        attention = MultiLatentAttention if config.multi_latent_attention else SelfAttention
        self.self_attention: Attention = attention(
            config, tp=tp, rng=rng, cp=cp, sequence_parallel=sequence_parallel, number=number, device=device
        )
        self.pre_mlp_layernorm: Norm | None = None
        self.mlp: MoELayer | MLP
        if config.moe_layer_pattern[number]:
            self.pre_mlp_layernorm = self._norm(device)
            axes = experts if experts is not None else ExpertAxes()
            self.mlp = MoELayer(
                config, layer_number=number, tp=tp, axes=axes, sequence_parallel=sequence_parallel, device=device
            )
        else:
            self.mlp = MLP(config, tp=tp, sequence_parallel=sequence_parallel, device=device)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """`[s, b, h]` (or `[s/tp, b, h]`) to the same."""
        attention = self._normed(
            self.input_layernorm, lambda normed: self.self_attention(normed, attention_mask), hidden_states
        )
        hidden_states = hidden_states + self._dropped(attention)
        return hidden_states + self._dropped(self._normed(self.pre_mlp_layernorm, self._mlp, hidden_states))

    def _norm(self, device: torch.device | None) -> Norm:
        config = self.config
        return layer_spec(config).norm(config, config.hidden_size, partial_grad=self.sequence_parallel, device=device)

    def _normed(self, norm: Norm | None, branch: Callable[[Tensor], Tensor], hidden_states: Tensor) -> Tensor:
        if norm is None:
            return branch(hidden_states)
        if self.config.recomputes("layernorm") and self.training:
            return without_intermediate(norm, branch, hidden_states)
        return branch(norm(hidden_states))

    def _mlp(self, hidden_states: Tensor) -> Tensor:
        if self.config.recomputes("moe" if isinstance(self.mlp, MoELayer) else "mlp") and self.training:
            return layer_spec(self.config).checkpoint(self.mlp, self.rng, hidden_states)
        return self.mlp(hidden_states)

    def _dropped(self, branch: Tensor) -> Tensor:
        if self.dropout == 0.0 or not self.training:
            return branch
        with self.rng.fork() if self.sequence_parallel else nullcontext():
            return F.dropout(branch, self.dropout)
