"""Contiguous memory for parameters and gradients, cut into buckets that are reduced and gathered in
one piece.

The place of every parameter is a pure function of names, shapes and `ParamInfo`: `plan_buffer`
touches no tensor, so that the plan of any rank of any layout can be made anywhere.
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
from megatron.core.tensor_parallel.mappings import all_gather_into_tensor, reduce_scatter_tensor

ALIGNMENT = 64  # elements; every parameter and every shard starts at a multiple (128 bytes in bf16)

Range = tuple[int, int]


@dataclass(frozen=True)
class ParamGroup:
    """What decides the hyperparameters of a parameter; all of a bucket have the same."""

    weight_decay: bool
    """False for 1-D parameters and for biases."""
    embedding: bool
    """The word embedding and the output layer, which may have a learning rate of their own."""

    @property
    def is_matrix(self) -> bool:
        """The weights of hidden layers."""
        return self.weight_decay and not self.embedding


@dataclass(frozen=True)
class ParamSpec:
    """A parameter without its memory."""

    name: str
    shape: Shape
    info: ParamInfo

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def group(self) -> ParamGroup:
        return ParamGroup(
            weight_decay=len(self.shape) > 1 and not self.name.endswith(".bias"),
            embedding=self.name.endswith(("word_embeddings.weight", "output_layer.weight")),
        )


@dataclass(frozen=True)
class Span:
    """A parameter's elements are `[start, stop)` of its bucket."""

    spec: ParamSpec
    start: int
    stop: int


@dataclass(frozen=True)
class BucketPlan:
    """Elements `[start, start + numel)` of the buffer, reduced and gathered in one collective.

    Offsets of the spans are relative to the bucket. Elements between and behind the spans belong to
    no parameter and stay zero.
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
    """Buckets are in the order in which backward completes them, each of one `ParamGroup`, each
    divisible into shards.

    `specs` come in forward order. Parameters with weight decay lie in reverse; a bucket is closed when it has
    `bucket_size` elements, where the group changes, and around a tied embedding (so that its shards on the first and
    the last stage correspond). Those without weight decay are a thousandth of a model and come
    last, ordered by how they are replicated, so that reductions and norms over a kind of them are
    over one contiguous range.
    """
    buckets: list[BucketPlan] = []
    for run in _bucket_runs(specs, bucket_size):
        spans = []
        position = 0
        for spec in run:
            spans.append(Span(spec, position, position + spec.numel))
            position = round_up(position + spec.numel, ALIGNMENT)
        # A bucket ends at a multiple of the shards, so that one reduce-scatter gives every rank an
        # equal, aligned part; parameters may straddle the border of two shards.
        start = buckets[-1].stop if buckets else 0
        numel = round_up(position, ALIGNMENT * num_shards)
        buckets.append(BucketPlan(start, numel, run[0].group, tuple(spans)))
    return tuple(buckets)


def _bucket_runs(specs: Sequence[ParamSpec], bucket_size: int) -> Iterator[list[ParamSpec]]:
    """Cut the parameters, in buffer order, into the runs that share a bucket."""
    # The last layers finish their backward pass first: their buckets are reduced while the first
    # layers still compute.
    backward = list(reversed(specs))
    matrices = [spec for spec in backward if spec.group.weight_decay]
    vectors = [spec for spec in backward if not spec.group.weight_decay]
    vectors.sort(key=lambda spec: (spec.info.sharding.is_split, spec.info.partial_grad))
    run: list[ParamSpec] = []
    for spec in matrices + vectors:
        full = sum(other.numel for other in run) >= bucket_size
        if run and (
            full
            or spec.group != run[0].group
            or spec.info.shared_embedding
            or run[0].info.shared_embedding
        ):
            yield run
            run = []
        run.append(spec)
    if run:
        yield run


def ranges_of(bucket: BucketPlan, keep: Callable[[ParamInfo], bool]) -> list[Range]:
    """Ranges of the bucket that cover the parameters that satisfy `keep`, merged; they start and
    end aligned.

    The zeros between two neighbours may be covered too.
    """
    ranges: list[Range] = []
    for span in bucket.spans:
        if not keep(span.spec.info):
            continue
        stop = round_up(span.stop, ALIGNMENT)
        if ranges and ranges[-1][1] == span.start:
            ranges[-1] = (ranges[-1][0], stop)
        else:
            ranges.append((span.start, stop))
    return ranges


def intersect(ranges: Sequence[Range], start: int, stop: int) -> list[Range]:
    """The parts of `ranges` inside `[start, stop)`, relative to `start`."""
    clipped = ((max(lo, start), min(hi, stop)) for lo, hi in ranges)
    return [(lo - start, hi - start) for lo, hi in clipped if lo < hi]


@dataclass(frozen=True)
class Piece:
    """A parameter's elements `[param_start, param_start + stop - start)` are `[start, stop)` of a
    shard.
    """

    param: nn.Parameter
    info: ParamInfo
    param_start: int
    start: int
    stop: int


def _shard_by_shard(
    collective: Callable[..., dist.Work], whole: torch.Tensor, dp: Axis
) -> list[dist.Work]:
    """Start `collective` of every shard of `whole`, to or from the rank that has it.

    For gloo, whose all-gather and reduce-scatter go through a copy of the whole and take about
    twice as long.
    """
    shards = zip(whole.chunk(dp.size), dp.ranks, strict=True)
    return [collective(shard, rank, group=dp.group, async_op=True) for shard, rank in shards]


class Bucket:
    """Parameters whose gradients are reduced together, and this rank's shard of them.

    `shard` is the data-parallel axis with the distributed optimizer and an axis of size 1 without: then the shard is
    the whole bucket. All collectives run in place and asynchronously, between a `start_` and a
    `finish_`. `grad_shard` is fp32, and a view of `grad_data` if that is fp32, too.
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
        self.shard_start, self.shard_stop = even_range(plan.numel, shard.rank, shard.size)
        self.param_shard = param_data[self.shard_start : self.shard_stop]
        self._reduced = grad_data[self.shard_start : self.shard_stop]
        in_fp32 = grad_data.dtype == torch.float32
        self.grad_shard = (
            self._reduced if in_fp32 else torch.zeros_like(self._reduced, dtype=torch.float32)
        )
        # Parameters whose gradient of the last micro-batch has not arrived: the reduction starts
        # when none is left.
        self.missing = set(self.params)
        self._dp = dp
        self.is_sharded = shard.size > 1  # other ranks have other parts of the sum
        self._grad_works: list[dist.Work] = []  # under way
        self._param_works: list[dist.Work] = []

    def start_grad_reduce(self) -> None:
        """Sum the gradients over DP; afterwards only `grad_shard` is valid."""
        if self._dp.size == 1:
            return
        assert self._dp.group is not None and not self._grad_works
        group = self._dp.group
        whole = self.grad_data
        if self.is_sharded and whole.device.type == "cpu":
            self._grad_works = _shard_by_shard(dist.reduce, whole, self._dp)
        elif self.is_sharded:
            self._grad_works = [
                reduce_scatter_tensor(self._reduced, whole, group=group, async_op=True)
            ]
        else:
            self._grad_works = [dist.all_reduce(whole, group=group, async_op=True)]

    def finish_grad_reduce(self) -> None:
        """Once per iteration: `grad_shard` holds the sum."""
        for work in self._grad_works:
            work.wait()
        self._grad_works = []
        if (
            self.grad_shard is not self._reduced
        ):  # bf16 gradients: clipping and the update need them in fp32
            self.grad_shard.copy_(self._reduced)

    @property
    def params_complete(self) -> bool:
        """No gather is under way."""
        return not self._param_works

    def start_param_gather(self) -> None:
        """Fill `param_data` with the `param_shard` of every rank."""
        if not self.is_sharded:
            return
        assert self._dp.group is not None and not self._param_works
        group = self._dp.group
        whole = self.param_data
        if whole.device.type == "cpu":
            self._param_works = _shard_by_shard(dist.broadcast, whole, self._dp)
        else:
            self._param_works = [
                all_gather_into_tensor(whole, self.param_shard, group=group, async_op=True)
            ]

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks that have the shards."""
        if self.is_sharded:
            assert self._dp.group is not None
            return self._dp.group
        return group_of((dist.get_rank(),))  # None would be the world

    def gather(self, shard_data: torch.Tensor) -> torch.Tensor:
        """`shard_data` of every rank, in the order of the bucket."""
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
        """Views of `grad_shard` that cover the parameters that satisfy `keep`, as few as can be."""
        ranges = intersect(ranges_of(self.plan, keep), self.shard_start, self.shard_stop)
        return [self.grad_shard[start:stop] for start, stop in ranges]

    def pieces(self) -> Iterator[Piece]:
        """The parameters, or parts of them, that lie in this rank's shard."""
        for span, param in zip(self.plan.spans, self.params, strict=True):
            for start, stop in intersect(
                [(span.start, span.stop)], self.shard_start, self.shard_stop
            ):
                yield Piece(
                    param, span.spec.info, self.shard_start + start - span.start, start, stop
                )


