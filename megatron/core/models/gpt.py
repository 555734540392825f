"""One pipeline chunk of a GPT, with embedding and output layer where it has them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.core.arithmetic import even_range
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.module import (
    Constant,
    MegatronModule,
    Normal,
    ParamInfo,
    make_parameter,
    param_info,
    set_param_info,
)
from megatron.core.parallel_state import Axis, ExpertAxes, ParallelState
from megatron.core.sharding import Sharding
from megatron.core.tensor_parallel import (
    TensorParallelRng,
    VocabParallelEmbedding,
    compute_padded_vocab_size,
)
from megatron.core.tensor_parallel.mappings import gather_from_tensor_parallel, gather_input
from megatron.core.transformer.layer_spec import select_layer_spec
from megatron.core.transformer.placement import WHOLE_SEQUENCES, ContextParallel, Placement
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.wings import resolve

# Imported if --mtp-num-layers requests it
_MULTI_TOKEN_PREDICTION = "megatron.core.transformer.multi_token_prediction:MultiTokenPrediction"


class PositionEmbedding(MegatronModule):
    """Learned position embeddings, replicated over TP."""

    def __init__(self, config: TransformerConfig, placement: Placement) -> None:
        super().__init__()
        if config.max_position_embeddings is None:
            raise ValueError("learned position embeddings need --max-position-embeddings")
        shape = (config.max_position_embeddings, config.hidden_size)
        info = ParamInfo(Normal(config.init_method_std), partial_grad=placement.sequence_parallel)
        self.weight = make_parameter(shape, config.params_dtype, placement.device, info)

    def forward(self, position_ids: Tensor) -> Tensor:
        return F.embedding(position_ids, self.weight)  # [s, b, h] or [s/tp, b, h]


class GPTEmbedding(MegatronModule):
    """Sum of word and position embeddings, with optional scale, norm and dropout."""

    def __init__(
        self,
        config: TransformerConfig,
        placement: Placement,
        *,
        num_rows: int,
        shared: bool,
        is_copy: bool = False,
    ) -> None:
        """Initialize the embedding with `num_rows` on all TP ranks, including padding.

        If it is `shared`, the first and the last pipeline stage have a word embedding each. The one
        of the last stage `is_copy`.
        """
        super().__init__()
        assert config.vocab_size is not None
        self.placement = placement
        self.dropout = config.hidden_dropout
        # Factors of the word embedding (Gemma, Granite) and of the sum of embeddings (muP)
        self.scale = config.embedding_multiplier
        self.sum_scale = config.mup_embedding_mult if config.use_mup else 1.0
        if config.scale_embeddings:
            # Rounded to the model's precision, with which published checkpoints were trained.
            scale = math.sqrt(config.hidden_size)
            rounded = torch.tensor(scale, dtype=config.params_dtype, device="cpu")
            self.scale *= rounded.item()
        self.word_embeddings = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            num_rows=num_rows,
            init=Normal(config.init_method_std),
            tp=placement.tp,
            shared=shared,
            is_copy=is_copy,
            sequence_parallel=placement.sequence_parallel,
            dtype=config.params_dtype,
            device=placement.device,
        )
        self.position_embeddings = None
        if config.position_embedding_type == "learned_absolute":
            self.position_embeddings = PositionEmbedding(config, placement)
        self.word_embeddings_layernorm = None
        if config.embedding_layernorm:
            norm = select_layer_spec(config).make_hidden_norm(config, placement)
            self.word_embeddings_layernorm = norm

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        """Embed `[b, s]` tokens: `[s, b, h]`, or `[s/tp, b, h]` under sequence parallelism."""
        hidden_states = self.word_embeddings(tokens.t())  # [s, b, h] or [s/tp, b, h]
        if self.scale != 1.0:
            hidden_states = hidden_states * self.scale
        if self.position_embeddings is not None:
            positions = self._select_positions(position_ids)
            hidden_states = hidden_states + self.position_embeddings(positions)
        if self.word_embeddings_layernorm is not None:
            hidden_states = self.word_embeddings_layernorm(hidden_states)
        if self.sum_scale != 1.0:
            hidden_states = hidden_states * self.sum_scale
        if self.dropout and self.training:
            # Under sequence parallelism the TP ranks have different tokens, and draw different
            # numbers.
            with self.placement.rng.fork_if(self.placement.sequence_parallel):
                hidden_states = F.dropout(hidden_states, self.dropout)
        return hidden_states

    def _select_positions(self, position_ids: Tensor) -> Tensor:
        """Return the `[b, s]` positions of this rank's tokens, `[s, b]` or `[s/tp, b]`."""
        positions = position_ids.t()  # [s, b]
        if not self.placement.sequence_parallel:
            return positions
        tp = self.placement.tp
        start, stop = even_range(positions.shape[0], tp.rank, tp.size)
        return positions[start:stop]


