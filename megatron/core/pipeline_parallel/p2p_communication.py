"""Messages between pipeline stages: one exchange per tick, of known shape and dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.parallel_state import Axis
from megatron.core.pipeline_parallel.schedules import Tick


class TensorSpec(NamedTuple):
    """What every activation between stages looks like, and its gradient."""

    shape: tuple[int, ...]  # [s, b, h]; [s/tp, b, h] under sequence parallelism
    dtype: torch.dtype
    device: torch.device


class Exchange:
    """The messages of one tick, posted together on construction; `wait` completes them.

    It must be kept until `wait`: gloo abandons a message whose exchange is garbage collected.
    With NCCL the first exchange builds the communicator of the whole group. Every rank gets there, because the first
    tick of a rank needs nothing from the others.
    """

    def __init__(self, tick: Tick, result: Tensor | None, pp: Axis, spec: TensorSpec) -> None:
        self._tick, self._pp = tick, pp
        self._received: Tensor | None = None
        self._operations: list[dist.P2POp] = []  # they keep the tensors alive until `wait`
        self._labels: list[str] = []
        if tick.receive is not None:
            self._received = torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)
            self._add(dist.irecv, self._received, tick.receive.peer, "receiving from")
        if tick.send is not None:
            assert result is not None
            self._add(dist.isend, result.contiguous(), tick.send.peer, "sending to")
        try:
            self._works = dist.batch_isend_irecv(self._operations) if self._operations else []
        except RuntimeError as error:
            raise self._failure(" and ".join(self._labels)) from error

    def wait(self) -> Tensor | None:
        """The received tensor, if any, once all messages of the tick are through (on CUDA: in stream order).

        Raises RuntimeError naming rank, tick and neighbour when the backend gives up.
        """
        one_work_per_message = len(self._works) == len(self._labels)  # gloo; NCCL has one for the batch
        labels = self._labels if one_work_per_message else [" and ".join(self._labels)] * len(self._works)
        for work, label in zip(self._works, labels, strict=True):
            try:
                work.wait()
            except RuntimeError as error:
                raise self._failure(label) from error
        self._works, self._operations = [], []
        return self._received

    def _add(self, operation: Callable[..., Any], tensor: Tensor, peer: int, verb: str) -> None:
        self._operations.append(dist.P2POp(operation, tensor, self._pp.ranks[peer], self._pp.group))
        self._labels.append(f"{verb} {self._name(peer)}")

    def _failure(self, label: str) -> RuntimeError:
        return RuntimeError(
            f"{self._name(self._pp.rank)}, {self._tick}: {label} failed; that rank has died, hangs, or is slower than "
            "the timeout of the process group"
        )

    def _name(self, pp_rank: int) -> str:
        return f"pipeline rank {pp_rank} (global rank {self._pp.ranks[pp_rank]})"
