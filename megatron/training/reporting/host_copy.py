"""Small numbers on their way from the device to the host, read later without waiting for newer work."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class HostCopy:
    """A copy under way."""

    _host: torch.Tensor
    _copied: torch.cuda.Event | None

    @classmethod
    def start(cls, tensor: torch.Tensor) -> HostCopy:
        if tensor.device.type != "cuda":
            return cls(tensor, None)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return cls(host, event)

    def wait(self) -> torch.Tensor:
        if self._copied is not None:
            self._copied.synchronize()
        return self._host
