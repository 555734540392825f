"""The directory in which a conversion grows, for one process at a time."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """The directory, made or emptied, for one process at a time; it is removed if the block fails.

    Raises ValueError while another conversion works there. What a killed one left goes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(handle, directory)
        try:
            _empty(directory)
            yield
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
    finally:
        os.close(handle)


def _lock(handle: int, directory: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(f"{directory}: another conversion to the same --save-dir is writing: wait for it") from error
    except OSError:  # some network file systems have no locks
        pass


def _empty(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
