"""The place of every parameter in the contiguous buffers: a pure function of names, shapes and `ParamInfo`.

No tensor is touched, so the plan of any rank of any layout can be made anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatron.core.dist_checkpointing.mapping import Shape
from megatron.core.module import ParamInfo
from megatron.core.utils import round_up

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

    Offsets of the spans are relative to the bucket. Elements between and behind the spans belong to no parameter
    and stay zero.
    """

    start: int
    numel: int
    group: ParamGroup
    spans: tuple[Span, ...]

    @property
    def stop(self) -> int:
        return self.start + self.numel


def plan_buffer(specs: Sequence[ParamSpec], bucket_size: int, num_shards: int) -> tuple[BucketPlan, ...]:
    """Buckets are in the order in which backward completes them, each of one `ParamGroup`, each divisible into shards.

    `specs` come in forward order. Parameters with weight decay lie in reverse; a bucket is closed when it has
    `bucket_size` elements, where the group changes, and around a tied embedding (so that its shards on the first and
    the last stage correspond). Those without weight decay are a thousandth of a model and come last, ordered by how
    they are replicated, so that reductions and norms over a kind of them are over one contiguous range.
    """
    buckets: list[BucketPlan] = []
    for run in _bucket_runs(specs, bucket_size):
        spans, position = [], 0
        for spec in run:
            spans.append(Span(spec, position, position + spec.numel))
            position = round_up(position + spec.numel, ALIGNMENT)
        # A bucket ends at a multiple of the shards, so that one reduce-scatter gives every rank an equal, aligned part;
        # parameters may straddle the border of two shards.
        start = buckets[-1].stop if buckets else 0
        numel = round_up(position, ALIGNMENT * num_shards)
        buckets.append(BucketPlan(start, numel, run[0].group, tuple(spans)))
    return tuple(buckets)


def _bucket_runs(specs: Sequence[ParamSpec], bucket_size: int) -> Iterator[list[ParamSpec]]:
    """Cut the parameters, in buffer order, into the runs that share a bucket."""
    # The last layers finish their backward pass first: their buckets are reduced while the first layers still compute.
    backward = list(reversed(specs))
    matrices = [spec for spec in backward if spec.group.weight_decay]
    vectors = [spec for spec in backward if not spec.group.weight_decay]
    vectors.sort(key=lambda spec: (spec.info.tp_split, spec.info.partial_grad))
    run: list[ParamSpec] = []
    for spec in matrices + vectors:
        full = sum(other.numel for other in run) >= bucket_size
        if run and (full or spec.group != run[0].group or spec.info.shared_embedding or run[0].info.shared_embedding):
            yield run
            run = []
        run.append(spec)
    if run:
        yield run


def ranges_of(bucket: BucketPlan, keep: Callable[[ParamInfo], bool]) -> list[Range]:
    """Ranges of the bucket that cover the parameters that satisfy `keep`, merged; they start and end aligned.

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
