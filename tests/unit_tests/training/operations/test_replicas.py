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


HOSTS = [f"node{rank}" for rank in range(30)]


def make_disagreement(first, size, suspects):
    """Return a disagreement of a replica with the next one of `size`; their ranks are 10 apart."""
    second = (first + 1) % size
    ranks = (10 * first, 10 * second)
    return Disagreement((first, second), ranks, suspects, False, ("w (bucket 0)",))


def test_replica_that_disagrees_with_both_neighbors_is_wrong():
    disagreements = [make_disagreement(0, 3, (0, 1)), make_disagreement(1, 3, (1, 2))]
    assert locate(disagreements) == [1]
    message = "rank 10 (node10) has computed wrong gradients of w (bucket 0): another replica"
    assert describe(disagreements, HOSTS).startswith(message)


def test_two_replicas_that_always_disagree_are_both_suspects():
    disagreements = [make_disagreement(0, 2, (0, 1)), make_disagreement(1, 2, (1, 0))]
    assert locate(disagreements) == [0, 1]
    message = "one of rank 0 (node0) and rank 10 (node10)"
    assert describe(disagreements, HOSTS).startswith(message)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_digest_changes_with_any_bit_and_order(dtype):
    generator = torch.Generator().manual_seed(1)
    tensor = torch.randn(3, 5, generator=generator).to(dtype)
    expected = digest(tensor).tolist()
    assert digest(tensor.clone()).tolist() == expected
    assert digest(tensor.flip(1)).tolist() != expected

    integer_dtype = torch.int32 if dtype == torch.float32 else torch.int16
    integers = tensor.view(integer_dtype).flatten()
    bits = (1, 1 << 7, -(1 << 15))  # the last one is the sign bit of int16
    for index in range(len(integers)):
        for bit in bits:
            integers[index] ^= bit
            assert digest(tensor).tolist() != expected
            integers[index] ^= bit
    assert digest(tensor).tolist() == expected
