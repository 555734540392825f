"""Training steps that are executed again, on the same rank and on another replica.

The gradients of a step are a function of its micro-batches, the generators of random numbers and
the weights, which all data-parallel replicas have. Another replica can therefore repeat the step of
a rank, and with deterministic kernels it gets the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron.core.deferred import start_max_reduce
from megatron.training.checkpoint.contents import get_rng_state, set_rng_state
from megatron.training.exit import NotFiniteError
from megatron.training.run import Batch, Run, forward_backward


class WrongResultError(NotFiniteError):
    """A rank has computed something that cannot be trusted; its step is not applied."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass
class Step:
    """What determines the gradients of a step on a rank, besides the weights."""

    microbatches: list[Batch]  # empty on stages that need no data
    num_microbatches: int
    rng_state: dict[str, Any]


def record_step(run: Run, batches: Iterator[Batch] | None, num_microbatches: int) -> Step:
    """Fetch the micro-batches of a step."""
    microbatches = []
    if any(run.needs_batch(chunk) for chunk in range(len(run.chunks))):
        assert batches is not None
        microbatches = [next(batches) for _ in range(num_microbatches)]
    return Step(microbatches, num_microbatches, get_rng_state(run.rng))


def execute(run: Run, step: Step) -> Tensor:
    """Compute the gradients of a step again, and return its losses as `forward_backward` does.

    Call it when no reduction is in progress.
    """
    for chunk in run.chunks:
        chunk.zero_grad_buffer()
    set_rng_state(step.rng_state, run.rng)
    return forward_backward(run, iter(step.microbatches), step.num_microbatches)


@contextmanager
def local_gradients(run: Run) -> Iterator[None]:
    """Let gradients stay those of this rank, without starting reductions."""
    config = run.config.ddp
    overlaps = config.overlap_grad_reduce
    config.overlap_grad_reduce = False
    try:
        yield
    finally:
        config.overlap_grad_reduce = overlaps


def shift(run: Run, value: Any, distance: int) -> Any:
    """Send `value` to the rank with the same shards, `distance` replicas ahead.

    Returns the value that this rank receives. `distance` is 1 or -1. Collective over the replicas.
    """
    dp = run.ps.dp
    group = run.ps.dp_cp.group
    target = dp.ranks[(dp.rank + distance) % dp.size]
    source = dp.ranks[(dp.rank - distance) % dp.size]
    received = [None]
    # Sending waits for the receiver, so that not all ranks may send first.
    if dp.rank % 2 == 0:
        dist.send_object_list([value], target, group=group)
        dist.recv_object_list(received, source, group=group)
    else:
        dist.recv_object_list(received, source, group=group)
        dist.send_object_list([value], target, group=group)
    return received[0]


def receive_step(run: Run, step: Step) -> Step:
    """Send `step` to the next replica, and return that of the previous one."""
    on_host = []
    for batch in step.microbatches:
        on_host.append({name: tensor.cpu() for name, tensor in batch.items()})
    received = shift(run, Step(on_host, step.num_microbatches, step.rng_state), 1)
    microbatches = []
    for batch in received.microbatches:
        microbatches.append({name: tensor.to(run.device) for name, tensor in batch.items()})
    return Step(microbatches, received.num_microbatches, received.rng_state)


def is_true_anywhere(run: Run, value: bool) -> bool:
    """Return whether `value` is true on any rank. Collective."""
    return start_max_reduce([int(value)], run.device)() == [1]
