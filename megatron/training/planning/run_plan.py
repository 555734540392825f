"""What a run will need on every pipeline stage (memory, files, traffic), worked out from its flags
without running it.

Weights, gradients and optimizer are exact: the model of a rank is built without memory, and its
buffers are planned by the code that plans them in training. Activations are
`rank_memory.ActivationMemory`, over the passes that the pipeline schedule runs.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from operator import mul
from typing import NamedTuple

from megatron.core.distributed.param_and_grad_buffer import ParamGroup
from megatron.core.optimizer import select_states
from megatron.core.parallel_state import ParallelState, Place
from megatron.core.pipeline_parallel.schedules import schedule
from megatron.core.transformer.moe import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.run_config import Config, ModelProvider
from megatron.training.planning.rank_memory import (
    ActivationMemory,
    EmptyChunk,
    ParameterInFile,
    empty_chunks,
    stored_sizes,
)

MEMORY_PARTS = {  # fields of `MemoryPlan`, and what they are called
    "weights": "weights",
    "gradients": "gradients (fp32)",
    "optimizer": "optimizer",
    "tables": "tables",
    "activations": "activations",
    "loss": "logits and loss",
    "temporary": "temporary",
}


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
        return sum(getattr(self, part) for part in MEMORY_PARTS)


@dataclass(frozen=True)
class Traffic:
    """Bytes of the whole tensors that a rank hands to the operations of one axis of `size` ranks."""

    size: int
    all_reduce: int = 0
    all_gather: int = 0
    reduce_scatter: int = 0
    send: int = 0
    all_to_all: int = 0

    @property
    def wire(self) -> float:
        """Bytes that leave the rank, with ring algorithms: (n - 1) / n of a gather or scatter,
        twice that of a sum.
        """
        once = self.all_gather + self.reduce_scatter + self.all_to_all
        return (self.size - 1) / self.size * (2 * self.all_reduce + once) + self.send


@dataclass(frozen=True)
class StagePlan:
    """One rank of a pipeline stage; the others of the stage have the same sizes."""

    ps: ParallelState
    num_layers: int
    num_parameters: int
    """Of this rank, without padding."""
    passes_in_flight: int
    """Forward passes, of a chunk and a micro-batch, that wait for their backward pass at the moment
    of the peak.
    """
    memory: MemoryPlan
    traffic: dict[str, Traffic]
    checkpoint_bytes: int
    """Roughly what this rank writes when all ranks share the writing; items are not cut for that.
    """


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
    """Fraction of a step in which a stage waits, if all chunks take equally long: (P - 1) / (m V +
    P - 1).
    """

    @property
    def largest(self) -> int:
        """Bytes on the fullest rank."""
        return max(stage.memory.total for stage in self.stages)

    def table(self) -> str:
        """What every stage needs, in GB of 10^9 bytes."""
        rows: list[tuple[str, list[float]]] = [
            (name, [getattr(stage.memory, part) for stage in self.stages])
            for part, name in MEMORY_PARTS.items()
        ]
        rows.append(("total memory", [stage.memory.total for stage in self.stages]))
        rows.append(("checkpoint", [stage.checkpoint_bytes for stage in self.stages]))
        for axis in ("tp", "cp", "pp", "dp", "ep", "edp", "embedding"):
            name = (
                "sent: tied embedding" if axis == "embedding" else f"sent per step: {axis.upper()}"
            )
            rows.append((name, [stage.traffic[axis].wire for stage in self.stages]))
        lines = [
            "GB per rank of stage     "
            + "".join(f"{stage.ps.pp.rank:>9d}" for stage in self.stages)
        ]
        lines += [
            f"  {name:23}" + "".join(f"{v / 1e9:>9.2f}" for v in values)
            for name, values in rows
            if any(values)
        ]
        lines.append(
            "passes in flight at peak "
            + "".join(f"{stage.passes_in_flight:>9d}" for stage in self.stages)
        )
        return "\n".join(lines)


def plan_run(
    config: Config, world_size: int, model_provider: ModelProvider, device_type: str = "cuda"
) -> RunPlan:
    """The plan of a run of `world_size` ranks; `config.model.vocab_size` must be known. CPU and GPU
    keep other things for backward.
    """
    model = config.model
    parallel = config.parallel
    pp_size = parallel.pp_size
    vpp_size = parallel.vpp_size
    num_microbatches = config.batch_schedule(parallel.dp_size(world_size)).num_microbatches
    ranks = [parallel.rank_at(Place(pp=stage), world_size) for stage in range(pp_size)]
    states = [ParallelState.for_rank(parallel, world_size, rank) for rank in ranks]
    chunks = [list(empty_chunks(config, ps, model_provider)) for ps in states]
    activations = ActivationMemory.of_run(config, device_type)
    stages = [
        _plan_stage(config, ps, own, activations, num_microbatches)
        for ps, own in zip(states, chunks, strict=True)
    ]
    sizes = stored_sizes(itertools.chain.from_iterable(chunks))
    num_parameters = sum(sizes.values())
    idle = 0
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
    grad_size = config.ddp.grad_dtype(config.model.params_dtype).itemsize
    copied = (
        4 if grad_size < 4 else 0
    )  # of a rank's reduced shard there is an fp32 copy where the buffer is not fp32
    buffers = [buffer for chunk in chunks for buffer in chunk.buffers]
    peak = _peak(config, activations, ps, chunks, num_microbatches)
    memory = MemoryPlan(
        weights=sum(buffer.weight_bytes for buffer in buffers),
        gradients=sum(
            buffer.numel * grad_size + buffer.numel // buffer.num_shards * copied
            for buffer in buffers
        ),
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
        _stored_bytes(
            config, {tensor: numel for tensor, numel in boxes.items() if tensor.expert is expert}
        )
        // size
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
    config: Config,
    activations: ActivationMemory,
    ps: ParallelState,
    chunks: list[EmptyChunk],
    num_microbatches: int,
) -> _Moment:
    """The backward pass at which most is held, over the ticks of this stage's schedule."""
    losses = [activations.head if chunk.post_process else 0 for chunk in chunks]
    layers = [activations.kept(chunk.kinds) for chunk in chunks]
    backward = [activations.backward(chunk.kinds, chunk.post_process) for chunk in chunks]
    messages = (
        2 * activations.residual if ps.pp.size > 1 else 0
    )  # a result being sent, an input being received
    # The peak is at a backward pass: it needs its temporaries while all passes in flight still hold
    # their activations.
    in_flight = [0] * len(chunks)
    peak = _Moment()
    group_size = config.parallel.microbatch_group_size_per_vp_stage
    for tick in schedule(
        ps.pp.rank, ps.pp.size, len(chunks), num_microbatches, group_size=group_size
    ):
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
    """Per parameter of `group`: fp32 main parameters, unless they are the model's own, and the
    update rule's state.
    """
    return 4 * (len(select_states(config.optimizer, group)) + main_parameters)


