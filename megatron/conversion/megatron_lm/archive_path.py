"""Paths inside an uncompressed tar archive, whose files are read where they are.

`/data/model.nemo/model_weights/common.pt` is the file `model_weights/common.pt` of the archive
`/data/model.nemo`.
"""

from __future__ import annotations

import fnmatch
import os
import tarfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, cast

from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.safe_files.reading import OPENERS, OpenFile

SUFFIX = ".nemo"
_MAX_HEADER = 1 << 20  # bytes that are read at once, e.g. of a long name
_MAX_MEMBERS = 1 << 20
_COMPRESSED = b"\x1f\x8b"  # gzip


class _Member(NamedTuple):
    """Position of a file in the archive."""

    position: int
    size: int


class _MemberStatus(NamedTuple):
    st_size: int


class ArchivePath(type(Path())):  # type: ignore[misc]
    """A path in an archive, with those methods of `pathlib.Path` that readers use."""

    __slots__ = ()

    @property
    def archive(self) -> Path:
        """The archive, a regular file."""
        for path in (self, *self.parents):
            if path.suffix == SUFFIX:
                return Path(str(path))
        raise ValueError(f"{self} is not in an archive *{SUFFIX}")

    @property
    def member(self) -> str:
        """The path in the archive."""
        return Path(str(self)).relative_to(self.archive).as_posix()

    @property
    def _members(self) -> dict[str, _Member]:
        status = os.stat(self.archive)
        return _read_members(self.archive, status.st_size, status.st_mtime_ns)

    def stat(self, *, follow_symlinks: bool = True) -> _MemberStatus:  # type: ignore[override]
        member = self._members.get(self.member)
        if member is None:
            raise FileNotFoundError(2, "no such file in the archive", str(self))
        return _MemberStatus(member.size)

    def is_file(self) -> bool:
        return self.member in self._members

    def is_dir(self) -> bool:
        return any(True for _ in self.iterdir())

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        return self.is_file() or self.is_dir()

    def is_symlink(self) -> bool:
        return False

    def resolve(self, strict: bool = False) -> ArchivePath:
        return self

    absolute = resolve

    def is_relative_to(self, *directory: str | os.PathLike[str]) -> bool:
        """Return whether the file is below a resolved directory or archive."""
        return (self.archive.resolve() / self.member).is_relative_to(*directory)

    def iterdir(self) -> Iterator[ArchivePath]:
        prefix = "" if self.member == "." else f"{self.member}/"
        names = {}
        for name in self._members:
            if name.startswith(prefix):
                first, _, _ = name.removeprefix(prefix).partition("/")
                names[first] = self / first
        return iter(names.values())

    def glob(self, pattern: str) -> Iterator[ArchivePath]:  # type: ignore[override]
        """Yield the paths that match a pattern of one level."""
        for path in self.iterdir():
            if fnmatch.fnmatchcase(path.name, pattern):
                yield path

    def read_bytes(self) -> bytes:
        with OpenMember(self) as file:
            return file.read(0, file.size)


class OpenMember(OpenFile):
    """An open file in an archive: a range of the file of the archive."""

    def __init__(self, path: Path, follow_links: bool = False) -> None:
        archive_path = cast(ArchivePath, path)
        size = archive_path.stat().st_size
        super().__init__(archive_path.archive, follow_links)
        self._start = archive_path._members[archive_path.member].position
        self.path = path
        self.size = size

    def map(self, start: int, stop: int) -> None:  # type: ignore[override]
        """Return None: files in an archive do not begin with a page."""

    def forget(self, position: int, length: int) -> None:
        super().forget(self._start + position, length)

    def _read_some(self, view: memoryview, position: int) -> int:
        length = min(len(view), self.size - position)
        if length <= 0:
            return 0
        return super()._read_some(view[:length], self._start + position)

    def measure_directory(self) -> int:
        return sum(file.stat().st_size for file in self.path.parent.iterdir() if file.is_file())


OPENERS[ArchivePath] = OpenMember


class _HeaderFile:
    """The file of an archive for `tarfile`, which reads headers of limited size only."""

    def __init__(self, file: OpenFile) -> None:
        self._file = file
        self._position = 0

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> int:
        self._position = position
        return position

    def read(self, size: int) -> bytes:
        if size > _MAX_HEADER:
            raise CheckpointError(f"{self._file.path}: a header has {size} bytes: it is damaged")
        content = self._file.read(self._position, size)
        self._position += len(content)
        return content


@lru_cache(maxsize=8)
def _read_members(archive: Path, size: int, time_ns: int) -> dict[str, _Member]:
    """Return the regular files of an archive; its size and time distinguish its versions.

    Raises CheckpointError for a compressed or damaged archive.
    """
    members: dict[str, _Member] = {}
    with OpenFile(archive) as file:
        if file.read(0, 2) == _COMPRESSED:
            raise CheckpointError(
                f"{archive} is compressed, so its files cannot be read in place: unpack it (tar "
                "xzf) and give its directory"
            )
        try:
            with tarfile.open(fileobj=_HeaderFile(file), mode="r:") as index:  # type: ignore[call-overload]
                for entry in index:
                    is_plain = entry.isreg() and not entry.issparse()
                    name = os.path.normpath(entry.name)
                    if is_plain and not name.startswith(("/", "..")):
                        members[name] = _Member(entry.offset_data, entry.size)
                    if len(members) > _MAX_MEMBERS:
                        raise CheckpointError(f"{archive} has more than {_MAX_MEMBERS} files")
        except (tarfile.TarError, ValueError) as error:
            raise CheckpointError(f"{archive} is not an archive, or damaged: {error}") from error
        for name, member in members.items():
            if member.position + member.size > file.size:
                raise CheckpointError(f"{archive} is truncated: {name} ends after the file")
    return members
