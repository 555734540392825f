"""Whether an operation has a Triton kernel (`core/triton_*.py`) for its tensors.

Without Triton, on a CPU, in graphs of torch.compile and with --no-triton-kernels callers use
operations of torch.
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
    "residual_norm": "megatron.core.triton_norms:residual_norm",
    "residual_norm_backward": "megatron.core.triton_norms:residual_norm_backward",
    "rotate": "megatron.core.triton_rotary:rotate",
    "softmax": "megatron.core.triton_kernels:softmax",
    "softmax_gradient": "megatron.core.triton_kernels:softmax_gradient",
    "swiglu": "megatron.core.triton_kernels:swiglu",
    "swiglu_backward": "megatron.core.triton_kernels:swiglu_backward",
}
# Elements of a row that a kernel of norms keeps in registers.
MAX_NORM_SIZE = 16384
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_is_enabled = True


def enable_kernels(is_enabled: bool) -> None:
    """Enable or disable the kernels of this process (--no-triton-kernels); the default is on."""
    global _is_enabled
    _is_enabled = is_enabled


def find_kernel(name: str, x: Tensor) -> Callable[..., Any] | None:
    """Return the operator `name` of a kernel, or None if it does not support `x`.

    An operator is not differentiable.
    """
    if torch.compiler.is_compiling() or not _is_enabled or not supports(x):
        return None
    kernel: Callable[..., Any] = _load(name)
    return kernel


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
