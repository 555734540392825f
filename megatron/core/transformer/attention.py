"""Self-attention over tensor and context parallelism."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megatron.core.module import MegatronModule, Normal, param_info, set_param_info
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel import TensorParallelRng
from megatron.core.transformer.context_parallel import WHOLE_SEQUENCES, ContextParallel
from megatron.core.transformer.core_attention import CoreAttention
from megatron.core.transformer.layer_spec import layer_spec, output_norm
from megatron.core.transformer.norm import Norm, NormAcrossHeads
from megatron.core.transformer.rotary import RotaryTables, rotate, split_qkv
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
    matrix is a plain concatenation of the ranks' rows. `cp` says how sequences are split, and what is exchanged.
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
        device: torch.device | None = None,
    ) -> None:
        """`number`: of the layer."""
        super().__init__()
        self.config, self.cp = config, cp
        self.across_heads = config.qk_layernorm and config.qk_layernorm_across_heads
        spec = layer_spec(config)
        self.groups = divide(config.query_groups, tp.size, "query groups over the tensor-parallel ranks")
        self.queries_per_group = config.num_attention_heads // config.query_groups
        head_dim = config.head_dim
        projection = config.num_attention_heads * head_dim
        self.linear_proj = spec.row(
            projection,
            config.hidden_size,
            init=Normal(config.output_init_std),
            tp=tp,
            sequence_parallel=sequence_parallel,
            bias=config.add_bias_linear,
            output_norm=output_norm(config, sequence_parallel, device),
            dtype=config.params_dtype,
            device=device,
        )
        normed = config.norm_placement != "post"
        column = partial(spec.norm_column, config) if normed else partial(spec.column, dtype=config.params_dtype)
        self.linear_qkv = column(
            config.hidden_size,
            projection + 2 * config.query_groups * head_dim,
            init=Normal(config.init_method_std),
            tp=tp,
            sequence_parallel=sequence_parallel,
            bias=config.has_qkv_bias,
            device=device,
        )
        weight, blocks = self.linear_qkv.weight, (projection // config.query_groups, head_dim, head_dim)
        set_param_info(weight, replace(param_info(weight), row_blocks=blocks))
        if self.across_heads:
            self.q_layernorm: Norm = NormAcrossHeads(config, config.num_attention_heads, tp, device)
            self.k_layernorm: Norm = NormAcrossHeads(config, config.query_groups, tp, device)
        elif config.qk_layernorm:
            # Each rank normalizes its own heads, so these gradients are partial sums even without sequence parallelism.
            self.q_layernorm = spec.norm(config, head_dim, partial_grad=True, device=device)
            self.k_layernorm = spec.norm(config, head_dim, partial_grad=True, device=device)
        self.rotary, window = None, config.window_of(number)
        if config.position_embedding_type == "rope":
            self.rotary = RotaryTables(
                config,
                cp.attention_axis,
                head_dim,
                config.rotary_interleaved,
                base=config.rotary_base_local if window is not None else None,
                kernel=spec.rope if config.apply_rope_fusion else None,
            )
        scale = config.softmax_scale
        self.core_attention = spec.core_attention(config, tp=tp, rng=rng, cp=cp, scale=scale, window=window)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """`[s, b, h]` (or `[s/tp, b, h]`) to the same; `attention_mask` `[b, 1, s, s]`, True = forbidden.

        Under context parallelism s counts the positions of this rank; the last dimension of the mask, and with a2a the
        one before, is the whole sequence.
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
        context = self.core_attention(query, key, value, attention_mask)
        return self.linear_proj(self.cp.to_sequence(context))
