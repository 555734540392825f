"""Files in object storage: ranges that are read, uploads in any order, and a probe of the store."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor

from megatron.core.object_path import ObjectPath
from megatron.core.object_storage import PART_SIZE, ConflictError
from megatron.core.safe_files.reading import OpenFile


class OpenObject(OpenFile):
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
            subview = view[start:stop]
            store = self._object.store
            content = memoryview(store.get_range(self._object.key, position + start, len(subview)))
            if len(content) != len(subview):
                raise OSError(errno.EIO, f"{len(content)} bytes came instead of {len(subview)}")
            subview[:] = content

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


class OrderedUpload:
    """An upload whose pieces any thread may write in any order.

    Pieces that are written before their turn are copied and wait.
    """

    def __init__(self, path: ObjectPath, size: int) -> None:
        self._upload = path.store.upload(path.key, size)
        self._size = size
        self._position = 0
        self._early: dict[int, bytes] = {}
        self._lock = threading.Lock()

    def write(self, position: int, content: memoryview) -> None:
        """Write `content` at byte `position` of the object."""
        with self._lock:
            if position != self._position:
                self._early[position] = bytes(content)
                return
            next_content: bytes | memoryview | None = content
            while next_content is not None:
                self._upload.write(next_content)
                self._position += len(next_content)
                next_content = self._early.pop(self._position, None)

    def close(self) -> None:
        """Complete the object. Without this call it never appears."""
        assert self._position == self._size, (self._position, self._size)
        self._upload.close()


def check_conditional_requests(directory: ObjectPath) -> None:
    """Raise ValueError for a store that ignores the conditions of requests.

    Two writers would overwrite each other's checkpoints there.
    """
    store = directory.store
    key = (directory / f".probe-{secrets.token_hex(8)}").key
    try:
        e_tag = store.create(key, b"1")
        # Both requests must fail: the object exists, and the other one names another version.
        refused = 0
        for attempt in (
            lambda: store.create(key, b"2"),
            lambda: store.replace(key, b"3", f'"{"0" * 32}"'),
        ):
            try:
                attempt()
            except ConflictError:
                refused += 1
        if refused < 2:
            endpoint = os.environ.get("AWS_ENDPOINT_URL", directory.bucket)
            raise ValueError(
                f"{directory}: the store at {endpoint} ignores conditional requests "
                "(If-None-Match, If-Match), without "
                "which two jobs would damage each other's checkpoints (rclone's and s3rver's do). "
                "Use another store"
            )
        # A request whose condition holds must succeed.
        store.replace(key, b"4", e_tag)
    except OSError as error:
        raise ValueError(f"checkpoints cannot be saved to {directory}: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            store.delete([key])
