"""A state of the generators from a checkpoint is looked at before it is set."""

import copy
import random

import numpy as np
import pytest
import torch

from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.tensor_parallel import TensorParallelRng
from megatron.training.checkpoint.checkpointing import get_rng_state, set_rng_state


def test_a_state_comes_back() -> None:
    rng = TensorParallelRng(0, 0)
    state = copy.deepcopy(get_rng_state(rng))
    wanted = random.random(), np.random.rand(), torch.rand(1)
    set_rng_state(state, rng)
    assert (random.random(), np.random.rand(), torch.rand(1)) == wanted


@pytest.mark.parametrize("place", [-1, 625, 10**6, 2**70, "x", None])
def test_a_place_outside_of_the_words_is_refused(place) -> None:
    """numpy does not look, and reads outside of its memory."""
    rng = TensorParallelRng(0, 0)
    state = get_rng_state(rng)
    algorithm, keys, _, *rest = state["np_rng_state"]
    state["np_rng_state"] = (algorithm, keys, place, *rest)
    with pytest.raises(
        CheckpointError, match=r"np_rng_state\[2\] is .*, but must be a whole number from 0 to 624"
    ):
        set_rng_state(state, rng)
