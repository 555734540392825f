"""Contiguous buffers for parameters and gradients, divided into buckets.

Each bucket is reduced and gathered by one collective. The position of each parameter is a pure
function of names, shapes and `ParamInfo`: `plan_buffer` uses no tensors, so that the plan of any
rank of any layout can be computed anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.arithmetic import even_range, round_up
from megatron.core.dist_checkpointing.mapping import Shape
from megatron.core.module import ParamInfo, param_info
from megatron.core.parallel_state import Axis, group_of
from megatron.core.tensor_parallel.layers import open_main_grad
from megatron.core.tensor_parallel.mappings import all_gather_into_tensor, reduce_scatter_tensor

# Each parameter and each shard starts at a multiple of this number of elements (128 bytes in bf16).
ALIGNMENT = 64

Range = tuple[int, int]


@dataclass(frozen=True)
class ParamGroup:
    """Properties that determine a parameter's hyperparameters; a bucket has only one group."""

    weight_decay: bool
    """False for 1-D parameters and for biases, except those with `ParamInfo.decayed`."""
    embedding: bool
    """True for the word embedding and the output layer, which may have their own learning rate."""
    decayed_vector: bool = False
    """True for vectors with `ParamInfo.decayed`."""
    width_mult: float = 1.0
    """`ParamInfo.width_mult`, the same for all parameters of a model."""
    is_hidden: bool = False
    """`ParamInfo.is_hidden`."""

    @property
    def is_matrix(self) -> bool:
        """True for the weights of hidden layers."""
        return self.weight_decay and not self.embedding and not self.decayed_vector


@dataclass(frozen=True)
class ParamSpec:
    """Description of a parameter, without its memory."""

    name: str
    shape: Shape
    info: ParamInfo

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def group(self) -> ParamGroup:
        is_matrix = len(self.shape) > 1 and not self.name.endswith(".bias")
        decayed_vector = self.info.decayed and not is_matrix
        return ParamGroup(
            weight_decay=is_matrix or decayed_vector,
            embedding=self.name.endswith(("word_embeddings.weight", "output_layer.weight")),
            decayed_vector=decayed_vector,
            width_mult=self.info.width_mult,
            is_hidden=self.info.is_hidden,
        )


@dataclass(frozen=True)
class Span:
    """The range `[start, stop)` of a parameter in its bucket."""

    spec: ParamSpec
    start: int
    stop: int


@dataclass(frozen=True)
class BucketPlan:
    """Elements `[start, start + numel)` of the buffer, reduced and gathered by one collective.

    The offsets of the spans are relative to the bucket. Elements between and after the spans do not
    belong to a parameter and stay zero.
    """

    start: int
    numel: int
    group: ParamGroup
    spans: tuple[Span, ...]

    @property
    def stop(self) -> int:
        return self.start + self.numel


def plan_buffer(
    specs: Sequence[ParamSpec], bucket_size: int, num_shards: int
) -> tuple[BucketPlan, ...]:
    """Return the buckets in the order in which the backward pass completes them.

    Each bucket has one `ParamGroup` and is divisible into `num_shards`. `specs` are in forward
    order. Parameters with weight decay are placed in reverse order; a bucket is closed when it has
    `bucket_size` elements, when the group changes, and before and after a tied embedding (so that
    its shards on the first and the last stage correspond). Parameters without weight decay, about a
    thousandth of a model, come last. They are sorted by their replication, so that reductions and
    norms of each kind need one contiguous range.
    """
    buckets: list[BucketPlan] = []
    start = 0
    for specs_of_bucket in _split_into_buckets(specs, bucket_size):
        spans = []
        position = 0
        for spec in specs_of_bucket:
            stop = position + spec.numel
            spans.append(Span(spec, position, stop))
            position = round_up(stop, ALIGNMENT)
        # The size is a multiple of the number of shards, so that a reduce-scatter gives each rank
        # an equal, aligned part; a parameter may be in two shards.
        numel = round_up(position, ALIGNMENT * num_shards)
        bucket = BucketPlan(start, numel, specs_of_bucket[0].group, tuple(spans))
        buckets.append(bucket)
        start = bucket.stop
    return tuple(buckets)


def _split_into_buckets(specs: Sequence[ParamSpec], bucket_size: int) -> Iterator[list[ParamSpec]]:
    """Yield the parameters of each bucket, in buffer order."""
    # The last layers complete their backward pass first: their buckets are reduced while the first
    # layers are still computing.
    matrices = []
    vectors = []
    for spec in reversed(specs):
        if spec.group.weight_decay:
            matrices.append(spec)
        else:
            vectors.append(spec)
    vectors.sort(key=lambda spec: (spec.info.sharding.is_split, spec.info.partial_grad))

    # A bucket ends when it is full, and has one kind of parameters only.
    bucket: list[ParamSpec] = []
    num_elements = 0
    for spec in matrices + vectors:
        if bucket:
            first = bucket[0]
            is_full = num_elements >= bucket_size
            is_other_group = spec.group != first.group
            is_tied = spec.info.shared_embedding or first.info.shared_embedding
            if is_full or is_other_group or is_tied:
                yield bucket
                bucket = []
                num_elements = 0
        bucket.append(spec)
        num_elements += spec.numel
    if bucket:
        yield bucket


