"""States of the random number generators of a process: Python, NumPy and PyTorch."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron.core.safe_files import schema
from megatron.core.safe_files.errors import CheckpointError

# The Mersenne Twister of Python, NumPy and PyTorch has 624 words of 32 bits and a position.
_NUM_WORDS = 624
_WORD = schema.integer(0, 2**32 - 1)
_POSITION = schema.integer(0, _NUM_WORDS)
_PYTHON_VERSION = 3  # of the tuple that random.getstate() returns


class GeneratorStates(NamedTuple):
    """Valid states of the generators of a process; `cuda` is that of the current device."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    cpu: Tensor
    cuda: Tensor | None

    def restore(self) -> None:
        """Set the generators of this process. The one of CUDA is left alone without a state."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)


def get_generator_states() -> dict[str, Any]:
    """Return the states of this process as plain data, under Megatron-LM's names."""
    algorithm, keys, *remaining_fields = np.random.get_state(legacy=True)
    cuda = None
    # Reading it would create a context of some 500 MB on the GPU for a program on the CPU.
    if torch.cuda.is_initialized():
        cuda = torch.cuda.get_rng_state()
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": (algorithm, np.asarray(keys).tolist(), *remaining_fields),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": cuda,
    }


def check_generator_states(state: Any) -> GeneratorStates:
    """Return the states in the result of `get_generator_states`, from a file.

    `cuda` is None without a GPU, and if its state is missing or that of another kind of device.
    Raises CheckpointError for an invalid state: NumPy and PyTorch do not validate it themselves,
    and NumPy reads out of bounds.
    """
    if not isinstance(state, Mapping):
        schema.refuse("it", state, "a dictionary")
    # All are required; `cuda_rng_state` is None if the process had no GPU.
    for name in ("random_rng_state", "np_rng_state", "torch_rng_state", "cuda_rng_state"):
        if name not in state:
            raise CheckpointError(f"it has no {name!r}")
    cpu = check_torch_state(state["torch_rng_state"], torch.device("cpu"), "torch_rng_state")
    if cpu is None:
        schema.refuse("torch_rng_state", state["torch_rng_state"], "the state of a CPU generator")
    cuda = None
    if torch.cuda.is_available() and state["cuda_rng_state"] is not None:
        cuda = check_torch_state(state["cuda_rng_state"], torch.device("cuda"), "cuda_rng_state")
    return GeneratorStates(
        _check_python(state["random_rng_state"]), _check_numpy(state["np_rng_state"]), cpu, cuda
    )


def _check_python(value: Any) -> tuple[Any, ...]:
    """Validate (version, 624 words and the position, next Gaussian number or None)."""
    state_name = "random_rng_state"
    schema.sequence(schema.anything, 3, 3)(value, state_name)
    version, words, gauss = value
    schema.one_of(_PYTHON_VERSION)(version, f"{state_name}[0]")
    schema.sequence(_WORD, _NUM_WORDS + 1, _NUM_WORDS + 1)(words, f"{state_name}[1]")
    _POSITION(words[-1], f"{state_name}[1][{_NUM_WORDS}]")
    schema.optional(schema.number())(gauss, f"{state_name}[2]")
    return version, tuple(words), gauss


def _check_numpy(value: Any) -> tuple[Any, ...]:
    """Validate ("MT19937", 624 words, position, has a Gaussian number, Gaussian number)."""
    state_name = "np_rng_state"
    schema.sequence(schema.anything, 5, 5)(value, state_name)
    algorithm, words, position, has_gauss, gauss = value
    if isinstance(words, np.ndarray):  # as Megatron-LM stores it
        words = words.tolist()
    schema.one_of("MT19937")(algorithm, f"{state_name}[0]")
    schema.sequence(_WORD, _NUM_WORDS, _NUM_WORDS)(words, f"{state_name}[1]")
    _POSITION(position, f"{state_name}[2]")
    schema.one_of(0, 1)(has_gauss, f"{state_name}[3]")
    schema.number()(gauss, f"{state_name}[4]")
    return algorithm, np.array(words, dtype=np.uint32), position, has_gauss, gauss


def check_torch_state(value: Any, device: torch.device, location: str) -> Tensor | None:
    """Validate the state of a generator of `device`; None for one of another kind of device."""
    # Not the generator of the process, which an invalid state must not change.
    generator = torch.Generator(device)
    is_state = (
        type(value) is Tensor
        and value.device.type == "cpu"
        and value.layout == torch.strided
        and value.dtype == torch.uint8
        and value.dim() == 1
    )
    if not is_state:
        schema.refuse(location, value, "a one-dimensional tensor of bytes")
    if value.numel() != generator.get_state().numel():
        return None  # e.g., of a GPU: the sizes of the states differ
    state: Tensor = value.contiguous()
    try:
        generator.set_state(state)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{location} is not the state of a generator: {reason}") from error
    return state
