"""A client of a network file system, emulated in this process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any
from unittest import mock


def _error(code: int, path: Any = None) -> OSError:
    return OSError(code, os.strerror(code), path)


class _Listing:
    """The entries of a directory that are not hidden, with the interface of os.scandir."""

    def __init__(self, entries: Iterator[os.DirEntry[str]], hidden: Collection[str]) -> None:
        with entries:
            self._entries = iter([entry for entry in entries if entry.name not in hidden])

    def __enter__(self) -> _Listing:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> _Listing:
        return self

    def __next__(self) -> os.DirEntry[str]:
        return next(self._entries)


@contextlib.contextmanager
def nfs_client(
    root: Path, *, stale: Collection[str] = (), unlisted: Collection[str] = ()
) -> Iterator[Collection[tuple[int, int]]]:
    """Let this process see `root` as a client of NFS or Lustre may see it.

    - Directories cannot be flushed (EINVAL) and files not be locked (ENOLCK).
    - The answer to every rename is lost, and the repeated request finds no source.
    - Files named in `stale` were replaced by another client after they were opened: the first read
      of each file fails with ESTALE.
    - `unlisted` names in `root` are missing from cached listings, until this client changes `root`.

    Yields the files (device and inode) whose first read has failed.
    """
    stale_files: set[tuple[int, int]] = set()
    hidden = set(unlisted)
    real_fsync = os.fsync
    real_preadv = os.preadv
    real_scandir = os.scandir
    real_mkdir = os.mkdir
    real_replace = os.replace

    def changes(path: Any) -> None:
        if Path(path).parent == root:
            hidden.clear()

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise _error(errno.EINVAL)
        real_fsync(descriptor)

    def flock(descriptor: int, operation: int) -> None:
        raise _error(errno.ENOLCK)

    def preadv(descriptor: int, *args: Any) -> int:
        status = os.fstat(descriptor)
        identity = (status.st_dev, status.st_ino)
        name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        if name in stale and identity not in stale_files:
            stale_files.add(identity)
            raise _error(errno.ESTALE)
        return real_preadv(descriptor, *args)

    def scandir(path: Any = ".") -> Any:
        entries = real_scandir(path)
        if isinstance(path, int) or Path(path) != root:
            return entries
        return _Listing(entries, hidden)

    def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
        real_mkdir(path, *args, **kwargs)
        changes(path)

    def rename(source: Any, target: Any) -> None:
        real_replace(source, target)
        changes(source)
        changes(target)
        raise _error(errno.ENOENT, source)

    with contextlib.ExitStack() as patches:
        for function in (fsync, preadv, scandir, mkdir, rename):
            patches.enter_context(mock.patch.object(os, function.__name__, function))
        patches.enter_context(mock.patch.object(os, "replace", rename))
        patches.enter_context(mock.patch.object(fcntl, "flock", flock))
        yield stale_files
