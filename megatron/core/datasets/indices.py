"""Built indices on disk, shared by all ranks of all nodes without any of them waiting for another.

One index is the files `<digest>-<name>-<array>.npy` and `<digest>-<name>-index.json`. The digest
covers everything the arrays depend on, so equal names mean equal contents: any number of processes
may build and write the same index at once. The .json comes last and carries the digest of every
array (type, shape and contents) and its own, so a reader takes a whole index or none; what is cut
or damaged is built again. Without a writable directory the index is built in memory.

What is slow to build is built in C++ (`helpers_cpp`), behind a typed front that chooses integer
widths.
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
except ImportError as error:
    raise ImportError(
        "the C++ dataset helpers (megatron/core/datasets/helpers.cpp) are not built for this Python: "
        "run `pip install -e .` or `python setup.py build_ext --inplace` in the repository"
    ) from error

INT32_MAX = np.iinfo(np.int32).max
MAX_BLEND_MEMBERS = np.iinfo(np.int16).max


def build_sample_index(
    sequence_lengths: np.ndarray,
    document_index: np.ndarray,
    seq_length: int,
    num_samples: int,
    extra_tokens: int,
) -> np.ndarray:
    """Row j, of `num_samples + 1`, is (position in document_index, token offset) where sample j
    starts.

    int32, or int64 where the document index has more entries than int32 counts.
    """
    assert seq_length > 0 and num_samples >= 0 and extra_tokens in (0, 1)
    lengths = np.require(sequence_lengths, np.int32, ["C", "A"])  # an .idx file maps them unaligned
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
    """Sample s comes from the member with the largest weight * max(s, 1) - (samples it has given),
    first on ties.

    `limits`: the most samples each member may give. Returns (member int16 [size], its sample int64 [size]).
    """
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

Arrays = dict[str, np.ndarray]
FORMAT = 1  # part of every digest: raise it when the meaning of an array changes
RECORD = 2  # part of every file name: raise it when the form of the .json changes


def digest_of(description: dict[str, Any]) -> str:
    """32 hexadecimal digits that stand for a JSON-able description."""
    text = json.dumps({"format": FORMAT, **description}, sort_keys=True)
    return xxhash.xxh3_128_hexdigest(text.encode())


def digest_of_array(array: np.ndarray) -> str:
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(array).data.cast("B"))


def _form(array: np.ndarray) -> str:
    return f"{array.dtype.str} {array.shape} "


def _recorded(array: np.ndarray) -> str:
    """Type, shape and contents."""
    return _form(array) + digest_of_array(array)


def load_or_build(
    directory: Path | None,
    name: str,
    description: dict[str, Any],
    build: Callable[[], Arrays],
    verify: bool = True,
) -> Arrays:
    """The arrays that `description` determines: mapped from `directory`, or built (and left there
    for the others).

    Without `verify` (another process of the node has just done it) the content of an index is not
    compared with its digests.
    """
    if directory is None:
        return _built(name, build)
    stem = directory / f"{digest_of({'record': RECORD, **description})}-{name}"
    arrays, damage = _load(stem, verify)
    if arrays is not None:
        return arrays
    if damage:
        logger.warning("the cached index %s-* is damaged (%s): building it again", stem, damage)
    arrays = _built(name, build)
    if damage or not _record_path(stem).exists():  # else another process was faster
        try:
            _store(stem, description, arrays, replace=bool(damage))
        except OSError as error:
            logger.warning(
                "cannot write the index cache %s (%s): the index stays in memory", directory, error
            )
            return arrays
    mapped, damage = _load(stem, verify)  # from now on all processes of a node share the page cache
    if mapped is None:
        logger.warning(
            "the index cache %s-* cannot be read back (%s): using the index in memory",
            stem,
            damage or "absent",
        )
        return arrays
    return mapped


def _built(name: str, build: Callable[[], Arrays]) -> Arrays:
    with ProgressBar(f"building the index {name}"):
        return build()


def _load(stem: Path, verify: bool) -> tuple[Arrays | None, str]:
    """(arrays, "") of a whole index, (None, "") where there is none, (None, what is wrong) for a damaged one."""
    path = _record_path(stem)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None, ""
    except (OSError, UnicodeDecodeError) as error:
        return None, f"{path.name}: {error}"
    try:
        record = json.loads(text)
        if record.pop("digest") != digest_of(record):
            return None, f"{path.name} does not have the recorded contents"
        recorded: dict[str, str] = record["arrays"]
        mapped = {
            key: np.load(f"{stem}-{key}.npy", mmap_mode="r", allow_pickle=False) for key in recorded
        }
    except Exception as error:  # whatever numpy and json say: the index is built again
        return None, f"{type(error).__name__}: {error}"
    arrays = {
        key: np.asarray(array) for key, array in mapped.items()
    }  # np.memmap itself is slow to index
    with ProgressBar(
        f"verifying {stem.name}", sum(array.nbytes for array in arrays.values())
    ) as progress:
        for key, array in arrays.items():
            if not recorded[key].startswith(_form(array)) or (
                verify and recorded[key] != _recorded(array)
            ):
                return None, f"{stem.name}-{key}.npy does not have the recorded contents"
            progress.add(array.nbytes)
    return arrays, ""


def _store(stem: Path, description: dict[str, Any], arrays: Arrays, replace: bool) -> None:
    stem.parent.mkdir(parents=True, exist_ok=True)
    for key, array in arrays.items():
        with committed(f"{stem}-{key}.npy", replace) as temporary, temporary.open("wb") as file:
            np.save(file, array, allow_pickle=False)
    record: dict[str, Any] = {
        "description": description,
        "arrays": {key: _recorded(array) for key, array in arrays.items()},
    }
    record["digest"] = digest_of(record)
    with committed(_record_path(stem), replace) as temporary:
        temporary.write_text(json.dumps(record, indent=1))
    fsync_directory(stem.parent)


def _record_path(stem: Path) -> Path:
    return Path(f"{stem}-index.json")
