"""Validation of untrusted files: composable checks for their type, size and content.

Files must be regular ones, of bounded size, inside the directory they belong to. Reading a pipe or
`/dev/zero` would never end, and a link or a `../` in the content of a file would make us read files
that its author has no right to.

A check is a function `(value, where) -> value` that raises CheckpointError with file, field and
value. A check does not trust the value: it never calls `repr` on a container, which might unfold
without end.

    TRAINING = record({"iteration": COUNT, "note?": text()})
    STATE = record({"files": sequence(file_name), "training": TRAINING})
    STATE(read_json(path), str(path))
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

from megatron.core.dist_checkpointing.format import links
from megatron.core.object_storage import PART_SIZE, ObjectPath, path_of
from megatron.core.terminal import escape_control_chars

_MADV_POPULATE_READ = 22  # <linux/mman.h>; Python has no name for it yet


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read.

    The message names the file or key, the reason and the fix.
    """


class DamagedError(CheckpointError):
    """A file differs from the one that was saved."""


class UnsafePickleError(CheckpointError):
    """A pickle names something that no checkpoint needs. No code of it was executed."""


Check = Callable[[Any, str], Any]


def limit(name: str, default: int) -> int:
    """Return a sanity limit. The environment variable MEGATRON_MAX_<name> overrides it."""
    value = os.environ.get(f"MEGATRON_MAX_{name}", str(default))
    if not value.isdecimal():
        raise ValueError(f"MEGATRON_MAX_{name}={value!r} must be a whole number")
    return int(value)


MAX_COUNT = 2**53 - 1  # the largest integer that every JSON parser represents exactly
MAX_RANK = limit("DIMENSIONS", 64)  # dimensions of a tensor, as in torch and numpy
MAX_DEPTH = 200  # nested containers
_MAX_FORMATTED = 60  # characters of a text in a message
_MAX_LISTED = 8  # entries of a container in a message

# Values for messages


def format_value(value: Any) -> str:
    """Return one short printable line for any value, without trusting it."""
    kind = type(value)
    if isinstance(value, str | bytes):
        shortened = repr(value[:_MAX_FORMATTED])
        if len(value) > _MAX_FORMATTED:
            shortened += "..."
        return shortened

    # `repr` of a huge integer takes quadratic time.
    if kind is int and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    if value is None or kind in (bool, int, float, complex) or is_dtype(value):
        return repr(value)

    # `repr` of a container may unfold without end.
    if isinstance(value, list | tuple | dict | set | frozenset):
        if kind is not dict and _is_short_and_flat(value):
            return escape_control_chars(str(value))[:200]
        return f"a {kind.__name__} of {len(value)} entries"

    # `repr` of any other object could run code of a hostile file.
    return escape_control_chars(f"a {kind.__module__}.{kind.__qualname__}")[:200]


def _is_short_and_flat(values: Any) -> bool:
    """Return whether a container has few entries, which are numbers and texts."""
    is_flat = all(type(item) in (int, float, str) for item in values)
    return len(values) <= _MAX_LISTED and is_flat


def abbreviate(lines: Sequence[str], limit: int = 20, between: str = "\n  ") -> str:
    """Join the first `limit` lines, and append the number of the others."""
    text = between.join(lines[:limit])
    if len(lines) > limit:
        text += f" ... and {len(lines) - limit} more"
    return text


def is_dtype(value: Any) -> bool:
    """Return whether `value` is a dtype of torch, without importing torch."""
    kind = type(value)
    return kind.__qualname__ == "dtype" and kind.__module__ == "torch"


def refuse(where: str, value: Any, wanted: str) -> NoReturn:
    """Raise CheckpointError for a value that is not `wanted`."""
    raise CheckpointError(f"{where} is {format_value(value)}, but must be {wanted}")


# Checks


def anything(value: Any, where: str) -> Any:
    """Accept any value."""
    return value


def boolean(value: Any, where: str) -> Any:
    """Accept True or False."""
    if type(value) is not bool:
        refuse(where, value, "true or false")
    return value


def integer(low: int = 0, high: int = MAX_COUNT) -> Check:
    """Accept a whole number from `low` to `high`."""

    def check(value: Any, where: str) -> Any:
        if type(value) is not int or not low <= value <= high:
            refuse(where, value, f"a whole number from {low} to {high}")
        return value

    return check


COUNT = integer()


def plausible(name: str, default: int, low: int = 1) -> Check:
    """Accept a whole number up to a `limit`."""
    high = limit(name, default)
    check_range = integer(low, high)

    def check(value: Any, where: str) -> Any:
        if type(value) is int and value > high:
            variable = f"MEGATRON_MAX_{name}"
            wanted = f"at most {high} (the environment variable {variable} raises the limit)"
            refuse(where, value, wanted)
        return check_range(value, where)

    return check


