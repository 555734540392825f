"""Whether an operation has a Triton kernel (`core/triton_*.py`) for its tensors.

Without Triton, on a CPU and with --no-triton-kernels callers use operations of torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron.core.wings import resolve

_KERNELS = {
    "adamw": "megatron.core.triton_kernels:adamw",
    "residual_norm": "megatron.core.triton_norms:add_and_normalize",
    "rotate": "megatron.core.triton_rotary:rotate",
    "split_and_rotate": "megatron.core.triton_rotary:split_and_rotate",
    "split_and_rotate_backward": "megatron.core.triton_rotary:split_and_rotate_backward",
    "softmax": "megatron.core.triton_kernels:softmax",
    "softmax_gradient": "megatron.core.triton_kernels:softmax_gradient",
    "swiglu": "megatron.core.triton_kernels:swiglu",
}
# Elements of a row that a kernel of norms keeps in registers.
MAX_NORM_SIZE = 16384
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_is_enabled = True
# Functions that graphs of torch.compile may contain, by name
_traceable: dict[str, Callable[..., Any]] = {}


def enable_kernels(is_enabled: bool) -> None:
    """Enable or disable the kernels of this process (--no-triton-kernels); the default is on."""
    global _is_enabled
    _is_enabled = is_enabled


def find_kernel(name: str, x: Tensor) -> Callable[..., Any] | None:
    """Return the function `name` of a kernel, or None if there is none or it does not support `x`.

    Only "residual_norm", "split_and_rotate" and "swiglu" are differentiable.
    """
    if torch.compiler.is_compiling():
        return _traceable.get(name)
    if not _is_enabled or name not in _KERNELS or not supports(x):
        return None
    kernel: Callable[..., Any] = _load(name)
    return kernel


def prepare_tracing(param: Tensor) -> None:
    """Let `find_kernel` return kernels for tensors like `param` while torch.compile traces.

    It can trace neither imports nor properties of devices.
    """
    _traceable.clear()
    if _is_enabled and supports(param):
        for name in ("residual_norm", "split_and_rotate", "swiglu"):
            _traceable[name] = _load(name)


@cache
def _load(name: str) -> Any:
    return resolve(_KERNELS[name])


def supports(x: Tensor) -> bool:
    """Return whether kernels read `x`."""
    return x.is_cuda and x.dtype in _DTYPES and _supports_device(x.device)


@cache
def _supports_device(device: torch.device) -> bool:
    """Return whether Triton is installed and compiles for the device: since NVIDIA's Ampere."""
    if importlib.util.find_spec("triton") is None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)
