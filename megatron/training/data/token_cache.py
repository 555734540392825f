"""Token files that are made from the data files of a run, in its cache of indices.

The name of a token file is a digest of everything that determines its tokens, so that any number of
ranks, nodes and runs may share a cache. An interrupted run leaves no file with such a name.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import xxhash
from numpy.typing import DTypeLike

from megatron.core.datasets.index_cache import compute_digest
from megatron.core.datasets.indexed_dataset_builder import IndexedDatasetBuilder
from megatron.core.durable_files import committed

SMALL_BYTES = 1 << 20  # files below this are tokenized by the process itself
ABANDONED_SECONDS = 3600.0  # without a change of a temporary file; its writer is dead
UNCERTAIN_SECONDS = 2.0  # a file that was changed so recently may change without a new time


def compute_file_digest(path: str, cache: Path | None = None) -> str:
    """Return the digest of a file's contents: times change with every copy to a node.

    With `cache`, the digest is stored there for as long as the size and the time of the file are
    unchanged, because reading terabytes of text takes hours.
    """
    state = os.stat(path)
    if state.st_size == 0:
        return ""
    is_certain = time.time() - state.st_mtime > UNCERTAIN_SECONDS
    if cache is None or not is_certain:
        return _hash_content(path)
    description = {
        "path": os.path.abspath(path),
        "host": socket.gethostname(),
        "identity": [state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns],
    }
    record = cache / f"{compute_digest(description)}-file-digest"
    with contextlib.suppress(OSError):
        digest = record.read_text(encoding="ascii")
        if len(digest) == 32:
            return digest
    digest = _hash_content(path)
    with contextlib.suppress(OSError):  # a directory that cannot be written is reported later
        cache.mkdir(parents=True, exist_ok=True)
        with committed(record) as temporary:
            temporary.write_text(digest, encoding="ascii")
    return digest


def _hash_content(path: str) -> str:
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        return xxhash.xxh3_128_hexdigest(content)


@contextlib.contextmanager
def cached_tokens(prefix: Path, dtype: DTypeLike, name: str) -> Iterator[IndexedDatasetBuilder]:
    """Yield the builder of token files, which get their names at the end of the block.

    `name` is that of the data. After an exception nothing is left.
    """
    _remove_abandoned_files(prefix)
    try:
        builder = IndexedDatasetBuilder(prefix, dtype)
    except OSError as error:
        raise ValueError(
            f"the tokens of {name} cannot be stored in {prefix.parent} "
            f"({error.strerror}): give a writable directory with --data-cache-path"
        ) from None
    try:
        yield builder
    except BaseException:
        builder.discard()
        raise
    # Another node has written the same files meanwhile, which may be in use.
    if Path(f"{prefix}.idx").exists():
        builder.discard()
    else:
        builder.commit()


def _remove_abandoned_files(prefix: Path) -> None:
    """Remove temporary files of processes that were killed."""
    for path in prefix.parent.glob(f"{prefix.name}.*.tmp-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                path.unlink()
