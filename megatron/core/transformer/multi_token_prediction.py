"""Multi-token prediction (MTP, DeepSeek-V3): layers that predict tokens further ahead.

Depth k (from 1) computes the representation of token i from the previous depth's, or the last
layer's, and from the embedding of token i + k, and predicts token i + k + 1. Embedding and output
matrix are those of the model. As in Megatron-LM, shifted sequences end with zeros that do not count
in the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.module import MegatronModule
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel.mappings import (
    exchange_heads_for_sequence,
    gather_from_tensor_parallel,
    start_sequence_all_gather,
)
from megatron.core.transformer.layer_spec import Precision, select_layer_spec
from megatron.core.transformer.placement import (
    ContextParallel,
    Placement,
    compute_local_positions,
)
from megatron.core.transformer.transformer_block import TransformerLayer
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class ShiftedBatch:
    """The data of one depth, `[b, s / cp]` each."""

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    num_tokens: Tensor
    """Number of tokens that count; under context parallelism the mean over the ranks."""


def shift_batch(
    tokens: Tensor, labels: Tensor, loss_mask: Tensor, num_depths: int, cp: ContextParallel
) -> list[ShiftedBatch]:
    """Return the data of every depth from that of the model. Collective over CP.

    Depth k gets sequences shifted by k positions, filled up with zeros.
    """
    # The next token of a position may be on another rank.
    tokens = _gather_positions(cp.axis, tokens)
    labels = _gather_positions(cp.axis, labels)
    loss_mask = _gather_positions(cp.axis, loss_mask)
    batches = []
    for _ in range(num_depths):
        tokens = _shift_left(tokens)
        labels = _shift_left(labels)
        loss_mask = _shift_left(loss_mask)
        batch = ShiftedBatch(
            tokens=_select_positions(cp.axis, tokens),
            labels=_select_positions(cp.axis, labels),
            loss_mask=_select_positions(cp.axis, loss_mask),
            # Equal on all ranks, so that the loss does not depend on where the masked tokens are.
            num_tokens=loss_mask.sum() / cp.axis.size,
        )
        batches.append(batch)
    return batches


def _gather_positions(cp: Axis, values: Tensor) -> Tensor:
    """Return whole sequences `[b, s]` from this rank's positions `[b, s/cp]`. Collective."""
    if cp.size == 1:
        return values
    by_rank = start_sequence_all_gather(values.unsqueeze(0), cp).wait()  # [cp, b, s/cp]
    # The first chunks of the ranks are 0 to CP - 1, the second ones 2 CP - 1 down to CP.
    first, second = by_rank.chunk(2, dim=-1)
    by_chunk = torch.cat((first, second.flip(0)))  # [2 cp, b, positions]
    return by_chunk.movedim(0, 1).flatten(1)


def _select_positions(cp: Axis, whole: Tensor) -> Tensor:
    """Return this rank's positions of `[b, s]` values, the inverse of `_gather_positions`."""
    if cp.size == 1:
        return whole
    positions = compute_local_positions(whole.shape[1], cp.rank, cp.size)
    return whole.index_select(1, positions.to(whole.device, non_blocking=True))


def _shift_left(values: Tensor) -> Tensor:
    """Move `[b, s]` values to the previous position; the last one becomes zero."""
    shifted = torch.zeros_like(values)
    shifted[:, :-1] = values[:, 1:]
    return shifted


