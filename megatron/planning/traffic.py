"""Bytes that one rank exchanges in a training step, by axis, counted from what the layers send.

Per micro batch and layer, two sums over TP forward and two backward (Shoeybi et al. 2019); under sequence parallelism
each becomes a gather and a scatter, and the inputs of the column-parallel layers are gathered once more in backward
(Korthikanti et al. 2022). Embedding and loss add theirs. Per step, DP reduces gradients and gathers parameters.
Left out are scalars, the loss's two numbers per token, and gradients of norms.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.parallel_state import ParallelState
from megatron.core.pipeline_parallel.schedules import schedule
from megatron.planning.activation_memory import ActivationMemory
from megatron.planning.empty_model import EmptyChunk
from megatron.training.config.run_config import Config


@dataclass(frozen=True)
class Traffic:
    """Bytes of the whole tensors that a rank hands to the operations of one axis of `size` ranks."""

    size: int
    all_reduce: int = 0
    all_gather: int = 0
    reduce_scatter: int = 0
    send: int = 0

    @property
    def wire(self) -> float:
        """Bytes that leave the rank, with ring algorithms: (n - 1) / n of a gather or scatter, twice that of a sum."""
        return (self.size - 1) / self.size * (2 * self.all_reduce + self.all_gather + self.reduce_scatter) + self.send


@dataclass(frozen=True)
class TrafficPlan:
    """One rank's traffic in a step."""

    tp: Traffic
    pp: Traffic
    dp: Traffic
    embedding: Traffic
    """The tied word embedding's gradient, between the first and the last stage."""


def plan_traffic(
    config: Config, ps: ParallelState, chunks: list[EmptyChunk], activations: ActivationMemory, microbatches: int
) -> TrafficPlan:
    """Of a step of `microbatches` on the rank of `ps`, whose model is `chunks`."""
    group_size = config.parallel.microbatch_group_size_per_vp_stage
    ticks = schedule(ps.pp.rank, ps.pp.size, len(chunks), microbatches, group_size=group_size)
    sends = sum(tick.send is not None for tick in ticks)
    return TrafficPlan(
        tp=_tensor_parallel(config, chunks, activations, microbatches),
        pp=Traffic(ps.pp.size, send=sends * activations.residual),
        dp=_data_parallel(config, chunks, ps.dp.size),
        embedding=_tied_embedding(config, chunks, ps.dp.size),
    )


def _tensor_parallel(
    config: Config, chunks: list[EmptyChunk], activations: ActivationMemory, microbatches: int
) -> Traffic:
    size = config.parallel.tp_size
    if size == 1:
        return Traffic(1)
    layers = sum(chunk.num_layers for chunk in chunks)
    again = sum(activations.recomputed_layers(chunk.num_layers) for chunk in chunks)
    ends = sum(chunk.pre_process + chunk.post_process for chunk in chunks)
    loss = sum(chunk.post_process for chunk in chunks)
    whole = activations.whole * microbatches
    sums = 4 * layers + 2 * again + ends
    if not config.parallel.sequence_parallel:
        return Traffic(size, all_reduce=sums * whole)
    gathers = sums + 2 * layers + loss
    return Traffic(size, all_gather=gathers * whole, reduce_scatter=sums * whole)


def _data_parallel(config: Config, chunks: list[EmptyChunk], size: int) -> Traffic:
    if size == 1:
        return Traffic(1)
    numel = sum(chunk.numel for chunk in chunks)
    gradients = config.ddp.grad_dtype(config.model.params_dtype).itemsize * numel
    if not config.ddp.use_distributed_optimizer:
        return Traffic(size, all_reduce=gradients)
    return Traffic(size, all_gather=config.model.params_dtype.itemsize * numel, reduce_scatter=gradients)


def _tied_embedding(config: Config, chunks: list[EmptyChunk], dp_size: int) -> Traffic:
    tied = [
        bucket.numel
        for chunk in chunks
        for bucket in chunk.buckets
        if any(span.spec.info.shared_embedding for span in bucket.spans)
    ]
    if not tied:
        return Traffic(1)
    return Traffic(2, all_reduce=4 * sum(tied) // (dp_size if config.ddp.use_distributed_optimizer else 1))
