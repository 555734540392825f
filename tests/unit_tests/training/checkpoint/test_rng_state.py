"""The state of random number generators in a checkpoint is validated before it is restored."""

import copy
import random

import numpy as np
import pytest
import torch

from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.tensor_parallel import TensorParallelRng
from megatron.training.checkpoint.contents import get_rng_state, set_rng_state

TRACKER = "model-parallel-rng"


def draw(rng):
    """Draw from every generator."""
    with rng.fork():
        split = torch.rand(1)
    return random.random(), random.gauss(0, 1), np.random.rand(), torch.rand(1), split


def test_restored_state_continues_with_the_same_numbers():
    rng = TensorParallelRng(0, 0)
    random.gauss(0, 1)  # keeps a second number for the next call
    np.random.randn()
    state = copy.deepcopy(get_rng_state(rng))
    expected = draw(rng)
    assert set_rng_state(state, rng) == []
    assert draw(rng) == expected


def test_state_with_numpy_words_as_an_array_is_restored():
    rng = TensorParallelRng(0, 0)
    state = get_rng_state(rng)
    algorithm, words, *rest = state["np_rng_state"]
    state["np_rng_state"] = (algorithm, np.array(words, dtype=np.uint32), *rest)
    expected = np.random.rand()
    set_rng_state(state, rng)
    assert np.random.rand() == expected


def test_states_of_another_device_are_left_alone():
    rng = TensorParallelRng(0, 0)
    state = get_rng_state(rng)
    state["cuda_rng_state"] = torch.zeros(16, dtype=torch.uint8)
    state["rng_tracker_states"] = {TRACKER: torch.zeros(16, dtype=torch.uint8)}
    if not torch.cuda.is_available():
        assert set_rng_state(state, rng) == ["of CUDA", "of the tensor-parallel regions"]


def replace(values, index, value):
    return (*values[:index], value, *values[index + 1 :])


def damage_numpy(index, value):
    return lambda state: state | {"np_rng_state": replace(state["np_rng_state"], index, value)}


def damage_python(index, value):
    return lambda state: (
        state | {"random_rng_state": replace(state["random_rng_state"], index, value)}
    )


def set_field(name, value):
    return lambda state: state | {name: value}


BYTES = torch.zeros(5056, dtype=torch.uint8)
WORDS = list(range(624))
INVALID = {
    "not a dictionary": lambda state: [state],
    "a field is missing": lambda state: {"random_rng_state": state["random_rng_state"]},
    # NumPy takes a dictionary for a state of another form, and reads out of bounds.
    "numpy: a dictionary": set_field("np_rng_state", {0: "MT19937", 1: WORDS, 2: 5, 3: 0, 4: 0.0}),
    "numpy: its own form": set_field(
        "np_rng_state",
        {"bit_generator": "MT19937", "state": {"key": WORDS, "pos": 10**6}},
    ),
    "numpy: two fields": set_field("np_rng_state", ("MT19937", WORDS)),
    "numpy: another algorithm": damage_numpy(0, "PCG64"),
    "numpy: too few words": damage_numpy(1, WORDS[:-1]),
    "numpy: too many words": damage_numpy(1, [*WORDS, 0]),
    "numpy: words are text": damage_numpy(1, "0" * 624),
    "numpy: a word is a list": damage_numpy(1, [*WORDS[:-1], [0]]),
    "numpy: a word is negative": damage_numpy(1, [*WORDS[:-1], -1]),
    "numpy: a word of 33 bits": damage_numpy(1, [*WORDS[:-1], 2**32]),
    "numpy: array of two dimensions": damage_numpy(1, np.zeros((624, 2), dtype=np.uint32)),
    **{
        f"numpy: position {position!r}": damage_numpy(2, position)
        for position in (-1, 625, 10**6, 2**70, "x", None, 1.5, True)
    },
    "numpy: flag": damage_numpy(3, 7),
    "numpy: Gaussian number is text": damage_numpy(4, "x"),
    "numpy: Gaussian number is infinite": damage_numpy(4, float("inf")),
    "python: a dictionary": set_field("random_rng_state", {0: 3, 1: WORDS, 2: None}),
    "python: version": damage_python(0, 9),
    "python: too few words": damage_python(1, tuple(WORDS)),
    "python: position": damage_python(1, (*WORDS, 10**6)),
    "python: a word is text": damage_python(1, (*WORDS, "x")),
    "python: Gaussian number is text": damage_python(2, "x"),
    "torch: a list": set_field("torch_rng_state", [0] * 5056),
    "torch: floats": set_field("torch_rng_state", BYTES.float()),
    "torch: two dimensions": set_field("torch_rng_state", BYTES.reshape(2, -1)),
    "torch: no storage": set_field("torch_rng_state", BYTES.to("meta")),
    "torch: sparse": set_field("torch_rng_state", BYTES.to_sparse()),
    "torch: empty": set_field("torch_rng_state", BYTES[:0]),
    "torch: too long": set_field("torch_rng_state", torch.zeros(5057, dtype=torch.uint8)),
    "torch: not a state": set_field("torch_rng_state", BYTES + 255),
    "torch: no state": set_field("torch_rng_state", None),
    "trackers: a list": set_field("rng_tracker_states", [1]),
    "trackers: text": set_field("rng_tracker_states", {TRACKER: "x"}),
    "trackers: not a state": set_field("rng_tracker_states", {TRACKER: BYTES + 255}),
}


@pytest.mark.parametrize("damage", INVALID.values(), ids=INVALID)
def test_invalid_state_is_an_error_and_changes_nothing(damage):
    rng = TensorParallelRng(0, 0)
    state = get_rng_state(rng)
    draw(rng)
    before = copy.deepcopy(get_rng_state(rng))
    expected = draw(rng)
    set_rng_state(before, rng)

    with pytest.raises(CheckpointError, match=r"generators cannot be restored: .*--no-load-rng"):
        set_rng_state(damage(state), rng)
    assert draw(rng) == expected
