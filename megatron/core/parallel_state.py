"""The topology of a run as a value: which rank stands where on the TP, CP, DP and PP axes.

Rank order is Megatron's: TP varies fastest, then CP, DP and PP (`rank = tp + TP * (cp + CP * (dp +
DP * pp))`, unless --use-tp-pp-dp-mapping; Narayanan et al. 2021, "Efficient Large-Scale Language
Model Training"). Experts are split over axes of their own through the same ranks of a stage: `rank
= etp + ETP * (ep + EP * (edp + EDP * pp))`. `ParallelState` is built once and passed down; layers
take a single `Axis`. There are no module globals.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import product
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.core.flags import flag
from megatron.core.lazy_import import lazy_module

if TYPE_CHECKING:
    import torch.distributed as dist
else:
    dist = lazy_module("torch.distributed")


class Place(NamedTuple):
    """Where a rank stands on the axes that span the world."""

    tp: int = 0
    cp: int = 0
    dp: int = 0
    pp: int = 0


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of the parallel axes; data parallelism takes what remains of the world."""

    tensor_model_parallel_size: int = flag(1, positive=True)
    """Number of ranks over which every layer's matrices are split."""
    pipeline_model_parallel_size: int = flag(1, positive=True)
    """Number of pipeline stages."""
    virtual_pipeline_model_parallel_size: int | None = flag(
        None,
        "--virtual-pipeline-model-parallel-size",
        "--num-virtual-stages-per-pipeline-rank",
        positive=True,
    )
    """Number of model chunks per pipeline stage (interleaved schedule)."""
    microbatch_group_size_per_vp_stage: int | None = flag(
        None, "--microbatch-group-size-per-virtual-pipeline-stage", positive=True
    )
    """Micro-batches that pass one model chunk of a stage before the next chunk. Default: the number
    of stages.
    """
    sequence_parallel: bool = flag(False)
    """Split activations outside the tensor-parallel regions along the sequence."""
    use_tp_pp_dp_mapping: bool = flag(False)
    """Count ranks over TP, CP, PP, DP, so that the stages of a replica are neighbours; else over
    TP, CP, DP, PP.
    """
    context_parallel_size: int = flag(1, positive=True)
    """Number of ranks over which every sequence is split."""
    cp_comm_type: list[str] = flag(("p2p",), choices=("p2p", "all_gather", "a2a"))
    """How attention gets at keys and values of other context-parallel ranks: around a ring (p2p),
    all at once (all_gather), or by exchanging positions for heads (a2a). One for all layers, or one
    for each.
    """
    expert_model_parallel_size: int = flag(1, positive=True)
    """Number of ranks over which the experts of a layer are distributed."""
    expert_tensor_parallel_size: int | None = flag(None, positive=True)
    """Number of ranks over which the matrices of each expert are split. Default: the
    tensor-parallel size.
    """

    def __post_init__(self) -> None:
        ways: Any = self.cp_comm_type
        object.__setattr__(self, "cp_comm_type", [ways] if isinstance(ways, str) else list(ways))

    @property
    def tp_size(self) -> int:
        return self.tensor_model_parallel_size

    @property
    def pp_size(self) -> int:
        return self.pipeline_model_parallel_size

    @property
    def cp_size(self) -> int:
        return self.context_parallel_size

    def cp_comm_type_of(self, number: int) -> str:
        """How layer `number` attends."""
        return self.cp_comm_type[number if len(self.cp_comm_type) > 1 else 0]

    @property
    def vpp_size(self) -> int:
        return self.virtual_pipeline_model_parallel_size or 1

    @property
    def replica_size(self) -> int:
        """Ranks that work on one sample."""
        return self.tp_size * self.cp_size * self.pp_size

    @property
    def ep_size(self) -> int:
        return self.expert_model_parallel_size

    @property
    def etp_size(self) -> int:
        return (
            self.tp_size
            if self.expert_tensor_parallel_size is None
            else self.expert_tensor_parallel_size
        )

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
        if (
            self.use_tp_pp_dp_mapping
            and self.etp_size * self.ep_size != self.tp_size * self.cp_size
        ):
            raise ValueError(
                f"--use-tp-pp-dp-mapping with --expert-model-parallel-size {self.ep_size}: the pipelines of experts "
                "and of dense layers would run through different ranks; leave it out"
            )
        return world_size // ranks

    def dp_size(self, world_size: int) -> int:
        """Data-parallel size that `world_size` leaves; ValueError if it does not fit."""
        if min(self.tp_size, self.cp_size, self.pp_size, self.vpp_size) < 1:
            raise ValueError(f"parallel sizes must be positive, got {self}")
        if world_size % self.replica_size != 0:
            context = f" x context ({self.cp_size})" if self.cp_size > 1 else ""
            raise ValueError(
                f"world size {world_size} is not a multiple of tensor ({self.tp_size}){context} x pipeline "
                f"({self.pp_size}) = {self.replica_size} ranks: start a multiple of {self.replica_size} processes or "
                f"change --tensor-model-parallel-size / {'--context-parallel-size / ' if context else ''}"
                "--pipeline-model-parallel-size"
            )
        if self.vpp_size > 1 and self.pp_size == 1:
            raise ValueError(
                f"--virtual-pipeline-model-parallel-size {self.vpp_size} needs --pipeline-model-parallel-size > 1"
            )
        return world_size // self.replica_size

    def place(self, rank: int, world_size: int) -> Place:
        """Where a rank stands."""
        rest, tp = divmod(rank, self.tp_size)
        rest, cp = divmod(rest, self.cp_size)
        if self.use_tp_pp_dp_mapping:
            dp, pp = divmod(rest, self.pp_size)
        else:
            pp, dp = divmod(rest, self.dp_size(world_size))
        return Place(tp, cp, dp, pp)

    def rank_at(self, place: Place, world_size: int) -> int:
        """The rank that stands there."""
        tp, cp, dp, pp = place
        outer = (
            pp + self.pp_size * dp
            if self.use_tp_pp_dp_mapping
            else dp + self.dp_size(world_size) * pp
        )
        return tp + self.tp_size * (cp + self.cp_size * outer)


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
class ExpertAxes:
    """What a layer with experts must know of the topology."""

    etp: Axis = Axis()
    ep: Axis = Axis()
    all: Axis = Axis()
    """ETP x EP, ETP fastest: all experts of a layer."""
    tokens: tuple[Axis, ...] = ()
    """Those over whose ranks the tokens of a micro-batch are split."""
    everyone: tuple[Axis, ...] = ()
    """Those over whose ranks the tokens of a step are split."""

    @property
    def token_ranks(self) -> int:
        """Number of ranks over which the tokens of a micro-batch are split."""
        return math.prod(axis.size for axis in self.tokens)

    @property
    def all_ranks(self) -> int:
        """Number of ranks over which the tokens of a step are split."""
        return math.prod(axis.size for axis in self.everyone)


