"""The loss on data that is not trained on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from megatron.training.data.samplers import Batch
from megatron.training.forward_backward import forward_backward
from megatron.training.reporting import console
from megatron.training.reporting.logging import Writer, reduce_losses
from megatron.training.run import Run


def evaluate(run: Run, batches: Iterator[Batch] | None) -> float:
    """Mean loss over --eval-iters global batches; the same on every rank. Collective.

    Dropout is off, and no random number is drawn, so training is not disturbed.
    """
    for chunk in run.chunks:
        chunk.eval()
    num_microbatches = run.eval_batch_size // run.batches.samples_per_microbatch
    totals = torch.zeros(2, device=run.device)
    with run.timers("evaluate"):
        for _ in range(run.config.training.eval_iters):
            totals += forward_backward(run, batches, num_microbatches, forward_only=True)
    for chunk in run.chunks:
        chunk.train()
    return reduce_losses([totals], run.ps)[0]


def report(run: Run, name: str, loss: float, writers: Sequence[Writer]) -> None:
    """One line of the log, and points under Megatron-LM's names."""
    iteration = run.state.iteration
    perplexity = math.exp(min(20.0, loss))
    line = f" {name} loss at iteration {iteration} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity:.6E} |"
    console.report(line, event="evaluation", split=name, iteration=iteration, loss=loss, perplexity=perplexity)
    values = {f"lm loss {name}": loss}
    if run.config.logging.log_validation_ppl_to_tensorboard:
        values[f"lm loss {name} ppl"] = perplexity
    for writer in writers:
        writer.scalars(values, iteration, run.state.consumed_train_samples)