class OutputLayer(MegatronModule):
    """Output matrix, whose rows (tokens) are split over TP, and loss."""

    TIED_KEY = "embedding.word_embeddings.weight"

    def __init__(
        self,
        config: TransformerConfig,
        placement: Placement,
        *,
        num_rows: int,
        own_weight: bool,
        tied_copy: bool,
    ) -> None:
        """Initialize the layer with `num_rows` on all TP ranks, including padding.

        Without `own_weight` it uses the matrix of the word embedding. With `tied_copy` its matrix
        is the last stage's copy of the tied word embedding, and is stored under that key.
        """
        super().__init__()
        assert config.vocab_size is not None
        self.tp = placement.tp
        self.sequence_parallel = placement.sequence_parallel
        self.vocab_size = config.vocab_size
        self.tied_copy = tied_copy
        self.cross_entropy = select_layer_spec(config).select_cross_entropy(config)
        self.softcap = config.final_logit_softcapping
        self.logits_divisor = config.logits_divisor
        self.weight = None
        if own_weight:
            sharding = Sharding(dim=0, axis=placement.tp, num_rows=config.vocab_size)
            info = ParamInfo(
                Normal(config.init_method_std),
                sharding,
                shared_embedding=tied_copy,
                counted=not tied_copy,  # the first stage counts the tied matrix
            )
            # [v, h], of which a rank has [v / tp, h]
            shape = (num_rows, config.hidden_size)
            self.weight = make_parameter(shape, config.params_dtype, placement.device, info)
        self.bias = None
        if config.output_layer_bias:
            sharding = Sharding(dim=0, axis=placement.tp, num_rows=config.vocab_size)
            info = ParamInfo(Constant(0.0), sharding)
            self.bias = make_parameter((num_rows,), config.params_dtype, placement.device, info)

    def forward(self, hidden_states: Tensor, weight: Tensor, labels: Tensor | None) -> Tensor:
        """Return the loss per token `[b, s]` fp32; without labels the logits `[b, s, vocab]`."""
        if self.logits_divisor != 1.0:
            # Before the product, because the loss does not keep logits.
            hidden_states = hidden_states / self.logits_divisor
        if labels is None:
            return self._compute_logits(hidden_states, weight)
        losses = self.cross_entropy(
            hidden_states,
            weight,
            labels.t(),
            vocab_size=self.vocab_size,
            tp=self.tp,
            sequence_parallel=self.sequence_parallel,
            softcap=self.softcap,
            bias=self.bias,
        )
        return losses.t()  # [s, b] -> [b, s]

    def _compute_logits(self, hidden_states: Tensor, weight: Tensor) -> Tensor:
        """Return the logits `[b, s, vocab]` without padding, on every TP rank."""
        whole = gather_input(hidden_states, self.tp, self.sequence_parallel)  # [s, b, h]
        local_logits = F.linear(whole, weight, self.bias)  # [s, b, v/tp]
        if self.softcap is not None:
            local_logits = torch.tanh(local_logits / self.softcap) * self.softcap
        logits = gather_from_tensor_parallel(local_logits, self.tp)  # [s, b, v]
        return logits[..., : self.vocab_size].transpose(0, 1)

    def sharded_state_dict(self, prefix: str = "") -> ShardedStateDict:
        """Return the parameters; a copy of the word embedding has the embedding's key."""
        state = super().sharded_state_dict(prefix)
        if self.weight is not None and self.tied_copy:
            del state[f"{prefix}weight"]
            sharding = param_info(self.weight).sharding
            state[self.TIED_KEY] = sharding.describe(self.TIED_KEY, self.weight)
        return state


@dataclass(frozen=True)
class ChunkSpec:
    """Layers and position of a pipeline chunk."""

    layers: range
    """Global layer numbers."""
    pre_process: bool
    """Whether the chunk has the embedding."""
    post_process: bool
    """Whether the chunk has the output layer."""
    ps: ParallelState
    rng: TensorParallelRng
    device: torch.device


def make_chunk_specs(
    stages: Sequence[Sequence[range]],
    ps: ParallelState,
    rng: TensorParallelRng,
    device: torch.device,
) -> list[ChunkSpec]:
    """Return the chunks of this rank; `stages` are the layers of all chunks by [stage][chunk]."""
    specs = []
    for index, layers in enumerate(stages[ps.pp.rank]):
        is_first = ps.is_first_chunk(index)
        is_last = ps.is_last_chunk(index)
        specs.append(ChunkSpec(layers, is_first, is_last, ps, rng, device))
    return specs


class TokenLosses(NamedTuple):
    """Result of the last chunk of a model with multi-token prediction."""

    next_token: Tensor
    """Loss per token `[b, s]` fp32."""
    mtp_totals: Tensor
    """Sum of the losses of the tokens that count, for each depth, `[depths]`."""
    mtp_num_tokens: Tensor
    """Number of these tokens `[depths]`; under context parallelism the mean over the ranks."""


