"""Random numbers under tensor parallelism, and activation checkpointing that repeats them.

Replicated regions draw from torch's default generator, which is seeded alike on all TP ranks;
regions that are split over TP (attention, the sequence-parallel residual stream) draw from a stream
of their own on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

TP_SEED_OFFSET = (
    2718  # Megatron-LM's distance between the seeds of the replicated and the split stream
)


class TensorParallelRng:
    """The stream of random numbers of this rank's split regions."""

    def __init__(self, seed: int, tp_rank: int, device: torch.device | None = None) -> None:
        self.device = device if device is not None else torch.device("cpu")
        generator = torch.Generator(self.device).manual_seed(seed + TP_SEED_OFFSET + tp_rank)
        self._state = generator.get_state()

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Inside, torch's default generator of the device is this stream."""
        outside = self._default_state()
        self._set_default_state(self._state)
        try:
            yield
        finally:
            self._state = self._default_state()
            self._set_default_state(outside)

    def get_state(self) -> Tensor:
        return self._state.clone()

    def set_state(self, state: Tensor) -> None:
        self._state = state.clone()

    def _default_state(self) -> Tensor:
        return (
            torch.cuda.get_rng_state(self.device)
            if self.device.type == "cuda"
            else torch.get_rng_state()
        )

    def _set_default_state(self, state: Tensor) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.device)
        else:
            torch.set_rng_state(state)


def checkpoint(
    function: Callable[..., Any],
    rng: TensorParallelRng,
    *args: Any,
    by: Callable[..., Any] = torch_checkpoint,
) -> Any:
    """`function(*args)` without keeping its activations: backward computes it again, with the same random numbers.

    `by` has the form of torch's checkpoint, which it may replace.
    """
    state = rng.get_state()
    calls = 0

    def run(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            return function(*args)
        now = rng.get_state()
        rng.set_state(state)
        try:
            return function(*args)
        finally:
            rng.set_state(now)

    return by(run, *args, use_reentrant=False)


def recompute_intermediate(
    first: Callable[[Tensor], Tensor], then: Callable[[Tensor], Tensor], x: Tensor
) -> Tensor:
    """`then(first(x))` without keeping `first(x)`: where backward needs it, it is computed again from `x`.

    For a cheap `first` whose input is kept in any case, such as a norm on the residual stream.
    `first` draws no random numbers. A compiler decides by itself what it keeps.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return then(first(x))
    between = [first(x)]
    source = x.detach()

    def pack(saved: Tensor) -> Tensor | torch.Size:
        if (
            not between
            or saved.data_ptr() != between[0].data_ptr()
            or saved.numel() != between[0].numel()
        ):
            return saved
        return (
            saved.shape if saved.is_contiguous() else saved
        )  # in another order it is kept as it is

    def unpack(packed: Tensor | torch.Size) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        with torch.no_grad():
            return first(source).view(packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = then(between[0])
    between.clear()  # the graph holds on to `pack`
    return y
