"""Measure the memory and communication of a training step: every storage and collective, via the
dispatcher.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """Dispatch mode: `live` is the bytes of all CPU storages created inside, `peak` the maximum
    since `reset`.

    `sent` counts the bytes that a rank passes to collectives and sends, by operation; `calls`
    counts operations.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        # Bytes that were allocated; freed ones are subtracted when they might make a new peak.
        self._counted = 0
        self.peak = 0
        self.sent: defaultdict[str, int] = defaultdict(int)
        self.calls: defaultdict[str, int] = defaultdict(int)

    @property
    def live(self) -> int:
        for key, (reference, size) in list(self._storages.items()):
            if reference.expired():
                del self._storages[key]
                self._counted -= size
        return self._counted

    def reset(self) -> None:
        self.peak = self.live
        self.sent.clear()
        self.calls.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.calls[name] += 1
        if func.namespace == "c10d":
            for tensor in tree_leaves(_payload(name, args)):
                self.sent[name] += tensor.nbytes
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                self._remember(tensor.untyped_storage())
        if self._counted > self.peak:
            self.peak = max(self.peak, self.live)
        return result

    def _remember(self, storage: torch.UntypedStorage) -> None:
        reference, size = self._storages.get(storage._cdata, (None, 0))
        if reference is None or reference.expired():  # another one may have had its address
            self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
            self._counted += storage.nbytes() - size


def _payload(name: str, args: tuple[Any, ...]) -> Any:
    """Return the tensors with the whole message: the larger side of gathers and scatters."""
    if name in ("_allgather_base_", "allgather_into_tensor_coalesced_"):
        return args[0]
    if name in ("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"):
        return args[1]
    if name in ("allreduce_", "broadcast_", "reduce_", "send", "alltoall_base_"):
        return args[0]
    return []