@dataclass(frozen=True)
class ParallelState:
    """Place of one rank on every axis.

    Ranks of `dp` read different samples, ranks of `cp` hold different parts of the same samples.
    All of them hold the same parameters: gradients are reduced and optimizer shards dealt out over
    `dp_cp`, which is both (CP varies fastest). Nothing is exchanged over `dp` alone, so it has no
    group of its own; with one rank of `cp` it is `dp_cp`. `model` spans TP x PP of one replica
    (reductions over a whole model); `embedding` spans the first and the last stage (tied
    embeddings), and is of size 1 on the stages between.

    `etp`, `ep` and `edp` are for experts: the inner width of each is split over `etp`, the experts of a layer are
    distributed over `ep`, and `edp` holds the replicas of one. `experts` spans ETP x EP (ETP
    fastest), all experts of a layer. Without expert parallelism these are `tp`, an axis of size 1,
    `dp_cp` and `tp`.
    """

    config: ParallelConfig
    rank: int
    world_size: int
    tp: Axis
    cp: Axis
    dp: Axis
    dp_cp: Axis
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

    @property
    def place(self) -> str:
        """This rank's place, for messages."""
        return f"tp {self.tp.rank}, cp {self.cp.rank}, dp {self.dp.rank}, pp {self.pp.rank}"

    @property
    def expert_axes(self) -> ExpertAxes:
        return ExpertAxes(
            self.etp, self.ep, self.experts, (self.tp, self.cp), (self.tp, self.dp_cp)
        )

    def stage_group(self) -> dist.ProcessGroup | None:
        """All ranks of this rank's pipeline stage; None: the world is one. Collective on them when
        first asked for.
        """
        if self.config.pp_size == 1:
            return None
        (ranks,) = _groups_along(self.config, self.world_size, self.rank, "tp", "cp", "dp")
        return group_of(ranks)

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
        axes = {
            name: Axis(r.index(rank), len(r), r)
            for name, (r,) in _groups(config, world_size, rank).items()
        }
        return cls(config, rank, world_size, **_with_expert_axes(axes, rank))

    @classmethod
    def create(cls, config: ParallelConfig, timeout: timedelta | None = None) -> ParallelState:
        """Build the process groups of this rank's axes; all ranks of the initialised world call it.

        A rank takes part in at most six groups (ten with experts) whatever the size of the world.
        NCCL's communicators are split off that of the world, all of an axis in one call; other
        groups are made by their members alone.
        """
        rank = dist.get_rank()
        world_size = dist.get_world_size()
        state = cls.for_rank(config, world_size, rank)
        everyone = _groups(config, world_size) if _can_split() else None
        own = _groups(config, world_size, rank)
        axes = {name: getattr(state, name) for name in own}
        for name, (ranks,) in own.items():
            group = None
            if name == "dp":
                continue
            if everyone is not None:
                several = [list(others) for others in everyone[name] if len(others) > 1]
                if several:
                    group = dist.split_group(split_ranks=several, timeout=timeout, group_desc=name)
            elif len(ranks) > 1 or (name == "embedding" and config.pp_size > 2):
                # Stages in the middle make one of themselves: from 2.15 on torch names a group by
                # how many its members have made before, so later groups of all ranks would wait for
                # each other under different names.
                group = dist.new_group(
                    list(ranks), timeout=timeout, use_local_synchronization=True, group_desc=name
                )
            if group is not None and len(ranks) > 1:
                axes[name] = Axis(ranks.index(rank), len(ranks), ranks, group)
        if config.cp_size == 1:
            axes["dp"] = axes["dp_cp"]
        return replace(state, **_with_expert_axes(axes, rank))  # type: ignore[arg-type]


