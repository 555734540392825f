"""A rank's model without memory: on torch's meta device, its buffers planned as in training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.buffer_plan import BucketPlan, ParamGroup, ParamSpec, plan_buffer
from megatron.core.models import ChunkPlace, chunk_places
from megatron.core.module import MegatronModule, param_info
from megatron.core.optimizer import OptimizerConfig
from megatron.core.parallel_state import Axis, ParallelConfig, ParallelState
from megatron.core.tensor_parallel import TensorParallelRng
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class RunShape:
    """What decides the needs of a run."""

    model: TransformerConfig
    """With its vocabulary."""
    parallel: ParallelConfig
    ddp: DistributedDataParallelConfig
    optimizer: OptimizerConfig
    layer_ranges: Sequence[Sequence[range]]
    """Global layer numbers by [stage][chunk]."""
    build_chunk: Callable[[ChunkPlace], MegatronModule]
    seq_length: int
    micro_batch_size: int
    num_microbatches: int
    """In a step of the full global batch."""
    vocab_divisor: int
    """--make-vocab-size-divisible-by."""
    data_mask: bool = False
    """The attention mask depends on the data (--reset-attention-mask)."""
    saves_optimizer: bool = True
    device_type: str = "cuda"
    """Where it runs: CPU and GPU keep other things."""


@dataclass(frozen=True)
class EmptyBuffer:
    """The parameters of a chunk that the same ranks hold."""

    buckets: tuple[BucketPlan, ...]
    replicas: Axis
    expert: bool
    """It holds experts alone, which are split in another way than the rest of the model."""

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.buckets[-1].stop


@dataclass(frozen=True)
class EmptyChunk:
    """A pipeline chunk of a rank, without memory."""

    module: MegatronModule
    kinds: tuple[int, ...]
    """Of its layers: 1 with experts, 0 dense."""
    pre_process: bool
    post_process: bool
    buffers: tuple[EmptyBuffer, ...]

    @property
    def num_layers(self) -> int:
        return len(self.kinds)

    @property
    def numel(self) -> int:
        """Elements of its parameter buffers, padding included."""
        return sum(buffer.numel for buffer in self.buffers)

    @property
    def buckets(self) -> list[BucketPlan]:
        return [bucket for buffer in self.buffers for bucket in buffer.buckets]


def empty_chunks(run: RunShape, ps: ParallelState) -> Iterator[EmptyChunk]:
    """The chunks of one rank on the meta device, with the layout of their buffers."""
    meta = torch.device("meta")
    for place in chunk_places(run.layer_ranges, ps, TensorParallelRng(0, ps.tp.rank), meta):
        module = run.build_chunk(place)
        specs = [ParamSpec(name, tuple(p.shape), param_info(p)) for name, p in module.named_parameters()]
        specs = [spec for spec in specs if spec.info.trained]
        apart = [spec.info.expert and run.parallel.splits_experts for spec in specs]
        buffers = [
            _empty_buffer(run, [spec for spec, on in zip(specs, apart, strict=True) if on is expert], axis, expert)
            for axis, expert in ((ps.dp_cp, False), (ps.edp, True))
            if expert in apart
        ]
        kinds = tuple(run.model.moe_layer_pattern[number] for number in place.layers)
        yield EmptyChunk(module, kinds, place.pre_process, place.post_process, tuple(buffers))


def _empty_buffer(run: RunShape, specs: list[ParamSpec], replicas: Axis, expert: bool) -> EmptyBuffer:
    bucket_size = run.ddp.bucket_size(sum(spec.numel for spec in specs), replicas.size)
    shards = replicas.size if run.ddp.use_distributed_optimizer else 1
    return EmptyBuffer(plan_buffer(specs, bucket_size, shards), replicas, expert)


class StoredTensor(NamedTuple):
    """A tensor in a checkpoint: its key, the optimizer group that it belongs to, whether it holds experts."""

    key: str
    group: ParamGroup
    expert: bool


def stored_sizes(chunks: Iterable[EmptyChunk], whole: bool = True) -> Counter[StoredTensor]:
    """Elements of every stored tensor, each once: of the whole model, or of these chunks' boxes."""
    sizes: Counter[StoredTensor] = Counter()
    for chunk in chunks:
        for key, entry in chunk.module.sharded_state_dict().items():
            assert isinstance(entry, ShardedTensor) and isinstance(entry.local, nn.Parameter)
            spec = ParamSpec(key, entry.global_shape, param_info(entry.local))
            boxes = sum(box.tensor.numel() for box in entry.boxes)
            sizes[StoredTensor(key, spec.group, spec.info.expert)] = spec.numel if whole else boxes
    return sizes
