"""Files and directories that appear whole or not at all, and survive a crash of the machine.

This is the only module that writes a temporary file, flushes it, renames it and flushes the
directory.
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

from megatron.core.terminal import format_size

DISCARDED = ".discarded-"  # prefix of a directory that is being removed
REPLACED = ".replaced-"  # prefix of a directory between the two renames of `put_in_place`


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add `path` to errors of the block: an OSError for a file descriptor has no file name."""
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
        # Some network file systems do not support this, and do not need it.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
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
    """Return a name next to `path` that is unique among the processes of all nodes.

    Readers do not take it for a data file.
    """
    unique = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    return Path(f"{os.fspath(path)}.tmp-{unique}")


@contextlib.contextmanager
def committed(path: str | os.PathLike[str], replace: bool = True) -> Iterator[Path]:
    """Yield a temporary file; if the block ends without an error, it is renamed to `path`.

    The file is flushed before. The name is durable after `fsync_directory`. Without `replace` an
    older file of that name is kept: if many nodes write equal files at once, readers on a network
    file system lose a mapped file when another node replaces it.
    """
    temporary = temporary_name(path)
    create_file(temporary).close()
    try:
        with naming(path):
            yield temporary
            fsync_file(temporary)
            if replace:
                rename(temporary, path)
            else:
                _rename_unless_taken(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _rename_unless_taken(temporary: Path, path: str | os.PathLike[str]) -> None:
    try:
        os.link(temporary, path)  # unlike a rename, this fails if the name is taken
    except FileExistsError:
        pass
    except OSError:  # this file system has no hard links
        rename(temporary, path)
        return
    temporary.unlink()


def create_file(path: str | os.PathLike[str]) -> FileIO:
    """Create a file for unbuffered writing. Raises FileExistsError if the name is taken.

    The name may be a link that someone else has created to make this process write elsewhere.
    """
    # O_EXCL and O_NOFOLLOW refuse an existing file and a link.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return FileIO(os.open(path, flags, 0o666), "wb")


def write_flushed(path: Path, *buffers: bytes) -> None:
    """Write and flush a file; its name is durable after `fsync_directory`.

    Use it in a directory that readers do not know yet: an interruption leaves a part of the file.
    An older file of that name is removed.
    """
    with naming(path):
        path.unlink(missing_ok=True)
        with create_file(path) as file:
            for buffer in buffers:
                view = memoryview(buffer)
                while view:
                    # An unbuffered write may be short.
                    view = view[file.write(view) :]
            os.fsync(file.fileno())


def write_durably(path: Path, content: bytes) -> None:
    """Replace a file: whenever the machine stops, it has its old or all of its new content."""
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


def rename(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Rename `source` to `target`, which is replaced if it is a file or an empty directory.

    A network file system repeats a request whose answer was lost; the repeated one finds no source.
    """
    before = os.lstat(source)
    try:
        os.replace(source, target)
    except FileNotFoundError:
        try:
            renamed = os.path.samestat(before, os.lstat(target))
        except OSError:
            renamed = False
        if not renamed:
            raise


def put_in_place(pending: Path, directory: Path) -> None:
    """Rename the finished directory `pending` to `directory`, durably, and remove the old one.

    Between the two renames, the old directory is next to `pending` under a name with the prefix
    `REPLACED`. An error or interruption in between gives it its name back; after a crash,
    `restore_replaced` does.
    """
    old = pending.with_name(f"{REPLACED}{directory.name}")
    try:
        if os.path.lexists(directory):  # possibly as a link whose target is gone
            remove(old)
            rename(directory, old)
        rename(pending, directory)
    except BaseException:
        # The second rename has failed: the old directory gets its name back.
        if os.path.lexists(old) and not os.path.lexists(directory):
            rename(old, directory)
        raise
    fsync_directory(directory.parent)
    remove(old)


def restore_replaced(path: Path, root: Path) -> bool:
    """Give `path`, left by a crash inside `put_in_place`, its name in `root` again.

    Returns whether that was possible: another directory may have the name.
    """
    original = root / path.name.removeprefix(REPLACED)
    if os.path.lexists(original):
        return False
    rename(path, original)
    fsync_directory(root)
    return True


def remove(path: Path) -> None:
    """Remove a file or link if it exists, or as much of a directory as possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def discard(directory: Path) -> None:
    """Remove a directory to which other processes may still be writing.

    It is renamed first, so that no file can be added while it is removed.
    """
    aside = directory.with_name(f"{DISCARDED}{directory.name}-{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):
        os.rename(directory, aside)
    for path in (aside, directory):
        with contextlib.suppress(OSError):
            remove(path)


def check_free_space(directory: Path, needed: int) -> None:
    """Raise OSError(ENOSPC) if this user has fewer than `needed` bytes left in the file system."""
    usage = os.statvfs(directory)
    # f_bavail excludes blocks that are reserved for root. Some network file systems report 0
    # blocks.
    free = usage.f_bavail * usage.f_frsize
    if usage.f_blocks and free < needed:
        reason = (
            f"{os.strerror(errno.ENOSPC)}: the checkpoint needs {format_size(needed)}, "
            f"{format_size(free)} are free"
        )
        raise OSError(errno.ENOSPC, reason, str(directory))


def describe_shortage(pending: Path, example: Path) -> str | None:
    """Return what must be freed for a directory as large as `example`, after `pending` is removed.

    None if that is not known, e.g. because a quota is exhausted and not the file system.
    """
    usage = os.statvfs(pending.parent)
    written_bytes, written_files = _measure_tree(pending)
    needed_bytes, needed_files = _measure_tree(example)
    # The tracker, which is replaced as a whole, and its block.
    missing_bytes = needed_bytes + usage.f_frsize - written_bytes - usage.f_bavail * usage.f_frsize
    missing_files = needed_files + 1 - written_files - usage.f_favail
    if usage.f_blocks and missing_bytes > 0:
        return f"free at least {missing_bytes:,} bytes in the file system"
    if usage.f_files and missing_files > 0:
        return (
            f"remove at least {missing_files} files from the file system, which limits their number"
        )
    return None


def _measure_tree(directory: Path) -> tuple[int, int]:
    """Return the bytes that a directory with its content uses on the disk, and the files."""
    num_bytes = 0
    num_files = 0
    for folder, _, names in os.walk(directory):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            num_bytes += os.lstat(path).st_blocks * 512
            num_files += 1
    return num_bytes, num_files