def number(low: float = -math.inf, high: float = math.inf) -> Check:
    """Accept a finite number from `low` to `high`."""
    limits = ""
    if (low, high) != (-math.inf, math.inf):
        limits = f" from {low:g} to {high:g}"

    def check(value: Any, where: str) -> Any:
        is_finite = type(value) in (int, float) and -math.inf < value < math.inf
        if not is_finite or not low <= value <= high:
            refuse(where, value, f"a finite number{limits}")
        return value

    return check


def text(limit: int = 4096) -> Check:
    """Accept a text of at most `limit` characters."""

    def check(value: Any, where: str) -> Any:
        if type(value) is not str or len(value) > limit:
            refuse(where, value, f"a text of at most {limit} characters")
        return value

    return check


def one_of(*choices: Any) -> Check:
    """Accept a value that is equal to a choice and has the same type."""

    def check(value: Any, where: str) -> Any:
        for choice in choices:
            if type(value) is type(choice) and value == choice:
                return value
        refuse(where, value, f"one of {', '.join(map(str, choices))}")

    return check


def optional(check: Check) -> Check:
    """Accept None in addition to the values that `check` accepts."""

    def check_optional(value: Any, where: str) -> Any:
        if value is None:
            return None
        return check(value, where)

    return check_optional


def sequence(check: Check, limit: int = 10**7, least: int = 0) -> Check:
    """Accept a list or tuple of `least` to `limit` entries."""

    def check_all(value: Any, where: str) -> Any:
        if not isinstance(value, list | tuple) or not least <= len(value) <= limit:
            refuse(where, value, f"a list of {least} to {limit} entries")
        for index, item in enumerate(value):
            check(item, f"{where}[{index}]")
        return value

    return check_all


def mapping(check: Check, keys: Check = text()) -> Check:  # noqa: B008 (a check has no state)
    """Accept a dictionary whose values pass `check`."""

    def check_all(value: Any, where: str) -> Any:
        if not isinstance(value, Mapping):
            refuse(where, value, "a dictionary")
        for name, item in value.items():
            keys(name, f"{where}: a key")
            check(item, f"{where}: {escape_control_chars(str(name))}")
        return value

    return check_all


def record(fields: Mapping[str, Check], closed: bool = False) -> Check:
    """Accept a dictionary with these fields.

    A name that ends in `?` is optional. If `closed`, other fields are an error.
    """
    checks = {name.removesuffix("?"): check for name, check in fields.items()}
    required = [name for name in fields if not name.endswith("?")]

    def check_fields(value: Any, where: str) -> Any:
        if not isinstance(value, Mapping):
            refuse(where, value, "a dictionary")
        for name in required:
            if name not in value:
                raise CheckpointError(f"{where} has no {name!r}")
        for name, check in checks.items():
            if name in value:
                check(value[name], f"{where}: {name}")
        if closed:
            unknown = [name for name in value if name not in checks]
            if unknown:
                name = format_value(unknown[0])
                raise CheckpointError(f"{where} has a field {name}, which is not known")
        return value

    return check_fields


def key(value: Any, where: str) -> Any:
    """Accept the name of a tensor or an object, which a terminal prints unchanged."""
    text(1024)(value, where)
    if not value.isprintable():
        refuse(where, value, "a printable name")
    return value


def file_name(value: Any, where: str) -> Any:
    """Accept the name of a file in the same directory, which a terminal prints unchanged."""
    text(255)(value, where)
    is_path = value in ("", ".", "..") or "/" in value or "\\" in value
    if is_path or not value.isprintable():
        refuse(where, value, "the name of a file, without a path")
    return value


SHAPE = sequence(integer(), MAX_RANK)


def plain(value: Any, where: str) -> Any:
    """Accept values that JSON can represent."""
    if isinstance(value, dict):
        for name, item in value.items():
            text()(name, f"{where}: a key")
            plain(item, f"{where}: {escape_control_chars(name)}")
    elif isinstance(value, list | tuple):
        for item in value:
            plain(item, where)
    elif value is not None and type(value) not in (bool, int, float, str):
        refuse(where, value, "plain data")
    return value


# Files


# Bytes of a file that is read whole
MAX_JSON = 256 << 20
_PLAUSIBLE_SIZE = 64 << 20  # always accepted
_MAX_SIZE = 1 << 30  # accepted if the files next to it are as large


