"""Background work: threads, and host memory that is allocated once.

Threads suffice: copies, hashes and writes of large buffers release the interpreter lock, so they
delay the training thread by microseconds. Neither another process, which could die or leak, nor
shared memory is needed.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

SLOT_SIZE = 8 << 20  # bytes that are staged and written at once
PAGE = 4096
_HOST_REGISTER_PORTABLE = 1


def same_cuda_device() -> Callable[[], None]:
    """Return a function that selects the current CUDA device of this thread in a new thread.

    A thread begins with device 0, where every local rank would open a context (hundreds of MB).
    """
    if not torch.cuda.is_initialized():
        return lambda: None
    return partial(torch.cuda.set_device, torch.cuda.current_device())


def default_workers() -> int:
    """Return the number of files that a rank writes at once by default: half of its cores, up to 8.

    More writers help fast file systems, in which one file takes one write at a time. The other
    cores are for training.
    """
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # The affinity counts the cores of a container or job, not those of the machine.
    return max(1, min(8, len(os.sched_getaffinity(0)) // (2 * local_ranks)))


_REQUESTS = 32  # in flight at once


def map_in_threads(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return `function(item)` of every item, in order; the calls overlap.

    Reading a small file waits for the storage: 50 ms each add up to minutes for thousands.
    """
    remaining = list(items)
    if len(remaining) < 2:
        return [function(item) for item in remaining]
    with ThreadPoolExecutor(min(_REQUESTS, len(remaining)), "checkpoint-requests") as pool:
        return list(pool.map(function, remaining))


class Saver(Protocol):
    """Owner of daemon threads that save."""

    def end_alone(self) -> None:
        """Finish the save in progress, if any, without calls that all ranks make together."""


_savers: weakref.WeakKeyDictionary[Saver, None] = weakref.WeakKeyDictionary()  # in this order


def end_saver_at_exit(saver: Saver) -> None:
    """Register a saver whose program may end without closing it, e.g., by an exception."""
    _savers[saver] = None


def _end_savers() -> None:
    for saver in list(_savers):
        try:
            saver.end_alone()
        except BaseException as error:  # Ctrl-C, too: the next one may have less to do
            logger.error(f"a save ends with the program: {type(error).__name__}: {error}")


# While threads still run. An interpreter that ends stops daemon threads wherever they are, which
# loses their save, and aborts the process if that is a function of C++.
threading._register_atexit(_end_savers)  # type: ignore[attr-defined]
os.register_at_fork(after_in_child=_savers.clear)  # a child has no such threads


Tasks = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class Workers:
    """Daemon threads that run tasks in the order of submission.

    The process does not wait for them at exit, but see `end_saver_at_exit`. They use the CUDA
    device of the thread that creates them. Without `close` they end after their tasks once this
    object is not used any more, as after an error.
    """

    def __init__(self, count: int, name: str) -> None:
        self._tasks: Tasks = queue.SimpleQueue()
        self._threads = [
            # The threads refer to the queue only: they end when this object is not used any more.
            threading.Thread(
                target=_serve,
                args=(self._tasks, same_cuda_device()),
                name=f"{name}-{i}",
                daemon=True,
            )
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._tasks.put((future, task))
        return future

    def close(self) -> None:
        self._end_threads()
        for thread in self._threads:
            thread.join()

    def __del__(self) -> None:
        self._end_threads()

    def _end_threads(self) -> None:
        for _ in self._threads:
            self._tasks.put(None)


def _serve(tasks: Tasks, use_device: Callable[[], None]) -> None:
    """Run tasks until one is None."""
    use_device()
    while (entry := tasks.get()) is not None:
        future, task = entry
        try:
            future.set_result(task())
        except BaseException as error:
            future.set_exception(error)
        del entry, future, task  # an idle thread must not keep objects alive


class Slot(NamedTuple):
    """Views of the same memory for copies and writes.

    `frame` includes the page before it, for a header.
    """

    address: int
    view: memoryview
    tensor: torch.Tensor
    frame: torch.Tensor


class StagingBuffer:
    """Page-aligned host memory in slots; `pinned` registers it with CUDA for asynchronous
    copies.
    """

    def __init__(self, num_slots: int, pinned: bool) -> None:
        stride = PAGE + SLOT_SIZE
        # Each slot has a page before it, for the header of a message to another node.
        self._memory = mmap.mmap(
            -1, num_slots * stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # forked data loaders have no use for it
            if hasattr(mmap, advice):
                self._memory.madvise(getattr(mmap, advice))
        tensor = torch.frombuffer(self._memory, dtype=torch.uint8)
        view = memoryview(self._memory)
        address = tensor.data_ptr()
        self.slots = [
            Slot(
                address + at,
                view[at : at + SLOT_SIZE],
                tensor[at:][:SLOT_SIZE],
                tensor[at - PAGE :][:stride],
            )
            for at in range(PAGE, num_slots * stride, stride)
        ]
        self._registered: int | None = None
        if pinned:
            # Registering maps the pages, too, but one after another.
            self.touch()
            self._register(address)

    def touch(self) -> None:
        """Map the pages now, in several threads: the first write to a page costs more than many
        later ones.
        """
        with ThreadPoolExecutor(default_workers(), "checkpoint-pages") as pool:
            pool.map(_clear, self.slots)

    def _register(self, address: int) -> None:
        status = torch.cuda.cudart().cudaHostRegister(
            address, len(self._memory), _HOST_REGISTER_PORTABLE
        )
        if int(status) != 0:
            raise MemoryError(
                f"cannot pin {len(self._memory) >> 20} MiB of host memory (CUDA error "
                f"{int(status)})"
            )
        self._registered = address

    def close(self) -> None:
        if self._registered is not None:
            torch.cuda.cudart().cudaHostUnregister(self._registered)
            self._registered = None
        self.slots = []


def _clear(slot: Slot) -> None:
    ctypes.memset(slot.address, 0, SLOT_SIZE)
