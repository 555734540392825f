"""Reading of untrusted files: regular ones, of bounded size, inside the directory they belong to.

Reading a pipe or `/dev/zero` would never end, and a link or a `../` in the content of a file would
make us read files that its author has no right to.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megatron.core.object_path import ObjectPath, path_of
from megatron.core.safe_files.errors import CheckpointError
from megatron.core.safe_files.schema import MAX_DEPTH, limit
from megatron.core.terminal import escape_control_chars
from megatron.core.wings import resolve

# ---- Symbolic links: none may lead out of the checkpoint that contains it ----
#
# A checkpoint from a stranger could otherwise contain `__0_0.distcp -> /home/me/private/...` and
# have a conversion copy the data of another checkpoint into an export. A directory that the user
# names may itself be a link, and the layout of Hugging Face's cache is allowed: files in
# `models--*/snapshots/<revision>` are links to `../../blobs` of the same model.

FOLLOW_LINKS = "MEGATRON_FOLLOW_LINKS"

# Directories named by the user: absolute paths as given. Their real paths may change: a run that
# saves goes on if its directory is moved and a link to the new place is left.
_named_directories: set[str] = set()


def confine_links(directory: Path) -> None:
    """Refuse links anywhere below `directory`, which the user has named, that lead out of it.

    Without this call, a file is confined to the directory that contains it.
    """
    if isinstance(directory, ObjectPath):
        return
    _named_directories.add(os.path.abspath(directory))


def allow_links() -> None:
    """Follow all links, in this process and its children (`--follow-links`)."""
    os.environ[FOLLOW_LINKS] = "1"


def find_outside_target(path: str | os.PathLike[str]) -> str | None:
    """Return the target of `path` if it leaves its checkpoint via a link, else None."""
    are_links_allowed = os.environ.get(FOLLOW_LINKS, "0") not in ("", "0")
    if are_links_allowed or isinstance(path, ObjectPath):
        return None
    absolute_path = os.path.abspath(path)
    directory = _find_confinement(absolute_path)
    # The usual case, with two system calls instead of two for each component of the path.
    is_normal = os.pardir not in os.fspath(path).split(os.sep)
    if is_normal and not _contains_link(absolute_path, directory):
        return None
    target = os.path.realpath(path)
    home = os.path.realpath(directory)
    if _is_inside(target, home):
        return None
    # Hugging Face's cache: snapshots/<revision>/<file> is a link to blobs/<hash>.
    snapshots = Path(home).parent
    blobs = snapshots.parent / "blobs"
    if snapshots.name == "snapshots" and _is_inside(target, str(blobs)):
        return None
    return target


def _find_confinement(path: str) -> str:
    """Return the directory that links at `path` must not leave."""
    # The outermost directory: if a program opens `run` and then `run/iter_0000010`, the latter
    # must not be a link that leaves `run`.
    directory = os.path.dirname(path)
    confinement = directory
    while directory != os.path.dirname(directory):
        directory = os.path.dirname(directory)
        if directory in _named_directories:
            confinement = directory
    return confinement


def _contains_link(path: str, directory: str) -> bool:
    """Return whether a component of `path` below `directory` is a link."""
    while path != directory:
        if os.path.islink(path):
            return True
        path = os.path.dirname(path)
    return False


def _is_inside(path: str, directory: str) -> bool:
    """Return whether an absolute path is below a directory."""
    return path.startswith(directory.rstrip("/") + "/")


# ---- Reading ----

_OPEN_OBJECT = "megatron.core.object_files:OpenObject"
_MADV_POPULATE_READ = 22  # <linux/mman.h>; Python has no name for it yet

# Bytes of a file that is read whole
MAX_JSON = 256 << 20
_PLAUSIBLE_SIZE = 64 << 20  # always accepted
_MAX_SIZE = 1 << 30  # accepted if the files next to it are as large
_STALE_ATTEMPTS = 3  # to read a file that another client of a network file system replaces


def _open_descriptor(path: str | os.PathLike[str], follow_links: bool) -> int:
    """Open `path` for reading.

    Raises CheckpointError unless it is a regular file inside its checkpoint, OSError if it is
    missing.
    """
    name = escape_control_chars(str(path))
    if not follow_links:
        target = find_outside_target(path)
        if target is not None:
            raise CheckpointError(
                f"{name} is a link to {escape_control_chars(target)}, "
                "outside of the checkpoint. If you trust it, use --follow-links, or set "
                f"{FOLLOW_LINKS}=1"
            )
    # Non-blocking: opening a pipe must not wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{name} is not a regular file")
    return descriptor


class OpenFile:
    """An open file of a checkpoint. Any thread can read any range of it."""

    # Bytes. Smaller gaps between two ranges are read, because another read would cost more.
    closest_gap = 16 << 10

    def __init__(self, path: Path, follow_links: bool = False) -> None:
        self.path = path
        self.follow_links = follow_links
        self.descriptor: int | None = _open_descriptor(path, follow_links)
        self.size = os.fstat(self.descriptor).st_size  # at the time of opening

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def read(self, position: int, length: int) -> bytes:
        """Return up to `length` bytes, fewer at the end of the file."""
        content = self._allocate(max(0, min(length, self.size - position)))
        self.read_into(memoryview(content), position)
        return bytes(content)

    def _allocate(self, count: int) -> bytearray:
        try:
            return bytearray(count)
        except MemoryError as error:
            raise CheckpointError(
                f"{escape_control_chars(str(self.path))}: {count} bytes of it do not fit in memory"
            ) from error

    def map(self, start: int, stop: int) -> mmap.mmap | None:
        """Map a range that begins with a page, and let the kernel read its pages.

        Returns None where that is not possible, or fails: the range must be read then, which
        reports errors of the disk. In a mapping they would be a SIGBUS.
        """
        if self.descriptor is None:
            return None
        try:
            mapped = mmap.mmap(self.descriptor, stop - start, offset=start, prot=mmap.PROT_READ)
        except (OSError, ValueError):  # cannot be mapped, or has become shorter
            return None
        try:
            mapped.madvise(_MADV_POPULATE_READ)
        except OSError:  # of the disk, or Linux is older than 5.14
            mapped.close()
            return None
        return mapped

    def read_into(self, view: memoryview, position: int) -> None:
        """Fill `view`. Raises CheckpointError if the file is too short or cannot be read."""
        try:
            self._fill(view, position)
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: cannot be read at {position}: {error.strerror}"
            ) from error

    def read_small(self) -> bytes:
        """Return the whole file. Unlike `read`, raises OSError if the storage fails.

        A file that cannot be read at the moment must not look like a damaged one.
        """
        content = self._allocate(self.size)
        try:
            self._fill(memoryview(content), 0)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        return bytes(content)

    def _fill(self, view: memoryview, position: int) -> None:
        done = 0
        while done < len(view):
            count = self._read_some(view[done:], position + done)
            if count == 0:
                raise CheckpointError(
                    f"{self.path}: truncated: it has {self.size} bytes, data should be at "
                    f"{position}..{position + len(view)}"
                )
            done += count

    def read_whole(self) -> bytes:
        """Return the whole file. Raises CheckpointError if its size is not plausible."""
        self.check_size()
        return self.read(0, self.size)

    def check_size(self) -> None:
        """Raise CheckpointError if the file is too large to be read whole.

        Such a file describes the other files of a checkpoint, but a sparse file and an object store
        can report any size at no cost. It may have 64 MiB, or as many bytes as all files of the
        directory use on disk, up to 1 GiB. MEGATRON_MAX_FILE_SIZE replaces these limits.
        """
        maximum = limit("FILE_SIZE", 0)
        if maximum == 0:  # not set by the user
            maximum = _PLAUSIBLE_SIZE
            if self.size > maximum:
                used = self.measure_directory()
                maximum = min(max(maximum, used), _MAX_SIZE)
        if self.size > maximum:
            raise CheckpointError(
                f"{escape_control_chars(str(self.path))} has {self.size} bytes, but at most "
                f"{maximum} are plausible: it is damaged or sparse (the environment variable "
                "MEGATRON_MAX_FILE_SIZE raises the limit)"
            )

    def forget(self, position: int, length: int) -> None:
        """Allow the page cache to drop this range: it will not be read again soon."""
        if self.descriptor is not None and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.descriptor, position, length, os.POSIX_FADV_DONTNEED)

    def _read_some(self, view: memoryview, position: int) -> int:
        """Fill the beginning of `view` from `position` on. Returns the bytes read, 0 at the end."""
        assert self.descriptor is not None
        for _ in range(_STALE_ATTEMPTS - 1):
            try:
                return os.preadv(self.descriptor, [view], position)
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
                self._reopen()
        return os.preadv(self.descriptor, [view], position)

    def _reopen(self) -> None:
        """Replace a stale descriptor, which other threads may be using, unless the file changed."""
        assert self.descriptor is not None
        descriptor = _open_descriptor(self.path, self.follow_links)
        try:
            if os.fstat(descriptor).st_size == self.size:
                os.dup2(descriptor, self.descriptor, inheritable=False)
        finally:
            os.close(descriptor)

    def measure_directory(self) -> int:
        """Return the bytes that the files next to this one use on disk, this one included."""
        total = 0
        with os.scandir(os.path.dirname(os.path.abspath(self.path))) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                # A sparse file uses fewer blocks (512 bytes each) than its size suggests.
                total += min(status.st_size, 512 * status.st_blocks)
        return total


def _open_object(path: ObjectPath) -> OpenFile:
    file: OpenFile = resolve(_OPEN_OBJECT)(path)
    return file


# By the type of the path; any other path is one of the local file system.
OPENERS: dict[type[Path], Callable[[Any], OpenFile]] = {ObjectPath: _open_object}


def open_file(path: str | os.PathLike[str], *, follow_links: bool = False) -> OpenFile:
    """Open a file of a checkpoint, on a file system or in object storage.

    `follow_links`: the user has named this file, so it may be a link to anywhere. Raises
    CheckpointError unless it is a regular file or an object, OSError if it is missing.
    """
    path = path_of(path)
    opener = OPENERS.get(type(path))
    if opener is None:
        return OpenFile(path, follow_links)
    return opener(path)


def read_regular(
    path: str | os.PathLike[str], limit: int = MAX_JSON, *, follow_links: bool = False
) -> bytes:
    """Return the content of a regular file of at most `limit` bytes, else raise CheckpointError.

    Raises OSError if it is missing or the storage fails.
    """
    attempt = 1
    while True:
        try:
            return _read_once(path, limit, follow_links)
        except OSError as error:
            # Another client of a network file system has replaced the file after it was opened.
            if error.errno != errno.ESTALE or attempt == _STALE_ATTEMPTS:
                raise
            attempt += 1


def _read_once(path: str | os.PathLike[str], limit: int, follow_links: bool) -> bytes:
    with open_file(path, follow_links=follow_links) as file:
        if file.size > limit:
            raise CheckpointError(
                f"{escape_control_chars(str(path))} has {file.size} bytes, "
                f"more than the {limit} that it may have"
            )
        return file.read_small()


def read_json(path: str | os.PathLike[str]) -> Any:
    """Return the content of a JSON file.

    Raises CheckpointError with the name of the file if it is not valid, OSError if it is missing.
    """
    return parse_json(read_regular(path), escape_control_chars(str(path)))


def parse_json(content: bytes, location: str, **options: Any) -> Any:
    """Parse JSON; raise CheckpointError if it is invalid or nested deeper than MAX_DEPTH."""
    try:
        value = json.loads(content, **options)
    except RecursionError as error:
        raise CheckpointError(f"{location} is not valid JSON: it is nested too deep") from error
    except ValueError as error:
        message = f"{location} is not valid JSON ({error}): it is damaged or of another format"
        raise CheckpointError(message) from error

    # Descend level by level, because the parser's own limit depends on the version of Python.
    level = [value]
    for _ in range(MAX_DEPTH):
        level = list(_iterate_children(level))
        if not level:
            return value
    raise CheckpointError(f"{location} is not valid JSON: it is nested more than {MAX_DEPTH} deep")


def _iterate_children(values: list[Any]) -> Iterable[Any]:
    """Yield the entries of all containers among the values."""
    for value in values:
        if type(value) is dict:
            yield from value.values()
        elif type(value) is list:
            yield from value
