"""Files and directories that appear whole or not at all, and survive a crash of the machine once
they have a name.

The only place that writes a temporary file, flushes it, renames it and flushes the directory.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

DISCARDED = ".discarded-"  # prefix of a directory that is being removed
REPLACED = ".replaced-"  # prefix of a directory between the two renames of `put_in_place`


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Errors inside the block name `path`: an OSError of a file descriptor does not."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def fsync_file(path: str | os.PathLike[str]) -> None:
    """Make the content of a closed file durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_directory(directory: str | os.PathLike[str]) -> None:
    """Make created, renamed and removed names in `directory` durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with naming(directory):
            os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (
            errno.EINVAL,
            errno.ENOTSUP,
        ):  # some network file systems cannot, and need not
            raise
    finally:
        os.close(descriptor)


def fsync_tree(directory: Path) -> None:
    """Make every file and directory below `directory` durable."""
    for folder, _, names in os.walk(directory):
        for name in names:
            fsync_file(os.path.join(folder, name))
        fsync_directory(folder)


def temporary_name(path: str | os.PathLike[str]) -> Path:
    """A name beside `path` that no other process on any node uses and that no reader takes for a
    data file.
    """
    return Path(
        f"{os.fspath(path)}.tmp-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    )


@contextlib.contextmanager
def committed(path: str | os.PathLike[str], replace: bool = True) -> Iterator[Path]:
    """A temporary path to write to; the file is flushed and takes the name `path` only if the block
    ends well.

    Its name is durable after `fsync_directory`. Without `replace` an older file of that name is
    kept: where many nodes write equal files at once, readers of a network file system lose a mapped
    file when another node replaces it.
    """
    temporary = temporary_name(path)
    create_file(temporary).close()
    try:
        yield temporary
        fsync_file(temporary)
        if replace:
            os.replace(temporary, path)
        else:
            _name_unless_taken(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _name_unless_taken(temporary: Path, path: str | os.PathLike[str]) -> None:
    try:
        os.link(temporary, path)  # unlike a rename, this fails when the name is taken
    except FileExistsError:
        pass
    except OSError:  # no hard links on this file system
        os.replace(temporary, path)
        return
    temporary.unlink()


def create_file(path: str | os.PathLike[str]) -> FileIO:
    """Create a file for unbuffered writing. Raises FileExistsError if the name is taken.

    The name may be a link that someone else has created to make this process write elsewhere.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return FileIO(os.open(path, flags, 0o666), "wb")


def write_flushed(path: Path, *parts: bytes) -> None:
    """Write and flush a file; its name is durable after `fsync_directory`.

    Use it in a directory that readers do not know yet: an interruption leaves a part of the file.
    An older file of that name is removed.
    """
    with naming(path):
        path.unlink(missing_ok=True)
        with create_file(path) as file:
            for part in parts:
                view = memoryview(part)
                while view:
                    view = view[file.write(view) :]
            os.fsync(file.fileno())


def write_durably(path: Path, content: bytes) -> None:
    """`path` has either its old content or all of the new one, whenever the machine stops."""
    with committed(path) as temporary:
        temporary.write_bytes(content)
    fsync_directory(path.parent)


def encode_json(value: Any) -> bytes:
    """Return the content of a JSON file for people and programs."""
    return (json.dumps(value, indent=2) + "\n").encode()


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file as a whole; its name is durable after `fsync_directory`."""
    with committed(path) as temporary:
        temporary.write_bytes(encode_json(value))


def put_in_place(pending: Path, directory: Path) -> None:
    """Rename the finished directory `pending` to `directory`, durably; what was there is removed
    afterwards.

    The old directory waits beside `pending` under a name with the prefix `REPLACED`. An error or
    interruption between the two renames puts it back; after a crash there `restore_replaced` does.
    """
    old = pending.with_name(f"{REPLACED}{directory.name}")
    try:
        if directory.exists():
            remove(old)
            os.replace(directory, old)
        os.replace(pending, directory)
    except BaseException:
        if old.exists() and not directory.exists():
            os.replace(old, directory)
        raise
    fsync_directory(directory.parent)
    remove(old)


def restore_replaced(path: Path, root: Path) -> bool:
    """Give `path`, which a crash inside `put_in_place` left, its name in `root` again if nothing
    has taken it.
    """
    original = root / path.name.removeprefix(REPLACED)
    if original.exists():
        return False
    os.rename(path, original)
    fsync_directory(root)
    return True


def remove(path: Path) -> None:
    """Remove a file or link if there is one, or as much of a directory as possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def discard(directory: Path) -> None:
    """Remove a directory that others may still be writing to: under another name first, so that
    nothing can join it.
    """
    aside = directory.with_name(f"{DISCARDED}{directory.name}-{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):
        os.rename(directory, aside)
    for path in (aside, directory):
        with contextlib.suppress(OSError):
            remove(path)


def check_free_space(directory: Path, needed: int) -> None:
    """Raises OSError(ENOSPC) when the file system of `directory` has less than `needed` bytes left
    for us.
    """
    usage = os.statvfs(directory)
    free = usage.f_bavail * usage.f_frsize
    if usage.f_blocks and free < needed:
        text = f"No space left: the checkpoint needs {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free"
        raise OSError(errno.ENOSPC, text, str(directory))
