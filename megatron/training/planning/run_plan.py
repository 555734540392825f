"""What a run will need on every pipeline stage, worked out from its flags without running it.

Weights, gradients and optimizer are exact: the model of a rank is built without memory, and its buffers are planned by
the code that plans them in training. Activations are `activation_memory.ActivationMemory`, over the passes that the
pipeline schedule runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from operator import mul
from typing import NamedTuple

from megatron.core.distributed.param_and_grad_buffer import ParamGroup
from megatron.core.optimizer import state_names
from megatron.core.parallel_state import ParallelState, Place
from megatron.core.pipeline_parallel.schedules import schedule
from megatron.training.config.run_config import Config, ModelProvider
from megatron.training.planning.activation_memory import ActivationMemory
from megatron.training.planning.costs import Traffic, plan_traffic
from megatron.training.planning.empty_model import EmptyChunk, ParameterInFile, empty_chunks, stored_sizes


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the device of one rank, but for the libraries' own and the allocator's gaps."""

    weights: int
    gradients: int
    optimizer: int
    tables: int
    """Rotary tables and fixed masks."""
    activations: int
    """Kept by embedding and layers between forward and backward, at the moment of the peak."""
    loss: int
    """Kept at that moment by the final norm and the loss, mostly the logits."""
    temporary: int
    """Held in addition by the pass under way, and by messages between stages."""

    @property
    def total(self) -> int:
        lasting = self.weights + self.gradients + self.optimizer + self.tables
        return lasting + self.activations + self.loss + self.temporary


@dataclass(frozen=True)
class StagePlan:
    """One rank of a pipeline stage; the others of the stage have the same sizes."""

    ps: ParallelState
    num_layers: int
    num_parameters: int
    """Of this rank, without padding."""
    passes_in_flight: int
    """Forward passes, of a chunk and a micro batch, that wait for their backward pass at the moment of the peak."""
    memory: MemoryPlan
    traffic: dict[str, Traffic]
    checkpoint_bytes: int
    """Roughly what this rank writes when all ranks share the writing; items are not cut for that."""


@dataclass(frozen=True)
class RunPlan:
    """All stages, and what belongs to the run as a whole."""

    stages: tuple[StagePlan, ...]
    num_parameters: int
    num_active: int
    """Of these, what a token is multiplied with: of the experts those that it goes to."""
    checkpoint_bytes: int
    num_microbatches: int
    bubble: float
    """Fraction of a step in which a stage waits, if all chunks take equally long: (P - 1) / (m V + P - 1)."""

    @property
    def largest(self) -> int:
        """Bytes on the fullest rank."""
        return max(stage.memory.total for stage in self.stages)

    def table(self) -> str:
        """What every stage needs, in GB of 10^9 bytes."""
        memory = [stage.memory for stage in self.stages]
        rows: list[tuple[str, list[float]]] = [
            ("weights", [m.weights for m in memory]),
            ("gradients (fp32)", [m.gradients for m in memory]),
            ("optimizer", [m.optimizer for m in memory]),
            ("tables", [m.tables for m in memory]),
            ("activations", [m.activations for m in memory]),
            ("logits and loss", [m.loss for m in memory]),
            ("temporary", [m.temporary for m in memory]),
            ("total memory", [m.total for m in memory]),
            ("checkpoint", [stage.checkpoint_bytes for stage in self.stages]),
        ]
        for axis in ("tp", "cp", "pp", "dp", "ep", "edp", "embedding"):
            name = "sent: tied embedding" if axis == "embedding" else f"sent per step: {axis.upper()}"
            rows.append((name, [stage.traffic[axis].wire for stage in self.stages]))
        lines = ["GB per rank of stage     " + "".join(f"{stage.ps.pp.rank:>9d}" for stage in self.stages)]
        lines += [f"  {name:23}" + "".join(f"{v / 1e9:>9.2f}" for v in values) for name, values in rows if any(values)]
        lines.append("passes in flight at peak " + "".join(f"{stage.passes_in_flight:>9d}" for stage in self.stages))
        return "\n".join(lines)


def plan_run(config: Config, world_size: int, model_provider: ModelProvider, device_type: str = "cuda") -> RunPlan:
    """The plan of a run of `world_size` ranks; `config.model.vocab_size` must be known. CPU and GPU keep other things
    for backward."""
    model, parallel = config.model, config.parallel
    pp_size, vpp_size = parallel.pp_size, parallel.vpp_size
    num_microbatches = config.batch_schedule(parallel.dp_size(world_size)).num_microbatches
    ranks = [parallel.rank_at(Place(pp=stage), world_size) for stage in range(pp_size)]
    states = [ParallelState.for_rank(parallel, world_size, rank) for rank in ranks]
    chunks = [list(empty_chunks(config, ps, model_provider)) for ps in states]
    activations = ActivationMemory.of_run(config, device_type)
    stages = [
        _plan_stage(config, ps, own, activations, num_microbatches) for ps, own in zip(states, chunks, strict=True)
    ]
    sizes = stored_sizes(itertools.chain.from_iterable(chunks))
    num_parameters, idle = sum(sizes.values()), 0
    if model.has_experts:
        of_experts = sum(numel for tensor, numel in sizes.items() if tensor.expert)
        idle = of_experts * (model.experts - model.moe_router_topk) // model.experts
    return RunPlan(
        tuple(stages),
        num_parameters,
        num_active=num_parameters - idle,
        checkpoint_bytes=_stored_bytes(config, sizes),
        num_microbatches=num_microbatches,
        bubble=(pp_size - 1) / (num_microbatches * vpp_size + pp_size - 1),
    )


