"""Bytes of activations that a pass through a model keeps for backward, and holds temporarily.

The method is that of Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large
Transformer Models"). The terms are those of this code, which keeps fewer tensors: a norm its input,
a linear layer its input, attention the query, key, value, output and one number per row, the gated
MLP one input, the loss its logits once. A fused attention kernel is assumed, except on a CPU with
attention dropout: torch has no such kernel, and keeps scores `[b, heads / tp, s, s]`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron.core.parallel_config import ParallelConfig
from megatron.core.tensor_parallel import compute_padded_vocab_size, get_loss_chunk_elements
from megatron.core.transformer.attention.core import supports_grouped_heads
from megatron.core.transformer.attention.kernels import SCORES_AT_ONCE, supports_flash
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
        # of them, with sequence parallelism, it has only its shard.
        self.tokens = seq_length * micro_batch_size // parallel.cp_size
        self.local_tokens = self.tokens
        if self.sequence_parallel:
            self.local_tokens //= self.tp_size

        # Tensors by shape.
        self.whole = self.tokens * model.hidden_size * self.itemsize  # [s/cp, b, h]
        self.residual = self.local_tokens * model.hidden_size * self.itemsize  # between layers
        self.inner = self._shard(model.ffn_size)  # [s/cp, b, ffn/tp]
        self.logits = self.tokens * vocab_rows * self.itemsize  # [s/cp, b, v/tp]
        # [s/cp, b, d] of each head, divided by TP. Kernels use one width for queries, keys and
        # values.
        self.per_head = self._shard(model.core_head_dim)
        self.key_values = 2 * self.per_head * model.query_groups  # all groups of this rank
        self.context = self._shard(model.v_width * model.num_attention_heads)
        # Bytes per row that a norm keeps in fp32: LayerNorm the scale and the mean, RMSNorm only
        # the scale.
        self.normalizer = 2 * FP32
        if model.normalization == "RMSNorm":
            self.normalizer = FP32
        # Output widths of the first matrix of the MLP that its activation keeps: a gated one has
        # gate and up projection, and ReLU keeps its result only.
        self.mlp_inputs = 1 + model.gated
        if model.relu:
            self.mlp_inputs = 0

    @classmethod
    def from_run(cls, config: Config, device_type: str) -> ActivationMemory:
        """Return the activations of the micro-batches of a run."""
        model = config.model
        parallel = config.parallel
        assert model.vocab_size is not None
        # The vocabulary is padded before it is split over TP.
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
        """Return whether attention over CP exchanges positions for heads (all-to-all)."""
        return self.cp_size > 1 and kind.cp_comm_type == "a2a"

    def _is_blockwise(self, kind: LayerKind) -> bool:
        """Return whether attention is computed in blocks instead of by a fused kernel."""
        if self.config.attends_in_blocks:
            return True
        # Over CP ranks the blocks are those of other ranks.
        if self.cp_size > 1 and not self._exchanges_heads(kind):
            return True
        # Documents are blocks, unless dropout requires the kernel of torch.
        return self.documents and not self.config.attention_dropout

    def _keeps_scores(self, kind: LayerKind) -> bool:
        """Return whether attention falls back to plain matrix products, which keep all scores."""
        has_dropout = self.config.attention_dropout > 0
        return self.device_type == "cpu" and has_dropout and not self._is_blockwise(kind)

    def _needs_mask(self, kind: LayerKind) -> bool:
        """Return whether attention needs a mask besides causal order."""
        has_slopes = self.config.position_embedding_type == "alibi"
        return self.documents or has_slopes or (kind.window and not self._has_flash_window(kind))

    def _has_flash_window(self, kind: LayerKind) -> bool:
        """Return whether flash attention applies the window of layers of this kind, if any."""
        model = self.config
        has_slopes = model.position_embedding_type == "alibi"
        over_ranks = self.cp_size > 1 and not self._exchanges_heads(kind)
        if has_slopes or over_ranks or model.attention_dropout or model.attn_logit_softcapping:
            return False
        return supports_flash(self.device_type, model.params_dtype, model.core_head_dim)

    # Kept from forward to backward.

    def count_layer(self, kind: LayerKind) -> int:
        """Return the bytes that a layer keeps, including its input."""
        model = self.config

        # The inputs of attention and of the MLP on the residual stream, and their norms.
        norm_statistics = self.local_tokens * self.normalizer
        num_norms = self._count_kept_norms(kind)
        total = self._count_residual_inputs() + num_norms * norm_statistics
        if not model.recomputes("layernorm") or model.share_parallel_norm:
            total += num_norms * self.residual  # the inputs of the linear layers
        if model.norm_placement == "both":
            # Norms after the branches keep the output of the branch.
            total += 2 * (self.residual + norm_statistics)

        # Attention.
        if model.multi_latent_attention:
            total += self._count_latents()
        else:
            total += self._count_qk_norms()
            total += self._count_limits_and_gates()
        if model.recomputes("mla_up_proj"):
            total += self.context
        else:
            total += self._count_core_attention(kind)

        # The MLP, and the dropout masks after attention and MLP.
        if not self.recomputes_mlp(kind):
            total += self._count_mlp(kind)
        if model.hidden_dropout:
            mask = self.local_tokens * model.hidden_size  # one byte per element
            if self.device_type == "cpu":
                mask = self.residual  # in the dtype of the model
            total += 2 * mask
        return total

    def _count_residual_inputs(self) -> int:
        """Return the bytes of the different inputs of attention and MLP on the residual stream."""
        if self.config.parallel_residual:
            return self.residual
        return 2 * self.residual

    def _count_kept_norms(self, kind: LayerKind) -> int:
        """Return the number of norms, of at most two, that keep their result.

        The norm of a dense MLP is recomputed together with the MLP, unless attention shares it.
        """
        if self.config.share_parallel_norm:
            return 1
        recomputes_mlp_norm = self.recomputes_mlp(kind) and not kind.experts
        return 2 - recomputes_mlp_norm

    def recomputes_mlp(self, kind: LayerKind) -> bool:
        """Return whether backward computes the MLP again."""
        module = "moe" if kind.experts else "mlp"
        return self.config.recomputes(module)

    def _count_core_attention(self, kind: LayerKind) -> int:
        """Return the bytes that attention keeps, from queries, keys and values to the input of the
        output projection.
        """
        model = self.config
        num_heads = model.num_attention_heads

        # Keys and values are repeated for all heads unless the kernel supports groups of heads.
        keeps_groups = self._is_blockwise(kind) or supports_grouped_heads(
            self.device_type, model.params_dtype, self._needs_mask(kind)
        )
        num_groups = num_heads
        if keeps_groups:
            num_groups = model.query_groups
        queries = self.per_head * num_heads
        keys_and_values = 2 * self.per_head * num_groups
        total = queries + keys_and_values + self.context
        if model.recomputes("core_attn"):
            return total
        if self._keeps_scores(kind):
            return self.context + self._count_kept_scores() + self._count_mask(kind)

        if self._exchanges_heads(kind) or model.v_width < model.qk_width:
            # The output of the kernel is a tensor of its own, not the input of the projection.
            total += self.per_head * num_heads
        # One number per token and head, from which backward computes the probabilities again.
        num_rows = self.tokens * num_heads // self.tp_size
        log_sum_exp = num_rows * FP32
        return total + log_sum_exp + self._count_mask(kind)

    @property
    def scores(self) -> int:
        """Bytes of `[b, heads / tp, s, s]` in fp32."""
        num_heads = self.config.num_attention_heads
        return self.tokens * self.seq_length * num_heads // self.tp_size * FP32

    def _count_kept_scores(self) -> int:
        """Return the bytes that plain matrix products with dropout keep, in fp32."""
        # Queries, keys and values, the latter two repeated for all heads.
        heads = 3 * self.per_head * self.config.num_attention_heads
        wide_heads = heads * FP32 // self.itemsize
        # Probabilities, the mask of the dropout, and their product.
        return wide_heads + 3 * self.scores

    def _count_qk_norms(self) -> int:
        """Return the bytes of the heads before and after their norm."""
        model = self.config
        if not model.qk_layernorm:
            return 0
        # Of the queries and keys, each head of a token is normalized separately.
        num_heads = model.num_attention_heads + model.query_groups
        num_rows = self.tokens * num_heads // self.tp_size
        inputs = self.per_head * num_heads
        return inputs + num_rows * self.normalizer

    def _count_limits_and_gates(self) -> int:
        """Return the bytes that --clip-qkv and --attention-output-gate keep."""
        model = self.config
        total = 0
        if model.clip_qkv is not None:
            total += self.per_head * model.num_attention_heads + self.key_values
        if model.attention_output_gate:
            # The sigmoid of the gates, and its product with the context.
            total += 2 * self.context
        return total

    def _count_latents(self) -> int:
        """Return the bytes of the compressed queries and keys of latent attention, before and after
        their norm, and of the shared part of the keys.
        """
        model = self.config
        # Queries may be projected from the residual stream directly.
        num_latents = 1
        latent_width = model.kv_lora_rank
        if model.q_lora_rank is not None:
            num_latents += 1
            latent_width += model.q_lora_rank
        key_width = model.qk_pos_emb_head_dim  # of the part that all heads share

        latents = self.local_tokens * latent_width * self.itemsize
        local_keys = self.local_tokens * key_width * self.itemsize
        total = latents + local_keys
        if model.recomputes("mla_up_proj"):
            # The up-projections start from the gathered keys.
            gathered_keys = self.tokens * key_width * self.itemsize
            return total + gathered_keys
        if model.qk_layernorm:
            total += self.local_tokens * num_latents * self.normalizer
            if not model.recomputes("layernorm"):
                total += latents
        return total

    def _count_mlp(self, kind: LayerKind) -> int:
        """Return the bytes that the MLP keeps; the load of experts is assumed to be balanced."""
        model = self.config
        num_dense = self.mlp_inputs + 1  # tensors before the activation, and its result
        if not kind.experts:
            return num_dense * self.inner

        # One row per chosen expert of each token: the input, the values before the activation
        # and, unless recomputed, two after it.
        etp_size = self.parallel.etp_size
        rows = self.local_tokens * model.moe_router_topk * etp_size
        inputs = rows * model.hidden_size * self.itemsize
        inner = rows * model.moe_ffn_size // etp_size * self.itemsize
        num_inner = self.mlp_inputs
        if not model.recomputes("moe_act"):
            num_inner += 2
        total = inputs + num_inner * inner
        # Four int64 indices per row for the dispatch.
        total += 4 * 8 * rows
        # The router keeps three tensors of scores in fp32.
        scores = self.local_tokens * model.experts * FP32
        total += 3 * scores

        # Shared experts are a dense MLP for all tokens.
        shared_width = model.moe_shared_expert_intermediate_size or 0
        return total + num_dense * self._shard(shared_width)

    def _count_mask(self, kind: LayerKind) -> int:
        """Return the bytes of the additive form of a boolean mask.

        Causal order alone needs no mask; blockwise attention recomputes its masks.
        """
        if self._is_blockwise(kind):
            return 0
        if self.documents:
            # Documents differ between sequences: a boolean mask of each, and its additive form.
            num_scores = self.tokens * self.cp_size * self.seq_length
            if self._keeps_scores(kind):
                return num_scores
            return num_scores * (1 + self.itemsize)
        if kind.window and not self._has_flash_window(kind) and not self._keeps_scores(kind):
            return self.seq_length**2 * self.itemsize
        return 0

    @property
    def head(self) -> int:
        """Bytes that the final norm and the loss keep."""
        # Per token: sum of exponentials (fp32), column (int64), whether this rank has it; losses
        # and mask (three in fp32).
        per_token = 4 + 8 + 1 + 3 * FP32
        statistics = self.tokens * per_token
        # The norm keeps its input and result, and at most two numbers in fp32 per token.
        norm = 2 * self.residual + self.local_tokens * 8
        return norm + self.logits + statistics

    def count_losses(self, post_process: bool, num_mtp_layers: int) -> int:
        """Return the bytes that final norms and losses of a chunk keep.

        Each layer for multi-token prediction has a norm and a loss of its own.
        """
        if not post_process:
            return 0
        return (1 + num_mtp_layers) * self.head

    def count_mtp(self, kinds: Sequence[LayerKind]) -> int:
        """Return the bytes that layers for multi-token prediction keep besides norm and loss."""
        total = 0
        for kind in kinds:
            # The embedding of the shifted tokens. The other input is the result of a final norm.
            total += self.residual
            if self.config.recomputes_mtp:
                total -= self.residual  # the input of the final norm is not kept
                continue
            total += self._count_mtp_layer(kind)
        return total

    def _count_mtp_layer(self, kind: LayerKind) -> int:
        """Return the bytes of the normed inputs next to each other, and of the layer."""
        norm_statistics = self.local_tokens * self.normalizer
        return 2 * (self.residual + norm_statistics) + self.count_layer(kind)

    # Kept between iterations.

    def count_tables(self, kinds: Sequence[LayerKind]) -> int:
        """Return the bytes that the layers of a chunk share: rotary tables, fixed masks."""
        # Layers that exchange heads share one set of tables, all other layers another one.
        kind_by_exchange = {}
        for kind in kinds:
            kind_by_exchange[self._exchanges_heads(kind)] = kind
        return sum(map(self._count_layer_tables, kind_by_exchange.values()))

    def _count_layer_tables(self, kind: LayerKind) -> int:
        """Return the bytes of the rotary table and the fixed mask of layers of this kind."""
        model = self.config
        is_latent = model.multi_latent_attention
        is_blockwise = self._is_blockwise(kind)
        total = 0

        # The rotary table: [positions, width]
        if model.position_embedding_type == "rope" or is_latent:
            positions = self.seq_length
            if is_blockwise or is_latent:
                positions //= self.cp_size  # only those of this rank
            width = model.qk_pos_emb_head_dim if is_latent else model.head_dim
            rotated_width = int(width * model.rotary_percent)
            total += positions * rotated_width * self.itemsize

        # The fixed mask: a bias per score in blocks, otherwise one boolean per pair of positions.
        num_pairs = self.seq_length**2
        num_scores = num_pairs // self.cp_size
        documents_need_mask = self.documents and (self.cp_size > 1 or not is_blockwise)
        has_window_mask = model.window_size is not None and not self._has_flash_window(kind)
        if model.position_embedding_type == "alibi":
            # ALiBi has another slope for each head.
            num_biases = num_scores * model.num_attention_heads // self.tp_size
            total += num_biases * self.itemsize
        elif has_window_mask or documents_need_mask:
            mask = num_pairs
            if is_blockwise:
                mask = num_scores * self.itemsize
            total += mask
        return total

    # Held during backward.

    def count_layer_backward(self, kind: LayerKind) -> int:
        """Return the maximum bytes that backward of a layer holds in addition to those it keeps."""
        model = self.config
        mlp = self._count_mlp(kind)

        # Recomputed values exist again for a while: the output of the norm, the MLP with its norm,
        # and the heads (when the MLP is freed).
        recomputed = 0
        if model.recomputes("layernorm"):
            recomputed += self.residual
        if self.recomputes_mlp(kind):
            num_recomputed_norms = 0
            if not model.share_parallel_norm:
                num_recomputed_norms = 2 - self._count_kept_norms(kind)
            recomputed += mlp + num_recomputed_norms * self.residual
        heads = 0
        if model.recomputes("mla_up_proj"):
            heads = self._count_core_attention(kind) - self.context
        # A gradient that is not fp32 is a tensor of its own before it is added to the fp32 buffer.
        weight_grad = 0
        if self.itemsize < FP32:
            num_elements = model.hidden_size * model.ffn_size // self.tp_size
            weight_grad = num_elements * self.itemsize

        # The moments at which the most can be held, in the order of backward from the second
        # linear layer of the MLP to attention. MLP and input are freed for the norm and attention.
        second_linear = self.inner + weight_grad
        if self.sequence_parallel:
            second_linear += self.whole  # the gathered gradient
        # The gradient; and, if gated, its product and a temporary that replaces the input of the
        # second linear layer.
        activation = self.inner
        if model.gated:
            activation += 2 * self.inner
        first_linear = self.whole + self.mlp_inputs * weight_grad - self.inner
        if self.sequence_parallel:
            first_linear += self.whole + self.residual
        # Three temporaries in fp32, and the gradient in the dtype of the model.
        wide_residual = self.residual * FP32
        norm = 3 * wide_residual // self.itemsize - mlp
        attention = self._count_attention_backward(kind) + heads
        attention -= mlp + self.residual
        most = max(second_linear, activation, first_linear, norm, attention)

        # The gradient of the residual stream exists throughout.
        return self.residual + recomputed + most

    def _count_attention_backward(self, kind: LayerKind) -> int:
        """Return the bytes of gradients and scores during backward of attention, unless a fused
        kernel computes it within a rank.
        """
        output = self.per_head * self.config.num_attention_heads
        if self._keeps_scores(kind):
            recomputed = 0
            if self.config.recomputes("core_attn"):
                recomputed = self._count_kept_scores()
            return recomputed + self.scores  # the gradient of the scores
        exchange = 0
        if self._exchanges_heads(kind):
            # The output, and queries, keys and values before and after their exchange.
            heads = output + self.key_values
            exchange = output + 3 * heads
        if not self._is_blockwise(kind):
            return exchange

        plain_scores = self._count_plain_scores()
        if self.cp_size == 1 or self._exchanges_heads(kind):
            # Gradients of the output, the queries, the keys and values.
            return max(exchange, 2 * output + self.key_values + plain_scores)
        # Gradients of the output, and of the queries in fp32.
        wide_queries = output * FP32 // self.itemsize
        queries = output + wide_queries + plain_scores
        if kind.cp_comm_type == "p2p":
            # Two parts in transit, two gradients, those of one block.
            parts = output + 5 * self.key_values
        else:
            # All parts, their gradients, and these gradients concatenated.
            parts = 3 * self.cp_size * self.key_values
        return max(exchange, queries + parts)

    def _count_plain_scores(self) -> int:
        """Return the bytes of the plain kernel, which caps scores: scores, their tanh, the gradient
        and a factor of it, in fp32.
        """
        if self.config.attn_logit_softcapping is None:
            return 0
        # The kernel computes as many rows of scores [rows, b, heads / tp, s / cp] at once as fit.
        positions = self.seq_length // self.cp_size
        num_heads = self.config.num_attention_heads // self.tp_size
        batch = self.tokens // positions
        scores_per_row = batch * num_heads * positions
        rows_at_once = SCORES_AT_ONCE // scores_per_row
        rows = max(1, min(positions, rows_at_once))

        per_score = 4 * FP32
        if self.itemsize < FP32:
            per_score += self.itemsize  # a copy in the dtype of the model
        return rows * scores_per_row * per_score

    @property
    def head_backward(self) -> int:
        """Bytes that backward of the loss holds beyond `head`: the gradient replaces the logits."""
        extra = self.whole
        if self.sequence_parallel:
            extra += self.whole + self.residual
        if self.itemsize == FP32:
            return extra
        # The gradient of the output matrix, or a chunk of the logits in fp32.
        num_weights = self.vocab_rows * self.config.hidden_size
        extra += num_weights * self.itemsize
        num_logits = self.logits // self.itemsize
        chunk_size = get_loss_chunk_elements(self.device_type)
        num_chunk_logits = min(chunk_size, num_logits)
        return max(extra, num_chunk_logits * FP32)

    # Chunks.

    def count_chunk(self, kinds: Sequence[LayerKind]) -> int:
        """Return the bytes that layers of these kinds keep from forward to backward of a
        micro-batch.
        """
        num_inputs, num_stored = self._split_recomputed(len(kinds))
        num_recomputed = len(kinds) - num_stored
        stored = kinds[num_recomputed:]
        inputs = num_inputs * self.residual
        return inputs + self._count_layers(stored)

    def count_chunk_backward(
        self,
        kinds: Sequence[LayerKind],
        post_process: bool,
        mtp_kinds: Sequence[LayerKind] = (),
    ) -> int:
        """Return the maximum bytes that backward of a chunk holds beyond the bytes it keeps.

        `mtp_kinds` are those of layers for multi-token prediction, which come after the others.
        """
        if not kinds and not post_process:
            return 0  # a chunk can contain the embedding alone
        num_inputs, num_stored = self._split_recomputed(len(kinds))
        num_recomputed = len(kinds) - num_stored
        stored = kinds[num_recomputed:]

        # The moments at which the most can be held: backward of the loss, then, when its memory is
        # freed, of each stored layer, and of each group of layers after its second forward.
        peaks = []
        head = self.count_losses(post_process, len(mtp_kinds)) + self.count_mtp(mtp_kinds)
        if post_process:
            peaks.append(self.head_backward)
        for kind in set(mtp_kinds):
            # Its own loss and that of the next token are freed, whose gradient exists.
            extra = self.residual + self.count_layer_backward(kind)
            if self.config.recomputes_mtp:
                # The layer exists again, with the input of its final norm.
                extra += self._count_mtp_layer(kind) + self.residual
            peaks.append(extra - 2 * self.head)
        for kind in set(stored):
            peaks.append(self.count_layer_backward(kind) - head)
        if num_inputs:
            # Whole groups exist again, after stored layers and loss are freed.
            freed = self._count_layers(stored) + head
            for group in self._split_groups(kinds[:num_recomputed]):
                recomputed = self._count_layers(group) - self.residual  # its input was kept
                backward = max(map(self.count_layer_backward, group))
                peaks.append(recomputed + backward - freed)
        return max(peaks)

    def count_recomputed_layers(self, num_layers: int) -> int:
        """Return the number of layers, the first of a chunk, whose whole forward runs twice."""
        _, num_stored = self._split_recomputed(num_layers)
        return num_layers - num_stored

    def _count_layers(self, kinds: Sequence[LayerKind]) -> int:
        """Return the bytes that layers of these kinds keep for backward."""
        total = 0
        # A model has few kinds of layers, but may have hundreds of layers.
        for kind in set(kinds):
            num_layers = kinds.count(kind)
            total += num_layers * self.count_layer(kind)
        return total

    def _split_recomputed(self, num_layers: int) -> tuple[int, int]:
        """Return the number of groups that keep only their input, and the number of layers that
        keep all their activations.
        """
        model = self.config
        if model.recompute_granularity != "full":
            return 0, num_layers
        assert model.recompute_num_layers is not None
        if model.recompute_method == "uniform":
            num_groups = math.ceil(num_layers / model.recompute_num_layers)
            return num_groups, 0
        # "block": groups of one layer, at the start of the chunk.
        num_groups = min(model.recompute_num_layers, num_layers)
        return num_groups, num_layers - num_groups

    def _split_groups(self, kinds: Sequence[LayerKind]) -> list[Sequence[LayerKind]]:
        """Return the groups of layers that are recomputed together."""
        model = self.config
        size = 1
        if model.recompute_method == "uniform":
            assert model.recompute_num_layers is not None
            size = min(model.recompute_num_layers, len(kinds))
        groups = []
        for start in range(0, len(kinds), size):
            stop = start + size
            groups.append(kinds[start:stop])
        return groups
