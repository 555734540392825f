"""Self-attention over tensor and context parallelism: multi-head, and multi-latent."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron.core.arithmetic import divide
from megatron.core.module import MegatronModule, param_info, set_param_info
from megatron.core.transformer.attention.core import CoreAttention
from megatron.core.transformer.attention.rotary import RotaryTables, rotate, split_qkv
from megatron.core.transformer.layer_spec import select_layer_spec
from megatron.core.transformer.norm import Norm
from megatron.core.transformer.placement import Placement
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.wings import resolve

_NORM_ACROSS_HEADS = "megatron.core.transformer.attention.head_norms:NormAcrossHeads"
_NORM_PER_HEAD = "megatron.core.transformer.attention.head_norms:NormPerHead"
_QUERY_SCALES = "megatron.core.transformer.attention.rope_scaling:QueryScales"


class Attention(MegatronModule):
    """Base of all kinds of attention, which have rotary tables and core attention."""

    rotary: RotaryTables | None
    core_attention: CoreAttention

    def share_tables(self, source: Attention) -> None:
        """Use the rotary tables and fixed masks of a layer of the same kind.

        Their size grows with the length of the sequence.
        """
        self.rotary = source.rotary
        self.core_attention.mask = source.core_attention.mask


class SelfAttention(Attention):
    """`softmax(q k^T / sqrt(d)) v Wo^T` of `q, k, v = norm(x) Wqkv^T`: groups are split over TP.

    A rank has whole groups: query heads with their key and value head. The rows of `linear_qkv`,
    viewed as `[groups, q + 2, d]`, are the query heads of a group, its key and its value. The
    global matrix is therefore the concatenation of the ranks' rows. With --attention-output-gate
    they are `[groups, 2 q + 2, d]`: the gates of the query heads follow these.
    """

    def __init__(
        self, config: TransformerConfig, placement: Placement, *, layer_number: int = 0
    ) -> None:
        """Initialize layer `layer_number` of the model."""
        super().__init__()
        spec = select_layer_spec(config)
        head_dim = config.head_dim
        self.config = config
        self.cp = placement.cp
        self.groups = divide(
            config.query_groups, placement.tp.size, "query groups over the tensor-parallel ranks"
        )
        self.queries_per_group = config.num_attention_heads // config.query_groups

        # Projections
        query_width = config.num_attention_heads * head_dim
        group_width = self.queries_per_group * head_dim
        row_blocks: tuple[int, ...] = (group_width, head_dim, head_dim)
        if config.attention_output_gate:
            row_blocks = (group_width, *row_blocks)
        self.linear_proj = spec.make_output_projection(config, placement, query_width)
        self.linear_qkv = spec.make_input_projection(
            config,
            placement,
            config.hidden_size,
            config.query_groups * sum(row_blocks),
            bias=config.has_qkv_bias,
            normed=config.has_input_norms,
            row_blocks=row_blocks,
        )

        # Norms of queries and keys
        # Their weights, or the norms themselves, involve all heads of this rank.
        self.normalizes_all_heads = config.qk_layernorm and (
            config.qk_layernorm_across_heads or config.qk_layernorm_per_head
        )
        if config.qk_layernorm:
            self.q_layernorm = self._make_head_norm(config.num_attention_heads, placement)
            self.k_layernorm = self._make_head_norm(config.query_groups, placement)

        # Positions and core attention
        window = config.get_window(layer_number)
        self.rotary = None
        if config.position_embedding_type == "rope" and not config.no_rope_pattern[layer_number]:
            self.rotary = self._make_rotary_tables(has_window=window is not None)
        self.query_scales = None
        if config.query_length_scaling:
            self.query_scales = resolve(_QUERY_SCALES)(config, self.cp.attention_axis)
        self.core_attention = spec.core_attention(
            config,
            placement,
            scale=config.chosen_score_scale,
            window=window,
        )

    def _make_head_norm(self, heads: int, placement: Placement) -> Norm:
        """Make the norm of queries or keys, which have `heads` heads in the whole model."""
        norm = self._make_norm_of_heads(heads, placement)
        if self.config.apply_wd_to_qk_layernorm:
            for param in norm.parameters():
                set_param_info(param, replace(param_info(param), decayed=True))
        return norm

    def _make_norm_of_heads(self, heads: int, placement: Placement) -> Norm:
        """Make a norm of queries or keys, of each head or across the `heads` of the model."""
        config = self.config
        if self.normalizes_all_heads:
            name = _NORM_ACROSS_HEADS if config.qk_layernorm_across_heads else _NORM_PER_HEAD
            norm: Norm = resolve(name)(config, heads, placement.tp, placement.device)
            return norm
        # Each rank normalizes its own heads, so the gradients are partial sums even without
        # sequence parallelism.
        spec = select_layer_spec(config)
        return spec.norm(config, config.head_dim, partial_grad=True, device=placement.device)

    def _make_rotary_tables(self, has_window: bool) -> RotaryTables:
        """Make the tables of a layer; layers with a window may have their own base (Gemma 3)."""
        config = self.config
        base = None
        if has_window:
            base = config.rotary_base_local
        # Exchanges of context parallelism and Transformer Engine expect contiguous tensors, kernels
        # of attention rows at multiples of 16 bytes.
        is_local = config.transformer_impl == "local" and self.cp.axis.size == 1
        return RotaryTables(
            config,
            self.cp.attention_axis,
            config.head_dim,
            config.rotary_interleaved,
            base=base,
            in_place=is_local and config.head_dim % 8 == 0,
        )

    def forward(
        self,
        hidden_states: Tensor,
        documents: Tensor | None = None,
        *,
        is_normalized: bool = False,
    ) -> Tensor:
        """Return the output of the branch, `[s, b, h]` (or `[s/tp, b, h]`) as its input.

        A token attends to tokens with the same number in `documents` `[b, s]`. Under context
        parallelism s counts the positions of this rank, except in `documents`, which are whole.
        `is_normalized`: the norm of the projection has been applied to the input.
        """
        # Project, and view the result by groups.
        project = self.linear_qkv.project if is_normalized else self.linear_qkv
        mixed = project(hidden_states)  # [s, b, (heads + 2 groups) / tp * d]
        length, batch, _ = mixed.shape
        # [s, b, groups / tp, q + 2, d], with gates [s, b, groups / tp, 2 q + 2, d]
        mixed = mixed.view(length, batch, self.groups, -1, self.config.head_dim)
        gate = None
        if self.config.attention_output_gate:
            # Gates stay on this rank: they multiply the context after the exchange of heads.
            mixed, gate = self._split_gate(mixed)
        if self.normalizes_all_heads:
            # Before the exchange of heads, while all heads of a token are on the TP ranks.
            query, key, value = split_qkv(mixed, self.queries_per_group, rotary=None)
            query = self.q_layernorm(query)
            key = self.k_layernorm(key)
            mixed = torch.cat((query, key, value), 3)

        if self.config.clip_qkv is not None:
            mixed = mixed.clamp(-self.config.clip_qkv, self.config.clip_qkv)

        # Exchange positions for heads where CP requires it: whole sequences from here on.
        mixed = self.cp.to_heads(mixed)
        rotary = None
        if self.rotary is not None:
            rotary = self.rotary(mixed.shape[0], mixed.dtype, mixed.device)

        # Split into queries, keys and values, normalize and rotate.
        if self.config.qk_layernorm and not self.normalizes_all_heads:
            query, key, value = split_qkv(mixed, self.queries_per_group, rotary=None)
            if rotary is not None and self.config.qk_layernorm_after_rope:
                query = self.q_layernorm(rotate(query, rotary))
                key = self.k_layernorm(rotate(key, rotary))
            else:
                query = self.q_layernorm(query)
                key = self.k_layernorm(key)
                if rotary is not None:
                    query = rotate(query, rotary)
                    key = rotate(key, rotary)
        else:
            query, key, value = split_qkv(mixed, self.queries_per_group, rotary)
        if self.query_scales is not None:
            query = query * self.query_scales(query.shape[0], query.dtype, query.device)

        # Attend, and return to the residual stream.
        context = self.core_attention(query, key, value, documents)  # [s, b, heads / tp * d]
        context = self.cp.to_sequence(context)
        if gate is not None:
            context = context * torch.sigmoid(gate)
        return self.linear_proj(context)

    def _split_gate(self, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """Split the heads of each group, `[s, b, g, 2 q + 2, d]`.

        Returns queries, key and value, `[s, b, g, q + 2, d]`, and the gates, `[s, b, g * q * d]`.
        """
        widths = [self.queries_per_group, self.queries_per_group, 2]
        query, gate, key_and_value = mixed.split(widths, 3)
        return torch.cat((query, key_and_value), 3), gate.flatten(2)
