"""Built indices on disk, shared by all ranks of all nodes without any of them waiting for another.

One index is the files `<digest>-<name>-<array>.npy` and `<digest>-<name>-index.json`. The digest covers everything the
arrays depend on, so equal names mean equal contents: any number of processes may build and write the same index at
once. The .json comes last and carries the digest of every array (type, shape and contents) and its own, so a reader
takes a whole index or none; what is cut or damaged is built again. Without a writable directory the index is built in
memory.
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
from megatron.core.utils import Progress

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
    directory: Path | None, name: str, description: dict[str, Any], build: Callable[[], Arrays], verify: bool = True
) -> Arrays:
    """The arrays that `description` determines: mapped from `directory`, or built (and left there for the others).

    Without `verify` (another process of the node has just done it) the content of an index is not compared with its
    digests.
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
            logger.warning("cannot write the index cache %s (%s): the index stays in memory", directory, error)
            return arrays
    mapped, damage = _load(stem, verify)  # from now on all processes of a node share the page cache
    if mapped is None:
        logger.warning(
            "the index cache %s-* cannot be read back (%s): using the index in memory", stem, damage or "absent"
        )
        return arrays
    return mapped


def _built(name: str, build: Callable[[], Arrays]) -> Arrays:
    with Progress(f"building the index {name}"):
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
        mapped = {key: np.load(f"{stem}-{key}.npy", mmap_mode="r", allow_pickle=False) for key in recorded}
    except Exception as error:  # whatever numpy and json say: the index is built again
        return None, f"{type(error).__name__}: {error}"
    arrays = {key: np.asarray(array) for key, array in mapped.items()}  # np.memmap itself is slow to index
    with Progress(f"verifying {stem.name}", sum(array.nbytes for array in arrays.values())) as progress:
        for key, array in arrays.items():
            if not recorded[key].startswith(_form(array)) or (verify and recorded[key] != _recorded(array)):
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
