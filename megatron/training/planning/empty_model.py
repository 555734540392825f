"""A rank's model without memory: on torch's meta device, its buffers planned as in training."""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed.param_and_grad_buffer import BucketPlan, ParamGroup, ParamSpec, plan_buffer
from megatron.core.models import chunk_places
from megatron.core.module import MegatronModule, param_info
from megatron.core.parallel_state import ParallelState
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, TensorParallelRng
from megatron.core.transformer.grouped_linear import GroupedLinear
from megatron.core.transformer.transformer_config import COMPUTED_LOCALLY, LayerKind, TransformerConfig
from megatron.training.config.run_config import Config, ModelProvider

_LINEAR = (ColumnParallelLinear, RowParallelLinear, GroupedLinear)


@dataclass(frozen=True)
class EmptyBuffer:
    """The parameters of a chunk that the same ranks hold."""

    buckets: tuple[BucketPlan, ...]
    num_shards: int
    """Parts of equal size that gradients and optimizer are cut into; 1 without the distributed optimizer."""
    expert: bool
    """It holds experts alone, which are split in another way than the rest of the model."""
    itemsize: int
    """Bytes of a weight: 1 in fp8 (--fp8-param-gather)."""
    scale_bytes: int = 0
    """Of the scales of weights in fp8."""

    @property
    def weight_bytes(self) -> int:
        return self.numel * self.itemsize + self.scale_bytes

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.buckets[-1].stop


@dataclass(frozen=True)
class EmptyChunk:
    """A pipeline chunk of a rank, without memory."""

    module: MegatronModule
    kinds: tuple[LayerKind, ...]
    """Of its layers."""
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


def empty_chunks(config: Config, ps: ParallelState, model_provider: ModelProvider) -> Iterator[EmptyChunk]:
    """The chunks of one rank on the meta device, with the layout of their buffers.

    They have the local layers: shapes are the same, and no other back end need be installed.
    """
    run, config = config, replace(config, model=replace(config.model, **COMPUTED_LOCALLY))
    meta = torch.device("meta")
    for place in chunk_places(config.layer_ranges(), ps, TensorParallelRng(0, ps.tp.rank), meta):
        module = model_provider(config, place)
        specs = [ParamSpec(name, tuple(p.shape), param_info(p)) for name, p in module.named_parameters()]
        specs = [spec for spec in specs if spec.info.trained]
        in_fp8 = _weights_in_fp8(run.model, module, place.layers)
        buffers = []
        for expert, fp8 in itertools.product((False, True), repeat=2):
            own = [
                spec
                for spec in specs
                if (spec.info.expert and config.parallel.splits_experts, spec.name in in_fp8) == (expert, fp8)
            ]
            if own:
                replicas = ps.edp if expert else ps.dp_cp
                bucket_size = config.ddp.bucket_size(sum(spec.numel for spec in own), replicas.size)
                shards = replicas.size if config.ddp.use_distributed_optimizer else 1
                sizes = (1, _scale_bytes(run.model, own)) if fp8 else (run.model.params_dtype.itemsize, 0)
                buffers.append(EmptyBuffer(plan_buffer(own, bucket_size, shards), shards, expert, *sizes))
        kinds = tuple(
            LayerKind.of(config.model, number, config.parallel.cp_comm_type_of(number)) for number in place.layers
        )
        yield EmptyChunk(module, kinds, place.pre_process, place.post_process, tuple(buffers))


def _weights_in_fp8(config: TransformerConfig, chunk: MegatronModule, layers: Sequence[int]) -> set[str]:
    """The names of the weights that --fp8-param-gather keeps in fp8: of all linear layers of the layers in fp8."""
    names = {name: module for name, module in chunk.named_modules() if isinstance(module, _LINEAR)}
    numbers = {f"decoder.layers.{local}.": number for local, number in enumerate(layers)}
    return {
        f"{name}.weight"
        for prefix, number in numbers.items()
        if config.fp8_param_gather and config.quantizes(number)
        for name in names
        if name.startswith(prefix)
    }


def _scale_bytes(config: TransformerConfig, specs: Sequence[ParamSpec]) -> int:
    """A scale in fp32 for each matrix, or for each of its blocks of 128 x 128."""
    block = 128 if config.fp8_recipe == "blockwise" else sys.maxsize
    return 4 * sum(
        math.prod(spec.shape[:-2]) * math.prod(-(-size // block) for size in spec.shape[-2:]) for spec in specs
    )


class ParameterInFile(NamedTuple):
    """A parameter in a checkpoint: its key, the optimizer group that it belongs to, whether it holds experts."""

    key: str
    group: ParamGroup
    expert: bool


def stored_sizes(chunks: Iterable[EmptyChunk], whole: bool = True) -> Counter[ParameterInFile]:
    """Elements of every stored tensor, each once: of the whole model, or of these chunks' boxes."""
    sizes: Counter[ParameterInFile] = Counter()
    for chunk in chunks:
        for key, entry in chunk.module.sharded_state_dict().items():
            assert isinstance(entry, ShardedTensor) and isinstance(entry.local, nn.Parameter)
            spec = ParamSpec(key, entry.global_shape, param_info(entry.local))
            boxes = sum(box.tensor.numel() for box in entry.boxes)
            sizes[ParameterInFile(key, spec.group, spec.info.expert)] = spec.numel if whole else boxes
    return sizes