def _stored_bytes(config: Config, sizes: Mapping[ParameterInFile, int]) -> int:
    """Of weights and optimizer in a checkpoint, which holds main parameters in any case."""
    total = 0
    for tensor, numel in sizes.items():
        total += numel * config.model.params_dtype.itemsize
        if not config.checkpoint.no_save_optim:
            total += numel * _optimizer_bytes(config, tensor.group, main_parameters=True)
    return total


# Traffic, counted from what the layers send.
#  Per micro-batch and layer, two sums over TP forward and two backward (Shoeybi et al. 2019); under
# sequence parallelism each becomes a gather and a scatter, and the inputs of the column-parallel
# layers are gathered once more in backward (Korthikanti et al. 2022). Embedding and loss add
# theirs. Per step, DP reduces gradients and gathers parameters. Left out are scalars, the loss's
# two numbers per token, and gradients of norms.


def plan_traffic(
    config: Config,
    ps: ParallelState,
    chunks: list[EmptyChunk],
    activations: ActivationMemory,
    num_microbatches: int,
) -> dict[str, Traffic]:
    """A step's traffic by axis on the rank of `ps`, whose model is `chunks`.

    `embedding` is the tied word embedding's gradient, between the first and the last stage; `ep` are tokens to their
    experts and back; `edp` gradients and parameters of experts that are split in another way than
    the rest.
    """
    group_size = config.parallel.microbatch_group_size_per_vp_stage
    ticks = schedule(ps.pp.rank, ps.pp.size, len(chunks), num_microbatches, group_size=group_size)
    sends = sum(tick.send is not None for tick in ticks)
    return {
        "tp": _tensor_parallel(config, chunks, activations, num_microbatches),
        "cp": _context_parallel(config, chunks, activations, num_microbatches),
        "pp": Traffic(ps.pp.size, send=sends * activations.residual),
        "dp": _data_parallel(config, chunks, ps.dp_cp.size, expert=False),
        "embedding": _tied_embedding(config, chunks, ps.dp_cp.size),
        "ep": _expert_parallel(config, ps, chunks, activations, num_microbatches),
        "edp": _data_parallel(config, chunks, ps.edp.size, expert=True),
    }


