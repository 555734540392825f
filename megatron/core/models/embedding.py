"""The first and the last matrix of a language model."""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.module import MegatronModule, Normal, ParamInfo, make_parameter
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_parallel,
    gather_from_sequence,
    gather_from_tensor_parallel,
)
from megatron.core.transformer.layer_spec import layer_spec
from megatron.core.transformer.placement import Placement
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import even_range


class PositionEmbedding(MegatronModule):
    """A learned vector per position, replicated over TP."""

    def __init__(self, config: TransformerConfig, place: Placement) -> None:
        super().__init__()
        if config.max_position_embeddings is None:
            raise ValueError("learned position embeddings need --max-position-embeddings")
        shape = (config.max_position_embeddings, config.hidden_size)
        info = ParamInfo(Normal(config.init_method_std), partial_grad=place.sequence_parallel)
        self.weight = make_parameter(shape, config.params_dtype, place.device, info)

    def forward(self, position_ids: Tensor) -> Tensor:
        return F.embedding(position_ids, self.weight)


class GPTEmbedding(MegatronModule):
    """Words (scaled) + positions, norm, dropout: `[b, s]` to `[s, b, h]`, `[s/tp, b, h]` under sequence parallelism."""

    def __init__(self, config: TransformerConfig, place: Placement, *, num_rows: int, shared: bool) -> None:
        """`num_rows`: with padding, of all TP ranks; `shared`: the last stage has a copy of the words."""
        super().__init__()
        assert config.vocab_size is not None
        self.place, self.dropout = place, config.hidden_dropout
        # In the model's precision, as checkpoints were trained.
        scale = torch.tensor(math.sqrt(config.hidden_size), dtype=config.params_dtype, device="cpu").item()
        self.scale = scale if config.scale_embeddings else None
        self.word_embeddings = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            num_rows=num_rows,
            info=ParamInfo(Normal(config.init_method_std), tp_dim=0, shared_embedding=shared),
            tp=place.tp,
            sequence_parallel=place.sequence_parallel,
            dtype=config.params_dtype,
            device=place.device,
        )
        learned, normed = config.position_embedding_type == "learned_absolute", config.embedding_layernorm
        self.position_embeddings = PositionEmbedding(config, place) if learned else None
        self.word_embeddings_layernorm = layer_spec(config).hidden_norm(config, place) if normed else None

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        hidden_states = self.word_embeddings(tokens.t())
        if self.scale is not None:
            hidden_states = hidden_states * self.scale
        if self.position_embeddings is not None:
            positions = position_ids.t()  # [s, b]
            if self.place.sequence_parallel:
                start, stop = even_range(positions.shape[0], self.place.tp.rank, self.place.tp.size)
                positions = positions[start:stop]
            hidden_states = hidden_states + self.position_embeddings(positions)
        if self.word_embeddings_layernorm is not None:
            hidden_states = self.word_embeddings_layernorm(hidden_states)
        if self.dropout and self.training:
            with self.place.rng.fork() if self.place.sequence_parallel else nullcontext():
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
        place: Placement,
        *,
        num_rows: int,
        own_weight: bool,
        tied_copy: bool,
    ) -> None:
        """`num_rows`: with padding, of all TP ranks."""
        super().__init__()
        assert config.vocab_size is not None
        self.tp, self.sequence_parallel = place.tp, place.sequence_parallel
        self.vocab_size, self.tied_copy = config.vocab_size, tied_copy
        self.cross_entropy = layer_spec(config).cross_entropy(config)
        self.softcap = config.final_logit_softcapping
        info = ParamInfo(Normal(config.init_method_std), tp_dim=0, shared_embedding=tied_copy, counted=not tied_copy)
        shape = (num_rows // place.tp.size, config.hidden_size)
        self.weight = make_parameter(shape, config.params_dtype, place.device, info) if own_weight else None

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
