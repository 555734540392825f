"""Self-attention over tensor and context parallelism."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron.core.module import MegatronModule, param_info, set_param_info
from megatron.core.transformer.attention.core import CoreAttention
from megatron.core.transformer.attention.rotary import RotaryTables, rotate, split_qkv
from megatron.core.transformer.layer_spec import layer_spec
from megatron.core.transformer.norm import Norm, NormAcrossHeads
from megatron.core.transformer.placement import Placement
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide


class Attention(MegatronModule):
    """What all kinds of attention have: positions and a core."""

    rotary: RotaryTables | None
    core_attention: CoreAttention

    def share_tables(self, other: Attention) -> None:
        """Use the rotary tables and fixed masks of a layer of the same kind: they are as large as the sequence."""
        self.rotary, self.core_attention.mask = other.rotary, other.core_attention.mask


class SelfAttention(Attention):
    """Norm and attention. Query groups are split over TP: a rank has whole ones, query heads with their key and value.

    Rows of `linear_qkv`, viewed as `[groups, q + 2, d]`: the query heads of a group, its key, its value. So the global
    matrix is a plain concatenation of the ranks' rows.
    """

    def __init__(self, config: TransformerConfig, place: Placement, *, number: int = 0) -> None:
        """`number`: of the layer."""
        super().__init__()
        spec, tp, head_dim = layer_spec(config), place.tp, config.head_dim
        self.config, self.cp = config, place.cp
        self.groups = divide(config.query_groups, tp.size, "query groups over the tensor-parallel ranks")
        self.queries_per_group = config.num_attention_heads // config.query_groups
        width = config.num_attention_heads * head_dim
        self.linear_proj = spec.projection_out(config, place, width)
        self.linear_qkv = spec.projection_in(
            config,
            place,
            config.hidden_size,
            width + 2 * config.query_groups * head_dim,
            bias=config.has_qkv_bias,
            normed=config.norm_placement != "post",
        )
        weight, blocks = self.linear_qkv.weight, (self.queries_per_group * head_dim, head_dim, head_dim)
        set_param_info(weight, replace(param_info(weight), row_blocks=blocks))
        self.across_heads = config.qk_layernorm and config.qk_layernorm_across_heads
        if self.across_heads:
            self.q_layernorm: Norm = NormAcrossHeads(config, config.num_attention_heads, tp, place.device)
            self.k_layernorm: Norm = NormAcrossHeads(config, config.query_groups, tp, place.device)
        elif config.qk_layernorm:
            # Each rank normalizes its own heads, so these gradients are partial sums even without sequence parallelism.
            self.q_layernorm = spec.norm(config, head_dim, partial_grad=True, device=place.device)
            self.k_layernorm = spec.norm(config, head_dim, partial_grad=True, device=place.device)
        window = config.window_of(number)
        self.rotary = self._rotary_tables(window is not None) if config.position_embedding_type == "rope" else None
        self.core_attention = spec.core_attention(config, place, scale=config.softmax_scale, window=window)

    def _rotary_tables(self, in_window: bool) -> RotaryTables:
        config, kernel = self.config, layer_spec(self.config).rope
        return RotaryTables(
            config,
            self.cp.attention_axis,
            config.head_dim,
            config.rotary_interleaved,
            base=config.rotary_base_local if in_window else None,
            kernel=kernel if config.apply_rope_fusion else None,
        )

    def forward(self, hidden_states: Tensor, documents: Tensor | None = None) -> Tensor:
        """`[s, b, h]` (or `[s/tp, b, h]`) to the same; tokens see those with the same number in `documents` `[b, s]`.

        Under context parallelism s counts the positions of this rank, but for `documents`, which are whole.
        """
        mixed = self.linear_qkv(hidden_states)  # [s, b, (heads + 2 groups) / tp * d]
        mixed = mixed.view(*mixed.shape[:2], self.groups, self.queries_per_group + 2, self.config.head_dim)
        if self.across_heads:  # before an exchange of heads
            query, key, value = split_qkv(mixed, self.queries_per_group, None)
            mixed = torch.cat((self.q_layernorm(query), self.k_layernorm(key), value), 3)
        mixed = self.cp.to_heads(mixed)
        rotary = self.rotary(mixed.shape[0], mixed.dtype, mixed.device) if self.rotary is not None else None
        if self.config.qk_layernorm and not self.across_heads:
            query, key, value = split_qkv(mixed, self.queries_per_group, None)
            query, key = self.q_layernorm(query), self.k_layernorm(key)
            if rotary is not None:
                query, key = rotate(query, rotary), rotate(key, rotary)
        else:
            query, key, value = split_qkv(mixed, self.queries_per_group, rotary)
        context = self.core_attention(query, key, value, documents)
        return self.linear_proj(self.cp.to_sequence(context))
