"""Durable files: temp file, fsync, rename, fsync of the directory."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from megatron.core.dist_checkpointing.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
METADATA = ".metadata"
METADATA_JSON = "metadata.json"
COMMON = "common.pt"
CHECKSUMS = "checksums.json"
BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_PENDING, _REPLACED, _TEMPORARY = ".saving-", ".replaced-", ".tmp"


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """An OSError of the block says which file it is about: those of a descriptor do not know."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def fsync_directory(directory: Path) -> None:
    """Make created, renamed and removed names in `directory` durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot, and need not
            raise
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: bytes) -> None:
    """`path` has either its old content or all of the new one, whenever the machine stops."""
    temporary = path.with_name(path.name + _TEMPORARY)
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    fsync_directory(path.parent)


def write_tracker(save_directory: str | os.PathLike[str], iteration: int | str) -> None:
    """Name the latest checkpoint of `save_directory`; to be called when it is committed, never before."""
    write_durably(Path(save_directory) / TRACKER, str(iteration).encode())


def read_tracker(save_directory: str | os.PathLike[str]) -> int | str | None:
    """The iteration that the tracker names, "release", or None without a tracker. A garbled one is a ValueError."""
    path = Path(save_directory) / TRACKER
    try:
        text = path.read_bytes().decode("utf-8", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if text == "release":
        return text
    if not (text.isascii() and text.isdigit()):
        raise CheckpointError(
            f"{path}: {text[:40]!r} is neither an iteration nor 'release'. Write the iteration to load into it, or "
            "remove it so that the newest complete checkpoint is taken."
        )
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
        remove(path)


def remove(path: Path) -> None:
    """A file, a link, or as much of a directory as possible: what stays has a name that nobody takes for whole."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def put_in_place(pending: Path, directory: Path) -> None:
    """Rename the finished `pending` to `directory`, durably; what was there is removed afterwards.

    An error or interruption between the renames puts it back.
    """
    old = directory.with_name(f"{_REPLACED}{directory.name}")
    try:
        if directory.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.replace(directory, old)
        os.replace(pending, directory)
    except BaseException:
        if old.exists() and not directory.exists():
            os.replace(old, directory)
        raise
    fsync_directory(directory.parent)
    shutil.rmtree(old, ignore_errors=True)


def clean_up(save_directory: str | os.PathLike[str]) -> list[str]:
    """Remove what crashed saves left in `save_directory`; returns the removed names. No save may be running.

    A crash in the moment between the two renames that replace a checkpoint left the old one under another name: it gets
    its name back.
    """
    root, removed = Path(save_directory), []
    if not root.is_dir():
        return []
    for path in sorted(root.iterdir()):
        if path.name.startswith(_REPLACED):
            original = path.with_name(path.name.removeprefix(_REPLACED))
            if not original.exists():
                os.rename(path, original)
                fsync_directory(root)
                continue
        elif not path.name.startswith(_PENDING) and path.name != TRACKER + _TEMPORARY:
            continue
        remove(path)
        removed.append(path.name)
    return removed


def check_free_space(directory: Path, needed: int) -> None:
    """Raises OSError(ENOSPC) when the file system of `directory` has less than `needed` bytes left for us."""
    usage = os.statvfs(directory)
    free = usage.f_bavail * usage.f_frsize
    if usage.f_blocks and free < needed:
        text = f"No space left: the checkpoint needs {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free"
        raise OSError(errno.ENOSPC, text, str(directory))
