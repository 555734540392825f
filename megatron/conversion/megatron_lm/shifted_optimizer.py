"""Repair of the optimizer state that Megatron-core up to 0.19.2 stores shifted.

Its `fully_reshardable` form cuts the parameters out of a flat buffer without the padding at the
ends of buckets, but at positions that include this padding. Every parameter after the first padded
bucket therefore contains elements of the parameters that follow it. The elements between the cuts
are not in the files: those of the alignment gaps, and of the end of the buffer, where zeros were
added. Everything else can be put back, because the positions follow from the arguments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatron.conversion.megatron_lm.legacy_files import MegatronRank, list_expert_ranks
from megatron.conversion.megatron_lm.optimizer_state import (
    PieceTable,
    compute_bucket_size,
    count_elements,
    plan_buckets,
    split_by_optimizer,
)
from megatron.conversion.model_space.layouts import Layout, LocalParameter, rank_parameters
from megatron.conversion.model_space.lazy_tensors import flatten, view_box
from megatron.conversion.model_space.optimizer_states import optimizer_key, optimizer_states
from megatron.conversion.model_space.views import SourceView
from megatron.core.arithmetic import round_up
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.dist_checkpointing.mapping import LazyTensor, Shape
from megatron.core.run_checkpoint.source import Source
from megatron.core.transformer.transformer_config import TransformerConfig

# Buckets end at a multiple of the number of replicas, and of these (in elements).
_BUCKET_ALIGNMENT = 128
_BANDWIDTH_ALIGNMENT = 2**16  # with --ddp-pad-buckets-for-high-nccl-busbw


@dataclass(frozen=True)
class Cut:
    """A parameter's elements in a flat buffer: where they are, and where they were cut out."""

    parameter: LocalParameter
    start: int  # first element of the parameter, in the buffer without padding
    file_start: int  # first element that was cut out; the tensor in the file begins with it

    @property
    def stored_end(self) -> int:
        """Return the position after the last element that was cut out."""
        return self.file_start + self.parameter.numel


class ShiftedBuffer:
    """The flat buffer of a chunk, and the parameters that were cut out of it."""

    def __init__(self, source: Source, cuts: Sequence[Cut]) -> None:
        self._source = source
        self.cuts = cuts

    def count_lost(self) -> int:
        """Return the number of elements that no tensor in the files contains."""
        # Two cuts may overlap, and leave gaps elsewhere: compare each parameter with all cuts.
        lost = 0
        for cut in self.cuts:
            num_stored = 0
            for _, start, stop in self._find_stored(cut.start, cut.parameter.numel):
                num_stored += stop - start
            lost += cut.parameter.numel - num_stored
        return lost

    def read(self, state: str, cut: Cut, offset: Shape, shape: Shape) -> torch.Tensor:
        """Return `shape[0]` elements of a parameter's state, from element `offset[0]` on.

        Lost elements of the main parameter are those of the weight, which is rounded; those of
        other states are zero.
        """
        (start,) = offset
        (count,) = shape
        # Values of lost elements
        if state == "param":
            weight = self._read_local(cut.parameter.key, cut.parameter, start, count)
            value = weight.float()
        else:
            value = torch.zeros(count)

        # Replace them by the stored values, which are in tensors of this or of other parameters.
        first = cut.start + start
        for stored_cut, begin, end in self._find_stored(first, count):
            key = optimizer_key(state, stored_cut.parameter.key)
            values = self._read_local(
                key, stored_cut.parameter, begin - stored_cut.file_start, end - begin
            )
            value[begin - first : end - first] = values
        return value

    def _find_stored(self, start: int, count: int) -> Iterator[tuple[Cut, int, int]]:
        """Yield (cut, begin, end) for each cut that contains elements of `[start, start + count)`.

        The common elements are `[begin, end)` of the buffer.
        """
        for cut in self.cuts:
            begin = max(start, cut.file_start)
            end = min(start + count, cut.stored_end)
            if begin < end:
                yield cut, begin, end

    def _read_local(
        self, key: str, parameter: LocalParameter, start: int, count: int
    ) -> torch.Tensor:
        """Return elements of the part of the tensor `key` that the rank of `parameter` owns.

        They are `count` of its row-major local elements, from element `start` on.
        """
        value: torch.Tensor | None = None
        tensor = self._source.tensors[key]
        for (offset, shape), box_start in parameter.locate_boxes():
            begin = max(start, box_start)
            end = min(start + count, box_start + math.prod(shape))
            if begin >= end:
                continue
            elements = flatten(view_box(tensor, offset, shape))
            values = elements.read((begin - box_start,), (end - begin,))
            # Most ranges are in one box, and need no copy.
            if end - begin == count:
                return values
            if value is None:
                value = values.new_empty(count)
            value[begin - start : end - start] = values
        assert value is not None, f"{key}: elements {start} to {start + count} are in no box"
        return value


