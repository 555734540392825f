"""Names in a directory of checkpoints: the files of a checkpoint, the tracker, what unfinished
saves leave.
"""

from __future__ import annotations

import glob
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

import xxhash

from megatron.core.dist_checkpointing.format import schema
from megatron.core.durable_files import (
    DISCARDED,
    REPLACED,
    discard,
    restore_replaced,
    write_durably,
)
from megatron.core.object_storage import ObjectPath, path_of

RUN = ".run"  # its random content names the run that is saved here, for what the nodes keep of it
TRACKER = "latest_checkpointed_iteration.txt"
CLAIM = ".claim"  # who saves, or has saved, a checkpoint in object storage
METADATA = ".metadata"
METADATA_JSON = "metadata.json"
COMMON = "common.pt"
BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_PENDING = ".saving-"
_DELETING = ".deleting-"


def write_tracker(save_directory: str | os.PathLike[str], iteration: int | str) -> None:
    """Name the latest checkpoint of `save_directory`; to be called when it is committed, never
    before.
    """
    _write_whole(path_of(save_directory) / TRACKER, str(iteration).encode())


def _write_whole(path: Path, content: bytes) -> None:
    if isinstance(path, ObjectPath):
        path.store.put(path.key, content)
    else:
        write_durably(path, content)


def run_name(save_directory: Path) -> str:
    """A name for the run that is saved to this directory, made by its owner at the first start.

    A copy of the directory is another run, and so is one that was emptied.
    """
    path = save_directory / RUN
    if not path.is_file():
        _write_whole(path, secrets.token_hex(8).encode())
    where = str(save_directory.resolve()).encode()
    return xxhash.xxh3_64_hexdigest(path.read_bytes() + where)


def read_tracker(save_directory: str | os.PathLike[str]) -> int | str | None:
    """The iteration that the tracker names, "release", or None without a tracker. A garbled one is
    a ValueError.
    """
    path = path_of(save_directory) / TRACKER
    try:
        named = schema.read_regular(path).decode("utf-8", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if named == "release":
        return named
    if not (named.isascii() and named.isdigit()):
        raise schema.CheckpointError(
            f"{path}: {named[:40]!r} is neither an iteration nor 'release'"
        )
    return int(named)


def is_complete(directory: str | os.PathLike[str]) -> bool:
    """Whether `directory` holds a committed torch_dist checkpoint (its files are not looked into)."""
    path = path_of(directory)
    if isinstance(path, ObjectPath) and read_commit(path) is None:
        return False
    return (path / METADATA).is_file() and (path / METADATA_JSON).is_file()


_COMMIT = schema.record(
    {
        "save_id?": schema.text(),
        "revoked?": schema.text(),
        "files?": schema.mapping(schema.sequence(schema.anything, 2, 2), schema.file_name),
    }
)
_FILE = (schema.COUNT, schema.text(16))


def encode_commit(save_id: str, sums: Mapping[str, tuple[int, bytes]]) -> bytes:
    """The `metadata.json` of a checkpoint in object storage: of each file, size and xxh3_64 of its
    blocks' hashes.

    `sums` are `FileChecksums` by name.
    """
    listed = {
        name: (size, xxhash.xxh3_64_hexdigest(blocks)) for name, (size, blocks) in sums.items()
    }
    return json.dumps({**BACKEND, "save_id": save_id, "files": listed}).encode()


def read_commit(directory: ObjectPath) -> dict[str, tuple[int, str]] | None:
    """Size and hash of the files of a committed checkpoint; None if it is not committed, or was
    revoked.

    Empty for a checkpoint that was written to a file system and copied.
    """
    where = f"{directory / METADATA_JSON}"
    try:
        content = _COMMIT(schema.read_json(directory / METADATA_JSON), where)
    except FileNotFoundError:
        return None
    if "revoked" in content:
        return None
    listed = content.get("files", {})
    for name, fields in listed.items():
        for check, value in zip(_FILE, fields, strict=True):
            check(value, f"{where}: {name}")
    return {name: (fields[0], fields[1]) for name, fields in listed.items()}


def pending_directory(directory: Path, save_id: str) -> Path:
    """Where the checkpoint grows before it gets its name by one rename."""
    return directory.with_name(f"{_PENDING}{directory.name}-{save_id}")


def remove_unfinished(directory: Path) -> None:
    """Remove what crashed saves of the checkpoint `directory` left beside it. No save of it may be
    running.
    """
    for path in directory.parent.glob(f"{_PENDING}{glob.escape(directory.name)}-*"):
        discard(path)


def clean_up(save_directory: str | os.PathLike[str]) -> list[str]:
    """Remove what crashed saves left in `save_directory`; returns the removed names. No save may be
    running.

    A crash between the two renames that replace a checkpoint left the old one under another name:
    it gets its name back.
    """
    root = path_of(save_directory)
    removed = []
    if (
        isinstance(root, ObjectPath) or not root.is_dir()
    ):  # in object storage, taking a generation has done it
        return []
    for path in sorted(root.iterdir()):
        if path.name.startswith(REPLACED):
            # A link could make any directory look like a checkpoint of this run.
            if not path.is_symlink() and restore_replaced(path, root):
                continue
        elif not path.name.startswith((_PENDING, _DELETING, DISCARDED, TRACKER + ".tmp")):
            continue
        discard(path)
        removed.append(path.name)
    return removed
