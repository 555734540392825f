"""Self-attention over tensor and context parallelism: with heads of its own, and from latent
vectors.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.arithmetic import divide
from megatron.core.module import MegatronModule
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import copy_to_tensor_parallel, gather_from_sequence
from megatron.core.transformer.attention.core import CoreAttention
from megatron.core.transformer.attention.rotary import (
    Rotary,
    RotaryTables,
    rotate,
    split_qkv,
    yarn_mscale,
)
from megatron.core.transformer.backends import select_layer_spec
from megatron.core.transformer.norm import Norm, NormAcrossHeads
from megatron.core.transformer.placement import Placement
from megatron.core.transformer.transformer_config import TransformerConfig


class Attention(MegatronModule):
    """What all kinds of attention have: positions and a core."""

    rotary: RotaryTables | None
    core_attention: CoreAttention

    def share_tables(self, other: Attention) -> None:
        """Use the rotary tables and fixed masks of a layer of the same kind: they are as large as
        the sequence.
        """
        self.rotary = other.rotary
        self.core_attention.mask = other.core_attention.mask


class SelfAttention(Attention):
    """Norm and attention. Query groups are split over TP: a rank has whole ones, query heads with
    their key and value.

    Rows of `linear_qkv`, viewed as `[groups, q + 2, d]`: the query heads of a group, its key, its
    value. So the global matrix is a plain concatenation of the ranks' rows.
    """

    def __init__(self, config: TransformerConfig, place: Placement, *, number: int = 0) -> None:
        """`number`: of the layer."""
        super().__init__()
        spec = select_layer_spec(config)
        tp = place.tp
        head_dim = config.head_dim
        self.config = config
        self.cp = place.cp
        self.groups = divide(
            config.query_groups, tp.size, "query groups over the tensor-parallel ranks"
        )
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
            row_blocks=(self.queries_per_group * head_dim, head_dim, head_dim),
        )
        self.across_heads = config.qk_layernorm and config.qk_layernorm_across_heads
        if self.across_heads:
            self.q_layernorm: Norm = NormAcrossHeads(
                config, config.num_attention_heads, tp, place.device
            )
            self.k_layernorm: Norm = NormAcrossHeads(config, config.query_groups, tp, place.device)
        elif config.qk_layernorm:
            # Each rank normalizes its own heads, so these gradients are partial sums even without
            # sequence parallelism.
            self.q_layernorm = spec.norm(config, head_dim, partial_grad=True, device=place.device)
            self.k_layernorm = spec.norm(config, head_dim, partial_grad=True, device=place.device)
        window = config.get_window(number)
        self.rotary = (
            self._rotary_tables(window is not None)
            if config.position_embedding_type == "rope"
            else None
        )
        self.core_attention = spec.core_attention(
            config, place, scale=config.softmax_scale, window=window
        )

    def _rotary_tables(self, in_window: bool) -> RotaryTables:
        config = self.config
        kernel = select_layer_spec(self.config).rope
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

        Under context parallelism s counts the positions of this rank, but for `documents`, which
        are whole.
        """
        mixed = self.linear_qkv(hidden_states)  # [s, b, (heads + 2 groups) / tp * d]
        mixed = mixed.view(
            *mixed.shape[:2], self.groups, self.queries_per_group + 2, self.config.head_dim
        )
        if self.across_heads:  # before an exchange of heads
            query, key, value = split_qkv(mixed, self.queries_per_group, None)
            mixed = torch.cat((self.q_layernorm(query), self.k_layernorm(key), value), 3)
        mixed = self.cp.to_heads(mixed)
        rotary = (
            self.rotary(mixed.shape[0], mixed.dtype, mixed.device)
            if self.rotary is not None
            else None
        )
        if self.config.qk_layernorm and not self.across_heads:
            query, key, value = split_qkv(mixed, self.queries_per_group, None)
            query = self.q_layernorm(query)
            key = self.k_layernorm(key)
            if rotary is not None:
                query = rotate(query, rotary)
                key = rotate(key, rotary)
        else:
            query, key, value = split_qkv(mixed, self.queries_per_group, rotary)
        context = self.core_attention(query, key, value, documents)
        return self.linear_proj(self.cp.to_sequence(context))


