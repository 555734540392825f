"""Probable causes of data paths and token files that cannot be opened, for messages."""

from __future__ import annotations

import contextlib
import difflib
import os

import numpy as np

from megatron.core.datasets.indexed_dataset import DTYPES


def explain_size(
    prefix: str, dtype: np.dtype, lengths: np.ndarray, size: int, expected: int
) -> str:
    """Return why a .bin of `size` bytes differs from the `expected` bytes of its .idx."""
    num_tokens = int(lengths.sum(dtype=np.int64))
    message = (
        f"{prefix}.bin has {size} bytes, but {prefix}.idx describes {num_tokens} tokens in "
        f"{len(lengths)} sequences of {dtype.name}, which end at byte {expected}"
    )
    if size == 0:
        return f"{message}: the .bin is empty, write it again with tools/preprocess_data.py"
    # The size may fit another dtype, which shows that the files do not belong together.
    fitting = []
    for candidate_dtype in DTYPES.values():
        if candidate_dtype.kind in "iu" and candidate_dtype.itemsize * num_tokens == size:
            fitting.append(candidate_dtype.name)
    if fitting:
        return (
            f"{message}: the .bin appears to have {' or '.join(fitting)} tokens, so the .idx "
            "belongs to another dataset"
        )
    reason = "is truncated" if size < expected else "does not belong to this .idx"
    return f"{message}: the .bin {reason}, write both again with tools/preprocess_data.py"


def explain_prefix(prefix: str) -> str:
    """Return a hint at the probable mistake in a data path."""
    if prefix.endswith((".bin", ".idx")):
        return f"A data path is the common prefix of both files: pass {prefix[:-4]!r}"
    with contextlib.suppress(ValueError):
        float(prefix)
        return "It looks like a weight: each weight of a blend must be followed by a path"
    if os.path.isfile(prefix):
        return f"It is a file: convert text with tools/preprocess_data.py --input {prefix}"
    similar = _find_similar_datasets(prefix)
    if similar:
        return f"Did you mean {' or '.join(similar)}?"
    return (
        "A data path is the common prefix of a .bin and an .idx that tools/preprocess_data.py wrote"
    )


def _find_similar_datasets(prefix: str) -> list[str]:
    """Return datasets next to `prefix` whose names begin with its name or are similar to it."""
    directory, name = os.path.split(prefix)
    names = []
    with contextlib.suppress(OSError):
        for file in sorted(os.listdir(directory or ".")):
            if file.endswith(".idx"):
                names.append(file.removesuffix(".idx"))
    # preprocess_data.py appends the key of the text to its --output-prefix.
    similar = [candidate for candidate in names if name and candidate.startswith(f"{name}_")]
    if not similar:
        similar = difflib.get_close_matches(name, names, n=3, cutoff=0.75)
    return [os.path.join(directory, candidate) for candidate in similar[:3]]
