"""Background threads of saving and loading.

Threads are enough: copies, hashes and writes of large buffers release the interpreter lock, so the training thread is
held up for microseconds; there is no process that could die, leak or be forked, and no shared memory.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch


def same_cuda_device() -> Callable[[], None]:
    """To be called first in a new thread: has it use the CUDA device that is current here, now.

    A thread begins with device 0, where every local rank would open a context of its own (hundreds of MB).
    """
    if not torch.cuda.is_initialized():
        return lambda: None
    return partial(torch.cuda.set_device, torch.cuda.current_device())


class Workers:
    """Daemon threads that run tasks in the order of submission; the process never waits for them at exit.

    They work on the CUDA device of the thread that makes them.
    """

    def __init__(self, count: int, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._use_device = same_cuda_device()
        self._threads = [threading.Thread(target=self._serve, name=f"{name}-{i}", daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._tasks.put((future, task))
        return future

    def close(self) -> None:
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        self._use_device()
        while (entry := self._tasks.get()) is not None:
            future, task = entry
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)
            del entry, future, task  # an idle thread keeps nothing alive
