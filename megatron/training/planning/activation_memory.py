"""Bytes of activations that a pass through a model keeps for backward, and holds temporarily.

The method is that of Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large
Transformer Models"). The terms are those of this code, which keeps fewer tensors: a norm its input,
a linear layer its input, attention the query, key, value, output and one number per row, the gated
MLP one input, the loss its logits once. A fused attention kernel is assumed, and dropout with one
byte per element, as on CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.parallel_state import ParallelConfig
from megatron.core.tensor_parallel import compute_padded_vocab_size, get_loss_chunk_elements
from megatron.core.transformer.attention.core import supports_grouped_heads
from megatron.core.transformer.attention.kernels import SCORES_AT_ONCE
from megatron.core.transformer.transformer_config import LayerKind, TransformerConfig
from megatron.training.config.run_config import Config

FP32 = 4  # bytes


class ActivationMemory:
    """Activations of one micro-batch of `[s, b]` tokens on one tensor- and context-parallel rank.

    All sizes are in bytes. `vocab_rows` is the number of rows of the output matrix on this rank,
    including padding. With `documents`, attention stays within documents (--reset-attention-mask).
    """

    def __init__(
        self,
        model: TransformerConfig,
        parallel: ParallelConfig,
        seq_length: int,
        micro_batch_size: int,
        vocab_rows: int,
        documents: bool = False,
        device_type: str = "cuda",
    ) -> None:
        self.config = model
        self.parallel = parallel
        self.seq_length = seq_length
        self.vocab_rows = vocab_rows
        self.documents = documents
        self.device_type = device_type
        self.tp_size = parallel.tp_size
        self.cp_size = parallel.cp_size
        self.sequence_parallel = parallel.sequence_parallel
        self.itemsize = model.params_dtype.itemsize

        # Inside tensor-parallel regions a rank has all tokens of its context-parallel part. Outside
        # of them, under sequence parallelism, it has only its share.
        self.tokens = seq_length * micro_batch_size // parallel.cp_size
        self.local_tokens = self.tokens // self.tp_size if self.sequence_parallel else self.tokens

        # Tensors by shape.
        self.whole = self.tokens * model.hidden_size * self.itemsize  # [s/cp, b, h]
        self.residual = self.local_tokens * model.hidden_size * self.itemsize  # between layers
        self.inner = self._shard(model.ffn_size)  # [s/cp, b, ffn/tp]
        self.logits = self.tokens * vocab_rows * self.itemsize  # [s/cp, b, v/tp]
        # [s/cp, b, d] of each head, divided by TP. Kernels use one width for queries, keys and
        # values.
        self.per_head = self._shard(max(model.qk_width, model.v_width))
        self.key_values = 2 * self.per_head * model.query_groups  # all groups of this rank
        self.context = self._shard(model.v_width * model.num_attention_heads)
        # Bytes per row that a norm keeps in fp32: RMSNorm the scale, LayerNorm also the mean.
        self.normalizer = FP32 if model.normalization == "RMSNorm" else 2 * FP32
        self.mlp_inputs = 2 if model.gated else 1  # widths of the first matrix of the MLP

    @classmethod
    def from_run(cls, config: Config, device_type: str) -> ActivationMemory:
        """Return the activations of the micro-batches of a run."""
        model = config.model
        parallel = config.parallel
        assert model.vocab_size is not None
        vocab_rows = compute_padded_vocab_size(
            model.vocab_size, config.tokenizer.make_vocab_size_divisible_by, parallel.tp_size
        )
        return cls(
            model,
            parallel,
            config.data.seq_length,
            config.training.micro_batch_size,
            vocab_rows // parallel.tp_size,
            config.data.reset_attention_mask,
            device_type,
        )

    def _shard(self, width: int) -> int:
        """Return the bytes of `[s/cp, b, width / tp]`."""
        return self.tokens * width // self.tp_size * self.itemsize

    # Kinds of attention.

    def _exchanges_heads(self, kind: LayerKind) -> bool:
        """Whether attention over CP exchanges positions for heads (all-to-all)."""
        return self.cp_size > 1 and kind.cp_comm_type == "a2a"

    def _is_blockwise(self, kind: LayerKind) -> bool:
        """Whether attention is computed in blocks instead of by a fused kernel."""
        in_documents = self.documents and not self.config.attention_dropout
        over_ranks = self.cp_size > 1 and not self._exchanges_heads(kind)
        return self.config.attends_in_blocks or over_ranks or in_documents

    def _needs_mask(self, kind: LayerKind) -> bool:
        return self.documents or kind.window or self.config.position_embedding_type == "alibi"

    # Kept from forward to backward.

    def layer(self, kind: LayerKind) -> int:
        """Return the bytes that a layer keeps, including its input."""
        c = self.config
        num_norms = self._count_kept_norms(kind)
        total = 2 * self.residual + num_norms * self.local_tokens * self.normalizer
        if not c.recomputes("layernorm"):
            total += num_norms * self.residual  # the inputs of the linear layers
        if c.norm_placement == "both":
            total += 2 * (self.residual + self.local_tokens * self.normalizer)
        total += self._latents() if c.multi_latent_attention else self._qk_norms()
        total += self.context if c.recomputes("mla_up_proj") else self._core_attention(kind)
        if not self.recomputes_mlp(kind):
            total += self._mlp(kind)
        if c.hidden_dropout:
            total += 2 * self.local_tokens * c.hidden_size
        return total

    def _count_kept_norms(self, kind: LayerKind) -> int:
        """Return how many of the two norms keep their result: the MLP's norm is recomputed with
        it.
        """
        return 1 if self.recomputes_mlp(kind) and not kind.experts else 2

    def recomputes_mlp(self, kind: LayerKind) -> bool:
        """Whether backward computes the MLP again."""
        return self.config.recomputes("moe" if kind.experts else "mlp")

    def _core_attention(self, kind: LayerKind) -> int:
        """Return the bytes that attention keeps, from queries, keys and values to the input of the
        output projection.
        """
        c = self.config
        num_heads = c.num_attention_heads
        keeps_groups = self._is_blockwise(kind) or supports_grouped_heads(
            self.device_type, c.params_dtype, self._needs_mask(kind)
        )
        num_groups = c.query_groups if keeps_groups else num_heads
        total = self.per_head * (num_heads + 2 * num_groups) + self.context
        if c.recomputes("core_attn"):
            return total
        if self._exchanges_heads(kind) or c.v_width < c.qk_width:
            # The output of the kernel exists besides the input of the projection.
            total += self.per_head * num_heads
        log_sum_exp = self.tokens * num_heads // self.tp_size * FP32
        return total + log_sum_exp + self._mask(kind)

    def _qk_norms(self) -> int:
        """Return the bytes of the heads before and after their norm."""
        c = self.config
        if not c.qk_layernorm:
            return 0
        num_heads = c.num_attention_heads + c.query_groups
        return self.per_head * num_heads + self.tokens * num_heads // self.tp_size * self.normalizer

    def _latents(self) -> int:
        """Return the bytes of the compressed queries and keys of latent attention, before and after
        their norm, and of the shared part of the keys.
        """
        c = self.config
        widths = [width for width in (c.q_lora_rank, c.kv_lora_rank) if width is not None]
        total = self.local_tokens * (sum(widths) + c.qk_pos_emb_head_dim) * self.itemsize
        if c.recomputes("mla_up_proj"):
            return total + self.tokens * c.qk_pos_emb_head_dim * self.itemsize
        if c.qk_layernorm:
            normed = 0 if c.recomputes("layernorm") else sum(widths) * self.itemsize
            total += self.local_tokens * (normed + len(widths) * self.normalizer)
        return total

    def _mlp(self, kind: LayerKind) -> int:
        """Return the bytes that the MLP keeps; experts are assumed to be evenly loaded."""
        c = self.config
        if not kind.experts:
            return (self.mlp_inputs + 1) * self.inner
        etp_size = self.parallel.etp_size
        # The rows of each chosen expert: input, values around the activation, its product, places.
        rows = self.local_tokens * c.moe_router_topk * etp_size
        inner = rows * c.moe_ffn_size // etp_size * self.itemsize
        num_inner = self.mlp_inputs + (0 if c.recomputes("moe_act") else 2)
        total = rows * c.hidden_size * self.itemsize + num_inner * inner
        total += 4 * 8 * rows
        # The router keeps three tensors of scores in fp32.
        total += 3 * self.local_tokens * c.experts * FP32
        shared = self._shard(c.moe_shared_expert_intermediate_size or 0)
        return total + (self.mlp_inputs + 1) * shared

    def _mask(self, kind: LayerKind) -> int:
        """Return the bytes of the additive form of a boolean mask.

        Causal order alone needs none; attention in blocks computes its masks again.
        """
        if self._is_blockwise(kind):
            return 0
        if self.documents:
            return self.tokens * self.cp_size * self.seq_length * (1 + self.itemsize)
        return self.seq_length**2 * self.itemsize if kind.window else 0

    @property
    def head(self) -> int:
        """Bytes that the final norm and the loss keep."""
        # Per token: sum of exponentials (fp32), column (int64), whether this rank has it; losses
        # and mask (three in fp32).
        per_token = 4 + 8 + 1 + 3 * FP32
        return 2 * self.residual + self.logits + self.tokens * per_token + self.local_tokens * 8

    # Kept between iterations.

    def tables(self, kinds: Sequence[LayerKind]) -> int:
        """Return the bytes that the layers of a chunk share: rotary tables, fixed masks."""
        by_exchange = {self._exchanges_heads(kind): kind for kind in kinds}
        return sum(map(self._tables, by_exchange.values()))

    def _tables(self, kind: LayerKind) -> int:
        c = self.config
        blockwise = self._is_blockwise(kind)
        total = 0
        if c.position_embedding_type == "rope" or c.multi_latent_attention:
            only_own_positions = blockwise or c.multi_latent_attention
            positions = self.seq_length // self.cp_size if only_own_positions else self.seq_length
            width = c.qk_pos_emb_head_dim if c.multi_latent_attention else c.head_dim
            total += positions * int(width * c.rotary_percent) * self.itemsize
        scores = self.seq_length**2 // self.cp_size
        if c.position_embedding_type == "alibi":
            total += scores * c.num_attention_heads // self.tp_size * self.itemsize
        elif c.window_size is not None or (self.documents and (self.cp_size > 1 or not blockwise)):
            total += scores * self.itemsize if blockwise else self.seq_length**2
        return total

    # Held during backward.

    def layer_backward(self, kind: LayerKind) -> int:
        """Return the maximum bytes that backward of a layer holds beyond what the layer keeps."""
        c = self.config
        # Recomputed values exist again for a while: the output of the norm, the MLP with its norm,
        # and the heads (when the MLP is gone).
        recomputed = self.residual if c.recomputes("layernorm") else 0
        if self.recomputes_mlp(kind):
            recomputed += self._mlp(kind) + (2 - self._count_kept_norms(kind)) * self.residual
        heads = 0
        if c.recomputes("mla_up_proj"):
            heads = self._core_attention(kind) - self.context
        # A gradient that is not fp32 exists on its own before it is added to the fp32 buffer.
        weight_grad = 0
        if self.itemsize < FP32:
            weight_grad = c.hidden_size * c.ffn_size // self.tp_size * self.itemsize

        # The moments at which the most can be held. The MLP and its input are gone at the first
        # and the last.
        attention = self._attention_backward(kind) + heads - self._mlp(kind) - self.residual
        gathered = self.whole if self.sequence_parallel else 0
        second_linear = gathered + self.inner + weight_grad
        # The gradient, its product, and a temporary instead of the input of the second linear.
        activation = (3 if c.gated else 1) * self.inner
        first_linear = self.whole + self.mlp_inputs * weight_grad - self.inner
        if self.sequence_parallel:
            first_linear += self.whole + self.residual
        # Three temporaries in fp32, and the gradient in the dtype of the model.
        norm = 3 * self.residual * FP32 // self.itemsize - self._mlp(kind)
        most = max(attention, second_linear, activation, first_linear, norm)

        # The gradient of the residual stream exists throughout.
        return self.residual + recomputed + most

    def _attention_backward(self, kind: LayerKind) -> int:
        """Return the bytes of gradients and scores during backward of blockwise or exchanged
        attention.
        """
        output = self.per_head * self.config.num_attention_heads
        exchange = 0
        if self._exchanges_heads(kind):
            # The output, and queries, keys and values before and after their exchange.
            exchange = output + 3 * (output + self.key_values)
        if not self._is_blockwise(kind):
            return exchange
        # Gradients of the output, and of the queries in fp32.
        queries = output + output * FP32 // self.itemsize + self._plain_scores()
        if self.cp_size == 1 or self._exchanges_heads(kind):
            parts = output + 2 * self.key_values  # of one block, and of all
        elif kind.cp_comm_type == "p2p":
            # Two parts in transit, two gradients, those of one block.
            parts = output + 5 * self.key_values
        else:
            # All parts, their gradients, and these in one piece.
            parts = 3 * self.cp_size * self.key_values
        return max(exchange, queries + parts)

    def _plain_scores(self) -> int:
        """Return the bytes of the plain kernel, which caps scores: scores, their tanh, the gradient
        and a factor of it, in fp32.
        """
        if self.config.attn_logit_softcapping is None:
            return 0
        positions = self.seq_length // self.cp_size
        num_heads = self.config.num_attention_heads // self.tp_size
        batch = self.tokens // positions
        per_row = batch * num_heads * self.seq_length // self.cp_size
        rows = max(1, min(positions, SCORES_AT_ONCE // per_row))
        copy = self.itemsize if self.itemsize < FP32 else 0
        return rows * per_row * (4 * FP32 + copy)

    @property
    def head_backward(self) -> int:
        """Bytes that backward of the loss holds beyond `head`: the gradient replaces the logits."""
        extra = self.whole
        if self.sequence_parallel:
            extra += self.whole + self.residual
        if self.itemsize == FP32:
            return extra
        extra += self.vocab_rows * self.config.hidden_size * self.itemsize
        num_logits = self.logits // self.itemsize
        return max(extra, FP32 * min(get_loss_chunk_elements(self.device_type), num_logits))

    # Chunks.

    def kept(self, kinds: Sequence[LayerKind]) -> int:
        """Return the bytes that layers of these kinds keep from forward to backward of a
        micro-batch.
        """
        num_inputs, num_stored = self._split_recomputed(len(kinds))
        return num_inputs * self.residual + self._layers(kinds[len(kinds) - num_stored :])

    def backward(self, kinds: Sequence[LayerKind], post_process: bool) -> int:
        """Return the maximum bytes that backward of a chunk holds beyond what it keeps."""
        num_layers = len(kinds)
        num_inputs, num_stored = self._split_recomputed(num_layers)
        stored = kinds[num_layers - num_stored :]
        head = self.head if post_process else 0
        # The moments at which the most can be held; a chunk can have the embedding alone.
        peaks = [0] if not kinds else []
        if post_process:
            peaks.append(self.head_backward)
        for kind in set(stored):
            peaks.append(self.layer_backward(kind) - head)
        if num_inputs:
            for group in self._split_groups(kinds[: num_layers - num_stored]):
                again = self._layers(group) - self.residual  # the input of the group is kept
                peak = again + max(self.layer_backward(kind) for kind in group)
                peaks.append(peak - self._layers(stored) - head)
        return max(peaks)

    def count_recomputed_layers(self, num_layers: int) -> int:
        """Return the number of layers, the first of a chunk, whose whole forward runs twice."""
        _, num_stored = self._split_recomputed(num_layers)
        return num_layers - num_stored

    def _layers(self, kinds: Sequence[LayerKind]) -> int:
        return sum(kinds.count(kind) * self.layer(kind) for kind in set(kinds))

    def _split_recomputed(self, num_layers: int) -> tuple[int, int]:
        """Return the number of groups that keep only their input, and of layers that keep all."""
        c = self.config
        if c.recompute_granularity != "full":
            return 0, num_layers
        assert c.recompute_num_layers is not None
        if c.recompute_method == "uniform":
            return -(-num_layers // c.recompute_num_layers), 0
        num_groups = min(c.recompute_num_layers, num_layers)
        return num_groups, num_layers - num_groups

    def _split_groups(self, kinds: Sequence[LayerKind]) -> list[Sequence[LayerKind]]:
        """Return the groups of layers that are recomputed together."""
        c = self.config
        assert c.recompute_num_layers is not None
        size = min(c.recompute_num_layers, len(kinds)) if c.recompute_method == "uniform" else 1
        return [kinds[start : start + size] for start in range(0, len(kinds), size)]
