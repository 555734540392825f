"""Search for the layouts of a run that fit into a device, the fastest estimates first.

Memory, bubble and traffic are those of the plan of each layout. The time of a step is an estimate
from assumed speeds, in which no message overlaps with computation: use it to compare layouts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.core.parallel_state import ParallelState
from megatron.planning.meta_model import MetaChunk
from megatron.planning.run_plan import (
    RunPlan,
    StagePlan,
    build_stages,
    make_pass_costs,
    plan_stages,
)
from megatron.planning.summary import set_planned_vocab_size
from megatron.training.config.arguments import FlagValues
from megatron.training.config.parsing import make_config
from megatron.training.config.run_config import Config, ModelProvider
from megatron.training.reporting.measurements import compute_flops_per_token

MICRO_BATCH_SIZES = (1, 2, 4, 8)
MAX_CHUNKS_PER_STAGE = 8  # more chunks send more messages than their smaller bubble saves
MIN_TOKENS_PER_RANK = 1024  # of a sequence over CP; smaller blocks are too small for a kernel
# Collectives of a layer for multi-token prediction besides those of any layer: 2 of its embedding,
# 6 of the projection of two inputs, 3 of its loss.
_MESSAGES_PER_MTP_LAYER = 11

RECOMPUTATION: dict[str, dict[str, Any]] = {  # from the fastest to the smallest
    "": {},
    "--recompute-granularity selective": {"recompute_granularity": "selective"},
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


@dataclass(frozen=True)
class Hardware:
    """Speeds of one device, for estimates of the step time."""

    tflops: float
    """Achieved TFLOP/s of matrix products."""
    memory_bandwidth: float
    """Bytes per second of its memory."""
    node_bandwidth: float
    """Bytes per second that it sends to devices of its node."""
    network_bandwidth: float
    """Bytes per second that it sends to other nodes."""
    devices_per_node: int


@dataclass(frozen=True)
class RatedLayout:
    """A layout that fits, with the numbers of its plan."""

    flags: str
    seconds: float
    """Estimated time of a step."""
    memory: int
    """Bytes on the rank with the most memory in use."""
    bubble: float
    traffic: float
    """Bytes that the busiest rank sends per step."""


class _Shape(NamedTuple):
    """The sizes that determine the parameters of a rank."""

    tp: int
    pp: int
    vpp: int
    ep: int


@dataclass(frozen=True)
class LayoutSearch:
    """Search over the layouts of a run; replaces the parallel sizes, the micro-batch size and the
    recomputation in `flag_values`.
    """

    flag_values: FlagValues
    world_size: int
    model_provider: ModelProvider
    available: float
    """Bytes that a rank may use."""
    hardware: Hardware

    def find(self, count: int) -> list[RatedLayout]:
        """Return at most `count` layouts that fit, fastest first.

        Raises ValueError for flags that set a part of the layout which the search would replace.
        """
        self._check_flags()
        base = make_config(self._make_single_rank(), 1)
        set_planned_vocab_size(base)

        layouts: list[RatedLayout] = []
        for shortest, shape in self._list_shapes(base):
            # The remaining shapes are slower, even if their other messages took no time.
            limit = math.inf
            if len(layouts) >= count:
                limit = layouts[count - 1].seconds
            if shortest >= limit:
                break
            if _count_smallest_state(base, shape) <= self.available:
                layouts += self._search_shape(base, shape, limit)
            # Of equal estimates, the one with more memory left is better.
            layouts.sort(key=lambda layout: (layout.seconds, layout.memory))
        return layouts[:count]

    def _search_shape(self, base: Config, shape: _Shape, limit: float) -> list[RatedLayout]:
        """Return the layouts of a shape that fit and may take less than `limit` seconds: the
        smallest CP that needs no recomputation, and those below it with recomputation.
        """
        layouts: list[RatedLayout] = []
        stages: list[list[MetaChunk]] = []
        for cp_size in self._list_context_sizes():
            needs_recomputation = True
            for micro_batch_size in MICRO_BATCH_SIZES:
                layout = None
                for flags, values in self._list_changes(shape, cp_size, micro_batch_size):
                    if self.estimate_shortest_step(base, values) >= limit:
                        break
                    try:
                        config = make_config(self.flag_values | values, self.world_size)
                    except ValueError:
                        break  # impossible with this model, batch or number of ranks
                    set_planned_vocab_size(config)
                    if not stages:
                        stages = build_stages(config, self.world_size, self.model_provider)
                    # The first stage has the most passes in flight; most layouts fail here.
                    costs = make_pass_costs(config, self.world_size, self.model_provider)
                    first = plan_stages(config, self.world_size, stages[:1], costs)
                    if first.largest > self.available:
                        continue
                    plan = plan_stages(config, self.world_size, stages, costs)
                    if plan.largest <= self.available:
                        layout = self._make_layout(flags, config, plan)
                        break  # more recomputation only costs time
                if layout is None:
                    break  # larger micro-batches need more memory
                layouts.append(layout)
                needs_recomputation &= "recompute" in layout.flags
            if not needs_recomputation:
                break  # shorter parts of sequences only send more messages
        return layouts

    def _list_context_sizes(self) -> list[int]:
        """Return the sizes of CP with which a rank has enough tokens."""
        largest = max(1, self.flag_values["seq_length"] // MIN_TOKENS_PER_RANK)
        return _list_powers(min(largest, self.world_size))

    def _check_flags(self) -> None:
        """Raise ValueError for flags that conflict with the search or that it requires."""
        for name in ("pipeline_model_parallel_layout", "num_layers_per_virtual_pipeline_stage"):
            if self.flag_values.get(name) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"--search selects the layout of the pipeline: leave out {flag}")
        for name in ("global_batch_size", "seq_length"):
            if self.flag_values.get(name) is None:
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"--search compares the time of a step: add {flag}")

    def _make_single_rank(self) -> FlagValues:
        """Return the flags of the same model on one rank."""
        sizes: dict[str, Any] = {
            "tensor_model_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            "virtual_pipeline_model_parallel_size": None,
            "context_parallel_size": 1,
            "expert_model_parallel_size": 1,
            "expert_tensor_parallel_size": None,
            "micro_batch_size": 1,
        }
        return self.flag_values | sizes

    def _list_shapes(self, base: Config) -> list[tuple[float, _Shape]]:
        """Return (lower bound of the seconds of a step, shape) of all shapes, sorted."""
        # The embedding and the loss may count as layers of the pipeline.
        num_layers = base.model.num_layers
        num_layers += base.pipeline_layout.account_for_embedding_in_pipeline_split
        num_layers += base.pipeline_layout.account_for_loss_in_pipeline_split
        num_experts = 1
        if base.model.has_experts:
            num_experts = base.model.experts

        # With the largest CP the bubble is smallest: a replica has more micro-batches.
        largest_cp = self._list_context_sizes()[-1]
        tp_sizes = _list_powers(min(self.hardware.devices_per_node, self.world_size))
        pp_sizes = [size for size in range(1, num_layers + 1) if num_layers % size == 0]
        ep_sizes = _list_powers(num_experts)
        shapes = []
        for tp, pp, ep in itertools.product(tp_sizes, pp_sizes, ep_sizes):
            is_divisible = self.world_size % math.lcm(tp * pp, ep * pp) == 0
            if not is_divisible:
                continue
            for vpp in _list_chunks_per_stage(num_layers, pp):
                shape = _Shape(tp, pp, vpp, ep)
                changes = self._list_changes(shape, largest_cp, micro_batch_size=1)
                _, values = next(changes)
                seconds = self.estimate_shortest_step(base, values)
                shapes.append((seconds, shape))
        return sorted(shapes)

    def estimate_shortest_step(self, base: Config, values: Mapping[str, Any]) -> float:
        """Return a lower bound of the seconds of a step with these flags.

        It is the time of matrix products and of TP messages, stretched by the bubble.
        """
        model = base.model
        tp_size = values["tensor_model_parallel_size"]
        pp_size = values["pipeline_model_parallel_size"]
        cp_size = values["context_parallel_size"]
        replica_size = tp_size * pp_size * cp_size

        # The bubble, as a fraction of the work
        num_samples = base.training.global_batch_size
        assert num_samples is not None
        samples_per_replica = num_samples * replica_size / self.world_size
        num_microbatches = samples_per_replica / values["micro_batch_size"]
        num_chunks = values["virtual_pipeline_model_parallel_size"]
        bubble = (pp_size - 1) / (num_microbatches * num_chunks)

        # Messages. Every layer gathers and reduces the output of attention; a dense one also its
        # input, and both of the MLP.
        messages_per_layer = 2
        if not model.has_experts and not model.multi_latent_attention:
            messages_per_layer = 8
        num_tokens = num_samples * base.data.seq_length / self.world_size
        message = num_tokens * model.hidden_size * model.params_dtype.itemsize
        num_messages = messages_per_layer * (model.num_layers + model.num_mtp_layers)
        num_messages += _MESSAGES_PER_MTP_LAYER * model.num_mtp_layers
        sent = num_messages * message * (tp_size - 1)
        messages = sent / self.hardware.node_bandwidth

        level = values.get("recompute_granularity", model.recompute_granularity)
        compute = _estimate_compute(base, level, self.world_size, self.hardware)
        return (compute + messages) * (1 + bubble)

    def _list_changes(
        self, shape: _Shape, cp_size: int, micro_batch_size: int
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the flags of a layout and their values, with more and more recomputation."""
        sizes: dict[str, Any] = {
            "tensor_model_parallel_size": shape.tp,
            "pipeline_model_parallel_size": shape.pp,
            "virtual_pipeline_model_parallel_size": shape.vpp,
            "context_parallel_size": cp_size,
            "expert_model_parallel_size": shape.ep,
            "micro_batch_size": micro_batch_size,
        }
        required = {"micro_batch_size"}
        if (self.flag_values.get("num_experts") or 0) > 1:
            sizes["expert_tensor_parallel_size"] = 1
            required.add("expert_tensor_parallel_size")  # its default is TP

        # Flags of the sizes. 1 is the default, but replaces another value on the command line.
        words = []
        for name, size in sizes.items():
            if size != 1 or name in required or name in self.flag_values:
                flag = name.replace("_", "-")
                words.append(f"--{flag} {size}")

        switches = {"use_distributed_optimizer": True}
        words.append("--use-distributed-optimizer")
        if shape.tp > 1:
            switches["sequence_parallel"] = True
            words.append("--sequence-parallel")

        # A command line cannot take back --recompute-granularity: the search only adds to it.
        level_given = self.flag_values.get("recompute_granularity")
        for flags, changes in RECOMPUTATION.items():
            if flags and level_given in ("full", changes["recompute_granularity"]):
                continue
            command_line = " ".join([*words, flags]).strip()
            yield command_line, sizes | switches | changes

    def _make_layout(self, flags: str, config: Config, plan: RunPlan) -> RatedLayout:
        """Return a layout with the estimates of its slowest stage and of the most bytes sent."""
        seconds = 0.0
        traffic = 0.0
        for stage in plan.stages:
            seconds_of_stage = _estimate_step(config, plan, stage, self.world_size, self.hardware)
            sent_by_stage = sum(axis.wire for axis in stage.traffic.values())
            seconds = max(seconds, seconds_of_stage)
            traffic = max(traffic, sent_by_stage)
        return RatedLayout(flags, seconds, plan.largest, plan.bubble, traffic)


