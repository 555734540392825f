"""Optional NVIDIA apex: import of its modules, and the limit of its kernels."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import torch

# Maximum number of elements per tensor: the kernels index with 32 bits.
MAX_ELEMENTS = 1 << 30


def import_apex(module: str, flag: str) -> Any:
    """Import a module of apex that `flag` requested.

    Raises ValueError if it cannot be imported; `flag` must also accept the value `torch`.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{flag} apex: {module} cannot be imported ({error}). Build apex with its C++ and CUDA "
            f"extensions (docs/gpu.md), or use {flag} torch"
        ) from error


def split_for_kernels(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of flat tensors that are small enough for the kernels, in order."""
    slices: list[torch.Tensor] = []
    for tensor in tensors:
        slices += tensor.split(MAX_ELEMENTS)
    return slices


def import_apex_norms() -> Any:
    # The Python module imports its extension only when it is called: import it now for the error.
    import_apex("fused_layer_norm_cuda", "--norm-impl")
    return import_apex("apex.normalization.fused_layer_norm", "--norm-impl")
