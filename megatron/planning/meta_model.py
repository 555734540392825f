"""The model of one rank on torch's meta device: exact sizes of weights, buffers and checkpoints
without allocating memory.

Gradient buffers are planned by the same code as in training.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed.param_and_grad_buffer import (
    BucketPlan,
    ParamGroup,
    ParamSpec,
    plan_buffer,
)
from megatron.core.models import make_chunk_specs
from megatron.core.module import MegatronModule, param_info
from megatron.core.parallel_state import ParallelState
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallelRng,
)
from megatron.core.transformer.grouped_linear import GroupedLinear
from megatron.core.transformer.transformer_config import (
    LOCAL_BACKEND_FIELDS,
    TransformerConfig,
)
from megatron.core.wings import resolve
from megatron.training.config.run_config import Config, ModelProvider

_PLAN_FROZEN_BYTES = "megatron.training.adapters.frozen_weights:plan_frozen_bytes"
_LINEAR = (ColumnParallelLinear, RowParallelLinear, GroupedLinear)
FP32 = 4  # bytes
FP8_BLOCK = 128  # rows and columns that share a scale with --fp8-recipe blockwise


@dataclass(frozen=True)
class MetaBuffer:
    """The parameters of a chunk that are replicated over the same ranks."""

    buckets: tuple[BucketPlan, ...]
    num_shards: int
    """Number of equal parts of gradients and optimizer state; 1 without the distributed optimizer.
    """
    is_expert: bool
    """Whether the buffer contains only experts, which are sharded over other ranks than the rest.
    """
    itemsize: int
    """Bytes per weight; 1 in fp8 (--fp8-param-gather)."""
    scale_bytes: int = 0
    """Bytes of the scales of fp8 weights."""

    @property
    def numel(self) -> int:
        """Number of elements, including padding."""
        return self.buckets[-1].stop

    @property
    def weight_bytes(self) -> int:
        return self.numel * self.itemsize + self.scale_bytes


class SizedParameter(NamedTuple):
    """A parameter of the model."""

    key: str
    group: ParamGroup  # of the optimizer
    is_expert: bool
    is_saved: bool
    """Whether checkpoints contain it; with --lora-rank, only those of adapters are saved."""


class StoredElements(NamedTuple):
    """Number of elements of a stored parameter: of the whole model, and of one chunk."""

    parameter: SizedParameter
    num_whole: int
    num_local: int


@dataclass(frozen=True)
class MetaChunk:
    """A pipeline chunk of a rank, without memory."""

    module: MegatronModule
    layers: range
    """Global layer numbers."""
    pre_process: bool
    post_process: bool
    buffers: tuple[MetaBuffer, ...]
    frozen_bytes: int
    """Bytes of parameters without gradients: the base model of adapters (--lora-rank)."""
    saves_frozen: bool
    """Whether checkpoints contain frozen parameters."""

    @cached_property
    def stored(self) -> list[StoredElements]:
        """Elements of every stored parameter; cached, because a search plans a chunk repeatedly."""
        counts = []
        for key, entry in self.module.sharded_state_dict().items():
            assert isinstance(entry, ShardedTensor)
            assert isinstance(entry.local, nn.Parameter)
            info = param_info(entry.local)
            spec = ParamSpec(key, entry.global_shape, info)
            is_saved = info.trained or self.saves_frozen
            parameter = SizedParameter(key, spec.group, info.sharding.is_expert, is_saved)
            num_local = sum(box.tensor.numel() for box in entry.boxes)
            counts.append(StoredElements(parameter, spec.numel, num_local))
        return counts

    @property
    def buckets(self) -> list[BucketPlan]:
        buckets: list[BucketPlan] = []
        for buffer in self.buffers:
            buckets += buffer.buckets
        return buckets


def build_meta_chunks(
    config: Config,
    ps: ParallelState,
    model_provider: ModelProvider,
) -> Iterator[MetaChunk]:
    """Build the chunks of one rank on the meta device, and plan their buffers.

    The layers are those of the local backend: it has the same shapes, and planning then does not
    require the packages of other backends.
    """
    local_config = replace(config, model=replace(config.model, **LOCAL_BACKEND_FIELDS))
    rng = TensorParallelRng(0, ps.tp.rank)
    layer_ranges = config.layer_ranges()
    # Tensors on the meta device have shapes but no memory.
    for chunk_spec in make_chunk_specs(layer_ranges, ps, rng, torch.device("meta")):
        module = model_provider(local_config, chunk_spec)
        yield MetaChunk(
            module,
            chunk_spec.layers,
            chunk_spec.pre_process,
            chunk_spec.post_process,
            tuple(_plan_buffers(config, ps, module, chunk_spec.layers)),
            frozen_bytes=_count_frozen_bytes(config, module),
            saves_frozen=config.lora.lora_rank is None,
        )


def _count_frozen_bytes(config: Config, module: MegatronModule) -> int:
    """Return the bytes of the base model of adapters, and of other parameters that are fixed."""
    if config.lora.lora_base_encoding is not None:
        return int(resolve(_PLAN_FROZEN_BYTES)(module, config))
    total = 0
    for parameter in module.parameters():
        if not param_info(parameter).trained:
            total += parameter.nbytes
    return total


def _plan_buffers(
    config: Config,
    ps: ParallelState,
    module: MegatronModule,
    layers: Sequence[int],
) -> Iterator[MetaBuffer]:
    """Plan the buffers of a chunk: separate ones for experts and for weights in fp8."""
    in_fp8 = _find_fp8_weights(config.model, module, layers)
    # (is_expert, is_fp8) -> parameters
    groups: dict[tuple[bool, bool], list[ParamSpec]] = {
        (False, False): [],
        (False, True): [],
        (True, False): [],
        (True, True): [],
    }
    for name, parameter in module.named_parameters():
        info = param_info(parameter)
        if not info.trained:
            continue  # frozen parameters have neither gradients nor optimizer state
        spec = ParamSpec(name, tuple(parameter.shape), info)
        is_expert = info.sharding.is_expert and config.parallel.splits_experts
        is_fp8 = name in in_fp8
        groups[is_expert, is_fp8].append(spec)

    for (is_expert, is_fp8), specs in groups.items():
        if not specs:
            continue
        # Buckets, whose size depends on the number of replicas.
        replicas = ps.edp if is_expert else ps.dp_cp
        numel = sum(spec.numel for spec in specs)
        bucket_size = config.ddp.bucket_size(numel, replicas.size)
        num_shards = 1
        if config.ddp.use_distributed_optimizer:
            num_shards = replicas.size
        # Bytes per weight, and of the scales of fp8.
        itemsize = config.model.params_dtype.itemsize
        scale_bytes = 0
        if is_fp8:
            itemsize = 1
            scale_bytes = _count_scale_bytes(config.model, specs)
        buckets = plan_buffer(specs, bucket_size, num_shards)
        yield MetaBuffer(buckets, num_shards, is_expert, itemsize, scale_bytes)


def _find_fp8_weights(
    config: TransformerConfig,
    chunk: MegatronModule,
    layers: Sequence[int],
) -> set[str]:
    """Return the names of the weights that --fp8-param-gather stores in fp8: those of all linear
    layers in layers that compute in fp8.
    """
    if not config.fp8_param_gather:
        return set()
    prefixes = []
    for local_layer, layer in enumerate(layers):
        if config.quantizes(layer):
            prefixes.append(f"decoder.layers.{local_layer}.")
    names = set()
    for name, module in chunk.named_modules():
        if isinstance(module, _LINEAR) and name.startswith(tuple(prefixes)):
            names.add(f"{name}.weight")
    return names


def _count_scale_bytes(config: TransformerConfig, specs: Sequence[ParamSpec]) -> int:
    """Return the bytes of the fp32 scales: one per matrix, or per block of 128 x 128."""
    num_scales = 0
    for spec in specs:
        *batch, rows, columns = spec.shape  # grouped linear layers have [experts, rows, columns]
        num_blocks = 1
        if config.fp8_recipe == "blockwise":
            num_row_blocks = math.ceil(rows / FP8_BLOCK)
            num_column_blocks = math.ceil(columns / FP8_BLOCK)
            num_blocks = num_row_blocks * num_column_blocks
        num_matrices = math.prod(batch)
        num_scales += num_matrices * num_blocks
    return 4 * num_scales


def count_stored_elements(
    chunks: Iterable[MetaChunk],
    whole: bool = True,
) -> Counter[SizedParameter]:
    """Return the number of elements of every stored parameter; each parameter is counted once.

    Counts whole parameters, or, with `whole` False, only the boxes of these chunks.
    """
    sizes: Counter[SizedParameter] = Counter()
    for chunk in chunks:
        for parameter, num_whole, num_local in chunk.stored:
            # Assigned, not added: both copies of a tied embedding have one key.
            sizes[parameter] = num_whole if whole else num_local
    return sizes
