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

from megatron.core.durable_files import committed, fsync_directory
from megatron.core.progress import ProgressBar

logger = logging.getLogger(__name__)

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