def _open_descriptor(path: str | os.PathLike[str], follow_links: bool) -> int:
    """Open `path` for reading.

    Raises CheckpointError unless it is a regular file inside its checkpoint, OSError if it is
    missing.
    """
    name = escape_control_chars(str(path))
    if not follow_links:
        target = links.find_outside_target(path)
        if target is not None:
            raise CheckpointError(
                f"{name} is a link to {escape_control_chars(target)}, "
                "outside of the checkpoint. If you trust it, use --follow-links, or set "
                f"{links.FOLLOW_LINKS}=1"
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
        count = max(0, min(length, self.size - position))
        try:
            content = bytearray(count)
        except MemoryError as error:
            raise CheckpointError(
                f"{escape_control_chars(str(self.path))}: {count} bytes of it do not fit in memory"
            ) from error
        self.read_into(memoryview(content), position)
        return bytes(content)

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
        done = 0
        while done < len(view):
            try:
                count = self._read_some(view[done:], position + done)
            except OSError as error:
                raise CheckpointError(
                    f"{self.path}: cannot be read at {position + done}: {error.strerror}"
                ) from error
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
        return os.preadv(self.descriptor, [view], position)

    def measure_directory(self) -> int:
        """Return the bytes that the files next to this one use on disk, this one included."""
        total = 0
        with os.scandir(os.path.dirname(os.path.abspath(self.path))) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                # A sparse file uses fewer blocks (512 bytes each) than its size suggests.
                total += min(status.st_size, 512 * status.st_blocks)
        return total


class _OpenObject(OpenFile):
    """An object. It is not held open; each read is one request, or several in parallel."""

    closest_gap = 1 << 20  # a request takes as long as reading a megabyte

    def __init__(self, path: ObjectPath, follow_links: bool = False) -> None:
        self.path = path
        self.descriptor = None
        self.size = path.stat().st_size
        self._object = path

    def _read_some(self, view: memoryview, position: int) -> int:
        length = min(len(view), self.size - position)
        if length <= 0:
            return 0

        def fetch(start: int) -> None:
            """Fill one part of `view` with one request."""
            stop = min(start + PART_SIZE, length)
            part = view[start:stop]
            store = self._object.store
            content = memoryview(store.get_range(self._object.key, position + start, len(part)))
            if len(content) != len(part):
                raise OSError(errno.EIO, f"{len(content)} bytes came instead of {len(part)}")
            part[:] = content

        # Large reads are split into parallel requests.
        starts = range(0, length, PART_SIZE)
        if len(starts) == 1:
            fetch(0)
        else:
            with ThreadPoolExecutor(min(8, len(starts)), "object-reader") as pool:
                list(pool.map(fetch, starts))
        return length

    def measure_directory(self) -> int:
        directory = self._object.parent.key
        sizes = self._object.store.sizes(directory)
        return sum(sizes.values())


# By the type of the path; any other path is one of the local file system.
OPENERS: dict[type[Path], Callable[[Any], OpenFile]] = {ObjectPath: _OpenObject}


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
    """Return the content of a regular file of at most `limit` bytes, else raise CheckpointError."""
    with open_file(path, follow_links=follow_links) as file:
        if file.size > limit:
            raise CheckpointError(
                f"{escape_control_chars(str(path))} has {file.size} bytes, "
                f"more than the {limit} that it may have"
            )
        return file.read(0, file.size)


def read_json(path: str | os.PathLike[str]) -> Any:
    """Return the content of a JSON file.

    Raises CheckpointError with the name of the file if it is not valid, OSError if it is missing.
    """
    return parse_json(read_regular(path), escape_control_chars(str(path)))


def parse_json(content: bytes, where: str, **options: Any) -> Any:
    """Parse JSON; raise CheckpointError if it is invalid or nested deeper than MAX_DEPTH."""
    try:
        value = json.loads(content, **options)
    except RecursionError as error:
        raise CheckpointError(f"{where} is not valid JSON: it is nested too deep") from error
    except ValueError as error:
        message = f"{where} is not valid JSON ({error}): it is damaged or of another format"
        raise CheckpointError(message) from error

    # Descend level by level, because the parser's own limit depends on the version of Python.
    level = [value]
    for _ in range(MAX_DEPTH):
        level = list(_iterate_children(level))
        if not level:
            return value
    raise CheckpointError(f"{where} is not valid JSON: it is nested more than {MAX_DEPTH} deep")


def _iterate_children(values: list[Any]) -> Iterable[Any]:
    """Yield the entries of all containers among the values."""
    for value in values:
        if type(value) is dict:
            yield from value.values()
        elif type(value) is list:
            yield from value


def named_file(directory: Path, name: Any, where: str) -> Path:
    """Return the path of a file in `directory` that the content of another file names.

    Raises CheckpointError naming `where` if it is not a name, or not the name of a regular file. A
    missing file is left to the caller.
    """
    path = directory / file_name(name, where)
    target = links.find_outside_target(path)
    if target is not None:
        raise CheckpointError(
            f"{where}: {name} is a link to {escape_control_chars(target)}, outside of {directory}"
        )
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{where}: {name} is not a regular file")
    return path
