"""The first and the last matrix of a language model."""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.module import MegatronModule, Normal, ParamInfo, make_parameter
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel import (
    TensorParallelRng,
    VocabParallelEmbedding,
    padded_vocab_size,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_parallel,
    gather_from_sequence,
    gather_from_tensor_parallel,
)
from megatron.core.transformer.layer_spec import layer_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import even_range


class PositionEmbedding(MegatronModule):
    """A learned vector per position, replicated over TP."""

    def __init__(self, config: TransformerConfig, *, partial_grad: bool, device: torch.device | None) -> None:
        super().__init__()
        if config.max_position_embeddings is None:
            raise ValueError("learned position embeddings need --max-position-embeddings")
        shape = (config.max_position_embeddings, config.hidden_size)
        info = ParamInfo(Normal(config.init_method_std), partial_grad=partial_grad)
        self.weight = make_parameter(shape, config.params_dtype, device, info)

    def forward(self, position_ids: Tensor) -> Tensor:
        return F.embedding(position_ids, self.weight)


class GPTEmbedding(MegatronModule):
    """Words (scaled) + positions, norm, dropout: `[b, s]` to `[s, b, h]`, `[s/tp, b, h]` under sequence parallelism."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        vocab_size: int,
        make_vocab_size_divisible_by: int,
        shared: bool,
        tp: Axis,
        rng: TensorParallelRng,
        sequence_parallel: bool,
        device: torch.device | None,
    ) -> None:
        super().__init__()
        self.tp, self.rng, self.sequence_parallel, self.dropout = tp, rng, sequence_parallel, config.hidden_dropout
        # In the model's precision, as checkpoints were trained.
        scale = torch.tensor(math.sqrt(config.hidden_size), dtype=config.params_dtype, device="cpu").item()
        self.scale = scale if config.scale_embeddings else None
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size,
            config.hidden_size,
            info=ParamInfo(Normal(config.init_method_std), tp_dim=0, shared_embedding=shared),
            tp=tp,
            sequence_parallel=sequence_parallel,
            make_vocab_size_divisible_by=make_vocab_size_divisible_by,
            dtype=config.params_dtype,
            device=device,
        )
        self.position_embeddings = (
            PositionEmbedding(config, partial_grad=sequence_parallel, device=device)
            if config.position_embedding_type == "learned_absolute"
            else None
        )
        self.word_embeddings_layernorm = (
            layer_spec(config).norm(config, config.hidden_size, partial_grad=sequence_parallel, device=device)
            if config.embedding_layernorm
            else None
        )

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        hidden_states = self.word_embeddings(tokens.t())
        if self.scale is not None:
            hidden_states = hidden_states * self.scale
        if self.position_embeddings is not None:
            positions = position_ids.t()  # [s, b]
            if self.sequence_parallel:
                start, stop = even_range(positions.shape[0], self.tp.rank, self.tp.size)
                positions = positions[start:stop]
            hidden_states = hidden_states + self.position_embeddings(positions)
        if self.word_embeddings_layernorm is not None:
            hidden_states = self.word_embeddings_layernorm(hidden_states)
        if self.dropout and self.training:
            with self.rng.fork() if self.sequence_parallel else nullcontext():
                hidden_states = F.dropout(hidden_states, self.dropout)
        return hidden_states


class OutputLayer(MegatronModule):
    """The rows (tokens) of the output matrix are split over TP; without `own_weight` the word embedding's are used.

    `tied_copy`: the matrix is the last stage's copy of the tied word embedding, and is stored under that key.
    """

    TIED_KEY = "embedding.word_embeddings.weight"

    def __init__(
        self,
        config: TransformerConfig,
        *,
        vocab_size: int,
        make_vocab_size_divisible_by: int,
        own_weight: bool,
        tied_copy: bool,
        tp: Axis,
        sequence_parallel: bool,
        device: torch.device | None,
    ) -> None:
        super().__init__()
        self.tp, self.sequence_parallel, self.vocab_size, self.tied_copy = tp, sequence_parallel, vocab_size, tied_copy
        self.cross_entropy = layer_spec(config).cross_entropy(config)
        self.softcap = config.final_logit_softcapping
        rows = padded_vocab_size(vocab_size, make_vocab_size_divisible_by, tp.size) // tp.size
        info = ParamInfo(Normal(config.init_method_std), tp_dim=0, shared_embedding=tied_copy, counted=not tied_copy)
        shape = (rows, config.hidden_size)
        self.weight = make_parameter(shape, config.params_dtype, device, info) if own_weight else None

    def forward(self, hidden_states: Tensor, weight: Tensor, labels: Tensor | None) -> Tensor:
        """Loss per token `[b, s]` in fp32; without labels the logits `[b, s, vocab]`."""
        if labels is None:
            return self._logits(hidden_states, weight)
        losses = self.cross_entropy(
            hidden_states,
            weight,
            labels.t(),
            vocab_size=self.vocab_size,
            tp=self.tp,
            sequence_parallel=self.sequence_parallel,
            softcap=self.softcap,
        )
        return losses.t()

    def _logits(self, hidden_states: Tensor, weight: Tensor) -> Tensor:
        """Logits of the real vocabulary `[b, s, vocab]` in the model's dtype, whole on every TP rank."""
        enter = gather_from_sequence if self.sequence_parallel else copy_to_tensor_parallel
        partial = F.linear(enter(hidden_states, self.tp), weight)
        if self.softcap is not None:
            partial = torch.tanh(partial / self.softcap) * self.softcap
        return gather_from_tensor_parallel(partial, self.tp)[..., : self.vocab_size].transpose(0, 1)

    def sharded_state_dict(self, prefix: str = "") -> ShardedStateDict:
        if self.weight is None:
            return {}
        key = self.TIED_KEY if self.tied_copy else prefix + "weight"
        return {key: ShardedTensor.split_rows(key, self.weight, self.tp.rank, self.tp.size, num_rows=self.vocab_size)}
