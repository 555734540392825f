"""GPT: the part of a decoder-only language model that stands on one pipeline chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.models.embedding import GPTEmbedding, OutputLayer
from megatron.core.module import MegatronModule
from megatron.core.parallel_state import Axis, ExpertAxes, ParallelState
from megatron.core.tensor_parallel import TensorParallelRng, padded_vocab_size
from megatron.core.transformer.placement import WHOLE_SEQUENCES, ContextParallel, Placement
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class ChunkPlace:
    """Where a pipeline chunk stands."""

    layers: range  # global layer numbers
    pre_process: bool  # holds the embedding
    post_process: bool  # holds the output layer
    ps: ParallelState
    rng: TensorParallelRng
    device: torch.device


def chunk_places(
    stages: Sequence[Sequence[range]], ps: ParallelState, rng: TensorParallelRng, device: torch.device
) -> list[ChunkPlace]:
    """The chunks of one rank; `stages` are the layers of all chunks by [stage][chunk]."""
    chunks = stages[ps.pp.rank]
    return [
        ChunkPlace(layers, ps.is_first_chunk(index), ps.is_last_chunk(index), ps, rng, device)
        for index, layers in enumerate(chunks)
    ]


class GPTModel(MegatronModule):
    """Layers `layers` of the model, with the embedding (`pre_process`) and the output layer (`post_process`).

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
        rows = padded_vocab_size(config.vocab_size, make_vocab_size_divisible_by, tp.size)
        self.embedding = GPTEmbedding(config, place, num_rows=rows, shared=two_copies) if pre_process else None
        self.decoder = TransformerBlock(config, place, layers=layers, post_process=post_process, stage=stage)
        self.output_layer = (
            OutputLayer(config, place, num_rows=rows, own_weight=two_copies or not tied, tied_copy=two_copies)
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
        """The activation `[s, b, h]` for the next chunk; on the last one the loss per token or the logits.

        `tokens`, `position_ids`, `labels` are `[b, s]`; `input_tensor` is the activation of the chunk before
        (`[s/tp, b, h]` under sequence parallelism). A token sees what comes before it, with `documents` `[b, s]` where
        that has the same number. Losses are `[b, s]` fp32, logits `[b, s, vocab]` in the model's dtype. Under context
        parallelism s counts the positions of this rank, but for `documents`, which are whole.
        """
        hidden_states = self.embedding(tokens, position_ids) if self.embedding is not None else input_tensor
        assert hidden_states is not None, "a chunk that is not the first needs input_tensor"
        hidden_states = self.decoder(hidden_states, documents)
        if self.output_layer is None:
            return hidden_states
        weight = self.output_layer.weight
        if weight is None:
            assert self.embedding is not None
            weight = self.embedding.word_embeddings.weight
        return self.output_layer(hidden_states, weight, labels)
