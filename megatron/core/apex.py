"""Optional import of NVIDIA apex."""

from __future__ import annotations

import importlib
from typing import Any


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
