"""Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2")."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.module import param_info, set_param_info
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import copy_to_tensor_parallel, gather_from_sequence
from megatron.core.transformer.attention.multi_head import Attention
from megatron.core.transformer.attention.rotary import Rotary, RotaryTables, rotate, yarn_mscale
from megatron.core.transformer.layer_spec import layer_spec
from megatron.core.transformer.placement import Placement
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide


class MultiLatentAttention(Attention):
    """Heads are split over TP; what their queries, keys and values are projected from is the same on all ranks.

    Rows by head: of queries `[plain, rotated]`, of `linear_kv_up_proj` `[plain key, value]`. The last rows of
    `linear_kv_down_proj` are the rotated part of the keys, one for all heads. Rotated are elements 2i and 2i + 1.
    """

    def __init__(self, config: TransformerConfig, place: Placement, *, number: int = 0) -> None:
        """`number`: of the layer."""
        super().__init__()
        self.config, self.place, self.cp = config, place, place.cp
        heads, spec = config.num_attention_heads, layer_spec(config)
        self.heads = divide(heads, place.tp.size, "attention heads over the tensor-parallel ranks")
        self.plain, self.rotated = config.qk_head_dim, config.qk_pos_emb_head_dim
        hidden, query, latent = config.hidden_size, config.q_lora_rank, config.kv_lora_rank
        self.linear_proj = spec.projection_out(config, place, heads * config.v_head_dim)
        if query is None:
            self.linear_q_proj = self._up(hidden, heads * config.qk_width, normed=False)
        else:
            self.linear_q_down_proj = self._down(query)
            self.linear_q_up_proj = self._up(query, heads * config.qk_width, config.qk_layernorm)
        self.linear_kv_down_proj = self._down(latent + self.rotated)
        self.linear_kv_up_proj = self._up(latent, heads * (self.plain + config.v_head_dim), config.qk_layernorm)
        # Rotation comes before an exchange of heads, so its positions are those of this rank with every --cp-comm-type.
        self.rotary = RotaryTables(config, place.cp.axis, self.rotated, interleaved=True)
        scale = yarn_mscale(config, config.mscale_all_dim) ** 2 / math.sqrt(config.qk_width)
        self.core_attention = spec.core_attention(config, place, scale=scale, window=config.window_of(number))

    def _up(self, inputs: int, outputs: int, normed: bool) -> ColumnParallelLinear:
        return layer_spec(self.config).projection_in(
            self.config, self.place, inputs, outputs, bias=False, normed=normed
        )

    def _down(self, outputs: int) -> ColumnParallelLinear:
        """The same on all TP ranks; each projects its own part of the sequence under sequence parallelism."""
        config = self.config
        alone = replace(self.place, tp=Axis(), sequence_parallel=False)
        linear = layer_spec(config).projection_in(config, alone, config.hidden_size, outputs, bias=False, normed=False)
        info = replace(param_info(linear.weight), tp_dim=None, partial_grad=self.place.sequence_parallel)
        set_param_info(linear.weight, info)
        return linear

    def forward(self, hidden_states: Tensor, documents: Tensor | None = None) -> Tensor:
        """`[s, b, h]` (or `[s/tp, b, h]`) to the same; `documents` as for `SelfAttention`."""
        query = self.linear_q_down_proj(hidden_states) if self.config.q_lora_rank is not None else hidden_states
        latent, shared = self.linear_kv_down_proj(hidden_states).split([self.config.kv_lora_rank, self.rotated], -1)
        # Every rank's heads use the shared part of the keys: its gradient is summed over TP.
        enter = gather_from_sequence if self.place.sequence_parallel else copy_to_tensor_parallel
        latents = (query, latent, enter(shared, self.place.tp), documents)
        if self.config.recomputes("mla_up_proj") and self.training:
            context = layer_spec(self.config).checkpoint(self._attend, self.place.rng, *latents)
        else:
            context = self._attend(*latents)
        return self.linear_proj(self.cp.to_sequence(context))

    def _attend(self, query: Tensor, latent: Tensor, shared: Tensor, documents: Tensor | None) -> Tensor:
        """From `[s, b, q_lora_rank]`, `[s, b, kv_lora_rank]` (both `[s/tp, ...]` under sequence parallelism) and
        `[s, b, rotated]` to `[s, b, heads/tp * v_head_dim]`."""
        assert self.rotary is not None
        rotary = self.rotary(shared.shape[0], shared.dtype, shared.device)
        query = self._query(query, rotary)
        key, value = self._key_and_value(latent, shared, rotary)
        # Fused kernels want one width: zeros at the end of a head change neither its scores nor what is kept of it.
        width = self.config.core_head_dim
        query, key, value = (self.cp.to_heads(F.pad(x, (0, width - x.shape[-1]))) for x in (query, key, value))
        context = self.core_attention(query, key, value, documents)
        if width > self.config.v_head_dim:
            context = context.unflatten(-1, (-1, width))[..., : self.config.v_head_dim].flatten(2)
        return context

    def _query(self, latent: Tensor, rotary: Rotary) -> Tensor:
        """`[s, b, heads/tp, 1, qk_width]`."""
        projection = self.linear_q_proj if self.config.q_lora_rank is None else self.linear_q_up_proj
        query = projection(latent)
        plain, rotated = query.unflatten(-1, (self.heads, 1, -1)).split([self.plain, self.rotated], -1)
        return torch.cat((plain, rotate(rotated, rotary)), -1)

    def _key_and_value(self, latent: Tensor, shared: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """`[s, b, heads/tp, 1, qk_width]` and `[s, b, heads/tp, 1, v_head_dim]`."""
        both = self.linear_kv_up_proj(latent)
        plain, value = both.unflatten(-1, (self.heads, 1, -1)).split([self.plain, self.config.v_head_dim], -1)
        rotated = rotate(shared.unflatten(-1, (1, 1, -1)), rotary).expand(-1, -1, self.heads, -1, -1)
        return torch.cat((plain, rotated), -1), value
