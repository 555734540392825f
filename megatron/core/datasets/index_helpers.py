"""Typed interface of the index builders that are written in C++ (`helpers_cpp`)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

try:
    from megatron.core.datasets import helpers_cpp
except ImportError:
    # Programs that build no index, e.g. `pretrain_gpt.py --help`, do not need them.
    IS_COMPILED = False
else:
    IS_COMPILED = True

INT32_MAX = np.iinfo(np.int32).max
MAX_BLEND_MEMBERS = np.iinfo(np.int16).max


def require_compiled_helpers() -> None:
    """Raise ValueError if the index builders are not compiled for this Python."""
    if not IS_COMPILED:
        raise ValueError(
            "the C++ dataset helpers (megatron/core/datasets/helpers.cpp) are not built for this "
            "Python: run `make setup`, `pip install -e .` or `python setup.py build_ext --inplace` "
            "in the repository"
        )


def build_sample_index(
    sequence_lengths: np.ndarray,
    document_index: np.ndarray,
    seq_length: int,
    num_samples: int,
    extra_tokens: int,
) -> np.ndarray:
    """Return the start of each sample as (position in document_index, token offset).

    The result is [num_samples + 1, 2], int32, or int64 if the document index has more entries than
    int32 counts.
    """
    assert seq_length > 0 and num_samples >= 0 and extra_tokens in (0, 1)
    require_compiled_helpers()
    lengths = np.require(sequence_lengths, np.int32, ["C", "A"])  # unaligned if mapped from an .idx
    documents = np.require(document_index, np.int32, ["C", "A"])
    if len(documents) > INT32_MAX:
        return helpers_cpp.build_sample_index_int64(
            lengths, documents, seq_length, num_samples, extra_tokens
        )
    return helpers_cpp.build_sample_index_int32(
        lengths, documents, seq_length, num_samples, extra_tokens
    )


def build_blend_index(
    weights: NDArray[np.float64], size: int, limits: NDArray[np.int64] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the member (int16 [size]) and the member's sample (int64 [size]) of each blend sample.

    Sample s comes from the member with the largest weight * max(s, 1) - (samples drawn from it),
    the first one on ties. `limits` is the maximum number of samples per member.
    """
    require_compiled_helpers()
    assert 0 < len(weights) <= MAX_BLEND_MEMBERS, (
        f"{len(weights)} members; int16 counts {MAX_BLEND_MEMBERS}"
    )
    assert np.all(weights >= 0) and np.all(np.isfinite(weights))
    if limits is None:
        limits = np.full(len(weights), np.iinfo(np.int64).max)
    assert len(limits) == len(weights)
    return helpers_cpp.build_blend_index(
        np.require(weights, np.float64, ["C", "A"]), np.require(limits, np.int64, ["C", "A"]), size
    )
