import pytest

from megatron.core.parallel_state import ParallelConfig, ParallelState


@pytest.mark.parametrize("tp,pp,dp", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 3, 2), (4, 2, 3)])
def test_axes_partition_the_world_in_megatron_order(tp, pp, dp):
    world = tp * pp * dp
    states = [ParallelState.for_rank(ParallelConfig(tp, pp), world, rank) for rank in range(world)]
    for state in states:
        assert state.rank == state.tp.rank + tp * (state.dp.rank + dp * state.pp.rank)
        for name, size in (("tp", tp), ("dp", dp), ("pp", pp), ("model", tp * pp)):
            axis = state.__dict__[name]
            assert axis.size == size == len(axis.ranks)
            assert axis.ranks[axis.rank] == state.rank
            # All members of a group agree on it.
            assert all(states[member].__dict__[name].ranks == axis.ranks for member in axis.ranks)
        assert {states[m].dp.rank for m in state.model.ranks} == {state.dp.rank}


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
        (ParallelConfig(2, 2), 6, r"world size 6 is not a multiple of tensor \(2\) x pipeline \(2\)"),
        (ParallelConfig(1, 1, virtual_pipeline_model_parallel_size=2), 1, "needs --pipeline-model-parallel-size"),
        (ParallelConfig(0, 1), 1, "must be positive"),
    ],
)
def test_impossible_layouts_are_explained(config, world, message):
    with pytest.raises(ValueError, match=message):
        ParallelState.for_rank(config, world, 0)


def test_rank_outside_the_world():
    with pytest.raises(ValueError, match="rank 4 is not part of a world of 4"):
        ParallelState.for_rank(ParallelConfig(), 4, 4)