def _list_powers(largest: int) -> list[int]:
    """Return the powers of 2 up to a number."""
    return [2**exponent for exponent in range(largest.bit_length())]


def _list_chunks_per_stage(num_layers: int, pp_size: int) -> list[int]:
    """Return the numbers of chunks that divide the layers of a stage."""
    if pp_size == 1:
        return [1]
    layers_per_stage = num_layers // pp_size
    largest = min(layers_per_stage, MAX_CHUNKS_PER_STAGE)
    return [size for size in range(1, largest + 1) if layers_per_stage % size == 0]


def _count_smallest_state(base: Config, shape: _Shape) -> float:
    """Return a lower bound of the bytes of weights and gradients of a rank.

    Counts only matrices of attention and dense MLPs, which TP and PP divide.
    """
    model = base.model
    if model.multi_latent_attention or model.fp8_param_gather:
        return 0.0

    # Elements of a layer: one square matrix of attention, and the MLP
    per_layer = model.hidden_size * model.hidden_size
    if not model.has_experts:
        num_matrices = 3 if model.gated else 2
        per_layer += num_matrices * model.hidden_size * model.ffn_size
    grad_itemsize = base.ddp.grad_dtype(model.params_dtype).itemsize
    itemsize = model.params_dtype.itemsize + grad_itemsize
    num_layers = model.num_layers + model.num_mtp_layers
    return num_layers * per_layer * itemsize / (shape.pp * shape.tp)


