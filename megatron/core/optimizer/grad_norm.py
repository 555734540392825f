"""Norm and zeros of the gradient of the whole model, and the clipping coefficient."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from megatron.core.module import ParamInfo
from megatron.core.optimizer.flat_shard import FlatShard
from megatron.core.parallel_state import Axis, ParallelState
from megatron.core.private_operators import compute_norms
from megatron.core.wings import resolve

_ROW = 1024  # elements summed in fp32

_APEX_SUM_OF_SQUARES = "megatron.core.optimizer.rules.apex_adam:apex_sum_of_squares"


def sum_of_squares(grads: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the sum of squares of flat fp32 tensors as an fp64 scalar.

    Rows are summed in fp32 and the rows' sums in fp64: as fast as an fp32 sum and as precise as an
    fp64 one. (A plain fp32 sum on a CPU is off by 1e-3 for 32 million elements.) On a GPU, one
    operator reads all tensors; it sums blocks of 65536 elements in fp32, thread by thread.
    """
    if device.type == "cuda" and grads:
        return compute_norms(grads).double().square().sum()
    total = torch.zeros((), dtype=torch.float64, device=device)
    for grad in grads:
        end_of_rows = grad.numel() // _ROW * _ROW
        rows = grad[:end_of_rows].view(-1, _ROW)
        trailing = grad[end_of_rows:].view(1, -1)
        for matrix in (rows, trailing):
            # One kernel per part, without a temporary tensor of squares.
            row_norms = torch.linalg.vector_norm(matrix, dim=1)
            total += row_norms.double().square().sum()
    return total


def count_zeros(grads: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the number of zeros as an fp64 scalar."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for grad in grads:
        total += grad.numel() - torch.count_nonzero(grad)
    return total


def compute_clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return the factor of gradients of norm `norm`; `max_norm` 0 disables clipping."""
    if max_norm == 0:
        return torch.ones_like(norm)
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def counts_for_model(info: ParamInfo, ps: ParallelState, sharded: bool) -> bool:
    """Return whether this rank adds its part of a parameter to a sum over the whole model.

    The sum is taken over `find_norm_axis`. `sharded`: the values are sharded over data parallelism.
    """
    # A value that is replicated over an axis is counted by the first rank of that axis.
    # Split values are counted by every rank of the axis: each has another part.
    is_split = info.sharding.is_split
    if ps.config.splits_experts and info.sharding.is_expert:
        return (is_split or ps.etp.is_first) and (sharded or ps.edp.is_first)
    is_counted_over_tp = info.counted and (is_split or ps.tp.is_first)
    if not ps.config.splits_experts:
        return is_counted_over_tp
    # The sum is over all ranks, and includes the replicas.
    return is_counted_over_tp and (sharded or ps.dp_cp.is_first)


def find_norm_axis(shard: Axis, ps: ParallelState) -> Axis:
    """Return the ranks that hold different parts of the gradient.

    These are all ranks, or those of one replica if each replica has the whole gradient.
    """
    if shard.size == 1 and not ps.config.splits_experts:
        return ps.model
    all_ranks = tuple(range(ps.world_size))
    return Axis(ps.rank, ps.world_size, all_ranks, dist.group.WORLD)


class GradNorm:
    """Sums over the gradients of the whole model, each parameter counted once."""

    def __init__(
        self, shards: Sequence[FlatShard], shard_axis: Axis, ps: ParallelState, use_apex: bool
    ) -> None:
        self._axis = find_norm_axis(shard_axis, ps)
        self._device = shards[0].param.device
        self._sum_of_squares = resolve(_APEX_SUM_OF_SQUARES) if use_apex else sum_of_squares
        # Ranges of the gradient shards that this rank counts. Ranges are merged, so they include
        # alignment gaps, which are zero: they do not change the norm, but the number of zeros.
        self._grads: list[torch.Tensor] = []
        num_elements = 0
        for shard in shards:
            counted = partial(counts_for_model, ps=ps, sharded=shard.bucket.is_sharded)
            self._grads += shard.bucket.grad_ranges(counted)
            for param_slice in shard.bucket.pieces():
                if counted(param_slice.info):
                    num_elements += param_slice.stop - param_slice.start
        num_covered = sum(len(grad) for grad in self._grads)
        self._num_gaps = num_covered - num_elements

    def compute(self, with_zeros: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the sum of squares and the number of zeros over the whole model. Collective.

        The second is None unless `with_zeros`.
        """
        # fp64 scalars of this rank's parts
        sums = [self._sum_of_squares(self._grads, self._device)]
        if with_zeros:
            num_zeros = count_zeros(self._grads, self._device) - self._num_gaps
            sums.append(num_zeros)
        # One reduction for both.
        total = torch.stack(sums)
        if self._axis.size > 1:
            dist.all_reduce(total, group=self._axis.group)
        if with_zeros:
            return total[0], total[1]
        return total[0], None
