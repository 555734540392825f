"""Context parallelism within one process: every rank reads the tensors of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron.core.parallel_state import Axis


class LocalExchange:
    """Exchange of one rank with others whose tensors are known; `gradients` are sums by rank."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.gradients = [torch.zeros_like(tensor) for tensor in tensors]

    def __call__(self, cp: Axis) -> LocalExchange:
        self._cp = cp
        return self

    def fetch(self, local: Tensor) -> Iterator[tuple[int, Tensor]]:
        for step in range(self._cp.size):
            source = (self._cp.rank - step) % self._cp.size
            yield source, self.tensors[source]

    def add_gradient(self, source: int, gradient: Tensor) -> None:
        self.gradients[source] += gradient

    def finish(self) -> Tensor:
        return torch.zeros_like(self.tensors[self._cp.rank])
