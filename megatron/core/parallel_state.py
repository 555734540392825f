"""The topology of a run as a value: the coordinates of each rank on the TP, CP, DP and PP axes.

Rank order is Megatron's (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training"):
TP varies fastest, then CP, DP and PP, unless --use-tp-pp-dp-mapping is given::

    rank = tp + TP * (cp + CP * (dp + DP * pp))

Experts are split over separate axes through the same ranks of a stage::

    rank = etp + ETP * (ep + EP * (edp + EDP * pp))

`ParallelState` is built once and passed down, instead of module globals; layers take a single
`Axis`.
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
from typing import TypeVar

import torch.distributed as dist

from megatron.core.parallel_config import ParallelConfig, Place

T = TypeVar("T")


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks of a group, by default of the job. Collective."""
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


@dataclass(frozen=True)
class Axis:
    """Position of a rank on a parallel axis.

    `group` is None for axes of size 1, and for axes that are described without process groups
    (`ParallelState.for_rank`).
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

    @property
    def sends_from_host(self) -> bool:
        """Return whether messages to single ranks must be in host memory.

        gloo passes their addresses to sockets; its collectives copy tensors of a GPU themselves.
        """
        return self.group is not None and dist.get_backend(self.group) == "gloo"


@dataclass(frozen=True)
class ExpertAxes:
    """The axes that a layer with experts uses."""

    etp: Axis = Axis()
    ep: Axis = Axis()
    all: Axis = Axis()
    """ETP x EP (ETP varies fastest), which contains all experts of a layer."""
    tokens: tuple[Axis, ...] = ()
    """Axes that shard the tokens of a micro-batch."""
    everyone: tuple[Axis, ...] = ()
    """Axes that shard the tokens of a global batch."""

    @property
    def token_ranks(self) -> int:
        """Number of ranks that share the tokens of a micro-batch."""
        return math.prod(axis.size for axis in self.tokens)

    @property
    def all_ranks(self) -> int:
        """Number of ranks that share the tokens of a global batch."""
        return math.prod(axis.size for axis in self.everyone)


@dataclass(frozen=True)
class ParallelState:
    """Position of a rank on all axes.

    Ranks of `dp` read different samples; ranks of `cp` have different parts of the same samples.
    All of them have the same parameters, so gradients are reduced and optimizer shards distributed
    over `dp_cp`, their product (CP varies fastest). Communication never uses `dp` alone, so it has
    no group of its own; with a CP size of 1 it is `dp_cp`. `model` is TP x PP of one replica, for
    reductions over a whole model. `embedding` consists of the first and the last stage, for tied
    embeddings; it has size 1 on the stages in between.

    `etp`, `ep` and `edp` are the axes of experts: the inner width of each expert is split over
    `etp`, the experts of a layer are distributed over `ep`, and the replicas of an expert are on
    `edp`. `experts` is ETP x EP (ETP varies fastest), with all experts of a layer. Without expert
    parallelism these are `tp`, an axis of size 1, `dp_cp` and `tp`.
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
        """This rank's coordinates, for messages."""
        return f"tp {self.tp.rank}, cp {self.cp.rank}, dp {self.dp.rank}, pp {self.pp.rank}"

    @property
    def expert_axes(self) -> ExpertAxes:
        return ExpertAxes(
            self.etp, self.ep, self.experts, (self.tp, self.cp), (self.tp, self.dp_cp)
        )

    def stage_group(self) -> dist.ProcessGroup | None:
        """Return the group of all ranks of this rank's pipeline stage; None if that is the world.

        The first call creates the group and is collective over its ranks.
        """
        if self.config.pp_size == 1:
            return None
        (ranks,) = _list_groups_along(self.config, self.world_size, self.rank, "tp", "cp", "dp")
        return group_of(ranks)

    def is_first_chunk(self, chunk: int) -> bool:
        """Return whether this rank's `chunk` is the first of the model, with the embedding."""
        return self.pp.is_first and chunk == 0

    def is_last_chunk(self, chunk: int) -> bool:
        """Return whether this rank's `chunk` is the last one, with the output layer and the
        loss.
        """
        return self.pp.is_last and chunk == self.vpp_size - 1

    @classmethod
    def for_rank(cls, config: ParallelConfig, world_size: int = 1, rank: int = 0) -> ParallelState:
        """Describe any rank of any layout without process groups (converters, planners, tests)."""
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not part of a world of {world_size} ranks")
        axes: dict[str, Axis] = {}
        for name, (ranks,) in _list_groups(config, world_size, rank).items():
            axes[name] = Axis(ranks.index(rank), len(ranks), ranks)
        return cls(config, rank, world_size, **_with_expert_axes(axes, rank))

    @classmethod
    def create(cls, config: ParallelConfig, timeout: timedelta | None = None) -> ParallelState:
        """Build the process groups of this rank's axes. Collective over the initialized world.

        A rank is a member of at most six groups (ten with experts), independent of the world size.
        With NCCL, communicators are split off that of the world, all groups of an axis in one call;
        with other backends, groups are created by their members alone.
        """
        rank = dist.get_rank()
        world_size = dist.get_world_size()
        state = cls.for_rank(config, world_size, rank)
        own_groups = _list_groups(config, world_size, rank)
        # To split a communicator, every rank lists the groups of all ranks.
        all_groups = _list_groups(config, world_size) if _can_split() else None
        axes: dict[str, Axis] = {}
        for name, (ranks,) in own_groups.items():
            axes[name] = getattr(state, name)
            if name == "dp":  # no communication over `dp` alone
                continue
            group = _find_shared_group(name, ranks, axes)
            if group is not None:
                pass
            elif all_groups is not None:
                group = _split_world(name, all_groups[name], world_size, timeout)
            elif len(ranks) > 1 or (name == "embedding" and config.pp_size > 2):
                # Each rank of a middle stage creates a group of itself, see `_list_others`.
                group = dist.new_group(
                    list(ranks), timeout=timeout, use_local_synchronization=True, group_desc=name
                )
            if group is not None and len(ranks) > 1:
                axes[name] = Axis(ranks.index(rank), len(ranks), ranks, group)
        # Without context parallelism both axes consist of the same ranks and share a group.
        if config.cp_size == 1:
            axes["dp"] = axes["dp_cp"]
        return replace(state, **_with_expert_axes(axes, rank))  # type: ignore[arg-type]


