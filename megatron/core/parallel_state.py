"""The topology of a run as a value: which rank stands where on the TP, DP and PP axes.

Rank order is Megatron's: TP varies fastest, then DP, then PP
(`rank = tp + TP * (dp + DP * pp)`, unless --use-tp-pp-dp-mapping; Narayanan et al. 2021, "Efficient Large-Scale
Language Model Training"). Experts are split over axes of their own through the same ranks of a stage:
`rank = etp + ETP * (ep + EP * (edp + EDP * pp))`. `ParallelState` is built once and passed down; layers take a single
`Axis`. There are no module globals.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import product

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
    expert_model_parallel_size: int = 1
    """Number of ranks over which the experts of a layer are distributed."""
    expert_tensor_parallel_size: int | None = None
    """Number of ranks over which the matrices of each expert are split. Default: the tensor-parallel size."""

    @property
    def tp_size(self) -> int:
        return self.tensor_model_parallel_size

    @property
    def pp_size(self) -> int:
        return self.pipeline_model_parallel_size

    @property
    def vpp_size(self) -> int:
        return self.virtual_pipeline_model_parallel_size or 1

    @property
    def ep_size(self) -> int:
        return self.expert_model_parallel_size

    @property
    def etp_size(self) -> int:
        return self.tp_size if self.expert_tensor_parallel_size is None else self.expert_tensor_parallel_size

    @property
    def splits_experts(self) -> bool:
        """Whether experts are split in another way than the matrices of dense layers."""
        return (self.etp_size, self.ep_size) != (self.tp_size, 1)

    def edp_size(self, world_size: int) -> int:
        """Replicas of an expert that `world_size` leaves; ValueError if it does not fit."""
        self.dp_size(world_size)
        if min(self.etp_size, self.ep_size) < 1:
            raise ValueError(f"parallel sizes must be positive, got {self}")
        ranks = self.etp_size * self.ep_size * self.pp_size
        if world_size % ranks != 0:
            raise ValueError(
                f"world size {world_size} is not a multiple of expert tensor ({self.etp_size}) x expert "
                f"({self.ep_size}) x pipeline ({self.pp_size}) = {ranks} ranks: change --expert-tensor-parallel-size / "
                "--expert-model-parallel-size, or the number of processes"
            )
        if self.splits_experts and self.use_tp_pp_dp_mapping and self.etp_size * self.ep_size != self.tp_size:
            raise ValueError(
                f"--use-tp-pp-dp-mapping with --expert-model-parallel-size {self.ep_size}: the pipelines of experts "
                "and of dense layers would run through different ranks; leave it out"
            )
        return world_size // ranks

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

    `etp`, `ep` and `edp` are to an expert what `tp`, `pp` and `dp` are to the model: its inner width is split over
    `etp`, the experts of a layer are distributed over `ep`, and `edp` holds the replicas of one. `experts` spans
    ETP x EP, all experts of a layer. Without expert parallelism they are `tp`, an axis of size 1, `dp` and `tp`.
    """

    config: ParallelConfig
    rank: int
    world_size: int
    tp: Axis
    dp: Axis
    pp: Axis
    model: Axis
    embedding: Axis
    etp: Axis
    ep: Axis
    edp: Axis
    experts: Axis

    @property
    def vpp_size(self) -> int:
        return self.config.vpp_size

    def is_first_chunk(self, chunk: int) -> bool:
        """Whether the model begins in this rank's `chunk`: it has the embedding."""
        return self.pp.is_first and chunk == 0

    def is_last_chunk(self, chunk: int) -> bool:
        """Whether the model ends in this rank's `chunk`: it has the output layer and the loss."""
        return self.pp.is_last and chunk == self.vpp_size - 1

    @classmethod
    def for_rank(cls, config: ParallelConfig, world_size: int = 1, rank: int = 0) -> ParallelState:
        """Describe any rank of any layout without process groups (converters, planners, tests)."""
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not part of a world of {world_size} ranks")
        axes = {name: Axis(r.index(rank), len(r), r) for name, (r,) in _groups(config, world_size, rank).items()}
        return cls(config, rank, world_size, **_with_expert_axes(axes, rank))

    @classmethod
    def create(cls, config: ParallelConfig, timeout: timedelta | None = None) -> ParallelState:
        """Build the process groups of this rank's axes; all ranks of the initialised world call it.

        A rank takes part in at most five groups, nine with expert parallelism, whatever the size of the world. NCCL's
        communicators are split off that of the world, all of an axis in one call; other groups are made by their
        members alone.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        state = cls.for_rank(config, world_size, rank)
        everyone = _groups(config, world_size) if _can_split() else None
        axes: dict[str, Axis] = {}
        for name, (ranks,) in _groups(config, world_size, rank).items():
            group = None
            if everyone is not None:
                several = [list(others) for others in everyone[name] if len(others) > 1]
                if several:
                    group = dist.split_group(split_ranks=several, timeout=timeout, group_desc=name)
            elif len(ranks) > 1:
                group = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True, group_desc=name)
            if group is not None:
                axes[name] = Axis(ranks.index(rank), len(ranks), ranks, group)
        present = {name: getattr(state, name) for name in _groups(config, world_size, rank)}
        return replace(state, **_with_expert_axes(present | axes, rank))  # type: ignore[arg-type]


def _with_expert_axes(axes: dict[str, Axis], rank: int) -> dict[str, Axis]:
    """Without expert parallelism experts are split as dense layers are."""
    if "edp" in axes:
        return axes
    return axes | {"etp": axes["tp"], "ep": Axis(ranks=(rank,)), "edp": axes["dp"], "experts": axes["tp"]}


def _can_split() -> bool:
    """Whether the communicator of the world can be split: NCCL's can, once it is bound to its device."""
    world = dist.group.WORLD
    return dist.get_backend() == "nccl" and world is not None and world.bound_device_id is not None


