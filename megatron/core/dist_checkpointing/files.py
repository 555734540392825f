"""Names in a directory of checkpoints: the files of a checkpoint, the tracker, what unfinished saves leave."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from megatron.core.dist_checkpointing.format.schema import CheckpointError, read_regular
from megatron.core.durable_files import DISCARDED, REPLACED, discard, restore_replaced, write_durably

TRACKER = "latest_checkpointed_iteration.txt"
METADATA = ".metadata"
METADATA_JSON = "metadata.json"
COMMON = "common.pt"
CHECKSUMS = "checksums.bin"
OLD_CHECKSUMS = "checksums.json"
BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_PENDING, _DELETING = ".saving-", ".deleting-"


def write_tracker(save_directory: str | os.PathLike[str], iteration: int | str) -> None:
    """Name the latest checkpoint of `save_directory`; to be called when it is committed, never before."""
    write_durably(Path(save_directory) / TRACKER, str(iteration).encode())


def read_tracker(save_directory: str | os.PathLike[str]) -> int | str | None:
    """The iteration that the tracker names, "release", or None without a tracker. A garbled one is a ValueError."""
    path = Path(save_directory) / TRACKER
    try:
        text = read_regular(path).decode("utf-8", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if text == "release":
        return text
    if not (text.isascii() and text.isdigit()):
        raise CheckpointError(f"{path}: {text[:40]!r} is neither an iteration nor 'release'")
    return int(text)


def is_complete(directory: str | os.PathLike[str]) -> bool:
    """Whether `directory` holds a committed torch_dist checkpoint (its files are not looked into)."""
    path = Path(directory)
    return (path / METADATA).is_file() and (path / METADATA_JSON).is_file()


def pending_directory(directory: Path, save_id: str) -> Path:
    """Where the checkpoint grows before it gets its name by one rename."""
    return directory.with_name(f"{_PENDING}{directory.name}-{save_id}")


def remove_unfinished(directory: Path) -> None:
    """Remove what crashed saves of the checkpoint `directory` left beside it. No save of it may be running."""
    for path in directory.parent.glob(f"{_PENDING}{glob.escape(directory.name)}-*"):
        discard(path)


def clean_up(save_directory: str | os.PathLike[str]) -> list[str]:
    """Remove what crashed saves left in `save_directory`; returns the removed names. No save may be running.

    A crash between the two renames that replace a checkpoint left the old one under another name: it gets its name
    back.
    """
    root, removed = Path(save_directory), []
    if not root.is_dir():
        return []
    for path in sorted(root.iterdir()):
        if path.name.startswith(REPLACED):
            if restore_replaced(path, root):
                continue
        elif not path.name.startswith((_PENDING, _DELETING, DISCARDED, TRACKER + ".tmp")):
            continue
        discard(path)
        removed.append(path.name)
    return removed
