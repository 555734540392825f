"""Multi-latent attention, of which keys and values are projections of one small vector."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.arithmetic import divide
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import copy_to_tensor_parallel, gather_from_sequence
from megatron.core.transformer.attention.multi_head import Attention
from megatron.core.transformer.attention.rope_scaling import QueryScales, compute_yarn_mscale
from megatron.core.transformer.attention.rotary import Rotary, RotaryTables, rotate
from megatron.core.transformer.layer_spec import select_layer_spec
from megatron.core.transformer.placement import Placement
from megatron.core.transformer.transformer_config import TransformerConfig


class MultiLatentAttention(Attention):
    """Multi-latent attention (DeepSeek-V2): heads are split over TP, latent vectors replicated.

    Queries and keys have a part without (`plain`) and a part with (`rotated`) rotary embedding.
    Rows of a query head are `[plain, rotated]`, rows of a head of `linear_kv_up_proj` are `[plain
    key, value]`. The last rows of `linear_kv_down_proj` are the rotated part of the keys, which all
    heads share. By default rotation is interleaved: elements 2i and 2i + 1.
    """

    def __init__(
        self, config: TransformerConfig, placement: Placement, *, layer_number: int = 0
    ) -> None:
        """Initialize layer `layer_number` of the model."""
        super().__init__()
        self.config = config
        self.placement = placement
        self.cp = placement.cp
        self.plain = config.qk_head_dim
        self.rotated = config.qk_pos_emb_head_dim
        heads = config.num_attention_heads
        latent = config.kv_lora_rank
        spec = select_layer_spec(config)
        self.heads = divide(
            heads, placement.tp.size, "attention heads over the tensor-parallel ranks"
        )

        # Output projection, and the projections of queries
        context_size = heads * config.v_head_dim
        self.linear_proj = spec.make_output_projection(config, placement, context_size)
        query_size = heads * config.qk_width
        if config.q_lora_rank is None:
            self.linear_q_proj = self._make_up_projection(
                config.hidden_size,
                query_size,
                normed=False,
            )
        else:
            self.linear_q_down_proj = self._make_down_projection(config.q_lora_rank)
            self.linear_q_up_proj = self._make_up_projection(
                config.q_lora_rank,
                query_size,
                normed=config.qk_layernorm,
            )

        # Projections of keys and values
        self.linear_kv_down_proj = self._make_down_projection(latent + self.rotated)
        key_value_size = heads * (self.plain + config.v_head_dim)
        self.linear_kv_up_proj = self._make_up_projection(
            latent,
            key_value_size,
            normed=config.qk_layernorm,
        )

        # Rotation precedes an exchange of heads, so the positions are those of this rank for every
        # --cp-comm-type.
        self.rotary = RotaryTables(
            config, placement.cp.axis, self.rotated, interleaved=config.latent_rotary_interleaved
        )
        self.query_scales = None
        if config.query_length_scaling:
            self.query_scales = QueryScales(config, placement.cp.axis)
        mscale = compute_yarn_mscale(config, config.mscale_all_dim)
        scale = mscale**2 / math.sqrt(config.qk_width)  # one factor each of queries and keys
        self.core_attention = spec.core_attention(
            config,
            placement,
            scale=scale,
            window=config.get_window(layer_number),
        )

    def _make_up_projection(self, inputs: int, outputs: int, normed: bool) -> ColumnParallelLinear:
        """Make a projection to heads, with the norm of its input if `normed`."""
        config = self.config.select_latent_norms()
        spec = select_layer_spec(config)
        return spec.make_input_projection(
            config,
            self.placement,
            inputs,
            outputs,
            bias=False,
            normed=normed,
        )

    def _make_down_projection(self, outputs: int) -> ColumnParallelLinear:
        """Make a replicated projection to latent vectors.

        Under sequence parallelism each TP rank projects its part of the sequence.
        """
        config = self.config
        return select_layer_spec(config).make_input_projection(
            config,
            self.placement,
            config.hidden_size,
            outputs,
            bias=False,
            normed=False,
            replicated=True,
        )

    def forward(self, hidden_states: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return the output of the branch, as `SelfAttention.forward`."""
        # Project to the latent vectors.
        query = hidden_states
        if self.config.q_lora_rank is not None:
            query = self.linear_q_down_proj(hidden_states)  # [s, b, q_lora_rank]
        projected = self.linear_kv_down_proj(hidden_states)  # [s, b, kv_lora_rank + rotated]
        widths = [self.config.kv_lora_rank, self.rotated]
        latent, shared_key = projected.split(widths, -1)
        # The heads of all TP ranks use the shared part of the keys: its gradient is summed over TP.
        if self.placement.sequence_parallel:
            shared_key = gather_from_sequence(shared_key, self.placement.tp)
        else:
            shared_key = copy_to_tensor_parallel(shared_key, self.placement.tp)

        # Project from them to heads, and attend.
        if self.config.recomputes("mla_up_proj") and self.training:
            # Keep the latent vectors only: keys and values are several times as large.
            spec = select_layer_spec(self.config)
            context = spec.checkpoint(
                self._attend,
                self.placement.rng,
                query,
                latent,
                shared_key,
                documents,
            )
        else:
            context = self._attend(query, latent, shared_key, documents)
        context = self.cp.to_sequence(context)
        return self.linear_proj(context)

    def _attend(
        self,
        query: Tensor,  # [s, b, q_lora_rank], with sequence parallelism [s/tp, b, q_lora_rank]
        latent: Tensor,  # [s, b, kv_lora_rank], with sequence parallelism [s/tp, b, kv_lora_rank]
        shared_key: Tensor,  # [s, b, rotated]
        documents: Tensor | None,
    ) -> Tensor:
        """Return the context `[s, b, heads/tp * v_head_dim]`."""
        assert self.rotary is not None
        rotary = self.rotary(shared_key.shape[0], shared_key.dtype, shared_key.device)
        query = self._project_query(query, rotary)
        key, value = self._project_key_and_value(latent, shared_key, rotary)
        # Fused kernels require equal widths. Zeros at the end of a head change neither its scores
        # nor the part of the context that is used.
        width = self.config.core_head_dim
        context = self.core_attention(
            self._pad_and_exchange(query, width),
            self._pad_and_exchange(key, width),
            self._pad_and_exchange(value, width),
            documents,
        )
        value_width = self.config.v_head_dim
        if width > value_width:
            by_head = context.unflatten(-1, (-1, width))  # [s, b, heads/tp, width]
            context = by_head[..., :value_width].flatten(2)
        return context

    def _pad_and_exchange(self, x: Tensor, width: int) -> Tensor:
        """Pad heads to `width` elements, and exchange positions for heads where CP requires it."""
        padding = width - x.shape[-1]
        return self.cp.to_heads(F.pad(x, (0, padding)))

    def _project_query(self, latent: Tensor, rotary: Rotary) -> Tensor:
        """Return the queries, `[s, b, heads/tp, 1, qk_width]`."""
        if self.config.q_lora_rank is None:
            query = self.linear_q_proj(latent)
        else:
            query = self.linear_q_up_proj(latent)
        query = query.unflatten(-1, (self.heads, 1, -1))
        plain, rotated = query.split([self.plain, self.rotated], -1)
        rotated = rotate(rotated, rotary)
        query = torch.cat((plain, rotated), -1)
        if self.query_scales is not None:
            query = query * self.query_scales(query.shape[0], query.dtype, query.device)
        return query

    def _project_key_and_value(
        self,
        latent: Tensor,
        shared_key: Tensor,
        rotary: Rotary,
    ) -> tuple[Tensor, Tensor]:
        """Return keys `[s, b, heads/tp, 1, qk_width]`, values `[s, b, heads/tp, 1, v_head_dim]`."""
        # The part without positions differs between heads.
        key_value = self.linear_kv_up_proj(latent)
        key_value = key_value.unflatten(-1, (self.heads, 1, -1))
        widths = [self.plain, self.config.v_head_dim]
        plain, value = key_value.split(widths, -1)
        # The rotated part is the same for all heads.
        one_head = shared_key.unflatten(-1, (1, 1, -1))  # [s, b, 1, 1, rotated]
        rotated = rotate(one_head, rotary)
        rotated = rotated.expand(-1, -1, self.heads, -1, -1)
        key = torch.cat((plain, rotated), -1)
        return key, value
