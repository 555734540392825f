"""Self-attention over tensor and context parallelism."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.module import MegatronModule, Normal, param_info, set_param_info
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, TensorParallelRng, checkpoint
from megatron.core.transformer.attention_mask import AttentionMask
from megatron.core.transformer.blockwise_attention import blockwise_attention
from megatron.core.transformer.context_parallel import WHOLE_SEQUENCES, ContextParallel
from megatron.core.transformer.norm import Norm
from megatron.core.transformer.rotary import RotaryTables, rotate, split_qkv
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide


class CoreAttention(MegatronModule):
    """Softmax of scores, times values: heads are split over TP, positions over `cp`, which says what is exchanged.

    `scale` multiplies the scores; None means 1 / sqrt(d).
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        tp: Axis,
        rng: TensorParallelRng,
        cp: ContextParallel = WHOLE_SEQUENCES,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.config, self.rng, self.cp, self.scale = config, rng, cp, scale
        heads = cp.head_axis
        self.mask = AttentionMask(config, (tp.rank * heads.size + heads.rank, tp.size * heads.size))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None) -> Tensor:
        """`[s, b, g, heads, d]` each, of keys and values with 1 for heads; returns `[s, b, g * heads * d]`."""
        if self.config.recomputes("core_attn") and self.training:
            return checkpoint(self._attend, self.rng, query, key, value, attention_mask)
        return self._attend(query, key, value, attention_mask)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None) -> Tensor:
        length, batch = query.shape[:2]
        split_over = self.cp.attention_axis
        # [s, b, heads/tp, d] -> [b, heads/tp, s, d], views: the kernels take any strides and answer with the same
        q, k, v = (x.flatten(2, 3).permute(1, 2, 0, 3) for x in (query, key, value))
        dropout = self.config.attention_dropout if self.training else 0.0
        if split_over.size > 1:
            assert dropout == 0.0, "the kernels that give a log-sum-exp have no dropout on every device"
            exchange = (split_over, self.cp.comm_type)
            context = blockwise_attention(q, k, v, self.mask, attention_mask, *exchange, scale=self.scale)
        elif dropout == 0.0:
            context = self._sdpa(q, k, v, attention_mask, 0.0)
        else:
            with self.rng.fork():
                context = self._sdpa(q, k, v, attention_mask, dropout)
        return context.permute(2, 0, 1, 3).reshape(length, batch, -1)

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, dropout: float) -> Tensor:
        mask = self.mask(q.shape[2], attention_mask, q.dtype, q.device)
        grouped = q.shape[1] > k.shape[1]
        if grouped and not takes_groups(q.device.type, q.dtype, mask is not None):
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
            grouped = False
        return F.scaled_dot_product_attention(
            q, k, v, mask, dropout_p=dropout, is_causal=mask is None, scale=self.scale, enable_gqa=grouped
        )


class Attention(MegatronModule):
    """What all kinds of attention have: positions and a core."""

    rotary: RotaryTables | None
    core_attention: CoreAttention

    def share_tables(self, other: Attention) -> None:
        """Use the rotary tables and fixed masks of a layer of the same kind: they are as large as the sequence."""
        self.rotary, self.core_attention.mask = other.rotary, other.core_attention.mask


class SelfAttention(Attention):
    """Query groups are split over TP: a rank has whole groups, each some query heads with their key and value head.

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
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.config, self.cp = config, cp
        self.groups = divide(config.query_groups, tp.size, "query groups over the tensor-parallel ranks")
        self.queries_per_group = config.num_attention_heads // config.query_groups
        head_dim, dtype = config.head_dim, config.params_dtype
        projection = config.num_attention_heads * head_dim
        self.linear_proj = RowParallelLinear(
            projection,
            config.hidden_size,
            init=Normal(config.output_init_std),
            tp=tp,
            sequence_parallel=sequence_parallel,
            bias=config.add_bias_linear,
            dtype=dtype,
            device=device,
        )
        self.linear_qkv = ColumnParallelLinear(
            config.hidden_size,
            projection + 2 * config.query_groups * head_dim,
            init=Normal(config.init_method_std),
            tp=tp,
            sequence_parallel=sequence_parallel,
            bias=config.has_qkv_bias,
            dtype=dtype,
            device=device,
        )
        weight, blocks = self.linear_qkv.weight, (projection // config.query_groups, head_dim, head_dim)
        set_param_info(weight, replace(param_info(weight), row_blocks=blocks))
        # Each rank normalizes its own heads, so these gradients are partial sums even without sequence parallelism.
        if config.qk_layernorm:
            self.q_layernorm = Norm(config, head_dim, partial_grad=True, device=device)
            self.k_layernorm = Norm(config, head_dim, partial_grad=True, device=device)
        self.rotary = None
        if config.position_embedding_type == "rope":
            self.rotary = RotaryTables(config, cp.attention_axis, head_dim, config.rotary_interleaved)
        self.core_attention = CoreAttention(config, tp=tp, rng=rng, cp=cp)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """`[s, b, h]` (or `[s/tp, b, h]`) to the same; `attention_mask` `[b, 1, s, s]`, True = forbidden.

        Under context parallelism s counts the positions of this rank; the last dimension of the mask, and with a2a the
        one before, is the whole sequence.
        """
        mixed = self.linear_qkv(hidden_states)  # [s, b, (heads + 2 groups) / tp * d]
        mixed = mixed.view(*mixed.shape[:2], self.groups, self.queries_per_group + 2, self.config.head_dim)
        mixed = self.cp.to_heads(mixed)
        rotary = self.rotary(mixed.shape[0], mixed.dtype, mixed.device) if self.rotary is not None else None
        if self.config.qk_layernorm:
            query, key, value = split_qkv(mixed, self.queries_per_group, None)
            query, key = self.q_layernorm(query), self.k_layernorm(key)
            if rotary is not None:
                query, key = rotate(query, rotary), rotate(key, rotary)
        else:
            query, key, value = split_qkv(mixed, self.queries_per_group, rotary)
        context = self.core_attention(query, key, value, attention_mask)
        return self.linear_proj(self.cp.to_sequence(context))


def takes_groups(device_type: str, dtype: torch.dtype, masked: bool) -> bool:
    """Whether a fused kernel takes fewer key and value heads than query heads.

    On CUDA that is flash attention alone, which has no masks and no fp32. Without it torch would fall back to plain
    matrix products that keep all probabilities; copies of keys and values for every query head cost far less.
    """
    return device_type != "cuda" or (not masked and dtype in (torch.float16, torch.bfloat16))
