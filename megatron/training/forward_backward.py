"""One global batch through this rank's model chunks, to train or to evaluate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megatron.core.pipeline_parallel import run_schedule
from megatron.core.transformer.layer_spec import layer_spec
from megatron.core.transformer.moe.router import finish_step, measurements, routers
from megatron.training.data.samplers import Batch
from megatron.training.reporting import console
from megatron.training.reporting.logging import reduce_losses
from megatron.training.run import Loss, Run


class MicrobatchFeed:
    """The micro batches of one iteration on the device: each is fetched once and kept until its last chunk used it.

    `documents` stay on the host: where they begin and end decides what attention launches, and the device, asked for
    it, would first have to finish all that it was given.
    """

    def __init__(self, batches: Iterator[Batch] | None, device: torch.device, users: Sequence[int]) -> None:
        """`users`: the chunks that need any of a batch."""
        self._batches, self._device, self._users = batches, device, users
        self._held: dict[int, Batch] = {}

    def __call__(self, chunk: int, microbatch: int) -> Batch:
        if chunk not in self._users:
            return {}
        if chunk == self._users[0]:  # the chunks see micro batches in the same order, the first one before the others
            assert self._batches is not None
            batch = next(self._batches)
            self._held[microbatch] = {
                key: x if key == "documents" else x.to(self._device, non_blocking=True) for key, x in batch.items()
            }
        return self._held.pop(microbatch) if chunk == self._users[-1] else self._held[microbatch]


def forward_backward(
    run: Run, batches: Iterator[Batch] | None, num_microbatches: int, forward_only: bool = False
) -> Tensor:
    """Forward (and backward) of `num_microbatches` micro batches; gradients accumulate in the chunks' buffers.

    Returns fp32 [numerator, denominator] of the loss as this rank saw it, zeros but on the last stage: the sum over
    micro batches of their mean loss and the number of micro batches, or with --calculate-per-token-loss the sum over
    tokens and their number. Under context parallelism, too, it is the sum over tokens that is reported, because a rank
    sees only a part of each sequence; what is minimized without that flag are the means of the parts, as in
    Megatron-LM. Nothing is read back from the device.
    """
    totals = torch.zeros(2, dtype=torch.float32, device=run.device)
    users = [chunk for chunk in range(len(run.chunks)) if run.needs_batch(chunk)]
    feed = MicrobatchFeed(batches, run.device, users)
    forward_step = _make_forward_step(run, feed, num_microbatches, totals)
    # Gradients accumulate locally; only the last backward pass of each chunk starts their reduction.
    for chunk in run.chunks:
        chunk.require_sync = False
    layer_spec(run.config.model).start_step()
    if run.config.model.has_experts and not forward_only:
        start_step(run, num_microbatches)

    def before_last_backward(chunk: int) -> None:
        run.chunks[chunk].require_sync = True

    run_schedule(
        forward_step,
        len(run.chunks),
        num_microbatches,
        pp=run.ps.pp,
        tensor_shape=activation_shape(run),
        dtype=run.config.model.params_dtype,
        device=run.device,
        forward_only=forward_only,
        before_last_backward=None if forward_only else before_last_backward,
        group_size=run.config.parallel.microbatch_group_size_per_vp_stage,
    )
    return totals


def start_step(run: Run, num_microbatches: int) -> None:
    """Auxiliary losses are means over micro batches and replicas, as the loss is; ranks of CP have shares of them."""
    per_token = run.config.training.calculate_per_token_loss
    scale = run.optimizer.loss_scale * (1.0 if per_token else run.ps.cp.size / num_microbatches)
    for router in routers(run.chunks):
        router.start_step(scale, per_token)


def measure_experts(run: Run, num_microbatches: int) -> Tensor | None:
    """This rank's share of the auxiliary losses by layer; the expert bias follows the load. After the reductions."""
    if not run.config.model.has_experts:
        return None
    of_rank = routers(run.chunks)
    finish_step(of_rank)
    return measurements(run.config.model, of_rank, num_microbatches, run.device) / run.ps.dp.size


def activation_shape(run: Run) -> tuple[int, int, int]:
    """[s/cp, b, h] between stages, [s/(cp tp), b, h] under sequence parallelism."""
    sequence = run.config.data.seq_length // run.ps.cp.size
    if run.config.parallel.sequence_parallel:
        sequence //= run.ps.tp.size
    return sequence, run.config.training.micro_batch_size, run.config.model.hidden_size


def _make_forward_step(
    run: Run, feed: MicrobatchFeed, num_microbatches: int, totals: Tensor
) -> Callable[[int, int, Tensor | None], Tensor]:
    per_token = run.config.training.calculate_per_token_loss
    means = not per_token and run.ps.cp.size == 1
    loss_scale = run.optimizer.loss_scale

    def forward_step(chunk: int, microbatch: int, activation: Tensor | None) -> Tensor:
        with run.timers("batch-generator", level=2):
            batch = feed(chunk, microbatch)
        with run.timers("forward-compute", level=2):
            output = run.forward_step(run.chunks[chunk], batch, activation)
        if not isinstance(output, Loss):
            return output
        total, num_tokens = output
        mean = total / num_tokens.clamp(min=1)
        reported = (mean, torch.ones_like(mean)) if means else (total, num_tokens.float())
        totals.add_(torch.stack(reported).detach())
        # The scale keeps small fp16 gradients from underflow; the optimizer divides by it.
        if per_token:  # the gradients are divided by the number of tokens of the global batch at the end
            return total * loss_scale
        return mean * (loss_scale / num_microbatches)

    return forward_step


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


def report_evaluation(run: Run, name: str, loss: float) -> None:
    """One line of the log, and points under Megatron-LM's names."""
    iteration = run.state.iteration
    perplexity = math.exp(min(20.0, loss))
    line = f" {name} loss at iteration {iteration} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity:.6E} |"
    console.report(line, event="evaluation", split=name, iteration=iteration, loss=loss, perplexity=perplexity)
    values = {f"lm loss {name}": loss}
    if run.config.logging.log_validation_ppl_to_tensorboard:
        values[f"lm loss {name} ppl"] = perplexity
    for writer in run.writers:
        writer.scalars(values, iteration, run.state.consumed_train_samples)
