"""Paths in object storage: `s3://bucket/prefix`, `gs://` and `az://`.

Their requests are in `object_storage`, which is imported by the first one.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.core.wings import resolve

if TYPE_CHECKING:
    from megatron.core.object_storage import ObjectStore

SCHEMES = ("s3", "gs", "az")
_OPEN_STORE = "megatron.core.object_storage:open_store"

Listing = tuple[list[str], list[str]]  # keys of directories and of objects
_listings: ContextVar[dict[str, Listing] | None] = ContextVar("listings", default=None)


@contextlib.contextmanager
def listing_once() -> Iterator[None]:
    """List each directory in object storage at most once, and look up files in these lists.

    For many questions about a few directories: each would be a request of milliseconds.
    """
    token = _listings.set({})
    try:
        yield
    finally:
        _listings.reset(token)


class _Stat(NamedTuple):
    st_size: int


class ObjectPath(type(Path())):  # type: ignore[misc]
    """A path in object storage, with those methods of `pathlib.Path` that readers use.

    It is a Path so that the directory of a checkpoint has one type. Functions that require a path
    in the local file system (`open`, `os.rename`, `shutil`) raise ValueError.
    """

    __slots__ = ()

    def __str__(self) -> str:
        if not self.parts:  # the last of `parents`
            return "."
        scheme, *components = self.parts
        return f"{scheme}//{'/'.join(components)}"

    def __fspath__(self) -> str:
        raise ValueError(
            f"{self}: this requires a directory of a file system; object storage is for "
            "torch_dist checkpoints"
        )

    @property
    def bucket(self) -> str:
        """The scheme and the bucket."""
        return f"{self.parts[0]}//{self.parts[1]}"

    @property
    def key(self) -> str:
        return "/".join(self.parts[2:])

    @property
    def store(self) -> ObjectStore:
        """The store, opened once per process: it has threads, which do not survive a fork."""
        store: ObjectStore = resolve(_OPEN_STORE)(self.bucket, os.getpid())
        return store

    def resolve(self, strict: bool = False) -> ObjectPath:
        return self

    absolute = resolve

    def stat(self, *, follow_symlinks: bool = True) -> Any:
        return _Stat(self.store.size(self.key))

    def is_file(self) -> bool:
        if _listings.get() is not None and self.key:
            _, objects = self.parent._list()
            return self.key in objects
        try:
            return bool(self.key) and self.stat().st_size >= 0
        except FileNotFoundError:
            return False

    def is_dir(self) -> bool:
        directories, objects = self._list()
        return bool(directories or objects)

    def _list(self) -> Listing:
        """Return the directories and the objects in this directory, as keys."""
        listings = _listings.get()
        if listings is None:
            return self.store.children(self.key)
        url = str(self)
        if url not in listings:
            listings[url] = self.store.children(self.key)
        return listings[url]

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        return self.is_file() or self.is_dir()

    def is_symlink(self) -> bool:
        return False

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Return at once: a directory exists as soon as it contains an object."""

    def iterdir(self) -> Any:
        directories, objects = self._list()
        paths = []
        for key in directories + objects:
            _, _, name = key.rpartition("/")
            paths.append(self / name)
        return iter(paths)

    def glob(self, pattern: str) -> Any:  # type: ignore[override]
        """Yield the paths that match a pattern without `**`."""
        first, _, remaining_pattern = pattern.partition("/")
        for path in self.iterdir():
            if not fnmatch.fnmatchcase(path.name, first):
                continue
            if remaining_pattern:
                yield from path.glob(remaining_pattern)
            else:
                yield path

    def read_bytes(self) -> bytes:
        return self.store.read(self.key).content

    def read_text(self, encoding: str | None = None, errors: str | None = None) -> str:  # type: ignore[override]
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    def unlink(self, missing_ok: bool = False) -> None:
        self.store.delete([self.key])


def path_of(name: str | os.PathLike[str]) -> Path:
    """Return the path of a directory, or in object storage, that a flag or argument specifies."""
    if isinstance(name, Path):
        return name
    text = os.fspath(name)
    scheme, separator, bucket_and_key = text.partition("://")
    if not separator:
        return Path(text)
    if scheme not in SCHEMES or not bucket_and_key.strip("/"):
        examples = [f"{supported_scheme}://bucket/prefix" for supported_scheme in SCHEMES]
        raise ValueError(f"{text}: give a directory, or one of {', '.join(examples)}")
    return ObjectPath(text)
