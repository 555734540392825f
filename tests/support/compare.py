"""Comparisons: every tensor of a source, and bitwise equality of any file content."""

import argparse
from typing import Any

import numpy as np
import torch

from megatron.core.run_checkpoint.source import Source


def read_whole(source: Source, key: str) -> torch.Tensor:
    """Return the whole tensor `key` of a source."""
    return source.tensors[key].read_all()


def read_all(source: Source) -> dict[str, torch.Tensor]:
    """Return every tensor of `source` by key."""
    return {key: read_whole(source, key) for key in source.tensors}


def assert_same(a: Any, b: Any, place: str = "") -> None:
    """Assert equal types, structure and values; tensors and arrays bitwise, mappings in any
    order.
    """
    assert type(a) is type(b), (place, type(a), type(b))

    if isinstance(b, argparse.Namespace):
        return assert_same(vars(a), vars(b), place)

    if isinstance(b, dict):
        assert a.keys() == b.keys(), (place, a.keys() ^ b.keys())
        for key in b:
            assert_same(a[key], b[key], f"{place}/{key}")
    elif isinstance(b, torch.Tensor):
        assert a.dtype == b.dtype, place
        assert torch.equal(a, b), place
    elif isinstance(b, np.ndarray):
        assert a.dtype == b.dtype, place
        assert np.array_equal(a, b), place
    elif isinstance(b, (list, tuple)) and type(b) is not torch.Size:
        assert len(a) == len(b), place
        for index in range(len(b)):
            assert_same(a[index], b[index], f"{place}[{index}]")
    else:
        assert a == b, (place, a, b)
    return None
