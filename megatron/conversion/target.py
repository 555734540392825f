"""The directory a conversion writes: it grows under another name, for one process, and is named when it is whole."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.core.dist_checkpointing.files import fsync_directory


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


def put_in_place(partial: Path, target: Path) -> None:
    """Rename the finished `partial` to `target`, durably; what was there is removed afterwards.

    An interruption between the renames puts the old target back.
    """
    old = target.with_name(f".{target.name}.replaced")
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)  # of a replacement that was killed after its renames
        try:
            os.replace(target, old)
            os.replace(partial, target)
        except BaseException:
            if not target.exists():
                os.replace(old, target)
            raise
    else:
        os.replace(partial, target)
    fsync_directory(target.parent)
    shutil.rmtree(old, ignore_errors=True)