class RepairedOptimizer(SourceView):
    """A view of `source` with shifted optimizer state at its correct positions.

    `source` must not compare main parameters with weights. This view does, which proves the repair:
    the error of a wrong position is the same as for other checkpoints.
    """

    def __init__(self, source: Source, config: TransformerConfig) -> None:
        super().__init__(source)
        self.lost = 0  # elements of each state that no tensor contains
        self.moved = 0  # elements of each state that were stored at another position
        self._table = PieceTable(source.description)

        # Weights, as they are stored
        for key, tensor in source.tensors.items():
            if not key.startswith("optimizer."):
                self._table.add_whole(key, tensor)

        # Optimizer state, from the buffers
        states = optimizer_states(source.tensors)
        for cuts in _list_buffers(config, source.args):
            buffer = ShiftedBuffer(source, cuts)
            self.lost += buffer.count_lost()
            for cut in cuts:
                if cut.start != cut.file_start:
                    self.moved += cut.parameter.numel
                for state in states:
                    self._add_state(buffer, cut, state)
        if not self.moved:
            raise CheckpointError(
                f"{source.description}: its arguments specify no bucket that ends in padding, so "
                "the optimizer state cannot be put back"
            )
        self._table.complete(has_optimizer=True)
        self.tensors = {key: self._table.tensors[key] for key in source.tensors}

    def _add_state(self, buffer: ShiftedBuffer, cut: Cut, state: str) -> None:
        """Add a state of a parameter, if the source has it."""
        key = optimizer_key(state, cut.parameter.key)
        if key not in self._source.tensors:
            return
        dtype = self._source.tensors[key].dtype
        elements = LazyTensor((cut.parameter.numel,), dtype, partial(buffer.read, state, cut))
        self._table.add_local(key, cut.parameter, elements)


def _list_buffers(config: TransformerConfig, args: Mapping[str, Any]) -> Iterator[list[Cut]]:
    """Yield the cuts of every chunk of every model-parallel rank."""
    layout = Layout.from_args(args)
    parallel = layout.parallel
    has_expert_optimizer = parallel.ep_size > 1

    def cut_chunks(rank: MegatronRank, optimizer: int, alignment: int) -> Iterator[list[Cut]]:
        """Yield the cuts of the chunks that an optimizer of the rank has."""
        chunks = rank_parameters(config, layout, rank.tp, rank.pp, 1, rank.expert, args)
        optimizer_chunks = split_by_optimizer(chunks, has_expert_optimizer)[optimizer]
        num_parameters = count_elements(optimizer_chunks)
        for index, parameters in enumerate(optimizer_chunks):
            bucket_size = compute_bucket_size(args, rank.pp, index, num_parameters)
            yield _cut_out(parameters, bucket_size, alignment)

    # The optimizer of dense layers has replicas over DP and CP.
    dp_size = args.get("data_parallel_size") or 1
    cp_size = args.get("context_parallel_size") or 1
    replicas = dp_size * cp_size
    alignment = _align_buckets(args, replicas)
    for tp, pp in layout.ranks:
        yield from cut_chunks(MegatronRank(tp, pp), 0, alignment)

    # The optimizer of experts has the same number of ranks per stage.
    if has_expert_optimizer:
        ranks_per_stage = replicas * parallel.tp_size
        expert_replicas = max(1, ranks_per_stage // (parallel.etp_size * parallel.ep_size))
        alignment = _align_buckets(args, expert_replicas)
        for rank in list_expert_ranks(parallel):
            yield from cut_chunks(rank, 1, alignment)


def _align_buckets(args: Mapping[str, Any], replicas: int) -> int:
    """Return the number of elements that the ends of buckets are multiples of."""
    alignment = math.lcm(replicas, _BUCKET_ALIGNMENT)
    if args.get("ddp_pad_buckets_for_high_nccl_busbw"):
        alignment = math.lcm(alignment, _BANDWIDTH_ALIGNMENT)
    return alignment


def _cut_out(
    parameters: Sequence[LocalParameter], bucket_size: int | None, alignment: int
) -> list[Cut]:
    """Return where a chunk's parameters are in its buffer, and where they were cut out."""
    plan = plan_buckets(parameters, bucket_size)

    # Elements of padding before each bucket: at the ends of all buckets before it
    padding_before = [0]
    for size in plan.sizes:
        padding = round_up(size, alignment) - size
        padding_before.append(padding_before[-1] + padding)

    cuts = []
    for (parameter, start), placed in zip(plan.list_positions(), plan.placed, strict=True):
        file_start = start + padding_before[placed.bucket]
        cuts.append(Cut(parameter, start, file_start))
    return cuts
