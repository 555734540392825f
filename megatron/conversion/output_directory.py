"""The directory that a conversion writes to before it is moved into place."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.conversion.model_space.pieces import make_empty_directory
from megatron.core.durable_files import fsync_tree, put_in_place, remove


def pending_name(name: str) -> str:
    """Return the name under which the directory `name` is written, next to its place."""
    return f".{name}.converting"


@contextmanager
def replaced_directory(directory: Path) -> Iterator[Path]:
    """Yield an empty directory, which replaces `directory` if the block ends without an error.

    It is next to `directory`, so that the final rename stays within one file system.
    """
    directory = directory.absolute()
    pending = directory.with_name(pending_name(directory.name))
    with exclusive_output_dir(pending):
        yield pending
        fsync_tree(pending)
        put_in_place(pending, directory)


@contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """Yield an empty directory, which becomes `directory` if the block ends without an error.

    Raises ValueError if `directory` has content.
    """
    if os.path.lexists(directory) and any(directory.iterdir()):
        raise ValueError(f"{directory} is not empty: choose another target or remove it first")
    with replaced_directory(directory) as pending:
        yield pending


@contextmanager
def exclusive_output_dir(directory: Path) -> Iterator[None]:
    """Create or empty `directory` for one process at a time, and remove it if the block fails.

    Leftovers of a killed conversion are removed. Raises ValueError while another conversion writes
    there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    handle = _open_own_directory(directory)
    try:
        _lock(handle, directory)
        try:
            # Remove the leftovers of a killed conversion.
            for path in directory.iterdir():
                remove(path)
            make_empty_directory(directory)
            yield
        except BaseException:
            remove(directory)
            raise
    finally:
        os.close(handle)


def _lock(handle: int, directory: Path) -> None:
    """Lock the directory. The kernel releases the lock when the process ends."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(
            f"{directory}: another conversion to the same --save-dir is writing: wait for it"
        ) from error
    except OSError:  # some network file systems do not support locks
        pass


def _open_own_directory(directory: Path) -> int:
    """Open the directory, refusing links: the target of a planted one would be emptied."""
    try:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        raise ValueError(
            f"{directory} is a link: remove it, since a conversion would write to its target"
        ) from error
    # Another user could replace files while they are written.
    if os.fstat(handle).st_uid != os.geteuid():
        os.close(handle)
        raise ValueError(
            f"{directory} belongs to another user: remove it, or choose another --save-dir"
        )
    return handle