def _plan_stage(
    config: Config,
    ps: ParallelState,
    chunks: list[EmptyChunk],
    activations: ActivationMemory,
    num_microbatches: int,
) -> StagePlan:
    itemsize = config.model.params_dtype.itemsize
    buffers = [buffer for chunk in chunks for buffer in chunk.buffers]
    peak = _peak(config, activations, ps, chunks, num_microbatches)
    memory = MemoryPlan(
        weights=sum(buffer.weight_bytes for buffer in buffers),
        gradients=sum(_gradient_bytes(config, buffer.numel, buffer.numel // buffer.num_shards) for buffer in buffers),
        optimizer=sum(
            bucket.numel // buffer.num_shards * _optimizer_bytes(config, bucket.group, itemsize < 4)
            for buffer in buffers
            for bucket in buffer.buckets
        ),
        tables=sum(activations.tables(chunk.kinds) for chunk in chunks),
        activations=peak.activations,
        loss=peak.loss,
        temporary=peak.temporary,
    )
    boxes = stored_sizes(chunks, whole=False)
    stored = sum(
        _stored_bytes(config, {tensor: numel for tensor, numel in boxes.items() if tensor.expert is expert}) // size
        for expert, size in ((False, ps.dp_cp.size), (True, ps.edp.size))
    )
    return StagePlan(
        ps,
        num_layers=sum(chunk.num_layers for chunk in chunks),
        num_parameters=sum(p.numel() for chunk in chunks for p in chunk.module.parameters()),
        passes_in_flight=peak.passes,
        memory=memory,
        traffic=plan_traffic(config, ps, chunks, activations, num_microbatches),
        checkpoint_bytes=stored,
    )


def _gradient_bytes(config: Config, numel: int, shard: int) -> int:
    """Of the buffer, and of the fp32 copy of a rank's reduced shard where the buffer is not fp32."""
    itemsize = config.ddp.grad_dtype(config.model.params_dtype).itemsize
    return numel * itemsize + (shard * 4 if itemsize < 4 else 0)


class _Moment(NamedTuple):
    """What a stage holds of passes, in bytes, and the number of passes in flight."""

    activations: int = 0
    loss: int = 0
    temporary: int = 0
    passes: int = 0

    @property
    def size(self) -> int:
        return self.activations + self.loss + self.temporary


def _peak(
    config: Config, activations: ActivationMemory, ps: ParallelState, chunks: list[EmptyChunk], num_microbatches: int
) -> _Moment:
    """The backward pass at which most is held, over the ticks of this stage's schedule."""
    losses = [activations.head if chunk.post_process else 0 for chunk in chunks]
    layers = [activations.kept(chunk.kinds) for chunk in chunks]
    backward = [activations.backward(chunk.kinds, chunk.post_process) for chunk in chunks]
    messages = 2 * activations.residual if ps.pp.size > 1 else 0  # a result being sent, an input being received
    # The peak is at a backward pass: it needs its temporaries while all passes in flight still hold their activations.
    in_flight, peak = [0] * len(chunks), _Moment()
    group_size = config.parallel.microbatch_group_size_per_vp_stage
    for tick in schedule(ps.pp.rank, ps.pp.size, len(chunks), num_microbatches, group_size=group_size):
        if tick.action is None:
            continue
        chunk = tick.action.chunk
        if tick.action.kind == "forward":
            in_flight[chunk] += 1
            continue
        now = _Moment(
            sum(map(mul, in_flight, layers)),
            sum(map(mul, in_flight, losses)),
            backward[chunk] + messages,
            sum(in_flight),
        )
        peak = max(peak, now, key=lambda moment: moment.size)
        in_flight[chunk] -= 1
    return peak


def _optimizer_bytes(config: Config, group: ParamGroup, main_parameters: bool) -> int:
    """Per parameter of `group`: fp32 main parameters, unless they are the model's own, and the update rule's state."""
    return 4 * (len(state_names(config.optimizer, group)) + main_parameters)


def _stored_bytes(config: Config, sizes: Mapping[ParameterInFile, int]) -> int:
    """Of weights and optimizer in a checkpoint, which holds main parameters in any case."""
    total = 0
    for tensor, numel in sizes.items():
        total += numel * config.model.params_dtype.itemsize
        if not config.checkpoint.no_save_optim:
            total += numel * _optimizer_bytes(config, tensor.group, main_parameters=True)
    return total
