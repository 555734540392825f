"""Which replica is found to have computed wrong gradients."""

import pytest
import torch

from megatron.training.operations.replicas import (
    Disagreement,
    describe,
    digest,
    judge,
    locate,
)

RIGHT = [1, 2]
WRONG = [3, 4]


@pytest.mark.parametrize(
    "local, by_next, local_again, by_next_again, suspects, is_transient",
    [
        (WRONG, RIGHT, RIGHT, RIGHT, (0,), True),
        (RIGHT, WRONG, RIGHT, RIGHT, (1,), True),
        (RIGHT, WRONG, RIGHT, WRONG, (0, 1), False),
        (WRONG, RIGHT, [5, 6], RIGHT, (0,), False),
        (RIGHT, RIGHT, RIGHT, WRONG, (1,), False),
    ],
)
def test_replica_that_changes_its_result_was_wrong(
    local, by_next, local_again, by_next_again, suspects, is_transient
):
    assert judge(local, by_next, local_again, by_next_again) == (suspects, is_transient)


def make_disagreement(first, size, suspects):
    pair = (first, (first + 1) % size)
    return Disagreement(pair, (10 * pair[0], 10 * pair[1]), suspects, False, ("w (bucket 0)",))


def test_replica_that_disagrees_with_both_neighbors_is_wrong():
    disagreements = [make_disagreement(0, 3, (0, 1)), make_disagreement(1, 3, (1, 2))]
    assert locate(disagreements) == [1]
    hosts = [f"node{rank}" for rank in range(30)]
    assert describe(disagreements, hosts).startswith(
        "rank 10 (node10) has computed wrong gradients of w (bucket 0): another replica"
    )


def test_two_replicas_that_always_disagree_are_both_suspects():
    disagreements = [make_disagreement(0, 2, (0, 1)), make_disagreement(1, 2, (1, 0))]
    assert locate(disagreements) == [0, 1]
    hosts = [f"node{rank}" for rank in range(30)]
    assert describe(disagreements, hosts).startswith("one of rank 0 (node0) and rank 10 (node10)")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_digest_changes_with_any_bit_and_order(dtype):
    tensor = torch.randn(3, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = digest(tensor).tolist()
    assert digest(tensor.clone()).tolist() == expected

    integers = tensor.view(torch.int32 if dtype == torch.float32 else torch.int16).flatten()
    for index in range(len(integers)):
        for bit in (0, 7, 15):
            integers[index] ^= 1 << bit if bit < 15 else -(1 << 15)
            assert digest(tensor).tolist() != expected
            integers[index] ^= 1 << bit if bit < 15 else -(1 << 15)

    assert digest(tensor.flip(1)).tolist() != expected
