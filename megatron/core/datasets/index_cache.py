"""Cache of built indices on disk, shared by all ranks of all nodes without waiting.

An index consists of the files `<digest>-<name>-<array>.npy` and `<digest>-<name>-index.json`. The
digest covers everything that the arrays depend on, so equal names mean equal contents, and any
number of processes may build and write the same index at once. The .json is written last. It
contains the digest of each array (type, shape and contents) and its own, so that a reader gets a
whole index or none; a truncated or damaged index is built again. Without a writable directory the
index stays in memory.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron.core.durable_files import committed, fsync_directory
from megatron.core.progress import ProgressBar

try:
    from megatron.core.datasets import helpers_cpp
except ImportError:
    # Programs that build no index, e.g. `pretrain_gpt.py --help`, do not need them.
    IS_COMPILED = False
else:
    IS_COMPILED = True

# ---- Typed interface of the builders that are written in C++ (`helpers_cpp`) ----

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


logger = logging.getLogger(__name__)

# ---- Cache on disk ----

Arrays = dict[str, np.ndarray]

# Increase a version when its subject changes.
CONTENT_VERSION = 1  # meaning of an array; part of each digest
RECORD_VERSION = 2  # form of the .json; part of each file name


def compute_digest(description: dict[str, Any]) -> str:
    """Return the digest (32 hex digits) of a description of plain data."""
    text = json.dumps({"format": CONTENT_VERSION, **description}, sort_keys=True)
    return xxhash.xxh3_128_hexdigest(text.encode())


def compute_array_digest(array: np.ndarray) -> str:
    """Return the digest (32 hex digits) of an array's contents."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(array).data.cast("B"))


def _describe_form(array: np.ndarray) -> str:
    return f"{array.dtype.str} {array.shape} "


def _describe(array: np.ndarray) -> str:
    """Return type, shape and digest of an array, as they are recorded."""
    return _describe_form(array) + compute_array_digest(array)


def load_or_build(
    directory: Path | None,
    name: str,
    description: dict[str, Any],
    build: Callable[[], Arrays],
    verify: bool = True,
) -> Arrays:
    """Return the arrays that `description` determines, mapped from `directory`.

    If they are not there, build them and store them for other processes. Without `verify` (e.g.
    when another process of the node has verified them) contents are not compared with their
    digests.
    """
    if directory is None:
        return _build_with_progress(name, build)

    # Load
    digest = compute_digest({"record": RECORD_VERSION, **description})
    stem = directory / f"{digest}-{name}"
    arrays, damage = _load(stem, verify)
    if arrays is not None:
        return arrays
    if damage:
        logger.warning("the cached index %s-* is damaged (%s): building it again", stem, damage)

    # Build and store
    arrays = _build_with_progress(name, build)
    if damage or not _record_path(stem).exists():  # otherwise another process was faster
        try:
            _store(stem, description, arrays, replace=bool(damage))
        except OSError as error:
            logger.warning(
                "cannot write the index cache %s (%s): the index stays in memory", directory, error
            )
            return arrays

    # Map the stored files, so that all processes of a node share the page cache.
    mapped, damage = _load(stem, verify)
    if mapped is None:
        logger.warning(
            "the index cache %s-* cannot be read back (%s): using the index in memory",
            stem,
            damage or "absent",
        )
        return arrays
    return mapped


def _build_with_progress(name: str, build: Callable[[], Arrays]) -> Arrays:
    with ProgressBar(f"building the index {name}"):
        return build()


def _load(stem: Path, verify: bool) -> tuple[Arrays | None, str]:
    """Return (arrays, "") of a whole index, (None, "") without one, (None, reason) if damaged."""
    path = _record_path(stem)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None, ""
    except (OSError, UnicodeDecodeError) as error:
        return None, f"{path.name}: {error}"

    # Map the arrays.
    arrays: Arrays = {}
    try:
        record = json.loads(text)
        if record.pop("digest") != compute_digest(record):
            return None, f"{path.name} does not have the recorded contents"
        recorded: dict[str, str] = record["arrays"]
        for key in recorded:
            mapped = np.load(f"{stem}-{key}.npy", mmap_mode="r", allow_pickle=False)
            arrays[key] = np.asarray(mapped)  # indexing np.memmap itself is slow
    except Exception as error:  # NumPy and json raise many types; in any case it is built again
        return None, f"{type(error).__name__}: {error}"

    # Compare them with the record.
    total = sum(array.nbytes for array in arrays.values())
    with ProgressBar(f"verifying {stem.name}", total) as progress:
        for key, array in arrays.items():
            is_intact = recorded[key].startswith(_describe_form(array))
            if is_intact and verify:
                is_intact = recorded[key] == _describe(array)
            if not is_intact:
                return None, f"{stem.name}-{key}.npy does not have the recorded contents"
            progress.add(array.nbytes)
    return arrays, ""


def _store(stem: Path, description: dict[str, Any], arrays: Arrays, replace: bool) -> None:
    """Write the arrays, then the record of their digests."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    for key, array in arrays.items():
        with committed(f"{stem}-{key}.npy", replace) as temporary, temporary.open("wb") as file:
            np.save(file, array, allow_pickle=False)
    digests = {key: _describe(array) for key, array in arrays.items()}
    record: dict[str, Any] = {"description": description, "arrays": digests}
    record["digest"] = compute_digest(record)
    # Last, since it makes the index visible.
    with committed(_record_path(stem), replace) as temporary:
        temporary.write_text(json.dumps(record, indent=1))
    fsync_directory(stem.parent)


def _record_path(stem: Path) -> Path:
    return Path(f"{stem}-index.json")
