"""Marker for tests that depend on the torch version: saved tensors of operators, recompilation."""

import pytest
import torch

_VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])

of_current_torch = pytest.mark.skipif(
    _VERSION < (2, 13),
    reason=f"holds for the operators of torch 2.13, not for those of {torch.__version__}",
)
