"""The topology of a run as a value: which rank stands where on the TP, DP and PP axes.

Rank order is Megatron's: TP varies fastest, then DP, then PP
(`rank = tp + TP * (dp + DP * pp)`, unless --use-tp-pp-dp-mapping; Narayanan et al. 2021, "Efficient Large-Scale
Language Model Training"). `ParallelState` is built once and passed down; layers take a single `Axis`. There are no
module globals.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron.core.utils import flag


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of the parallel axes; data parallelism takes what remains of the world."""

    tensor_model_parallel_size: int = flag(1)
    """Number of ranks over which every layer's matrices are split."""
    pipeline_model_parallel_size: int = flag(1)
    """Number of pipeline stages."""
    virtual_pipeline_model_parallel_size: int | None = flag(
        None, "--virtual-pipeline-model-parallel-size", "--num-virtual-stages-per-pipeline-rank"
    )
    """Number of model chunks per pipeline stage (interleaved schedule)."""
    microbatch_group_size_per_vp_stage: int | None = flag(None, "--microbatch-group-size-per-virtual-pipeline-stage")
    """Micro batches that pass one model chunk of a stage before the next chunk. Default: the number of stages."""
    sequence_parallel: bool = flag(False)
    """Split activations outside the tensor-parallel regions along the sequence."""
    use_tp_pp_dp_mapping: bool = flag(False)
    """Count ranks over TP, then PP, then DP, so that the stages of a replica are neighbours; else TP, DP, PP."""

    @property
    def tp_size(self) -> int:
        return self.tensor_model_parallel_size

    @property
    def pp_size(self) -> int:
        return self.pipeline_model_parallel_size

    @property
    def vpp_size(self) -> int:
        return self.virtual_pipeline_model_parallel_size or 1

    def dp_size(self, world_size: int) -> int:
        """Data-parallel size that `world_size` leaves; ValueError if it does not fit."""
        model = self.tp_size * self.pp_size
        if min(self.tp_size, self.pp_size, self.vpp_size) < 1:
            raise ValueError(f"parallel sizes must be positive, got {self}")
        if world_size % model != 0:
            raise ValueError(
                f"world size {world_size} is not a multiple of tensor ({self.tp_size}) x pipeline ({self.pp_size}) "
                f"= {model} ranks: start a multiple of {model} processes or change "
                "--tensor-model-parallel-size / --pipeline-model-parallel-size"
            )
        if self.vpp_size > 1 and self.pp_size == 1:
            raise ValueError(
                f"--virtual-pipeline-model-parallel-size {self.vpp_size} needs --pipeline-model-parallel-size > 1"
            )
        return world_size // model

    def place(self, rank: int, world_size: int) -> tuple[int, int, int]:
        """Where a rank stands: its (tp, dp, pp)."""
        tp, rest, dp_size = rank % self.tp_size, rank // self.tp_size, self.dp_size(world_size)
        if self.use_tp_pp_dp_mapping:
            return tp, rest // self.pp_size, rest % self.pp_size
        return tp, rest % dp_size, rest // dp_size

    def rank_at(self, tp: int, dp: int, pp: int, world_size: int) -> int:
        """The rank that stands there."""
        if self.use_tp_pp_dp_mapping:
            return tp + self.tp_size * (pp + self.pp_size * dp)
        return tp + self.tp_size * (dp + self.dp_size(world_size) * pp)


@dataclass(frozen=True)
class Axis:
    """One rank's place on a parallel axis.

    `group` is None for an axis described without process groups (`ParallelState.for_rank`) and for axes of size 1.
    """

    rank: int = 0
    size: int = 1
    ranks: tuple[int, ...] = (0,)  # global ranks along the axis, in axis order
    group: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1


@dataclass(frozen=True)
class ParallelState:
    """Place of one rank on every axis.

    `model` spans TP x PP of one replica (reductions over a whole model); `embedding` spans the first and the last
    stage (tied embeddings), and is of size 1 on the stages between.
    """

    config: ParallelConfig
    rank: int
    world_size: int
    tp: Axis
    dp: Axis
    pp: Axis
    model: Axis
    embedding: Axis

    @property
    def vpp_size(self) -> int:
        return self.config.vpp_size

    @classmethod
    def for_rank(cls, config: ParallelConfig, world_size: int = 1, rank: int = 0) -> ParallelState:
        """Describe any rank of any layout without process groups (converters, planners, tests)."""
        lists = _ranks_along_axes(config, world_size, rank)
        return cls(config, rank, world_size, **{name: Axis(r.index(rank), len(r), r) for name, r in lists.items()})

    @classmethod
    def create(cls, config: ParallelConfig, timeout: timedelta | None = None) -> ParallelState:
        """Build the process groups of every axis; collective over the initialised world."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        state = cls.for_rank(config, world_size, rank)
        axes: dict[str, Any] = {}
        # Every rank takes part in the creation of every group, in one order; a group is created at its first member.
        for member in range(world_size):
            for name, ranks in _ranks_along_axes(config, world_size, member).items():
                if len(ranks) == 1 or member != ranks[0]:
                    continue
                group = dist.new_group(list(ranks), timeout=timeout, group_desc=name)
                if rank in ranks:
                    axes[name] = Axis(ranks.index(rank), len(ranks), ranks, group)
        return replace(state, **axes)


def _ranks_along_axes(config: ParallelConfig, world_size: int, rank: int) -> dict[str, tuple[int, ...]]:
    """Axis name -> global ranks of the group along that axis that holds `rank`."""
    tp_size, pp_size, dp_size = config.tp_size, config.pp_size, config.dp_size(world_size)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not part of a world of {world_size} ranks")
    tp, dp, pp = config.place(rank, world_size)

    def rank_of(tp: int, dp: int, pp: int) -> int:
        return config.rank_at(tp, dp, pp, world_size)

    ends = sorted({0, pp_size - 1})
    return {
        "tp": tuple(rank_of(t, dp, pp) for t in range(tp_size)),
        "dp": tuple(rank_of(tp, d, pp) for d in range(dp_size)),
        "pp": tuple(rank_of(tp, dp, p) for p in range(pp_size)),
        "model": tuple(rank_of(t, dp, p) for p in range(pp_size) for t in range(tp_size)),
        "embedding": tuple(rank_of(tp, dp, p) for p in ends) if pp in ends else (rank,),
    }