# Axes that use the group of another one with the same ranks, because every communicator of NCCL
# takes some 100 MB of the GPU. Only axes that do not communicate at the same time: the operations
# of a communicator run one after another.
_MAY_SHARE = {
    "model": ("tp", "pp"),
    "embedding": ("pp",),
    "etp": ("tp",),
    "experts": ("ep",),
}


def _find_shared_group(
    name: str, ranks: tuple[int, ...], axes: dict[str, Axis]
) -> dist.ProcessGroup | None:
    """Return the group of an axis with the same ranks. All ranks of the world find the same."""
    for candidate in _MAY_SHARE.get(name, ()):
        if axes[candidate].ranks == ranks:
            return axes[candidate].group
    return None


def group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Return a group that is not an axis; the first call is collective over its ranks."""
    return _make_group(dist.group.WORLD, ranks)


def forget_groups() -> None:
    """Release the groups of `group_of`, after the process groups were destroyed."""
    _make_group.cache_clear()


@functools.cache
def _make_group(world: dist.ProcessGroup | None, ranks: tuple[int, ...]) -> dist.ProcessGroup:
    return dist.new_group(list(ranks), use_local_synchronization=True)


def _with_expert_axes(axes: dict[str, Axis], rank: int) -> dict[str, Axis]:
    """Return `axes` with those of experts, which by default are split like dense layers."""
    dense = {
        "etp": axes["tp"],
        "ep": Axis(ranks=(rank,)),
        "edp": axes["dp_cp"],
        "experts": axes["tp"],
    }
    return dense | axes


def _can_split() -> bool:
    """Return whether the communicator of the world can be split.

    NCCL's can, if it is bound to its device.
    """
    world = dist.group.WORLD
    return dist.get_backend() == "nccl" and world is not None and world.bound_device_id is not None


def _split_world(
    name: str, groups: Sequence[tuple[int, ...]], world_size: int, timeout: timedelta | None
) -> dist.ProcessGroup | None:
    """Split the groups of an axis off the world; return that of this rank. Collective."""
    split_ranks = []
    for members in groups:
        if len(members) > 1:
            split_ranks.append(list(members))
    if not split_ranks:
        return None
    split_ranks += _list_others(split_ranks, world_size)
    return dist.split_group(split_ranks=split_ranks, timeout=timeout, group_desc=name)


def _list_others(groups: list[list[int]], world_size: int) -> list[list[int]]:
    """Return a group of each rank that is in none of `groups`.

    With torch up to 2.13 after a split, and since 2.15 always, the name of a group contains the
    number of groups that its members have created. With different numbers, later groups of these
    ranks would wait for each other under different names.
    """
    members: set[int] = set()
    for group in groups:
        members.update(group)
    other_groups = []
    for rank in range(world_size):
        if rank not in members:
            other_groups.append([rank])
    return other_groups


def _list_groups(
    config: ParallelConfig, world_size: int, rank: int | None = None
) -> dict[str, list[tuple[int, ...]]]:
    """Return the global ranks of each group along each axis, by the name of the axis.

    If `rank` is given, only the group that contains it. The embedding axis consists of the ends of
    each pipeline; a given rank between them is a group of its own.
    """
    groups = partial(_list_groups_along, config, world_size, rank)
    # Tied embeddings are on the first and the last stage.
    pipelines = groups("pp")
    # One rank if there is only one stage.
    ends = sorted({0, config.pp_size - 1})
    embedding = [tuple(ranks[end] for end in ends) for ranks in pipelines]
    if rank is not None and rank not in embedding[0]:
        embedding = [(rank,)]
    dense: dict[str, list[tuple[int, ...]]] = {
        "tp": groups("tp"),
        "cp": groups("cp"),
        "dp": groups("dp"),
        "dp_cp": groups("cp", "dp"),
        "pp": pipelines,
        "model": groups("tp", "pp"),
        "embedding": embedding,
    }
    if not config.splits_experts:
        return dense
    return dense | _list_expert_groups(config, world_size, rank)


def _list_expert_groups(
    config: ParallelConfig, world_size: int, rank: int | None
) -> dict[str, list[tuple[int, ...]]]:
    """Return the groups of the expert axes: those of a dense grid with ETP for TP and EP for CP."""
    config.edp_size(world_size)
    # The grid of experts has the same form: ETP varies fastest, then EP, EDP and PP.
    sizes = {"tensor_model_parallel_size": config.etp_size, "context_parallel_size": config.ep_size}
    expert_config = replace(config, **sizes)  # type: ignore[arg-type]
    groups = partial(_list_groups_along, expert_config, world_size, rank)
    return {
        "etp": groups("tp"),
        "ep": groups("cp"),
        "edp": groups("dp"),
        "experts": groups("tp", "cp"),
    }


def _list_groups_along(
    config: ParallelConfig, world_size: int, rank: int | None, *along: str
) -> list[tuple[int, ...]]:
    """Return the groups of ranks that differ only on the axes `along`.

    If `rank` is given, only the group that contains it.
    """
    sizes = Place(config.tp_size, config.cp_size, config.dp_size(world_size), config.pp_size)
    fixed: list[Sequence[int]] = [range(size) for size in sizes]
    if rank is not None:
        fixed = [(coordinate,) for coordinate in config.place(rank, world_size)]
    # A group is an origin and the places of its members relative to it.
    inner_spans: list[Sequence[int]] = []
    outer_spans: list[Sequence[int]] = []
    for name, size, coordinates in zip(Place._fields, sizes, fixed, strict=True):
        is_along = name in along
        inner_spans.append(range(size) if is_along else (0,))
        outer_spans.append((0,) if is_along else coordinates)
    # Offsets of the members of any group from its origin
    members = _list_places(inner_spans)
    groups = []
    for origin in _list_places(outer_spans):
        ranks = []
        for member in members:
            rank_place = Place(*map(add, origin, member))
            ranks.append(config.rank_at(rank_place, world_size))
        groups.append(tuple(ranks))
    return groups


def _list_places(spans: Sequence[Sequence[int]]) -> list[Place]:
    """Return all places with a coordinate of each span; TP varies fastest."""
    # `product` varies the last coordinate fastest.
    rank_places = []
    for coordinates in product(*reversed(spans)):
        rank_places.append(Place(*reversed(coordinates)))
    return rank_places
