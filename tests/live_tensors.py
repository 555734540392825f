"""What a training step really holds and sends: every tensor storage and every collective, seen at the dispatcher."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """Within it `live` is the bytes of all CPU storages made inside, `peak` the most since `reset`.

    `sent` counts the bytes that a rank hands to collectives and sends, by operation; `calls` all operations.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.live = self.peak = 0
        self.sent: defaultdict[str, int] = defaultdict(int)
        self.calls: defaultdict[str, int] = defaultdict(int)

    def reset(self) -> None:
        self._forget()
        self.peak = self.live
        self.sent.clear()
        self.calls.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.calls[name] += 1
        if func.namespace == "c10d":
            self.sent[name] += sum(t.numel() * t.element_size() for t in tree_leaves(_payload(name, args)))
        self._forget()
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                self._remember(tensor.untyped_storage())
        self.peak = max(self.peak, self.live)
        return result

    def _remember(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
            self.live += storage.nbytes()

    def _forget(self) -> None:
        for key in [key for key, (reference, _) in self._storages.items() if reference.expired()]:
            self.live -= self._storages.pop(key)[1]


def _payload(name: str, args: tuple[Any, ...]) -> Any:
    """The tensors that hold the whole message: the larger side of gathers and scatters."""
    if name in ("_allgather_base_", "allgather_into_tensor_coalesced_"):
        return args[0]
    if name in ("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"):
        return args[1]
    return args[0] if name in ("allreduce_", "send", "alltoall_base_") else []