def find_ranges(bucket: BucketPlan, keep: Callable[[ParamInfo], bool]) -> list[Range]:
    """Return aligned ranges of the bucket with the parameters that satisfy `keep`.

    Adjacent ranges are merged, including the zeros between them.
    """
    ranges: list[Range] = []
    for span in bucket.spans:
        if not keep(span.spec.info):
            continue
        start = span.start
        if ranges:
            previous_start, previous_stop = ranges[-1]
            if previous_stop == start:
                # Extend the previous range.
                start = previous_start
                ranges.pop()
        ranges.append((start, round_up(span.stop, ALIGNMENT)))
    return ranges


def intersect(ranges: Sequence[Range], start: int, stop: int) -> list[Range]:
    """Return the parts of `ranges` inside `[start, stop)`, relative to `start`."""
    intersections = []
    for range_start, range_stop in ranges:
        low = max(range_start, start)
        high = min(range_stop, stop)
        if low < high:
            intersections.append((low - start, high - start))
    return intersections


@dataclass(frozen=True)
class Piece:
    """The part of a parameter in a shard.

    Elements `[param_start, param_start + stop - start)` of the parameter are elements
    `[start, stop)` of the shard.
    """

    param: nn.Parameter
    info: ParamInfo
    param_start: int
    start: int
    stop: int


def _start_shard_by_shard(
    collective: Callable[..., dist.Work], whole: torch.Tensor, dp: Axis
) -> list[dist.Work]:
    """Start `collective` for each shard of `whole`, to or from the rank that owns the shard.

    With gloo this takes about half as long as all-gather and reduce-scatter, which copy the whole
    buffer.
    """
    works = []
    for shard, rank in zip(whole.chunk(dp.size), dp.ranks, strict=True):
        works.append(collective(shard, rank, group=dp.group, async_op=True))
    return works


class Bucket:
    """Parameters whose gradients are reduced together, and this rank's shard of them.

    With the distributed optimizer `shard` is the data-parallel axis. Without, it is an axis of size
    1, and the shard is the whole bucket. All collectives run in place and asynchronously, between a
    `start_` and a `finish_` method. `grad_shard` is fp32; it is a view of `grad_data` if that is
    fp32.
    """

    def __init__(
        self,
        plan: BucketPlan,
        params: Sequence[nn.Parameter],
        param_data: torch.Tensor,
        grad_data: torch.Tensor,
        dp: Axis,
        shard: Axis,
    ) -> None:
        self.plan = plan
        self.params = tuple(params)  # in the order of plan.spans
        self.param_data = param_data
        self.grad_data = grad_data

        # This rank's shard
        self.shard_start, self.shard_stop = even_range(plan.numel, shard.rank, shard.size)
        self.param_shard = param_data[self.shard_start : self.shard_stop]
        self._reduced = grad_data[self.shard_start : self.shard_stop]
        self.grad_shard = self._reduced
        if grad_data.dtype != torch.float32:
            self.grad_shard = torch.zeros_like(self._reduced, dtype=torch.float32)
        # Parameters whose gradient of the last micro-batch is missing; the reduction starts when
        # the set is empty.
        self.missing = set(self.params)
        self._dp = dp
        self.is_sharded = shard.size > 1
        # Collectives in flight.
        self._grad_works: list[dist.Work] = []
        self._param_works: list[dist.Work] = []

    def start_grad_reduce(self) -> None:
        """Start summing the gradients over DP; afterwards only `grad_shard` is valid."""
        for param in self.params:
            open_main_grad(param)  # zeros if no micro-batch has used the parameter
        if self._dp.size == 1:
            return
        assert self._dp.group is not None and not self._grad_works
        group = self._dp.group
        whole = self.grad_data
        if not self.is_sharded:
            work = dist.all_reduce(whole, group=group, async_op=True)
            self._grad_works = [work]
        elif whole.device.type == "cpu":  # gloo
            self._grad_works = _start_shard_by_shard(dist.reduce, whole, self._dp)
        else:
            # In place: the output is this rank's part of the input.
            work = reduce_scatter_tensor(self._reduced, whole, group=group, async_op=True)
            self._grad_works = [work]

    def finish_grad_reduce(self) -> None:
        """Wait until `grad_shard` contains the sum; call once per iteration."""
        for work in self._grad_works:
            work.wait()
        self._grad_works = []
        if self.grad_shard is not self._reduced:  # clipping and the update need fp32
            self.grad_shard.copy_(self._reduced)

    @property
    def params_complete(self) -> bool:
        """True if no gather is in flight."""
        return not self._param_works

    def start_param_gather(self) -> None:
        """Start filling `param_data` with the `param_shard` of each rank."""
        if not self.is_sharded:
            return
        assert self._dp.group is not None and not self._param_works
        group = self._dp.group
        whole = self.param_data
        if whole.device.type == "cpu":  # gloo
            self._param_works = _start_shard_by_shard(dist.broadcast, whole, self._dp)
        else:
            # In place: the input is this rank's part of the output.
            work = all_gather_into_tensor(whole, self.param_shard, group=group, async_op=True)
            self._param_works = [work]

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The group of the ranks that own the shards."""
        if self.is_sharded:
            assert self._dp.group is not None
            return self._dp.group
        return group_of((dist.get_rank(),))  # not None, which would mean the world

    def gather(self, shard_data: torch.Tensor) -> torch.Tensor:
        """Return the concatenated `shard_data` of all ranks. Collective."""
        if not self.is_sharded:
            return shard_data
        whole = shard_data.new_empty(self.plan.numel)
        all_gather_into_tensor(whole, shard_data, group=self._dp.group)
        return whole

    def finish_param_gather(self) -> None:
        for work in self._param_works:
            work.wait()
        self._param_works = []

    def grad_ranges(self, keep: Callable[[ParamInfo], bool]) -> list[torch.Tensor]:
        """Return the minimum number of views of `grad_shard` that cover selected parameters."""
        ranges = find_ranges(self.plan, keep)
        ranges_in_shard = intersect(ranges, self.shard_start, self.shard_stop)
        return [self.grad_shard[start:stop] for start, stop in ranges_in_shard]

    def pieces(self) -> Iterator[Piece]:
        """Yield the parameters, or parts of them, in this rank's shard."""
        for span, param in zip(self.plan.spans, self.params, strict=True):
            whole = [(span.start, span.stop)]
            for start, stop in intersect(whole, self.shard_start, self.shard_stop):
                # From an index of the shard to one of the bucket, and to one of the parameter
                param_start = self.shard_start + start - span.start
                yield Piece(param, span.spec.info, param_start, start, stop)