class GPTModel(MegatronModule):
    """A GPT, or the pipeline chunk with the given layers.

    Parameters are uninitialized until `initialize(seed)` or a load.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        layers: range | None = None,
        pre_process: bool = True,
        post_process: bool = True,
        tp: Axis | None = None,
        cp: ContextParallel = WHOLE_SEQUENCES,
        sequence_parallel: bool = False,
        experts: ExpertAxes | None = None,
        make_vocab_size_divisible_by: int = 128,
        rng: TensorParallelRng | None = None,
        device: torch.device | None = None,
        stage: dist.ProcessGroup | None = None,
    ) -> None:
        """Initialize the whole model by default.

        `layers` are global layer numbers. The chunk has the embedding if `pre_process`, and the
        output layer if `post_process`. `stage` contains the ranks of its pipeline stage.
        """
        super().__init__()
        if config.vocab_size is None or config.vocab_size < 1:
            raise ValueError(f"a model needs a vocabulary: vocab_size is {config.vocab_size}")
        self.config = config
        self.pre_process = pre_process
        self.cp = cp

        # Defaults: a single rank with all layers
        tp = tp or Axis()
        layers = range(config.num_layers) if layers is None else layers
        rng = rng or TensorParallelRng(0, tp.rank, device)
        placement = Placement(tp, rng, cp, sequence_parallel, experts or ExpertAxes(), device)

        # With tied embeddings or multi-token prediction, the first and the last stage have a copy
        # of the same matrix each, whose gradients are summed (see `shared_embedding`).
        is_tied = not config.untie_embeddings_and_output_weights
        has_mtp = post_process and config.num_mtp_layers > 0
        # A chunk with both ends has a single matrix, whose gradients are not summed.
        is_split = not (pre_process and post_process)
        is_shared = is_split and (is_tied or config.num_mtp_layers > 0)
        rows = compute_padded_vocab_size(config.vocab_size, make_vocab_size_divisible_by, tp.size)

        # Embedding, layers and output layer
        self.embedding = None
        if pre_process or has_mtp:
            self.embedding = GPTEmbedding(
                config, placement, num_rows=rows, shared=is_shared, is_copy=not pre_process
            )
        self.decoder = TransformerBlock(
            config, placement, layers=layers, post_process=post_process, stage=stage
        )
        self.mtp = None
        if has_mtp:
            self.mtp = resolve(_MULTI_TOKEN_PREDICTION)(config, placement, stage)
        self.output_layer = None
        if post_process:
            # A chunk with an embedding does not need another copy of the tied matrix.
            tied_copy = is_tied and self.embedding is None
            self.output_layer = OutputLayer(
                config,
                placement,
                num_rows=rows,
                own_weight=tied_copy or not is_tied,
                tied_copy=tied_copy,
            )
        if config.width_mult != 1.0:
            self._mark_hidden_matrices()

    def _mark_hidden_matrices(self) -> None:
        """Give all parameters the properties by which muP scales learning rates.

        The embeddings and the output layer are not hidden matrices: the size of their vocabulary
        does not grow with the width. Vectors and biases are not hidden matrices either.
        """
        for name, param in self.named_parameters():
            is_matrix = param.dim() > 1 and not name.endswith(".bias")
            is_hidden = is_matrix and not name.startswith(("embedding.", "output_layer."))
            info = replace(
                param_info(param), width_mult=self.config.width_mult, is_hidden=is_hidden
            )
            set_param_info(param, info)

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor,
        *,
        input_tensor: Tensor | None = None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor | TokenLosses:
        """Return the activation `[s, b, h]` for the next chunk, or the result of the last chunk.

        The last chunk returns the loss per token `[b, s]` fp32, or without labels the logits `[b,
        s, vocab]` in the model's dtype. With multi-token prediction the losses are `TokenLosses`,
        of the tokens where `loss_mask` is 1 (by default everywhere).

        `tokens`, `position_ids`, `labels` and `loss_mask` are `[b, s]`; `input_tensor` is the
        activation of the previous chunk (`[s/tp, b, h]` under sequence parallelism). A token
        attends to earlier tokens, and with `documents` `[b, s]` only to those with the same number.
        Under context parallelism s counts the positions of this rank, except in `documents`, which
        are whole.
        """
        hidden_states = input_tensor
        if self.pre_process:
            assert self.embedding is not None
            hidden_states = self.embedding(tokens, position_ids)
        assert hidden_states is not None, "all chunks but the first need input_tensor"
        hidden_states = self.decoder(hidden_states, documents)  # [s, b, h] or [s/tp, b, h]
        output_layer = self.output_layer
        if output_layer is None:
            return hidden_states
        weight = output_layer.weight
        if weight is None:
            # The only copy of the tied matrix is in the embedding of this chunk.
            assert self.embedding is not None
            weight = self.embedding.word_embeddings.weight
        if self.mtp is None or labels is None:
            return output_layer(hidden_states, weight, labels)

        # Multi-token prediction
        assert self.embedding is not None
        if loss_mask is None:
            loss_mask = torch.ones_like(labels, dtype=torch.float32)
        totals, num_tokens = self.mtp.compute_losses(
            hidden_states,
            tokens,
            labels,
            loss_mask,
            embed=partial(self.embedding, position_ids=position_ids),
            compute_loss=lambda states, targets: output_layer(states, weight, targets),
            documents=documents,
        )
        next_token = output_layer(hidden_states, weight, labels)
        return TokenLosses(next_token, totals, num_tokens)
