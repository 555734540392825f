"""The attempts of a job, numbered from 0: the current one, and why earlier ones have ended.

All ranks of a job make the same attempts. An attempt ends when any process ends it in the store of
the job, which must outlive every rank; then all ranks leave it and begin the next one.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from megatron.training.rendezvous import STORE_PREFIX, launcher_store

_REQUEST_TIMEOUT = timedelta(seconds=60)
_PAUSE = 0.02  # seconds between two looks


class AttemptBoard:
    """A client of the store with the attempts of this launch; for one thread.

    `prefix` is the part of the store that belongs to this launch.
    """

    def __init__(self, prefix: str) -> None:
        store = launcher_store(_REQUEST_TIMEOUT)
        assert store is not None
        self._prefix = prefix
        self._store = dist.PrefixStore(f"{prefix}/restart", store)

    def end(self, attempt: int, reason: str) -> None:
        """End `attempt` on all ranks. Only the first reason is kept."""
        self._store.compare_set(f"ended/{attempt}", "", reason)

    def has_ended(self, attempt: int) -> bool:
        return self._store.check([f"ended/{attempt}"])

    def wait_for_end(self, attempt: int, timeout: timedelta) -> bool:
        """Return whether `attempt` ends within `timeout`, as soon as it does."""
        try:
            self._store.wait([f"ended/{attempt}"], timeout)
        except dist.DistStoreError:
            return False
        return True

    def read_reason(self, attempt: int) -> str:
        """Return why `attempt` has ended."""
        return self._store.get(f"ended/{attempt}").decode(errors="replace")

    def find_current(self, attempt: int) -> int:
        """Return the first attempt from `attempt` on that has not ended."""
        while self.has_ended(attempt):
            attempt += 1
        return attempt

    def arrive(self, attempt: int, world_size: int, timeout: timedelta) -> None:
        """Wait until all ranks have arrived in `attempt`. Collective.

        Raises DistStoreError after `timeout`.
        """
        if self._store.add(f"arrived/{attempt}", 1) == world_size:
            self._store.set(f"complete/{attempt}", "")
        self._store.wait([f"complete/{attempt}"], timeout)

    def select_store(self, attempt: int) -> None:
        """Give the process groups of `attempt` a part of the store that no other attempt uses."""
        os.environ[STORE_PREFIX] = f"{self._prefix}/attempt/{attempt}"

    def finish(self) -> None:
        """Record that a rank has completed the run."""
        self._store.add("num_finished", 1)
        self._store.set("finished", "")

    def wait_until_all_finished(self, world_size: int, timeout: timedelta) -> None:
        """Wait until all ranks have completed the run, at most for `timeout`."""
        deadline = time.monotonic() + timeout.total_seconds()
        while self._store.add("num_finished", 0) < world_size and time.monotonic() < deadline:
            time.sleep(_PAUSE)

    def is_finished(self) -> bool:
        """Return whether any rank has completed the run: it cannot take part in an attempt."""
        return self._store.check(["finished"])


class Progress(NamedTuple):
    """The position of a worker: the attempt that it takes part in, and its iterations there.

    `fruitless` counts the attempts in a row, before this one, in which it completed none.
    """

    attempt: int = 0
    iterations: int = 0
    fruitless: int = 0

    def enter(self, attempt: int) -> Progress:
        """Return the position at the beginning of `attempt`, which follows this one."""
        return Progress(attempt, 0, 0 if self.iterations else self.fruitless + 1)


class SharedProgress:
    """The progress of a worker in memory that it shares with its monitor, which outlives it."""

    _FORMAT = struct.Struct("3q")

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, self._FORMAT.size)

    def read(self) -> Progress:
        return Progress(*self._FORMAT.unpack_from(self._memory))

    def write(self, progress: Progress) -> None:
        self._FORMAT.pack_into(self._memory, 0, *progress)

    def count_iteration(self) -> None:
        progress = self.read()
        self.write(progress._replace(iterations=progress.iterations + 1))
