"""Object storage via `obstore`: the requests of `object_path.ObjectPath`, imported with its first.

`obstore` is installed by the extra `object-storage`. An object appears whole when its upload ends,
so renames and flushes are not needed. Conditional requests decide between writers: `create`
succeeds for one of them, `replace` only for a writer that has seen the last version. Credentials
and endpoints come from the environment variables of the clouds' own tools (docs/storage.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    import obstore

T = TypeVar("T")

PART_SIZE = 8 << 20  # bytes of one request of an upload or a download
_MAX_PARTS = 9000  # of one upload; the clouds take 10,000
_MAX_WHOLE = 1 << 30  # bytes of an object that is read by one request
_MAX_LISTED = 10**7  # objects below one directory
_CONCURRENCY = 8  # parts of one object that are sent at once


class ConflictError(OSError):
    """Another writer was first: the object exists already, or has changed since it was read."""


class Version(NamedTuple):
    """The content of an object, and the version that `replace` requires."""

    content: bytes
    e_tag: str


def request_deadline() -> float:
    """Return the seconds that one request may take.

    With all its repetitions, an operation may take four times as long.
    """
    text = os.environ.get("MEGATRON_STORAGE_DEADLINE", "60")
    with contextlib.suppress(ValueError):
        seconds = float(text)
        if seconds > 0:
            return seconds
    raise ValueError(f"MEGATRON_STORAGE_DEADLINE={text!r} must be a positive number of seconds")


def _choose_defaults(root: str) -> dict[str, Any]:
    """Return defaults for settings that the environment does not specify.

    Signing the SHA-256 of all data costs five times the CPU time of sending it (1.0 of 1.2 s per
    GB). Messages of https are authenticated without it; with http it is the only protection.
    """
    if not root.startswith("s3:") or "AWS_UNSIGNED_PAYLOAD" in os.environ:
        return {}
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3"):
        endpoint = os.environ.get(name, "")
        if endpoint.startswith("http:"):
            return {}
    return {"aws_unsigned_payload": True}


class ObjectStore:
    """The objects of one bucket (of Azure: container). Errors are OSErrors that name the object."""

    def __init__(self, root: str) -> None:
        try:
            import obstore
            from obstore import store
        except ImportError as error:
            raise ValueError(
                f"{root} needs the package obstore: pip install 'obstore>=0.8,<0.13', or "
                "give a directory"
            ) from error
        self._root = root
        self._api = obstore
        deadline = timedelta(seconds=request_deadline())
        # Endpoints of test servers and of stores inside a cluster speak plain HTTP; the clouds' own
        # are https.
        client: dict[str, Any] = {
            "timeout": deadline,
            "connect_timeout": deadline / 4,
            "allow_http": True,
        }
        # Repeated with exponential back-off and jitter, until the total limit.
        retries: dict[str, Any] = {"max_retries": 10, "retry_timeout": 4 * deadline}
        options: dict[str, Any] = {
            "client_options": client,
            "retry_config": retries,
            "config": _choose_defaults(root),
        }
        try:
            self._store: Any = store.from_url(root, **options)
        except obstore.exceptions.BaseError as error:
            raise ValueError(f"{root} cannot be used: {first_line(error)}") from error

    def put(self, key: str, content: bytes) -> None:
        """Write an object unconditionally."""
        with self.errors(key):
            self._api.put(self._store, key, content, use_multipart=False)

    def create(self, key: str, content: bytes) -> str:
        """Write an object that does not exist yet, and return its e_tag. Else ConflictError."""
        return self._put_if(key, content, "create")

    def replace(self, key: str, content: bytes, e_tag: str) -> str:
        """Replace the version `e_tag` of an object, and return the new one. Else ConflictError."""
        try:
            return self._put_if(key, content, {"e_tag": e_tag})
        except ConflictError:
            # Ceph's gateway compares the header with the tag without its quotes. The condition is
            # the same.
            if not e_tag.startswith('"') or self.version(key) != e_tag:
                raise
            return self._put_if(key, content, {"e_tag": e_tag.strip('"')})

    def _put_if(self, key: str, content: bytes, mode: Any) -> str:
        try:
            with self.errors(key):
                answer = self._api.put(self._store, key, content, mode=mode, use_multipart=False)
                return str(answer["e_tag"])
        except ConflictError:
            # The answer to a successful request may be lost; the repeated request then finds its
            # own object. All contents name their writer, so equal content is ours.
            with contextlib.suppress(FileNotFoundError):
                existing = self.read(key)
                if existing.content == content:
                    return existing.e_tag
            raise

    def read(self, key: str) -> Version:
        """Read a whole object of at most 1 GiB."""
        with self.errors(key):
            answer = self._api.get(self._store, key)
            size = int(answer.meta["size"])
            if size > _MAX_WHOLE:
                raise OSError(errno.EFBIG, f"{size} bytes, at most {_MAX_WHOLE} are read", key)
            return Version(bytes(answer.bytes()), str(answer.meta["e_tag"]))

    def get_range(self, key: str, start: int, length: int) -> obstore.Bytes:
        """Read a range of an object; fewer bytes if the object ends before."""
        with self.errors(key):
            return self._api.get_range(self._store, key, start=start, length=length)

    def size(self, key: str) -> int:
        with self.errors(key):
            return int(self._api.head(self._store, key)["size"])

    def version(self, key: str) -> str | None:
        """Return the e_tag that `replace` requires; None if the object does not exist."""
        try:
            with self.errors(key):
                return str(self._api.head(self._store, key)["e_tag"])
        except FileNotFoundError:
            return None

    def upload(self, key: str, size: int) -> Upload:
        """Begin to upload an object of `size` bytes in parts."""
        part_size = max(PART_SIZE, -(-size // _MAX_PARTS))
        with self.errors(key):
            writer = self._api.open_writer(
                self._store, key, buffer_size=part_size, max_concurrency=_CONCURRENCY
            )
            return Upload(self, key, writer)

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the sizes of all objects below the directory `prefix`, by key."""

        async def collect() -> dict[str, int]:
            sizes: dict[str, int] = {}
            async for chunk in self._api.list(self._store, prefix):
                for item in chunk:
                    sizes[item["path"]] = item["size"]
                # A hostile store could list objects without end.
                if len(sizes) > _MAX_LISTED:
                    raise OSError(errno.EFBIG, f"more than {_MAX_LISTED} objects", prefix)
            return sizes

        with self.errors(prefix):
            return self._run_in_time(collect, prefix)

    def children(self, prefix: str) -> tuple[list[str], list[str]]:
        """Return the directories and the objects directly below `prefix`, as keys."""

        async def collect() -> tuple[list[str], list[str]]:
            answer = await self._api.list_with_delimiter_async(self._store, prefix or None)
            directories = list(answer["common_prefixes"])
            objects = [item["path"] for item in answer["objects"]]
            return directories, objects

        with self.errors(prefix):
            return self._run_in_time(collect, prefix)

    def _run_in_time(self, collect: Callable[[], Coroutine[Any, Any, T]], prefix: str) -> T:
        """Run a listing with a time limit, because a server might never send the last page."""
        seconds = 4 * request_deadline()

        async def run() -> T:
            return await asyncio.wait_for(collect(), seconds)

        # In a thread of its own: the caller may have a running event loop, as notebooks do.
        with ThreadPoolExecutor(1, "object-lister") as pool:
            try:
                listing = pool.submit(lambda: asyncio.run(run()))
                return listing.result()
            except (TimeoutError, asyncio.TimeoutError) as error:
                url = f"{self._root}/{prefix}"
                text = f"the list of objects did not end within {seconds:g} seconds"
                raise OSError(errno.ETIMEDOUT, text, url) from error

    def delete(self, keys: list[str]) -> None:
        """Delete objects; missing ones are ignored."""
        try:
            with self.errors(keys[0] if keys else ""):
                self._api.delete(self._store, keys)
        except FileNotFoundError:
            # The stores of Google and Azure stop at the first missing object.
            for key in keys:
                with contextlib.suppress(FileNotFoundError), self.errors(key):
                    self._api.delete(self._store, key)

    @contextlib.contextmanager
    def errors(self, key: str) -> Iterator[None]:
        """Turn errors of `obstore` into OSErrors that name the object."""
        exceptions = self._api.exceptions
        url = f"{self._root}/{key}"
        try:
            yield
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url) from error
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
            raise ConflictError(errno.EEXIST, "another writer was first", url) from error
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise PermissionError(
                errno.EACCES, f"access denied: {first_line(error)}", url
            ) from error
        except exceptions.BaseError as error:
            raise OSError(errno.EIO, first_line(error), url) from error


class Upload:
    """An upload in progress. The object appears at `close`; without it, it never appears."""

    def __init__(self, store: ObjectStore, key: str, writer: Any) -> None:
        self._writer = writer
        self._errors = partial(store.errors, key)

    def write(self, data: bytes | memoryview) -> int:
        with self._errors():
            return int(self._writer.write(data))

    def close(self) -> None:
        with self._errors():
            self._writer.close()


def first_line(error: BaseException) -> str:
    """Return the first line of an error: those of some libraries are pages long."""
    message, _, _ = str(error).partition("\n")
    return message[:300]


@lru_cache
def open_store(root: str, pid: int) -> ObjectStore:
    """Return the store of a bucket, once per process `pid`."""
    return ObjectStore(root)