def _groups(config: ParallelConfig, world_size: int, rank: int | None = None) -> dict[str, list[tuple[int, ...]]]:
    """Axis name -> global ranks of each group along that axis: of all of them, or of the one that holds `rank`.

    The embedding axis joins the ends of the pipeline; a rank between them is a group of its own if it is asked for.
    """
    tp_size, pp_size, dp_size = config.tp_size, config.pp_size, config.dp_size(world_size)
    tps, dps, pps = range(tp_size), range(dp_size), range(pp_size)
    ends = sorted({0, pp_size - 1})

    def rank_of(tp: int, dp: int, pp: int) -> int:
        return config.rank_at(tp, dp, pp, world_size)

    at_tp, at_dp, at_pp = tps, dps, pps  # the groups are along one axis, at these places on the others
    if rank is not None:
        at_tp, at_dp, at_pp = (range(i, i + 1) for i in config.place(rank, world_size))
    embedding = [tuple(rank_of(t, d, p) for p in ends) for d in at_dp for t in at_tp]
    if rank is not None and at_pp[0] not in ends:
        embedding = [(rank,)]
    dense = {
        "tp": [tuple(rank_of(t, d, p) for t in tps) for p in at_pp for d in at_dp],
        "dp": [tuple(rank_of(t, d, p) for d in dps) for p in at_pp for t in at_tp],
        "pp": [tuple(rank_of(t, d, p) for p in pps) for d in at_dp for t in at_tp],
        "model": [tuple(rank_of(t, d, p) for p in pps for t in tps) for d in at_dp],
        "embedding": embedding,
    }
    return dense | (_expert_groups(config, world_size, rank) if config.splits_experts else {})


def _expert_groups(config: ParallelConfig, world_size: int, rank: int | None) -> dict[str, list[tuple[int, ...]]]:
    """`_groups` of the expert axes."""
    edp_size, pp_size = config.edp_size(world_size), config.pp_size
    outer = (
        [("pp", pp_size), ("edp", edp_size)] if config.use_tp_pp_dp_mapping else [("edp", edp_size), ("pp", pp_size)]
    )
    sizes: dict[str, tuple[int, int]] = {}  # name -> number of ranks along it, and the distance between them
    stride = 1
    for name, size in [("etp", config.etp_size), ("ep", config.ep_size), *outer]:
        sizes[name] = (size, stride)
        stride *= size

    def groups(*names: str) -> list[tuple[int, ...]]:
        along = [range(0, size * stride, stride) for size, stride in (sizes[name] for name in reversed(names))]
        offsets = [sum(place) for place in product(*along)]
        ranks = range(world_size) if rank is None else (rank,)
        firsts = dict.fromkeys(r - sum(r // sizes[n][1] % sizes[n][0] * sizes[n][1] for n in names) for r in ranks)
        return [tuple(first + offset for offset in offsets) for first in firsts]

    return {"etp": groups("etp"), "ep": groups("ep"), "edp": groups("edp"), "experts": groups("etp", "ep")}
