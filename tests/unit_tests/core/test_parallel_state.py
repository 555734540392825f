import itertools

import pytest
import torch
import torch.distributed as dist

from megatron.core.parallel_config import ParallelConfig, Place
from megatron.core.parallel_state import ParallelState, _list_groups

AXES = ("tp", "cp", "dp_cp", "pp", "model", "embedding")


@pytest.mark.parametrize(
    "tp,cp,pp,dp",
    [(1, 1, 1, 1), (2, 1, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2), (2, 1, 2, 1), (2, 1, 3, 2), (4, 1, 2, 3), (1, 2, 1, 1),
     (2, 2, 1, 2), (2, 4, 3, 2)],
)  # fmt: skip
def test_axes_partition_the_world_in_megatron_order(tp, cp, pp, dp):
    world = tp * cp * pp * dp
    config = ParallelConfig(tp, pp, context_parallel_size=cp)
    states = [ParallelState.for_rank(config, world, rank) for rank in range(world)]
    for state in states:
        assert state.rank == state.tp.rank + tp * (
            state.cp.rank + cp * (state.dp.rank + dp * state.pp.rank)
        )
        assert state.dp_cp.rank == state.cp.rank + cp * state.dp.rank

        for name, size in (
            ("tp", tp),
            ("cp", cp),
            ("dp", dp),
            ("dp_cp", dp * cp),
            ("pp", pp),
            ("model", tp * pp),
        ):
            axis = state.__dict__[name]
            assert axis.size == size == len(axis.ranks)
            assert axis.ranks[axis.rank] == state.rank
            # All members of a group agree on it.
            assert all(states[member].__dict__[name].ranks == axis.ranks for member in axis.ranks)

        assert {states[m].dp_cp.rank for m in state.model.ranks} == {state.dp_cp.rank}


def test_embedding_axis_spans_the_first_and_last_stage():
    states = [ParallelState.for_rank(ParallelConfig(2, 3), 12, rank) for rank in range(12)]
    for state in states:
        if state.pp.rank == 1:
            assert state.embedding.size == 1
        else:
            first, last = state.embedding.ranks
            assert (states[first].pp.rank, states[last].pp.rank) == (0, 2)
            assert states[first].tp.rank == states[last].tp.rank == state.tp.rank

    assert ParallelState.for_rank(ParallelConfig(2, 1), 2, 1).embedding.size == 1


@pytest.mark.parametrize(
    "config,world,message",
    [
        (
            ParallelConfig(2, 2),
            6,
            r"world size 6 is not a multiple of tensor \(2\) x pipeline \(2\)",
        ),
        (
            ParallelConfig(2, 1, context_parallel_size=3),
            8,
            r"tensor \(2\) x context \(3\) x pipeline \(1\) = 6 ranks",
        ),
        (
            ParallelConfig(1, 1, virtual_pipeline_model_parallel_size=2),
            1,
            "needs --pipeline-model-parallel-size",
        ),
    ],
)
def test_impossible_layouts_are_rejected(config, world, message):
    with pytest.raises(ValueError, match=message):
        ParallelState.for_rank(config, world, 0)


@pytest.mark.parametrize(
    "name",
    [
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
    ],
)
def test_sizes_must_be_positive(name):
    with pytest.raises(ValueError, match="-size must be positive, got 0"):
        ParallelConfig(**{name: 0})


def test_rank_outside_the_world_is_rejected():
    with pytest.raises(ValueError, match="rank 4 is not part of a world of 4"):
        ParallelState.for_rank(ParallelConfig(), 4, 4)


@pytest.fixture
def counted(monkeypatch):
    """Simulate torch.distributed on one rank of a large world, and count the created groups."""
    made = []
    monkeypatch.setattr(dist, "get_world_size", lambda: 16384)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(
        dist,
        "new_group",
        lambda ranks, **options: made.append((ranks, options)) or made[-1],
    )
    return made


