"""Random numbers under tensor parallelism, and activation checkpointing that reproduces them.

Replicated regions draw from torch's default generator, which has the same seed on all TP ranks.
Regions that are split over TP (attention, the sequence-parallel residual stream) draw from a
separate stream on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

TP_SEED_OFFSET = 2718
"""Difference between the seeds of the replicated and the split stream, as in Megatron-LM."""


class TensorParallelRng:
    """The stream of random numbers for the split regions of this rank."""

    def __init__(self, seed: int, tp_rank: int, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        generator = torch.Generator(self.device).manual_seed(seed + TP_SEED_OFFSET + tp_rank)
        self._state = generator.get_state()

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Replace torch's default generator of the device by this stream."""
        default_state = self._get_default_state()
        self._set_default_state(self._state)
        try:
            yield
        finally:
            self._state = self._get_default_state()
            self._set_default_state(default_state)

    def fork_if(self, is_split: bool) -> AbstractContextManager[None]:
        """Return `fork` for a split region; a replicated one draws from the default generator."""
        if is_split:
            return self.fork()
        return nullcontext()

    def get_state(self) -> Tensor:
        return self._state.clone()

    def set_state(self, state: Tensor) -> None:
        self._state = state.clone()

    def _get_default_state(self) -> Tensor:
        if self.device.type == "cuda":
            return torch.cuda.get_rng_state(self.device)
        return torch.get_rng_state()

    def _set_default_state(self, state: Tensor) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.device)
        else:
            torch.set_rng_state(state)


def checkpoint(
    function: Callable[..., Any],
    rng: TensorParallelRng | None,
    *args: Any,
    by: Callable[..., Any] = torch_checkpoint,
) -> Any:
    """Return `function(*args)` without keeping its activations.

    The backward pass computes it again, with the same random numbers. `by` overrides torch's
    checkpoint, and has its signature. Graphs of --compile contain the call if `rng` is None, for
    functions that do not draw from it.
    """
    if rng is None:
        return by(function, *args, use_reentrant=False)
    # torch restores its default generators itself, but does not know this stream.
    state = rng.get_state()
    calls = 0

    def run(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            return function(*args)
        # A repetition uses the original state, and does not advance the stream.
        current_state = rng.get_state()
        rng.set_state(state)
        try:
            return function(*args)
        finally:
            rng.set_state(current_state)

    return by(run, *args, use_reentrant=False)


def recompute_intermediate(
    first: Callable[[Tensor], Tensor], then: Callable[[Tensor], Tensor], x: Tensor
) -> Tensor:
    """Return `then(first(x))` without keeping `first(x)`, which the backward pass recomputes from
    x.

    This is meant for a cheap `first` whose input is kept anyway, such as a norm of the residual
    stream. `first` must not draw random numbers. A compiler makes this decision itself.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return then(first(x))
    result = first(x)
    intermediate: Tensor | None = result
    source = x.detach()

    def pack(saved: Tensor) -> Tensor | torch.Size:
        """Replace the intermediate result by its shape."""
        # Other saved tensors, e.g. weights, are kept as they are.
        if intermediate is None or not _starts_at(saved, intermediate):
            return saved
        # Recomputation reproduces the contiguous layout only.
        if saved.numel() != intermediate.numel() or not saved.is_contiguous():
            return saved
        return saved.shape

    def unpack(packed: Tensor | torch.Size) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        with torch.no_grad():
            return first(source).view(packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = then(result)
    # The graph keeps a reference to `pack`, and thereby to this variable.
    intermediate = None
    return y


def _starts_at(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors start at the same element, also on the meta device."""
    same_storage = tensor.untyped_storage()._cdata == other.untyped_storage()._cdata
    return same_storage and tensor.storage_offset() == other.storage_offset()
