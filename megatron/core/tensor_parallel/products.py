"""Products of inputs and weights, by the faster of the libraries that torch contains."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.private_operators import HAS_ONEDNN_LINEAR, multiply_with_onednn

# oneDNN compiles a kernel for each new shape in 3 to 17 ms. A product of this many multiplications
# takes 3 ms; smaller ones would not make up for that.
_MIN_MULTIPLICATIONS = 1 << 27


def multiply_by_weight(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x W^T + b` for `x [..., in]` and `W [out, in]`. Not differentiable."""
    if _uses_onednn(x, weight):
        return multiply_with_onednn(x, weight, bias)
    return F.linear(x, weight, bias)


def _uses_onednn(x: Tensor, weight: Tensor) -> bool:
    """Return whether oneDNN multiplies large fp32 matrices; torch itself would call MKL."""
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return False
    if x.dtype != torch.float32 or weight.dtype != torch.float32:
        return False
    num_multiplications = x.numel() * weight.shape[0]
    return num_multiplications >= _MIN_MULTIPLICATIONS and _is_onednn_faster()


@cache
def _is_onednn_faster() -> bool:
    """Return whether oneDNN is available and the processor is AMD's.

    MKL does not select its fastest kernels there: on an EPYC with AVX2, oneDNN takes 0.83x to 0.95x
    of its time. On other processors the two were not compared.
    """
    if not HAS_ONEDNN_LINEAR:
        return False
    try:
        processors = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "AuthenticAMD" in processors and torch.backends.mkldnn.is_available()