def _tensor_parallel(
    config: Config, chunks: list[EmptyChunk], activations: ActivationMemory, microbatches: int
) -> Traffic:
    size = config.parallel.tp_size
    if size == 1:
        return Traffic(1)
    ends = sum(chunk.pre_process + chunk.post_process for chunk in chunks)
    # In units of `[s/cp, b, h]`; what enters latent attention is narrower.
    whole = activations.whole * microbatches
    entering = (_latent_width(config.model) or config.model.hidden_size) / config.model.hidden_size
    sums = float(ends)
    gathers = float(ends + sum(chunk.post_process for chunk in chunks))  # the loss's among them
    for chunk in chunks:
        again = activations.recomputed_layers(chunk.num_layers)
        for number, kind in enumerate(chunk.kinds):
            # Experts themselves are not split over TP as others are.
            mlp = not kind.experts or config.model.has_shared_experts
            twice = number < again
            mlp_again = mlp and activations.mlp_again(kind)
            heads_again = entering if config.model.recomputes("mla_up_proj") else 0.0
            sums += (1 + twice) * (1 + mlp) + entering + mlp + mlp_again
            gathers += (2 + twice) * (entering + mlp) + 1 + mlp + mlp_again + heads_again
    if not config.parallel.sequence_parallel:
        return Traffic(size, all_reduce=round(sums * whole))
    return Traffic(size, all_gather=round(gathers * whole), reduce_scatter=round(sums * whole))


def _latent_width(config: TransformerConfig) -> int:
    """Width of what latent attention's heads come from; 0 for other attention."""
    if not config.multi_latent_attention:
        return 0
    query = config.hidden_size if config.q_lora_rank is None else config.q_lora_rank
    return query + config.kv_lora_rank + config.qk_pos_emb_head_dim


def _context_parallel(
    config: Config, chunks: list[EmptyChunk], activations: ActivationMemory, microbatches: int
) -> Traffic:
    """Keys and values, exchanged again in backward, where their gradients return; or all heads
    there and back.
    """
    size = config.parallel.cp_size
    own = activations.key_values
    if size == 1:
        return Traffic(1)
    # by --cp-comm-type
    fetched = Counter[str]()
    layers = Counter[str]()
    for chunk in chunks:
        again = activations.recomputed_layers(chunk.num_layers)
        for number, kind in enumerate(chunk.kinds):
            way = kind.cp_comm_type
            twice = number < again or (way != "a2a" and config.model.recomputes("core_attn"))
            layers[way] += microbatches
            fetched[way] += (2 + twice) * microbatches
    there_and_back = own + 2 * activations.per_head * config.model.num_attention_heads
    return Traffic(
        size,
        all_to_all=fetched["a2a"] * there_and_back,
        send=(fetched["p2p"] * (size - 1) + layers["p2p"] * size) * own,
        all_gather=fetched["all_gather"] * size * own,
        reduce_scatter=layers["all_gather"] * size * own,
    )


def _expert_parallel(
    config: Config,
    ps: ParallelState,
    chunks: list[EmptyChunk],
    activations: ActivationMemory,
    microbatches: int,
) -> Traffic:
    """Every token goes to k experts and comes back, forward and backward; or all tokens go to all
    ranks.
    """
    model = config.model
    size = ps.experts.size
    if not model.has_experts or size == 1:
        return Traffic(1)
    layers = sum(
        isinstance(module, MoELayer) for chunk in chunks for module in chunk.module.modules()
    )
    again = sum(activations.recomputed_layers(chunk.num_layers) for chunk in chunks)
    passes = microbatches * (2 * layers + min(again, layers))
    if model.moe_token_dispatcher_type == "alltoall":
        rows = passes * 2 * model.moe_router_topk * ps.etp.size * activations.residual
        return Traffic(size, all_to_all=rows)
    whole = passes * size * activations.residual
    return Traffic(size, all_gather=whole, reduce_scatter=whole)


def _data_parallel(config: Config, chunks: list[EmptyChunk], size: int, expert: bool) -> Traffic:
    if size == 1:
        return Traffic(1)
    buffers = [buffer for chunk in chunks for buffer in chunk.buffers if buffer.expert is expert]
    gradients = config.ddp.grad_dtype(config.model.params_dtype).itemsize * sum(
        buffer.numel for buffer in buffers
    )
    if not config.ddp.use_distributed_optimizer:
        return Traffic(size, all_reduce=gradients)
    weights = sum(buffer.numel * buffer.itemsize for buffer in buffers)
    return Traffic(size, all_gather=weights, reduce_scatter=gradients)


def _tied_embedding(config: Config, chunks: list[EmptyChunk], dp_size: int) -> Traffic:
    tied = [
        bucket.numel
        for chunk in chunks
        for bucket in chunk.buckets
        if any(span.spec.info.shared_embedding for span in bucket.spans)
    ]
    if not tied:
        return Traffic(1)
    return Traffic(
        2, all_reduce=4 * sum(tied) // (dp_size if config.ddp.use_distributed_optimizer else 1)
    )
