"""Ordered parallel map over a stream of items in worker processes, robust against killed workers.

Based on torch's DataLoader, which has a queue of items for each worker, returns the results in
order, and raises RuntimeError on the SIGCHLD of a worker that dies, even in the middle of a result.
(ProcessPoolExecutor would wait for the rest of that result forever.) This module adds an orderly
end of the workers.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader

Item = TypeVar("Item")
Result = TypeVar("Result")

# Signals for the main process that launchers send to all processes.
WORKER_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class OrderedWorkers(Generic[Item, Result]):
    """Iterator over `(item, function(item))` in the order of `items`.

    `num_workers` processes compute the results; 0 means this process. Each worker has at most
    `ahead` items in its queue. Workers start with the first result and end with `close`, with the
    iterator, or with this process. Iteration raises a ValueError of `function` at its position in
    the order, and RuntimeError if a worker was killed.
    """

    def __init__(
        self,
        function: Callable[[Item], Result],
        items: Iterable[Item],
        num_workers: int,
        ahead: int = 2,
    ) -> None:
        self._function = function
        self._items = items
        self._num_workers = num_workers
        self._ahead = ahead
        self._pending: deque[Item] = deque()  # items whose results have not been returned
        # Not an `Event`: Ctrl-C during a call of one may leave its lock locked forever.
        self._stops = multiprocessing.RawValue(ctypes.c_bool, False)
        self._results: Any = None  # iterator of a DataLoader; created for the first result
        # Exit codes of workers that ended before `close`, by process id; negative: a signal.
        self.exit_codes: dict[int, int] = {}
        # The interpreter terminates worker processes on exit; the value marks this as intended.
        atexit.register(weakref.finalize(self, _set, self._stops))

    def __iter__(self) -> Iterator[tuple[Item, Result]]:
        return self

    def __next__(self) -> tuple[Item, Result]:
        if self._stops.value:
            raise StopIteration
        # Workers start with the first item, so that an unused iterator costs nothing.
        if self._results is None:
            self._results = self._start()
        try:
            result = next(self._results)
            if isinstance(result, ValueError):
                raise result
        except BaseException:
            self.close()
            raise
        return self._pending.popleft(), result

    def close(self) -> None:
        """End the worker processes."""
        _set(self._stops)
        if self._results is not None and self._num_workers > 0:
            for worker in self._results._workers:
                if worker.exitcode is not None:
                    self.exit_codes[worker.pid] = worker.exitcode
            # torch's SIGCHLD handler raises if another worker dies meanwhile. During garbage
            # collection torch would wait five seconds for each worker.
            with contextlib.suppress(RuntimeError):
                self._results._shutdown_workers()
        self._results = None

    def _start(self) -> Any:
        loader: DataLoader[Any] = DataLoader(
            # A DataLoader uses only `__getitem__` of its dataset.
            _ReturnErrors(self._function),  # type: ignore[arg-type]
            batch_size=None,
            sampler=_record(self._items, self._pending),  # type: ignore[arg-type]
            num_workers=self._num_workers,
            prefetch_factor=self._ahead if self._num_workers else None,
            collate_fn=_keep_result,
            worker_init_fn=functools.partial(_ignore_signals_until, self._stops, os.getpid()),
            # The loader draws a seed, which must not advance the generator of training.
            generator=torch.Generator(),
        )
        # Block signals while workers start, until `_ignore_signals_until` has set their handlers.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, WORKER_SIGNALS)
        try:
            return iter(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _set(value: ctypes.c_bool) -> None:
    value.value = True


class _ReturnErrors:
    """Wraps a function to return its ValueErrors instead of raising them.

    Raised in a worker, they would arrive with the worker's traceback in their message.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __getitem__(self, item: Any) -> Any:
        try:
            return self._function(item)
        except ValueError as error:
            return error


def _record(items: Iterable[Item], pending: deque[Item]) -> Iterator[Item]:
    """Yield the items, and append each one to `pending`."""
    for item in items:
        pending.append(item)
        yield item


def _keep_result(result: Result) -> Result:
    """Return the result unchanged.

    The default conversion to tensors would use /dev/shm, which is small in containers.
    """
    return result


def _ignore_signals_until(stops: ctypes.c_bool, parent: int, worker: int) -> None:
    """Install signal handlers in a worker that ignore signals until `stops` is true.

    Launchers signal whole process groups, but a run that saves and exits on a signal still needs
    its data: workers end when the main process closes them or has ended.

    torch's own watchdog is not sufficient: its process waits until its last results have been read,
    and workers that were started later keep the pipe open, so that with large results all of them
    would stay forever.
    """

    def end_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    def on_terminate(signum: int, frame: object) -> None:
        if stops.value:
            os._exit(0)

    for signal_number in WORKER_SIGNALS:
        signal.signal(
            signal_number, on_terminate if signal_number == signal.SIGTERM else signal.SIG_IGN
        )
    threading.Thread(target=end_with_parent, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WORKER_SIGNALS)