class ParamAndGradBuffer:
    """One contiguous parameter buffer and one gradient buffer of `grad_dtype` for the parameters of
    one dtype, or fp8.

    Rebinds `param.data` to its place in the parameter buffer and sets `param.main_grad` to its
    place in the gradient buffer.
    """

    def __init__(
        self,
        named_params: Sequence[tuple[str, nn.Parameter]],
        grad_dtype: torch.dtype,
        bucket_size: int,
        dp: Axis,
        shard: Axis,
    ) -> None:
        by_name = dict(named_params)
        specs = [
            ParamSpec(name, tuple(param.shape), param_info(param)) for name, param in named_params
        ]
        plans = plan_buffer(specs, bucket_size, shard.size)
        first = named_params[0][1]
        numel = plans[-1].stop
        self.param_data = torch.zeros(numel, dtype=first.dtype, device=first.device)
        self.is_fp8 = specs[0].info.fp8 is not None
        self.grad_data = torch.zeros(numel, dtype=grad_dtype, device=first.device)
        self.buckets: list[Bucket] = []
        for plan in plans:
            params = [by_name[span.spec.name] for span in plan.spans]
            param_data, grad_data = (
                data[plan.start : plan.stop] for data in (self.param_data, self.grad_data)
            )
            for span, param in zip(plan.spans, params, strict=True):
                view = param_data[span.start : span.stop].view(span.spec.shape)
                view.copy_(param.detach())
                param.data = view
                param.main_grad = grad_data[span.start : span.stop].view(span.spec.shape)  # type: ignore[attr-defined]
            self.buckets.append(Bucket(plan, params, param_data, grad_data, dp, shard))

    @torch.no_grad()
    def quantize(self) -> None:
        """Of fp8 parameters, once the main ones have their values: from now on the buffer has a
        byte for each.
        """
        self.param_data = torch.zeros(
            len(self.param_data), dtype=torch.uint8, device=self.param_data.device
        )
        for bucket in self.buckets:
            bucket.param_data = self.param_data[bucket.plan.start : bucket.plan.stop]
            bucket.param_shard = bucket.param_data[bucket.shard_start : bucket.shard_stop]
            for span in bucket.plan.spans:
                assert span.spec.info.fp8 is not None
                span.spec.info.fp8.quantize(bucket.param_data[span.start : span.stop])