@pytest.mark.parametrize("rank", [0, 1, 9, 4096, 8191, 12288, 16383])
def test_rank_creates_only_its_own_groups(rank, counted, monkeypatch):
    """TP 8 x PP 4 on 16,384 ranks: 10,784 groups in all, at most six of them this rank's."""
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    state = ParallelState.create(ParallelConfig(8, 4))
    assert [options["group_desc"] for _, options in counted] == [
        "tp",
        "dp_cp",
        "pp",
        "model",
        "embedding",
    ]

    for ranks, options in counted:
        axis = getattr(state, options["group_desc"])
        assert rank in ranks
        assert options["use_local_synchronization"]
        assert axis.ranks == tuple(ranks)
        assert axis.ranks[axis.rank] == rank
        assert (axis.group is None) == (len(ranks) == 1)

    assert (len(counted[-1][0]) == 2) == (rank // 4096 in (0, 3)), (
        "stages in the middle have no embedding to share"
    )


@pytest.mark.parametrize(
    "config,names",
    [
        ((1, 1), ["dp_cp"]),
        ((8, 1), ["tp", "dp_cp"]),
        ((1, 4), ["dp_cp", "pp", "embedding"]),
        ((1, 2), ["dp_cp", "pp"]),
    ],
)
def test_axes_of_size_1_and_of_equal_ranks_have_no_group(config, names, counted, monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    state = ParallelState.create(ParallelConfig(*config))
    assert [options["group_desc"] for _, options in counted] == names
    for axis in (state.tp, state.pp, state.dp_cp, state.model, state.embedding):
        assert (axis.group is None) == (axis.size == 1)
        assert axis.group is None or tuple(axis.group[0]) == axis.ranks


class BoundWorld:
    bound_device_id = torch.device("cuda", 0)


@pytest.mark.parametrize("rank", [0, 4097, 16383])
def test_nccl_communicators_are_split_once_per_axis(rank, counted, monkeypatch):
    """All ranks pass the same lists, as a split requires, and every rank is in one of them."""
    splits = []

    def split_group(split_ranks, timeout, group_desc):
        splits.append((group_desc, split_ranks))
        return next((group for group in split_ranks if rank in group), None)

    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "split_group", split_group)
    monkeypatch.setattr(dist.distributed_c10d._world, "default_pg", BoundWorld())
    state = ParallelState.create(ParallelConfig(8, 4))

    assert counted == []
    assert [name for name, _ in splits] == [
        "tp",
        "dp_cp",
        "pp",
        "model",
        "embedding",
    ]

    for name, groups in splits:
        members = [member for group in groups for member in group]
        assert sorted(members) == list(range(16384))
        # Ranks of middle stages have no embedding to share, but create as many groups as others.
        alone = [group for group in groups if len(group) == 1]
        assert len(alone) == (8192 if name == "embedding" else 0)
        assert all(group == sorted(group) for group in groups)
        axis = getattr(state, name)
        assert axis.group == (list(axis.ranks) if axis.size > 1 else None)


def sums_along_axes(rank, world_size, tp, cp, pp):
    made = []
    new_group = dist.new_group
    dist.new_group = lambda ranks, **options: made.append(ranks) or new_group(ranks, **options)
    try:
        state = ParallelState.create(ParallelConfig(tp, pp, context_parallel_size=cp))
    finally:
        dist.new_group = new_group

    sums = {}
    assert state.dp.group is None if cp > 1 else state.dp is state.dp_cp

    for name in AXES:
        axis = getattr(state, name)
        if axis.size > 1:
            total = torch.tensor(10**rank)
            dist.all_reduce(total, group=axis.group)
            sums[name] = (int(total), sum(10**member for member in axis.ranks))

    everyone = torch.ones(())
    dist.all_reduce(everyone, group=new_group())  # a group of all ranks can follow
    assert int(everyone) == world_size
    return made, sums