def group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """A group that is no axis. Collective on its ranks when first asked for."""
    return _group_in(dist.group.WORLD, ranks)


@functools.cache
def _group_in(world: dist.ProcessGroup | None, ranks: tuple[int, ...]) -> dist.ProcessGroup:
    return dist.new_group(list(ranks), use_local_synchronization=True)


def _with_expert_axes(axes: dict[str, Axis], rank: int) -> dict[str, Axis]:
    """Without expert parallelism experts are split as dense layers are."""
    dense = {
        "etp": axes["tp"],
        "ep": Axis(ranks=(rank,)),
        "edp": axes["dp_cp"],
        "experts": axes["tp"],
    }
    return dense | axes


def _can_split() -> bool:
    """Whether the communicator of the world can be split: NCCL's can, once it is bound to its
    device.
    """
    world = dist.group.WORLD
    return dist.get_backend() == "nccl" and world is not None and world.bound_device_id is not None


def _groups(
    config: ParallelConfig, world_size: int, rank: int | None = None
) -> dict[str, list[tuple[int, ...]]]:
    """Axis name -> global ranks of each group along that axis: of all of them, or of the one that
    holds `rank`.

    The embedding axis joins the ends of the pipeline; a rank between them is a group of its own if
    it is asked for.
    """
    groups = partial(_groups_along, config, world_size, rank)
    pipelines = groups("pp")
    ends = sorted({0, config.pp_size - 1})
    embedding = [tuple(ranks[end] for end in ends) for ranks in pipelines]
    dense: dict[str, list[tuple[int, ...]]] = {
        "tp": groups("tp"),
        "cp": groups("cp"),
        "dp": groups("dp"),
        "dp_cp": groups("cp", "dp"),
        "pp": pipelines,
        "model": groups("tp", "pp"),
        "embedding": embedding if rank is None or rank in embedding[0] else [(rank,)],
    }
    return dense | (_expert_groups(config, world_size, rank) if config.splits_experts else {})


def _expert_groups(
    config: ParallelConfig, world_size: int, rank: int | None
) -> dict[str, list[tuple[int, ...]]]:
    """`_groups` of the expert axes: the dense grid with ETP in the place of TP, and EP in that of CP."""
    config.edp_size(world_size)
    sizes = {"tensor_model_parallel_size": config.etp_size, "context_parallel_size": config.ep_size}
    groups = partial(_groups_along, replace(config, **sizes), world_size, rank)  # type: ignore[arg-type]
    return {
        "etp": groups("tp"),
        "ep": groups("cp"),
        "edp": groups("dp"),
        "experts": groups("tp", "cp"),
    }


def _groups_along(
    config: ParallelConfig, world_size: int, rank: int | None, *along: str
) -> list[tuple[int, ...]]:
    """The groups of ranks that differ on the axes `along` alone."""
    sizes = Place(config.tp_size, config.cp_size, config.dp_size(world_size), config.pp_size)
    here = (
        [range(size) for size in sizes]
        if rank is None
        else [(at,) for at in config.place(rank, world_size)]
    )
    split = [name in along for name in Place._fields]
    inside = _places([range(size) if on else (0,) for size, on in zip(sizes, split, strict=True)])
    outside = _places([(0,) if on else at for at, on in zip(here, split, strict=True)])
    return [
        tuple(config.rank_at(Place(*map(add, o, i)), world_size) for i in inside) for o in outside
    ]


def _places(spans: Sequence[Sequence[int]]) -> list[Place]:
    """All places with a coordinate of every span; TP varies fastest."""
    return [Place(*reversed(coordinates)) for coordinates in product(*reversed(spans))]
