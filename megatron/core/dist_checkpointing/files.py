"""File names of a checkpoint and of a directory of checkpoints, and the clean-up after crashes."""

from __future__ import annotations

import glob
import os
import secrets
from pathlib import Path

import xxhash

from megatron.core.durable_files import (
    DISCARDED,
    REPLACED,
    discard,
    restore_replaced,
    write_durably,
)
from megatron.core.object_path import ObjectPath, path_of
from megatron.core.safe_files import schema
from megatron.core.safe_files.errors import CheckpointError
from megatron.core.safe_files.reading import read_json, read_regular

RUN = ".run"  # its random content identifies the run for its checkpoints on the disks of nodes
TRACKER = "latest_checkpointed_iteration.txt"
CLAIM = ".claim"  # names the writer of a checkpoint in object storage
METADATA = ".metadata"
METADATA_JSON = "metadata.json"
INTEGRITY = "integrity.json"  # hashes of all files, for Megatron-LM's --verify-integrity
COMMON = "common.pt"
COMMON_STATE = "common_state/shard_0_1"  # object with the content of common.pt, for Megatron-LM
BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_PENDING = ".saving-"
# Prefixes of names that a crashed launch has left.
_LEFTOVERS = (_PENDING, ".deleting-", ".probe-", DISCARDED, f"{TRACKER}.tmp")


def write_tracker(save_directory: str | os.PathLike[str], iteration: int | str) -> None:
    """Name the latest checkpoint, durably; call it after that is committed, never before."""
    _write_whole(path_of(save_directory) / TRACKER, str(iteration).encode())


def _write_whole(path: Path, content: bytes) -> None:
    if isinstance(path, ObjectPath):
        path.store.put(path.key, content)
    else:
        write_durably(path, content)


def run_name(save_directory: Path) -> str:
    """Return a name for the run that is saved to this directory, created at its first launch.

    A copy of the directory is another run, and so is a directory that was emptied.
    """
    # The random content distinguishes emptied directories, the path distinguishes copies.
    if read_run_name(save_directory) is None:
        _write_whole(save_directory / RUN, secrets.token_hex(8).encode())
    name = read_run_name(save_directory)
    assert name is not None
    return name


def read_run_name(save_directory: Path) -> str | None:
    """Return the result of `run_name`, None before the first launch."""
    try:
        content = read_regular(save_directory / RUN, follow_links=True)
    except (FileNotFoundError, NotADirectoryError):
        return None
    address = str(save_directory.resolve()).encode()
    return xxhash.xxh3_64_hexdigest(content + address)


_MAX_DIGITS = len(str(schema.MAX_COUNT))


def read_tracker(save_directory: str | os.PathLike[str]) -> int | str | None:
    """Return the iteration that the tracker names, "release", or None without a tracker.

    Raises CheckpointError for any other content.
    """
    path = path_of(save_directory) / TRACKER
    try:
        named = read_regular(path).decode("utf-8", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if named == "release":
        return named
    # Python refuses to convert thousands of digits, without the name of the file.
    if not (named.isascii() and named.isdigit() and len(named) <= _MAX_DIGITS):
        raise CheckpointError(f"{path}: {named[:40]!r} is neither an iteration nor 'release'")
    return int(named)


def is_complete(directory: str | os.PathLike[str]) -> bool:
    """Return whether `directory` is a committed torch_dist checkpoint, by its file names alone."""
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


def read_commit(directory: ObjectPath) -> dict[str, tuple[int, str]] | None:
    """Return size and hash of the files of a committed checkpoint.

    None if it is not committed, or was revoked. Empty for a checkpoint that was written to a file
    system and copied.
    """
    location = f"{directory / METADATA_JSON}"
    try:
        content = _COMMIT(read_json(directory / METADATA_JSON), location)
    except FileNotFoundError:
        return None
    # Left by `object_commit.revoke`: the save was superseded or removed.
    if "revoked" in content:
        return None
    listed = content.get("files", {})
    for name, fields in listed.items():
        for check, value in zip(_FILE, fields, strict=True):
            check(value, f"{location}: {name}")
    return {name: (fields[0], fields[1]) for name, fields in listed.items()}


def pending_directory(directory: Path, save_id: str) -> Path:
    """Return where the checkpoint is written before it gets its name by one rename."""
    return directory.with_name(f"{_PENDING}{directory.name}-{save_id}")


def remove_unfinished(directory: Path) -> None:
    """Remove the files of crashed saves of the checkpoint `directory`; none may be running."""
    for path in directory.parent.glob(f"{_PENDING}{glob.escape(directory.name)}-*"):
        discard(path)


def clean_up(save_directory: str | os.PathLike[str]) -> list[str]:
    """Remove the files of crashed saves in `save_directory`; none may be running.

    A crash between the two renames that replace a checkpoint leaves the old one under another name:
    it gets its name back. Returns the removed names.
    """
    root = path_of(save_directory)
    removed = []
    # In object storage, taking a generation has removed them.
    if isinstance(root, ObjectPath) or not root.is_dir():
        return []
    for path in sorted(root.iterdir()):
        if path.name.startswith(REPLACED):
            # A link could make any directory look like a checkpoint of this run.
            if not path.is_symlink() and restore_replaced(path, root):
                continue
        elif not path.name.startswith(_LEFTOVERS):
            continue
        discard(path)
        removed.append(path.name)
    return removed
