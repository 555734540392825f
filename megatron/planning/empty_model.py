"""A rank's model without memory: on torch's meta device, its buffers planned as in training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed.buffer_plan import BucketPlan, ParamSpec, plan_buffer
from megatron.core.module import MegatronModule, param_info
from megatron.core.parallel_state import ParallelState
from megatron.core.tensor_parallel import TensorParallelRng
from megatron.training.config.run_config import Config
from megatron.training.run import ChunkPlace, ModelProvider


@dataclass(frozen=True)
class EmptyChunk:
    """A pipeline chunk of a rank, without memory."""

    module: MegatronModule
    num_layers: int
    pre_process: bool
    post_process: bool
    buckets: tuple[BucketPlan, ...]

    @property
    def numel(self) -> int:
        """Elements of its parameter buffer, padding included."""
        return self.buckets[-1].stop


def empty_chunks(config: Config, ps: ParallelState, model_provider: ModelProvider) -> Iterator[EmptyChunk]:
    """The chunks of one rank on the meta device, with the layout of their buffers."""
    meta = torch.device("meta")
    shards = ps.dp.size if config.ddp.use_distributed_optimizer else 1
    for index, layers in enumerate(config.layer_ranges()[ps.pp.rank]):
        first, last = ps.is_first_chunk(index), ps.is_last_chunk(index)
        rng = TensorParallelRng(0, ps.tp.rank)
        module = model_provider(config, ChunkPlace(layers, first, last, ps, rng, meta))
        specs = [ParamSpec(name, tuple(p.shape), param_info(p)) for name, p in module.named_parameters()]
        bucket_size = config.ddp.bucket_size(sum(spec.numel for spec in specs), ps.dp.size)
        yield EmptyChunk(module, len(layers), first, last, plan_buffer(specs, bucket_size, shards))


def stored_sizes(chunks: list[EmptyChunk], whole: bool = True) -> Counter[str]:
    """Elements of every stored tensor by key, each once: of the whole model or of these chunks' boxes."""
    sizes: Counter[str] = Counter()
    for chunk in chunks:
        for key, entry in chunk.module.sharded_state_dict().items():
            assert isinstance(entry, ShardedTensor)
            boxes = sum(box.tensor.numel() for box in entry.boxes)
            sizes[key] = torch.Size(entry.global_shape).numel() if whole else boxes
    return sizes
