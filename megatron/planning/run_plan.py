"""Requirements of a run on every pipeline stage (memory, files, traffic), computed from its flags.

Weights, gradients and optimizer state are exact: `meta_model` builds the model of a rank without
allocating memory. `pass_costs` runs its layers on such tensors, which measures the activations of a
pass, and the pipeline schedule determines how many passes keep theirs at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from typing import NamedTuple

from megatron.core.distributed.param_and_grad_buffer import ParamGroup
from megatron.core.optimizer import select_states
from megatron.core.parallel_config import Place
from megatron.core.parallel_state import ParallelState
from megatron.core.pipeline_parallel.schedules import list_actions
from megatron.core.terminal import select_unit
from megatron.planning.meta_model import (
    FP32,
    MetaChunk,
    SizedParameter,
    build_meta_chunks,
    count_stored_elements,
)
from megatron.planning.pass_costs import Part, PassCosts, list_parts
from megatron.planning.traffic import AXES, Traffic, plan_traffic
from megatron.training.config.run_config import Config, ModelProvider

MEMORY_PARTS = {  # field of `MemoryPlan` -> name in tables
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
    """Bytes on the device of one rank, without those of libraries and allocator fragmentation."""

    weights: int
    gradients: int
    optimizer: int
    tables: int
    """Rotary tables and fixed masks."""
    activations: int
    """Kept by embedding and layers for backward, at the peak."""
    loss: int
    """Kept by the final norm and the loss at the peak, mostly the logits."""
    temporary: int
    """Held temporarily by the current pass, and by messages between stages."""

    @property
    def total(self) -> int:
        return sum(getattr(self, component) for component in MEMORY_PARTS)


@dataclass(frozen=True)
class StagePlan:
    """One rank of a pipeline stage; the other ranks of the stage have the same sizes."""

    ps: ParallelState
    num_layers: int
    num_parameters: int
    """Number of parameters of this rank, without padding."""
    passes_in_flight: int
    """Number of forward passes, of a chunk and a micro-batch, whose backward pass has not finished
    at the peak.
    """
    memory: MemoryPlan
    traffic: dict[str, Traffic]
    checkpoint_bytes: int
    """Approximate bytes that this rank writes if all ranks share the writing."""

    def list_requirements(self) -> dict[str, float]:
        """Return the bytes of every requirement by its name in tables."""
        requirements: dict[str, float] = {}
        for component, name in MEMORY_PARTS.items():
            requirements[name] = getattr(self.memory, component)
        requirements["total memory"] = self.memory.total
        requirements["checkpoint"] = self.checkpoint_bytes
        for axis in AXES:
            name = f"sent per step: {axis.upper()}"
            if axis == "embedding":
                name = "sent: tied embedding"
            requirements[name] = self.traffic[axis].wire
        return requirements


@dataclass(frozen=True)
class RunPlan:
    """The plans of all stages, and properties of the whole run."""

    stages: tuple[StagePlan, ...]
    num_parameters: int
    num_trained: int
    """Number of parameters that are not frozen (--lora-rank)."""
    num_active: int
    """Number of parameters that a token uses; only the chosen experts count."""
    checkpoint_bytes: int
    export_bytes: int
    """Bytes of a model in Hugging Face format next to a checkpoint; 0 without
    --save-hf-interval.
    """
    num_microbatches: int
    has_activations: bool
    """Whether the passes were measured; if not, memory consists of weights, gradients and optimizer
    state, and there is no traffic.
    """
    bubble: float
    """Fraction of a step in which a stage waits, if all chunks take the same time: (P - 1) / (m V +
    P - 1).
    """

    @property
    def largest(self) -> int:
        """Bytes on the rank with the most memory in use."""
        return max(stage.memory.total for stage in self.stages)

    def format_table(self) -> str:
        """Return the requirements of every stage as a table, in the unit of the largest memory."""
        columns = [stage.list_requirements() for stage in self.stages]
        limit, unit = select_unit(self.largest)
        title = f"{unit} per rank of stage"
        header = f"{title:25}"
        footer = "passes in flight at peak "
        for stage in self.stages:
            header += f"{stage.ps.pp.rank:>9d}"
            footer += f"{stage.passes_in_flight:>9d}"

        rows = [header]
        for name in columns[0]:
            values = [column[name] for column in columns]
            if any(values):
                cells = [f"{value / limit:>9.2f}" for value in values]
                rows.append(f"  {name:23}{''.join(cells)}")
        rows.append(footer)
        return "\n".join(rows)


def plan_run(
    config: Config,
    world_size: int,
    model_provider: ModelProvider,
    device_type: str | None = None,
    measure_passes: bool = True,
) -> RunPlan:
    """Return the plan of a run of `world_size` ranks.

    `config.model.vocab_size` must be known. CPU and CUDA keep different tensors for backward. The
    default of `device_type` is that of --device, or "cuda". Without `measure_passes`, which imports
    a part of torch's compiler, the plan has no activations and no traffic.
    """
    chunks = build_stages(config, world_size, model_provider)
    costs = None
    if measure_passes:
        costs = make_pass_costs(config, world_size, model_provider, device_type)
    return plan_stages(config, world_size, chunks, costs)


def make_pass_costs(
    config: Config, world_size: int, model_provider: ModelProvider, device_type: str | None = None
) -> PassCosts:
    """Return the costs of the passes of a run, which are measured when they are requested."""
    device_type = device_type or config.distributed.device or "cuda"
    ps = _find_rank_of_stage(config, world_size, 0)
    return PassCosts(config, ps, model_provider, device_type)


def build_stages(
    config: Config, world_size: int, model_provider: ModelProvider
) -> list[list[MetaChunk]]:
    """Return the chunks of one rank of every pipeline stage."""
    stages = []
    for stage in range(config.parallel.pp_size):
        ps = _find_rank_of_stage(config, world_size, stage)
        stages.append(list(build_meta_chunks(config, ps, model_provider)))
    return stages


def _find_rank_of_stage(config: Config, world_size: int, stage: int) -> ParallelState:
    rank = config.parallel.rank_at(Place(pp=stage), world_size)
    return ParallelState.for_rank(config.parallel, world_size, rank)


def plan_stages(
    config: Config,
    world_size: int,
    chunks_of_stages: Sequence[list[MetaChunk]],
    costs: PassCosts | None,
) -> RunPlan:
    """Return the plan of a run whose stages have these chunks, with the `costs` of their passes.

    The chunks depend on TP, PP, the chunks per stage and the split of experts, but not on CP,
    recomputation and the micro-batch size.
    """
    parallel = config.parallel
    pp_size = parallel.pp_size
    batches = config.batch_schedule(parallel.dp_size(world_size))
    num_microbatches = batches.num_microbatches

    # Plan one rank of each stage.
    stages = []
    all_chunks: list[MetaChunk] = []
    for stage, chunks in enumerate(chunks_of_stages):
        ps = _find_rank_of_stage(config, world_size, stage)
        stages.append(_plan_stage(config, ps, chunks, costs, num_microbatches))
        all_chunks += chunks

    # Count the parameters of the whole model.
    sizes = count_stored_elements(all_chunks)
    num_parameters = sum(sizes.values())

    export_bytes = 0
    if config.checkpoint.save_hf_interval is not None:
        itemsize = config.model.params_dtype.itemsize
        if config.checkpoint.save_hf_dtype is not None:
            itemsize = 2  # with intervals only bf16 and fp16
        export_bytes = num_parameters * itemsize

    # In units of the forward and backward of one chunk.
    num_busy_ticks = num_microbatches * parallel.vpp_size
    num_idle_ticks = pp_size - 1
    return RunPlan(
        tuple(stages),
        num_parameters,
        num_trained=sum(numel for parameter, numel in sizes.items() if parameter.is_saved),
        num_active=num_parameters - _count_idle_parameters(config, sizes),
        checkpoint_bytes=_count_checkpoint_bytes(config, sizes),
        export_bytes=export_bytes,
        num_microbatches=num_microbatches,
        has_activations=costs is not None,
        bubble=num_idle_ticks / (num_busy_ticks + num_idle_ticks),
    )


def _count_idle_parameters(config: Config, sizes: Mapping[SizedParameter, int]) -> int:
    """Return the number of parameters in experts that are not chosen for a token."""
    model = config.model
    if not model.has_experts:
        return 0
    num_expert_parameters = 0
    for parameter, numel in sizes.items():
        if parameter.is_expert:
            num_expert_parameters += numel
    # Experts of a layer have equal sizes; shared experts are dense parameters.
    num_idle_experts = model.experts - model.moe_router_topk
    return num_expert_parameters * num_idle_experts // model.experts


def _plan_stage(
    config: Config,
    ps: ParallelState,
    chunks: list[MetaChunk],
    costs: PassCosts | None,
    num_microbatches: int,
) -> StagePlan:
    """Return the plan of the stage that rank `ps` is part of."""
    # Memory and traffic of passes
    passes: list[_ChunkPass] = []
    peak = _Moment()
    traffic = dict.fromkeys(AXES, Traffic(size=1))
    if costs is not None:
        passes = [_measure_pass(config, chunk, costs) for chunk in chunks]
        messages = 0
        if ps.pp.size > 1:
            # A result being sent and an input being received.
            messages = 2 * costs.message_bytes
        peak = _find_peak(config, ps, passes, messages, num_microbatches)
        traffic = plan_traffic(config, ps, chunks, costs, num_microbatches)

    # Memory
    weights, gradients, optimizer = _count_buffer_bytes(config, chunks)
    memory = MemoryPlan(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        tables=sum(chunk_pass.tables for chunk_pass in passes),
        activations=peak.activations,
        loss=peak.loss,
        temporary=peak.temporary,
    )

    # Checkpoint. All ranks that hold the same boxes share writing them.
    dense: dict[SizedParameter, int] = {}
    experts: dict[SizedParameter, int] = {}
    for parameter, numel in count_stored_elements(chunks, whole=False).items():
        group = experts if parameter.is_expert else dense
        group[parameter] = numel
    checkpoint_bytes = _count_checkpoint_bytes(config, dense) // ps.dp_cp.size
    checkpoint_bytes += _count_checkpoint_bytes(config, experts) // ps.edp.size

    num_parameters = 0
    for chunk in chunks:
        for weight in chunk.module.parameters():
            num_parameters += weight.numel()
    return StagePlan(
        ps,
        num_layers=sum(len(chunk.layers) for chunk in chunks),
        num_parameters=num_parameters,
        passes_in_flight=peak.passes,
        memory=memory,
        traffic=traffic,
        checkpoint_bytes=checkpoint_bytes,
    )


class _ChunkPass(NamedTuple):
    """Bytes of the pass of one micro-batch through a chunk."""

    activations: int
    """Kept for backward by the embedding and the layers."""
    loss: int
    """Kept for backward by the final norm, the loss, and layers for multi-token prediction."""
    temporary: int
    """Maximum held during backward in addition to what was kept at its start."""
    tables: int
    """Rotary tables and fixed masks, which are kept between iterations."""


def _measure_pass(config: Config, chunk: MetaChunk, costs: PassCosts) -> _ChunkPass:
    """Return the bytes of a pass through a chunk, from those of its parts."""
    kept = 0
    most = 0
    loss = 0
    tables: dict[object, int] = {}
    for part in list_parts(config.model, chunk):
        cost = costs.measure(part)
        # Backward begins with the last part: the parts before this one still keep their bytes.
        kept += cost.kept
        most = max(most, kept + cost.temporary)
        if part.post_process:
            loss = cost.kept
            tables["prediction"] = cost.tables
    for layer in chunk.layers:
        # Layers with experts and without share tables.
        layer_kind = costs.get_layer_kind(layer)._replace(experts=False)
        if layer_kind not in tables:
            tables[layer_kind] = costs.measure(Part(range(layer, layer + 1))).tables
    return _ChunkPass(kept - loss, loss, max(0, most - kept), sum(tables.values()))


def _count_buffer_bytes(config: Config, chunks: list[MetaChunk]) -> tuple[int, int, int]:
    """Return the bytes of weights, gradients and optimizer state, which includes the average."""
    params_dtype = config.model.params_dtype
    # An fp32 model is its own main copy.
    has_main_parameters = params_dtype.itemsize < FP32
    grad_itemsize = config.ddp.grad_dtype(params_dtype).itemsize
    # A reduced shard of gradients that are not fp32 has a copy in fp32.
    copy_itemsize = 0
    if grad_itemsize < FP32:
        copy_itemsize = FP32
    weights = 0
    gradients = 0
    optimizer = 0
    for chunk in chunks:
        weights += chunk.frozen_bytes
        for buffer in chunk.buffers:
            shard_numel = buffer.numel // buffer.num_shards
            weights += buffer.weight_bytes
            gradients += buffer.numel * grad_itemsize
            gradients += shard_numel * copy_itemsize
            for bucket in buffer.buckets:
                per_parameter = _count_optimizer_bytes(config, bucket.group, has_main_parameters)
                per_parameter += _count_average_bytes(config)
                bucket_shard_numel = bucket.numel // buffer.num_shards
                optimizer += bucket_shard_numel * per_parameter
    return weights, gradients, optimizer


class _Moment(NamedTuple):
    """Bytes that a stage holds for its passes at one moment, and the number of passes in flight."""

    activations: int = 0
    loss: int = 0
    temporary: int = 0
    passes: int = 0

    @property
    def size(self) -> int:
        return self.activations + self.loss + self.temporary


def _find_peak(
    config: Config,
    ps: ParallelState,
    passes: list[_ChunkPass],
    messages: int,
    num_microbatches: int,
) -> _Moment:
    """Return the moment at which the most is held, over the passes of the stage's schedule.

    The peak is during a backward pass, which needs its temporaries while all passes in flight,
    including its own, hold their activations.
    """
    # Follow the number of passes of each chunk that hold their activations.
    in_flight = [0] * len(passes)
    peak = _Moment()
    group_size = config.parallel.microbatch_group_size_per_vp_stage
    actions = list_actions(
        ps.pp.rank,
        ps.pp.size,
        len(passes),
        count_distinct_microbatches(num_microbatches, group_size or ps.pp.size),
        group_size,
    )
    for action in actions:
        chunk_index = action.chunk
        if action.kind == "forward":
            in_flight[chunk_index] += 1
            continue
        now = _Moment(
            activations=sum(map(mul, in_flight, [chunk.activations for chunk in passes])),
            loss=sum(map(mul, in_flight, [chunk.loss for chunk in passes])),
            temporary=passes[chunk_index].temporary + messages,
            passes=sum(in_flight),
        )
        peak = max(peak, now, key=lambda moment: moment.size)
        in_flight[chunk_index] -= 1
    return peak


def count_distinct_microbatches(num_microbatches: int, group_size: int) -> int:
    """Return a smaller number of micro-batches whose schedule has the same peak of memory.

    The schedule fills the pipeline, repeats the pattern of a group, and drains the pipeline. The
    last group keeps its size.
    """
    num_shortest = 4 * group_size + num_microbatches % group_size
    return min(num_microbatches, num_shortest)


def _count_optimizer_bytes(config: Config, group: ParamGroup, has_main_parameters: bool) -> int:
    """Return the bytes per parameter of `group`: the state of the update rule, and a separate main
    parameter with `has_main_parameters`.
    """
    total = 0
    if has_main_parameters:
        total += config.optimizer.get_state_dtype("param").itemsize
    for name in select_states(config.optimizer, group):
        total += config.optimizer.get_state_dtype(name).itemsize
    return total


def _count_average_bytes(config: Config) -> int:
    """Return the bytes per parameter of the average of the weights."""
    if config.optimizer.ema_decay is None:
        return 0
    return FP32


def _count_checkpoint_bytes(config: Config, sizes: Mapping[SizedParameter, int]) -> int:
    """Return the bytes of weights, their average, and optimizer state in a checkpoint.

    The optimizer state of a checkpoint always contains main parameters.
    """
    total = 0
    weight_itemsize = config.model.params_dtype.itemsize
    for parameter, numel in sizes.items():
        if not parameter.is_saved:
            continue
        total += numel * weight_itemsize
        total += numel * _count_average_bytes(config)
        if not config.checkpoint.no_save_optim:
            num_states = len(select_states(config.optimizer, parameter.group))
            total += numel * FP32 * (1 + num_states)
    return total