def _estimate_compute(
    config: Config, recompute_granularity: str | None, world_size: int, hardware: Hardware
) -> float:
    """Return the seconds of the matrix products of a step on one device, if all are equally busy.

    Recomputation repeats forward, a third of the operations: all of it, or that of attention.
    """
    model = config.model
    assert model.vocab_size is not None
    assert config.training.global_batch_size is not None
    seq_length = config.data.seq_length
    per_token = compute_flops_per_token(model, seq_length, model.vocab_size)
    if recompute_granularity == "full":
        per_token *= 4 / 3
    elif recompute_granularity == "selective":
        without_scores = compute_flops_per_token(model, 1, model.vocab_size)
        per_token += (per_token - without_scores) / 3
    num_tokens = config.training.global_batch_size * seq_length
    return per_token * num_tokens / world_size / (1e12 * hardware.tflops)


def _estimate_step(
    config: Config, plan: RunPlan, stage: StagePlan, world_size: int, hardware: Hardware
) -> float:
    """Return the estimated seconds of a step, as seen by one stage."""
    # Every micro-batch reads the weights twice, and adds to the gradients.
    memory = stage.memory
    moved = 2 * plan.num_microbatches * (memory.weights + memory.gradients)
    level = config.model.recompute_granularity
    passes = _estimate_compute(config, level, world_size, hardware)
    passes += moved / hardware.memory_bandwidth

    # Messages of the layers delay passes; the others are sent before, between and after them.
    between = 0.0
    for name, axis in stage.traffic.items():
        bandwidth = hardware.network_bandwidth
        if _count_neighbors(stage.ps, name) <= hardware.devices_per_node:
            bandwidth = hardware.node_bandwidth
        seconds = axis.wire / bandwidth
        if name in ("tp", "cp", "ep"):
            passes += seconds
        else:
            between += seconds
    return passes / (1 - plan.bubble) + between


def _count_neighbors(ps: ParallelState, axis: str) -> int:
    """Return the number of consecutive ranks that contain a group of an axis."""
    axes = {"tp": ps.tp, "cp": ps.cp, "dp": ps.dp_cp, "ep": ps.ep, "edp": ps.edp}
    ranks = axes.get(axis, ps.pp).ranks
    return max(ranks) - min(ranks) + 1
