"""Files that appear whole or not at all: written under a temporary name, made durable, then named."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def temporary_name(path: str | os.PathLike) -> str:
    """A name beside `path` that no other process on any node uses and that no reader takes for a data file."""
    return f"{os.fspath(path)}.tmp-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


def sync_and_close(file: BinaryIO) -> None:
    """What was written survives a crash of the machine."""
    file.flush()
    os.fsync(file.fileno())
    file.close()


def sync_directory(directory: str | os.PathLike) -> None:
    """Names created in `directory` survive a crash; file systems that cannot promise it are left alone."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def whole_file(path: str | os.PathLike, replace: bool) -> Iterator[BinaryIO]:
    """A file to write that gets its name when the block ends without an error. Without `replace`, an older one is kept.

    Keeping it matters where equal files are written by many nodes at once: readers of a network file system lose a
    mapped file when another node replaces it.
    """
    temporary = Path(temporary_name(path))
    try:
        with open(temporary, "wb") as file:
            yield file
            sync_and_close(file)
        if replace:
            os.replace(temporary, path)
        else:
            _name_unless_taken(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _name_unless_taken(temporary: Path, path: str | os.PathLike) -> None:
    try:
        os.link(temporary, path)  # unlike a rename, this fails when the name is taken
    except FileExistsError:
        return
    except OSError:  # no hard links on this file system
        os.replace(temporary, path)
