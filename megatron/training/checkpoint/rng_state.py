"""Random number generators in a checkpoint.

At the same layout a run continues with the same numbers, bit by bit. Another layout has other
generators: every rank is then seeded again as a function of seed, iteration and its coordinates, so
that such a run can be repeated, too.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.conversion.megatron_lm.generators import build_initial_cuda_state
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.dist_checkpointing.format import schema
from megatron.core.parallel_state import ParallelState
from megatron.core.tensor_parallel import TensorParallelRng

_TRACKER_STATE = "model-parallel-rng"

# The Mersenne Twister of Python, NumPy and PyTorch has 624 words of 32 bits and a position.
_NUM_WORDS = 624
_WORD = schema.integer(0, 2**32 - 1)
_POSITION = schema.integer(0, _NUM_WORDS)
_PYTHON_VERSION = 3  # of the tuple that random.getstate() returns


def rng_key(ps: ParallelState) -> str:
    """Return the key of this rank's generators: its coordinates and the layout, (pp, tp, dp
    x cp).
    """
    coordinates = f"{ps.pp.rank}.{ps.tp.rank}.{ps.dp_cp.rank}"
    return f"rng_state/shard_{coordinates}_{ps.pp.size}.{ps.tp.size}.{ps.dp_cp.size}"


def get_rng_state(rng: TensorParallelRng) -> dict[str, Any]:
    """Return the states of all generators of this process, in Megatron-LM's form."""
    algorithm, keys, *rest = np.random.get_state(legacy=True)
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": (algorithm, np.asarray(keys).tolist(), *rest),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "rng_tracker_states": {_TRACKER_STATE: rng.get_state()},
    }


def megatron_rng_state(ours: dict[str, Any], ps: ParallelState, seed: int) -> list[dict[str, Any]]:
    """Return the state `ours` as Megatron-LM restores it.

    Megatron-LM requires the state of CUDA generators; without a GPU they are those of the seed.
    """
    state = build_initial_cuda_state(seed, ps.tp.rank, ps.pp.rank)
    for name in ("random_rng_state", "np_rng_state", "torch_rng_state"):
        state[name] = ours[name]
    if ours["cuda_rng_state"] is not None:
        state["cuda_rng_state"] = ours["cuda_rng_state"]
        state["rng_tracker_states"] |= ours["rng_tracker_states"]
    return [state]


def set_rng_state(state: Any, rng: TensorParallelRng) -> list[str]:
    """Restore the generators of this process; returns those that do not fit and are left alone.

    The states of a GPU (16 bytes) and of a CPU (5,056 bytes) are not interchangeable. Raises
    CheckpointError for an invalid state: NumPy and PyTorch do not validate it themselves, and NumPy
    reads out of bounds.
    """
    try:
        return _restore(state, rng)
    except CheckpointError as error:
        raise CheckpointError(
            f"the state of the random number generators cannot be restored: {error}. Continue "
            "with generators seeded again (--no-load-rng)"
        ) from error


def _restore(state: Any, rng: TensorParallelRng) -> list[str]:
    if not isinstance(state, Mapping):
        schema.refuse("it", state, "a dictionary")
    names = ("random_rng_state", "np_rng_state", "torch_rng_state", "cuda_rng_state")
    for name in (*names, "rng_tracker_states"):
        if name not in state:
            raise CheckpointError(f"it has no {name!r}")

    # Validate everything before anything changes.
    python_state = _check_python(state["random_rng_state"])
    numpy_state = _check_numpy(state["np_rng_state"])
    cpu_state = _check_torch(state["torch_rng_state"], torch.device("cpu"), "torch_rng_state")
    if cpu_state is None:
        schema.refuse("torch_rng_state", state["torch_rng_state"], "the state of a CPU generator")
    cuda_state = None
    if torch.cuda.is_available() and state["cuda_rng_state"] is not None:
        device = torch.device("cuda")
        cuda_state = _check_torch(state["cuda_rng_state"], device, "cuda_rng_state")
    trackers = state["rng_tracker_states"]
    if not isinstance(trackers, Mapping):
        schema.refuse("rng_tracker_states", trackers, "a dictionary")
    tracker_state = None
    if trackers.get(_TRACKER_STATE) is not None:
        where = f"rng_tracker_states: {_TRACKER_STATE}"
        tracker_state = _check_torch(trackers[_TRACKER_STATE], rng.device, where)

    # Restore.
    unfit = []
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    torch.set_rng_state(cpu_state)
    if cuda_state is not None:
        torch.cuda.set_rng_state(cuda_state)
    elif torch.cuda.is_available() or state["cuda_rng_state"] is not None:
        unfit.append("of CUDA")
    if tracker_state is None:
        unfit.append("of the tensor-parallel regions")
    else:
        rng.set_state(tracker_state)
    return unfit


def _check_python(value: Any) -> tuple[Any, ...]:
    """Validate (version, 624 words and the position, next Gaussian number or None)."""
    where = "random_rng_state"
    schema.sequence(schema.anything, 3, 3)(value, where)
    version, words, gauss = value
    schema.one_of(_PYTHON_VERSION)(version, f"{where}[0]")
    schema.sequence(_WORD, _NUM_WORDS + 1, _NUM_WORDS + 1)(words, f"{where}[1]")
    _POSITION(words[-1], f"{where}[1][{_NUM_WORDS}]")
    schema.optional(schema.number())(gauss, f"{where}[2]")
    return version, tuple(words), gauss


def _check_numpy(value: Any) -> tuple[Any, ...]:
    """Validate ("MT19937", 624 words, position, has a Gaussian number, Gaussian number)."""
    where = "np_rng_state"
    schema.sequence(schema.anything, 5, 5)(value, where)
    algorithm, words, position, has_gauss, gauss = value
    if isinstance(words, np.ndarray):
        words = words.tolist()
    schema.one_of("MT19937")(algorithm, f"{where}[0]")
    schema.sequence(_WORD, _NUM_WORDS, _NUM_WORDS)(words, f"{where}[1]")
    _POSITION(position, f"{where}[2]")
    schema.one_of(0, 1)(has_gauss, f"{where}[3]")
    schema.number()(gauss, f"{where}[4]")
    return algorithm, np.array(words, dtype=np.uint32), position, has_gauss, gauss


def _check_torch(value: Any, device: torch.device, where: str) -> Tensor | None:
    """Validate the state of a generator of `device`; None for one of another kind of device."""
    generator = torch.Generator(device)
    is_state = (
        type(value) is Tensor
        and value.device.type == "cpu"
        and value.layout == torch.strided
        and value.dtype == torch.uint8
        and value.dim() == 1
    )
    if not is_state:
        schema.refuse(where, value, "a one-dimensional tensor of bytes")
    if value.numel() != generator.get_state().numel():
        return None
    state: Tensor = value.contiguous()
    try:
        generator.set_state(state)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{where} is not the state of a generator: {reason}") from error
    return state