class ParamAndGradBuffer:
    """A contiguous parameter buffer and a gradient buffer for the parameters of one dtype, or fp8.

    Rebinds `param.data` to a view of the parameter buffer, and sets `param.main_grad` to a view of
    the gradient buffer, which has dtype `grad_dtype`. Without `keep_values` parameters become zero.
    """

    def __init__(
        self,
        named_params: Sequence[tuple[str, nn.Parameter]],
        grad_dtype: torch.dtype,
        bucket_size: int,
        dp: Axis,
        shard: Axis,
        keep_values: bool = True,
    ) -> None:
        # Plan the buckets.
        by_name = dict(named_params)
        specs = []
        for name, param in named_params:
            specs.append(ParamSpec(name, tuple(param.shape), param_info(param)))
        plans = plan_buffer(specs, bucket_size, shard.size)
        self.is_fp8 = specs[0].info.fp8 is not None

        # Zeros, because the gaps between parameters take part in norms and updates.
        _, first = named_params[0]
        numel = plans[-1].stop
        self.param_data = torch.zeros(numel, dtype=first.dtype, device=first.device)
        self.grad_data = torch.zeros(numel, dtype=grad_dtype, device=first.device)

        # Move each parameter into the buffer; the module keeps using the same nn.Parameter.
        self.buckets: list[Bucket] = []
        for plan in plans:
            params = []
            param_data = self.param_data[plan.start : plan.stop]
            grad_data = self.grad_data[plan.start : plan.stop]
            for span in plan.spans:
                param = by_name[span.spec.name]
                params.append(param)
                view = param_data[span.start : span.stop].view(span.spec.shape)
                if keep_values:
                    view.copy_(param.detach())
                param.data = view
                grad_view = grad_data[span.start : span.stop].view(span.spec.shape)
                param.main_grad = grad_view  # type: ignore[attr-defined]
            self.buckets.append(Bucket(plan, params, param_data, grad_data, dp, shard))

    @torch.no_grad()
    def quantize(self) -> None:
        """Convert fp8 parameters to one byte each, after the main parameters have their values."""
        numel = len(self.param_data)
        device = self.param_data.device
        self.param_data = torch.zeros(numel, dtype=torch.uint8, device=device)
        for bucket in self.buckets:
            plan = bucket.plan
            bucket.param_data = self.param_data[plan.start : plan.stop]
            bucket.param_shard = bucket.param_data[bucket.shard_start : bucket.shard_stop]
            for span in plan.spans:
                fp8 = span.spec.info.fp8
                assert fp8 is not None
                fp8.quantize(bucket.param_data[span.start : span.stop])