@pytest.mark.parametrize(
    "world,tp,cp,pp",
    [(4, 2, 1, 2), (4, 2, 1, 1), (3, 1, 1, 3), (4, 1, 2, 1), (4, 1, 2, 2)],
)
def test_groups_of_processes(pool, world, tp, cp, pp):
    results = pool.run(sums_along_axes, world, tp, cp, pp)
    assert len({len(made) for made, _ in results}) == 1, (
        "from 2.15 on torch names groups by their number"
    )
    for rank, (made, sums) in enumerate(results):
        assert all(rank in ranks for ranks in made)
        assert len(set(sums.values())) <= len(made) <= 6
        assert all(total == expected for total, expected in sums.values())


@pytest.mark.parametrize("mapping", [False, True])
def test_rank_order_of_both_mappings(mapping):
    """TP, CP, DP, PP as Megatron-LM counts, or with --use-tp-pp-dp-mapping TP, CP, PP, DP; each
    place is one rank's.
    """
    config = ParallelConfig(2, 4, context_parallel_size=2, use_tp_pp_dp_mapping=mapping)
    outer = (
        [(pp, dp) for dp in range(3) for pp in range(4)]
        if mapping
        else itertools.product(range(4), range(3))
    )
    order = [Place(tp, cp, dp, pp) for pp, dp in outer for cp in range(2) for tp in range(2)]

    assert [config.place(rank, 48) for rank in range(48)] == order
    assert [config.rank_at(coordinates, 48) for coordinates in order] == list(range(48))

    state = ParallelState.for_rank(ParallelConfig(2, 4, use_tp_pp_dp_mapping=mapping), 24, 3)
    assert state.pp.ranks == ((1, 3, 5, 7) if mapping else (3, 9, 15, 21))
    assert state.dp.ranks == ((3, 11, 19) if mapping else (1, 3, 5))


@pytest.mark.parametrize(
    "tp,etp,ep,pp,world",
    [(1, None, 2, 1, 2), (2, 1, 2, 1, 4), (2, 2, 2, 1, 4), (2, 4, 2, 1, 8), (2, 1, 3, 2, 12)],
)
def test_expert_axes_partition_the_same_world(tp, etp, ep, pp, world):
    """rank = etp + ETP * (ep + EP * (edp + EDP * pp)), next to the dense axes and independent of
    them but for PP.
    """
    config = ParallelConfig(tp, pp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp)
    states = [ParallelState.for_rank(config, world, rank) for rank in range(world)]
    etp_size = etp or tp
    edp_size = world // ((etp or tp) * ep * pp)
    for state in states:
        group_rank = state.edp.rank + edp_size * state.pp.rank
        assert state.rank == state.etp.rank + etp_size * (state.ep.rank + ep * group_rank)

        for name, size in (
            ("etp", etp_size),
            ("ep", ep),
            ("edp", edp_size),
            ("experts", etp_size * ep),
        ):
            axis = getattr(state, name)
            assert axis.size == size == len(axis.ranks)
            assert axis.ranks[axis.rank] == state.rank
            assert all(getattr(states[member], name).ranks == axis.ranks for member in axis.ranks)

        assert state.experts.rank == state.etp.rank + etp_size * state.ep.rank
        assert {states[member].pp.rank for member in state.edp.ranks} == {state.pp.rank}

    everyone = _list_groups(config, world)
    for name in ("etp", "ep", "edp", "experts"):
        assert set(everyone[name]) == {getattr(state, name).ranks for state in states}


def test_default_expert_axes_are_those_of_dense_layers():
    state = ParallelState.for_rank(ParallelConfig(2, 2), 8, 5)
    assert state.etp is state.tp
    assert state.edp is state.dp_cp
    assert state.experts is state.tp
    assert state.ep.size == 1


@pytest.mark.parametrize(
    "options,message",
    [
        (
            {"expert_model_parallel_size": 3},
            r"8 is not a multiple of expert tensor \(2\) x expert \(3\)",
        ),
        (
            {"expert_model_parallel_size": 2, "use_tp_pp_dp_mapping": True},
            "would consist of different ranks",
        ),
    ],
)
def test_impossible_expert_axes_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        ParallelState.for_rank(ParallelConfig(2, 2, **options), 8, 0)
