"""GPT: the part of a decoder-only language model that stands on one pipeline chunk, with its first
and last matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.core.arithmetic import even_range
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.module import MegatronModule, Normal, ParamInfo, make_parameter, param_info
from megatron.core.parallel_state import Axis, ExpertAxes, ParallelState
from megatron.core.sharding import Sharding
from megatron.core.tensor_parallel import (
    TensorParallelRng,
    VocabParallelEmbedding,
    compute_padded_vocab_size,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_parallel,
    gather_from_sequence,
    gather_from_tensor_parallel,
)
from megatron.core.transformer.backends import select_layer_spec
from megatron.core.transformer.placement import WHOLE_SEQUENCES, ContextParallel, Placement
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig


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
    """Words (scaled) + positions, norm, dropout: `[b, s]` to `[s, b, h]`, `[s/tp, b, h]` under
    sequence parallelism.
    """

    def __init__(
        self, config: TransformerConfig, place: Placement, *, num_rows: int, shared: bool
    ) -> None:
        """`num_rows`: with padding, of all TP ranks; `shared`: the last stage has a copy of the words."""
        super().__init__()
        assert config.vocab_size is not None
        self.place = place
        self.dropout = config.hidden_dropout
        # In the model's precision, as checkpoints were trained.
        scale = torch.tensor(
            math.sqrt(config.hidden_size), dtype=config.params_dtype, device="cpu"
        ).item()
        self.scale = scale if config.scale_embeddings else None
        self.word_embeddings = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            num_rows=num_rows,
            init=Normal(config.init_method_std),
            tp=place.tp,
            shared=shared,
            sequence_parallel=place.sequence_parallel,
            dtype=config.params_dtype,
            device=place.device,
        )
        learned = config.position_embedding_type == "learned_absolute"
        normed = config.embedding_layernorm
        self.position_embeddings = PositionEmbedding(config, place) if learned else None
        self.word_embeddings_layernorm = (
            select_layer_spec(config).hidden_norm(config, place) if normed else None
        )

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
    """The rows (tokens) of the output matrix are split over TP; without `own_weight` the word
    embedding's are used.

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
        self.tp = place.tp
        self.sequence_parallel = place.sequence_parallel
        self.vocab_size = config.vocab_size
        self.tied_copy = tied_copy
        self.cross_entropy = select_layer_spec(config).cross_entropy(config)
        self.softcap = config.final_logit_softcapping
        self.weight = None
        if own_weight:
            info = ParamInfo(
                Normal(config.init_method_std),
                Sharding(dim=0, axis=place.tp, num_rows=config.vocab_size),
                shared_embedding=tied_copy,
                counted=not tied_copy,
            )
            shape = (num_rows, config.hidden_size)
            self.weight = make_parameter(shape, config.params_dtype, place.device, info)

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
        """Logits of the real vocabulary `[b, s, vocab]` in the model's dtype, whole on every TP
        rank.
        """
        enter = gather_from_sequence if self.sequence_parallel else copy_to_tensor_parallel
        partial = F.linear(enter(hidden_states, self.tp), weight)
        if self.softcap is not None:
            partial = torch.tanh(partial / self.softcap) * self.softcap
        return gather_from_tensor_parallel(partial, self.tp)[..., : self.vocab_size].transpose(0, 1)

    def sharded_state_dict(self, prefix: str = "") -> ShardedStateDict:
        """Return the matrix; a copy of the word embedding is stored under the embedding's key."""
        if self.weight is None or not self.tied_copy:
            return super().sharded_state_dict(prefix)
        sharding = param_info(self.weight).sharding
        return {self.TIED_KEY: sharding.describe(self.TIED_KEY, self.weight)}


@dataclass(frozen=True)
class ChunkSpec:
    """Where a pipeline chunk stands."""

    layers: range  # global layer numbers
    pre_process: bool  # holds the embedding
    post_process: bool  # holds the output layer
    ps: ParallelState
    rng: TensorParallelRng
    device: torch.device


def make_chunk_specs(
    stages: Sequence[Sequence[range]],
    ps: ParallelState,
    rng: TensorParallelRng,
    device: torch.device,
) -> list[ChunkSpec]:
    """The chunks of one rank; `stages` are the layers of all chunks by [stage][chunk]."""
    chunks = stages[ps.pp.rank]
    return [
        ChunkSpec(layers, ps.is_first_chunk(index), ps.is_last_chunk(index), ps, rng, device)
        for index, layers in enumerate(chunks)
    ]


class GPTModel(MegatronModule):
    """Layers `layers` of the model, with the embedding (`pre_process`) and the output layer
    (`post_process`).

    The whole model by default. Parameters are uninitialised until `initialize(seed)` or a load.
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
        super().__init__()
        if config.vocab_size is None or config.vocab_size < 1:
            raise ValueError(f"a model needs a vocabulary: vocab_size is {config.vocab_size}")
        self.config = config
        tp = tp if tp is not None else Axis()
        rng = rng if rng is not None else TensorParallelRng(0, tp.rank, device)
        experts = experts if experts is not None else ExpertAxes()
        place = Placement(tp, rng, cp, sequence_parallel, experts, device)
        layers = layers if layers is not None else range(config.num_layers)
        tied = not config.untie_embeddings_and_output_weights
        two_copies = tied and not (pre_process and post_process)
        rows = compute_padded_vocab_size(config.vocab_size, make_vocab_size_divisible_by, tp.size)
        self.embedding = (
            GPTEmbedding(config, place, num_rows=rows, shared=two_copies) if pre_process else None
        )
        self.decoder = TransformerBlock(
            config, place, layers=layers, post_process=post_process, stage=stage
        )
        self.output_layer = (
            OutputLayer(
                config,
                place,
                num_rows=rows,
                own_weight=two_copies or not tied,
                tied_copy=two_copies,
            )
            if post_process
            else None
        )

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor,
        *,
        input_tensor: Tensor | None = None,
        labels: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """The activation `[s, b, h]` for the next chunk; on the last one the loss per token or the
        logits.

        `tokens`, `position_ids`, `labels` are `[b, s]`; `input_tensor` is the activation of the chunk before
        (`[s/tp, b, h]` under sequence parallelism). A token sees what comes before it, with `documents` `[b, s]` where
        that has the same number. Losses are `[b, s]` fp32, logits `[b, s, vocab]` in the model's
        dtype. Under context parallelism s counts the positions of this rank, but for `documents`,
        which are whole.
        """
        hidden_states = (
            self.embedding(tokens, position_ids) if self.embedding is not None else input_tensor
        )
        assert hidden_states is not None, "a chunk that is not the first needs input_tensor"
        hidden_states = self.decoder(hidden_states, documents)
        if self.output_layer is None:
            return hidden_states
        weight = self.output_layer.weight
        if weight is None:
            assert self.embedding is not None
            weight = self.embedding.word_embeddings.weight
        return self.output_layer(hidden_states, weight, labels)
