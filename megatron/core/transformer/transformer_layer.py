"""One pre-norm transformer layer."""

from __future__ import annotations

from collections.abc import Callable, Container
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.dist_checkpointing.mapping import ShardedStateDict, map_keys
from megatron.core.module import MegatronModule
from megatron.core.parallel_state import Axis, ExpertAxes
from megatron.core.tensor_parallel import TensorParallelRng, checkpoint, without_intermediate
from megatron.core.transformer.attention import Attention, SelfAttention
from megatron.core.transformer.context_parallel import WHOLE_SEQUENCES, ContextParallel
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe import MoELayer
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.transformer.norm import Norm
from megatron.core.transformer.transformer_config import TransformerConfig

# On disk a norm is named after the projection that it feeds, if it feeds a single one: not that of experts, nor that of
# latent attention's input. (Transformer Engine's modules, Megatron-core's usual ones, have these names.)
NORM_KEYS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}


def norm_key(name: str, names: Container[str]) -> str:
    """`name`, on disk, of a parameter of a norm, by either of its names; others are their own. `names`: all weights."""
    for local, fused in NORM_KEYS.items():
        before, found, part = name.partition(local if local in name else fused)
        if found and (not before or before.endswith(".")):
            projection = before + fused.replace(".layer_norm_", ".weight")
            return before + (fused if projection in names else local) + part
    return name


class TransformerLayer(MegatronModule):
    """x + attention(norm(x)), then x + mlp(norm(x)), with dropout on both branches; `number` is the global one."""

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
        self.input_layernorm = Norm(config, config.hidden_size, partial_grad=sequence_parallel, device=device)
        attention = MultiLatentAttention if config.multi_latent_attention else SelfAttention
        self.self_attention: Attention = attention(
            config, tp=tp, rng=rng, cp=cp, sequence_parallel=sequence_parallel, device=device
        )
        self.pre_mlp_layernorm = Norm(config, config.hidden_size, partial_grad=sequence_parallel, device=device)
        self.mlp: MoELayer | MLP
        if config.moe_layer_pattern[number]:
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

    def _normed(self, norm: Norm, branch: Callable[[Tensor], Tensor], hidden_states: Tensor) -> Tensor:
        if self.config.recomputes("layernorm") and self.training:
            return without_intermediate(norm, branch, hidden_states)
        return branch(norm(hidden_states))

    def _mlp(self, hidden_states: Tensor) -> Tensor:
        if self.config.recomputes("moe" if isinstance(self.mlp, MoELayer) else "mlp") and self.training:
            return checkpoint(self.mlp, self.rng, hidden_states)
        return self.mlp(hidden_states)

    def _dropped(self, branch: Tensor) -> Tensor:
        if self.dropout == 0.0 or not self.training:
            return branch
        with self.rng.fork() if self.sequence_parallel else nullcontext():
            return F.dropout(branch, self.dropout)

    def sharded_state_dict(self, prefix: str = "") -> ShardedStateDict:
        state = super().sharded_state_dict(prefix)
        return map_keys(state, lambda key: norm_key(key, state))