class MultiLatentAttention(Attention):
    """Heads are split over TP; what their queries, keys and values are projected from is the same
    on all ranks.

    Rows by head: of queries `[plain, rotated]`, of `linear_kv_up_proj` `[plain key, value]`. The
    last rows of `linear_kv_down_proj` are the rotated part of the keys, one for all heads. Rotated
    are elements 2i and 2i + 1.
    """

    def __init__(self, config: TransformerConfig, place: Placement, *, number: int = 0) -> None:
        """`number`: of the layer."""
        super().__init__()
        self.config = config
        self.place = place
        self.cp = place.cp
        heads = config.num_attention_heads
        spec = select_layer_spec(config)
        self.heads = divide(heads, place.tp.size, "attention heads over the tensor-parallel ranks")
        self.plain = config.qk_head_dim
        self.rotated = config.qk_pos_emb_head_dim
        hidden = config.hidden_size
        query = config.q_lora_rank
        latent = config.kv_lora_rank
        self.linear_proj = spec.projection_out(config, place, heads * config.v_head_dim)
        if query is None:
            self.linear_q_proj = self._up(hidden, heads * config.qk_width, normed=False)
        else:
            self.linear_q_down_proj = self._down(query)
            self.linear_q_up_proj = self._up(query, heads * config.qk_width, config.qk_layernorm)
        self.linear_kv_down_proj = self._down(latent + self.rotated)
        self.linear_kv_up_proj = self._up(
            latent, heads * (self.plain + config.v_head_dim), config.qk_layernorm
        )
        # Rotation comes before an exchange of heads, so its positions are those of this rank with
        # every --cp-comm-type.
        self.rotary = RotaryTables(config, place.cp.axis, self.rotated, interleaved=True)
        scale = yarn_mscale(config, config.mscale_all_dim) ** 2 / math.sqrt(config.qk_width)
        self.core_attention = spec.core_attention(
            config, place, scale=scale, window=config.get_window(number)
        )

    def _up(self, inputs: int, outputs: int, normed: bool) -> ColumnParallelLinear:
        return select_layer_spec(self.config).projection_in(
            self.config, self.place, inputs, outputs, bias=False, normed=normed
        )

    def _down(self, outputs: int) -> ColumnParallelLinear:
        """The same on all TP ranks; each projects its own part of the sequence under sequence
        parallelism.
        """
        config = self.config
        return select_layer_spec(config).projection_in(
            config,
            self.place,
            config.hidden_size,
            outputs,
            bias=False,
            normed=False,
            replicated=True,
        )

    def forward(self, hidden_states: Tensor, documents: Tensor | None = None) -> Tensor:
        """`[s, b, h]` (or `[s/tp, b, h]`) to the same; `documents` as for `SelfAttention`."""
        query = (
            self.linear_q_down_proj(hidden_states)
            if self.config.q_lora_rank is not None
            else hidden_states
        )
        latent, shared = self.linear_kv_down_proj(hidden_states).split(
            [self.config.kv_lora_rank, self.rotated], -1
        )
        # Every rank's heads use the shared part of the keys: its gradient is summed over TP.
        enter = gather_from_sequence if self.place.sequence_parallel else copy_to_tensor_parallel
        latents = (query, latent, enter(shared, self.place.tp), documents)
        if self.config.recomputes("mla_up_proj") and self.training:
            context = select_layer_spec(self.config).checkpoint(
                self._attend, self.place.rng, *latents
            )
        else:
            context = self._attend(*latents)
        return self.linear_proj(self.cp.to_sequence(context))

    def _attend(
        self, query: Tensor, latent: Tensor, shared: Tensor, documents: Tensor | None
    ) -> Tensor:
        """From `[s, b, q_lora_rank]`, `[s, b, kv_lora_rank]` (both `[s/tp, ...]` under sequence
        parallelism) and `[s, b, rotated]` to `[s, b, heads/tp * v_head_dim]`.
        """
        assert self.rotary is not None
        rotary = self.rotary(shared.shape[0], shared.dtype, shared.device)
        query = self._query(query, rotary)
        key, value = self._key_and_value(latent, shared, rotary)
        # Fused kernels want one width: zeros at the end of a head change neither its scores nor
        # what is kept of it.
        width = self.config.core_head_dim
        query, key, value = (
            self.cp.to_heads(F.pad(x, (0, width - x.shape[-1]))) for x in (query, key, value)
        )
        context = self.core_attention(query, key, value, documents)
        if width > self.config.v_head_dim:
            context = context.unflatten(-1, (-1, width))[..., : self.config.v_head_dim].flatten(2)
        return context

    def _query(self, latent: Tensor, rotary: Rotary) -> Tensor:
        """`[s, b, heads/tp, 1, qk_width]`."""
        projection = (
            self.linear_q_proj if self.config.q_lora_rank is None else self.linear_q_up_proj
        )
        query = projection(latent)
        plain, rotated = query.unflatten(-1, (self.heads, 1, -1)).split(
            [self.plain, self.rotated], -1
        )
        return torch.cat((plain, rotate(rotated, rotary)), -1)

    def _key_and_value(
        self, latent: Tensor, shared: Tensor, rotary: Rotary
    ) -> tuple[Tensor, Tensor]:
        """`[s, b, heads/tp, 1, qk_width]` and `[s, b, heads/tp, 1, v_head_dim]`."""
        both = self.linear_kv_up_proj(latent)
        plain, value = both.unflatten(-1, (self.heads, 1, -1)).split(
            [self.plain, self.config.v_head_dim], -1
        )
        rotated = rotate(shared.unflatten(-1, (1, 1, -1)), rotary).expand(
            -1, -1, self.heads, -1, -1
        )
        return torch.cat((plain, rotated), -1), value
