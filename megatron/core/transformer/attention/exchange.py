"""Exchange of keys and values, and of their gradients, over context-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.deferred import bypass_stream_record, start_messages
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel.mappings import (
    start_sequence_all_gather,
    start_sequence_reduce_scatter,
)


class Exchange(Protocol):
    """Transport of one tensor per rank to all ranks, and of gradients back, for a single pass."""

    def fetch(self, local: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (rank, its tensor) of all ranks, starting with `local`.

        The next tensor is in transit while one is used.
        """

    def add_gradient(self, source: int, gradient: Tensor) -> None:
        """Contribute to the gradient of rank `source`, in the order of `fetch`."""

    def finish(self) -> Tensor:
        """Return the sum of all contributions to the gradient of this rank."""


class _RingShift:
    """A tensor of every rank on its way to the next rank of the ring."""

    def __init__(self, tensor: Tensor, cp: Axis) -> None:
        assert cp.group is not None
        self._device = tensor.device
        message = tensor.cpu() if cp.sends_from_host else tensor
        self._received = torch.empty_like(message)
        next_index = (cp.rank + 1) % cp.size
        previous_index = (cp.rank - 1) % cp.size
        next_rank = cp.ranks[next_index]
        previous_rank = cp.ranks[previous_index]
        # The operations keep the tensors alive until `wait`.
        self._operations = [
            dist.P2POp(dist.isend, bypass_stream_record(message), next_rank, cp.group),
            dist.P2POp(dist.irecv, bypass_stream_record(self._received), previous_rank, cp.group),
        ]
        self._works = start_messages(self._operations)

    def wait(self) -> Tensor:
        """Return the tensor of the previous rank."""
        for work in self._works:
            work.wait()
        self._operations = []
        return self._received.to(self._device)


class RingExchange:
    """Passes tensors around a ring, followed by their gradients one step later ("p2p")."""

    def __init__(self, cp: Axis) -> None:
        self._cp = cp
        self._gradient: _RingShift | None = None

    def fetch(self, local: Tensor) -> Iterator[tuple[int, Tensor]]:
        cp = self._cp
        current = local
        # After n steps a rank has the tensor of the n-th rank before it.
        for step in range(cp.size - 1):
            source = (cp.rank - step) % cp.size
            shift = _RingShift(current, cp)
            yield source, current
            current = shift.wait()
        # The last tensor, that of the next rank, is not passed on.
        last_source = (cp.rank + 1) % cp.size
        yield last_source, current

    def add_gradient(self, source: int, gradient: Tensor) -> None:
        # The previous rank has sent the sum of its contribution to `source` and all earlier ones.
        if self._gradient is not None:
            gradient += self._gradient.wait()
        self._gradient = _RingShift(gradient, self._cp)

    def finish(self) -> Tensor:
        # The last shift brings the sum for this rank, to which all other ranks have contributed.
        assert self._gradient is not None
        return self._gradient.wait()


class AllGatherExchange:
    """Gathers all tensors at once, and scatters the sums of all gradients ("all_gather")."""

    def __init__(self, cp: Axis) -> None:
        self._cp = cp
        self._gradients: dict[int, Tensor] = {}

    def fetch(self, local: Tensor) -> Iterator[tuple[int, Tensor]]:
        cp = self._cp
        gathering = start_sequence_all_gather(local, cp)
        yield cp.rank, local
        whole = gathering.wait()
        for source, source_shard in enumerate(whole.chunk(cp.size)):
            if source != cp.rank:
                yield source, source_shard

    def add_gradient(self, source: int, gradient: Tensor) -> None:
        self._gradients[source] = gradient

    def finish(self) -> Tensor:
        cp = self._cp
        # In the order of the ranks: the reduce-scatter sends part r to rank r.
        gradients = [self._gradients[source] for source in range(cp.size)]
        whole = torch.cat(gradients)
        return start_sequence_reduce_scatter(whole, cp).wait()


EXCHANGES: dict[str, Callable[[Axis], Exchange]] = {
    "p2p": RingExchange,
    "all_gather": AllGatherExchange,
}
"""Exchanges by --cp-comm-type."""
