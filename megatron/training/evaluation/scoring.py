"""Log-likelihoods of token sequences under the model of a run, at the run's own layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.datasets import Sample
from megatron.core.module import MegatronModule
from megatron.core.transformer.placement import ContextParallel
from megatron.training.data.loaders import DataIterator
from megatron.training.run import Batch, Loss, Run, evaluating, forward_backward


class ScoredSequence(NamedTuple):
    """Tokens, of which the last `num_scored` are scored given all earlier ones."""

    tokens: list[int]
    num_scored: int


class Score(NamedTuple):
    """Log-likelihood of tokens, and whether each of them is the most probable one."""

    log_likelihood: float
    is_greedy: bool


class _Sequences:
    """Sample i is sequence i, padded to `length` inputs; samples after the last are empty."""

    fingerprint = "sequences"

    def __init__(
        self, sequences: Sequence[ScoredSequence], num_samples: int, length: int, padding: int
    ) -> None:
        self.sequences = sequences
        self.num_samples = num_samples
        self.length = length
        self.padding = padding

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Sample:
        tokens = np.full(self.length, self.padding, dtype=np.int64)
        labels = np.full(self.length, self.padding, dtype=np.int64)
        loss_mask = np.zeros(self.length, dtype=np.float32)
        if index < len(self.sequences):
            sequence = self.sequences[index]
            count = len(sequence.tokens) - 1
            assert 0 < sequence.num_scored <= count <= self.length, (sequence, self.length)
            tokens[:count] = sequence.tokens[:-1]
            labels[:count] = sequence.tokens[1:]
            loss_mask[count - sequence.num_scored : count] = 1
        return {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": loss_mask,
            "position_ids": np.arange(self.length),
            "documents": np.zeros(self.length, dtype=np.int64),
        }


# Function of logits [n, vocab] and the labels of n scored tokens to contributions [n, k], which are
# summed over the tokens of a sequence
Measure = Callable[[Tensor, Tensor], Tensor]


def score_sequences(run: Run, sequences: Sequence[ScoredSequence], padding: int) -> list[Score]:
    """Return the scores of sequences of at most --seq-length + 1 tokens, on every rank. Collective.

    The replicas share the sequences. Training is not affected.
    """
    scores = []
    for log_likelihood, num_misses in _evaluate(run, sequences, padding, _score, 2).tolist():
        scores.append(Score(log_likelihood, num_misses == 0))
    return scores


def predict_next(run: Run, sequences: Sequence[list[int]], padding: int) -> list[int]:
    """Return the most probable next token of each sequence, on every rank. Collective."""
    scored = [ScoredSequence([*tokens, padding], 1) for tokens in sequences]
    predicted = _evaluate(run, scored, padding, _predict, 1)
    return [round(token) for token in predicted[:, 0].tolist()]


def _evaluate(
    run: Run,
    sequences: Sequence[ScoredSequence],
    padding: int,
    measure: Measure,
    num_values: int,
) -> Tensor:
    """Return sums of a measure over the scored tokens of each sequence, fp64 [n, num_values]."""
    config = run.config
    micro_batch_size = config.training.micro_batch_size
    per_microbatch = micro_batch_size * run.ps.dp.size
    num_microbatches = -(-len(sequences) // per_microbatch)
    num_microbatches += -num_microbatches % run.ps.pp.size  # as interleaved schedules require
    num_samples = num_microbatches * per_microbatch
    dataset = _Sequences(sequences, num_samples, config.data.seq_length, padding)
    batches = DataIterator(
        dataset,
        0,
        micro_batch_size,
        replace(config.loader, num_workers=0, dataloader_type="single"),
        run.ps.dp.rank,
        run.ps.dp.size,
        ContextParallel.from_parallel_state(run.ps),
        run.device,
    )
    # fp32 does not represent all tokens of a large vocabulary.
    totals = torch.zeros(num_samples, num_values, dtype=torch.float64, device=run.device)
    first_samples = iter(range(run.ps.dp.rank * micro_batch_size, num_samples, per_microbatch))

    def forward_step(
        chunk: MegatronModule, batch: Batch, activation: Tensor | None
    ) -> Tensor | Loss:
        output = chunk(
            batch.get("tokens"),
            batch.get("position_ids"),
            input_tensor=activation,
            documents=batch.get("documents") if config.data.reset_attention_mask else None,
        )
        last = len(run.chunks) - 1
        if chunk is not run.chunks[last] or not run.ps.is_last_chunk(last):
            assert isinstance(output, Tensor)
            return output
        is_scored = batch["loss_mask"] > 0
        values = measure(output[is_scored].float(), batch["labels"][is_scored])
        # The TP ranks of a replica have the same logits.
        if run.ps.tp.rank == 0:
            rows = is_scored.nonzero()[:, 0] + next(first_samples)
            totals.index_add_(0, rows, values.double())
        return _make_loss(values, config.model.num_mtp_layers)

    with evaluating(run):
        scoring = replace(run, forward_step=forward_step)
        forward_backward(scoring, batches, num_microbatches, forward_only=True)
    batches.close()
    dist.all_reduce(totals)  # zeros except on the ranks that have logits
    return totals[: len(sequences)]


def _score(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-likelihood of each label, and whether it is not the most probable token."""
    log_likelihoods = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    is_miss = logits.argmax(-1) != labels
    return torch.stack((log_likelihoods, is_miss.float()), dim=1)


def _predict(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the most probable token."""
    return logits.argmax(-1, keepdim=True)


def _make_loss(values: Tensor, num_mtp_layers: int) -> Loss:
    """Return the loss that the schedule requires; it is not used."""
    total = values.sum().float()
    depths = total.new_zeros(num_mtp_layers) if num_mtp_layers else None
    return Loss(total, total.new_ones(()), depths, depths)