class MultiTokenPredictionLayer(MegatronModule):
    """One depth: norms of both inputs, their projection, a transformer layer and its final norm."""

    def __init__(self, config: TransformerConfig, placement: Placement, *, depth: int) -> None:
        """Initialize depth `depth`, counted from 0."""
        super().__init__()
        spec = select_layer_spec(config)
        self.placement = placement
        self.checkpoint = spec.checkpoint
        self.recomputes = config.recomputes_mtp
        self.enorm = spec.make_hidden_norm(config, placement)
        self.hnorm = spec.make_hidden_norm(config, placement)
        self.eh_proj = spec.make_input_projection(
            config, placement, 2 * config.hidden_size, config.hidden_size, bias=False, normed=False
        )
        # A number beyond the model's layers selects the kind of its last layer.
        layer_number = config.num_layers + depth
        self.transformer_layer = TransformerLayer(config, placement, layer_number=layer_number)
        self.final_layernorm = spec.make_hidden_norm(config, placement)

    def forward(
        self, hidden_states: Tensor, embeddings: Tensor, documents: Tensor | None = None
    ) -> Tensor:
        """Return the normed representation of this depth.

        All activations are `[s, b, h]`, or `[s/tp, b, h]` under sequence parallelism.
        """
        if self.recomputes and self.training:
            rng = self.placement.rng
            output: Tensor = self.checkpoint(
                self._predict, rng, hidden_states, embeddings, documents
            )
            return output
        return self._predict(hidden_states, embeddings, documents)

    def _predict(
        self, hidden_states: Tensor, embeddings: Tensor, documents: Tensor | None
    ) -> Tensor:
        normed = (self.enorm(embeddings), self.hnorm(hidden_states))
        projected = self.eh_proj(torch.cat(normed, dim=-1))  # [s, b, h/tp]
        combined = self._gather_columns(projected)
        return self.final_layernorm(self.transformer_layer(combined, documents))

    def _gather_columns(self, projected: Tensor) -> Tensor:
        """Return `[s, b, h]` or `[s/tp, b, h]` from the columns of this rank, `[s, b, h/tp]`."""
        if self.placement.sequence_parallel:
            # Exchanges columns for positions: less communication than to gather all of both.
            return exchange_heads_for_sequence(projected, self.placement.tp)
        return gather_from_tensor_parallel(projected, self.placement.tp)


class MultiTokenPrediction(MegatronModule):
    """The depths of a model, in order; each needs the result of the previous one."""

    def __init__(
        self,
        config: TransformerConfig,
        placement: Placement,
        stage: dist.ProcessGroup | None = None,
    ) -> None:
        """Initialize all depths; `stage` contains the ranks that share fp8 scales."""
        super().__init__()
        self.cp = placement.cp
        # As in Megatron-LM, every depth computes in fp8, also with --first-last-layers-bf16, but in
        # bf16 where the other layers compute in fp4.
        make_precision = Precision
        if config.fp8 is not None:
            make_precision = select_layer_spec(config).precision
        self.precision = make_precision(config, stage)
        layers = []
        for depth in range(config.num_mtp_layers):
            layers.append(MultiTokenPredictionLayer(config, placement, depth=depth))
        self.layers = nn.ModuleList(layers)
        # All depths have the same kind of attention.
        # RoPE tables and masks are equal, so they exist once.
        first = layers[0].transformer_layer.self_attention
        for layer in layers[1:]:
            layer.transformer_layer.self_attention.share_tables(first)

    def compute_losses(
        self,
        hidden_states: Tensor,
        tokens: Tensor,
        labels: Tensor,
        loss_mask: Tensor,
        *,
        embed: Callable[[Tensor], Tensor],
        compute_loss: Callable[[Tensor, Tensor], Tensor],
        documents: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return, for each depth, the sum of the losses of the tokens that count, and their number.

        `tokens`, `labels` and `loss_mask` `[b, s / cp]` are those of the model. `compute_loss`
        returns the losses `[b, s / cp]` of representations and labels; the other arguments are
        those of `forward`. Collective over CP.
        """
        batches = shift_batch(tokens, labels, loss_mask, len(self.layers), self.cp)
        outputs = self(hidden_states, batches, embed, documents)
        totals = []
        for output, batch in zip(outputs, batches, strict=True):
            losses = compute_loss(output, batch.labels)
            totals.append((losses * batch.loss_mask).sum())
        num_tokens = [batch.num_tokens for batch in batches]
        return torch.stack(totals), torch.stack(num_tokens)

    def forward(
        self,
        hidden_states: Tensor,
        batches: list[ShiftedBatch],
        embed: Callable[[Tensor], Tensor],
        documents: Tensor | None = None,
    ) -> list[Tensor]:
        """Return the representations of all depths.

        `hidden_states` is the output of the last layer after the final norm, and `embed` computes
        the embedding of `[b, s]` tokens.
        """
        outputs = []
        for layer, batch in zip(self.layers, batches, strict=True):
            embeddings = embed(batch.tokens)
            with self.precision.chunk():
                hidden_states = layer(hidden_states, embeddings, documents)
            outputs.append(hidden_states)
        return outputs
