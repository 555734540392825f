"""A function over a stream of items in other processes: results in order, and a killed process is
noticed.

torch's DataLoader does the work: it has a queue of items for each worker, puts the results in
order, and raises RuntimeError on the SIGCHLD of a worker that dies, even in the middle of a result.
(ProcessPoolExecutor would wait for the rest of that result forever.) What is added here is how
workers end.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.synchronize import Event
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader

Item = TypeVar("Item")
Result = TypeVar("Result")

WORKER_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGUSR1,
)  # meant for the main process, but sent to all


class OrderedWorkers(Generic[Item, Result]):
    """`(item, function(item))` in the order of `items`, computed by `num_workers` processes; 0: by this one.

    Workers have at most `ahead` items each. They start with the first result and end with `close`,
    with the iterator, or with this process. Raises the ValueErrors of `function` in their place in
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
        self._taken: deque[Item] = deque()  # items whose results have not been asked for
        self._stop: Event = multiprocessing.Event()
        self._results: Any = None  # the iterator of a DataLoader, from the first result on
        # The interpreter terminates worker processes when it ends: they must know beforehand that
        # this is intended.
        atexit.register(weakref.finalize(self, self._stop.set))

    def __iter__(self) -> Iterator[tuple[Item, Result]]:
        return self

    def __next__(self) -> tuple[Item, Result]:
        if self._stop.is_set():
            raise StopIteration
        if self._results is None:
            self._results = self._start()
        try:
            result = next(self._results)
            if isinstance(result, ValueError):
                raise result
        except BaseException:
            self.close()
            raise
        return self._taken.popleft(), result

    def close(self) -> None:
        """End the worker processes."""
        self._stop.set()
        if self._results is not None and self._num_workers > 0:
            # Not left to the garbage collector, under which torch waits five seconds for each
            # worker.
            self._results._shutdown_workers()
        self._results = None

    def _start(self) -> Any:
        loader: DataLoader[Any] = DataLoader(
            _ErrorsAsResults(self._function),  # type: ignore[arg-type]  # has __getitem__, which is all that is used
            batch_size=None,
            sampler=_noted(self._items, self._taken),  # type: ignore[arg-type]
            num_workers=self._num_workers,
            prefetch_factor=self._ahead if self._num_workers else None,
            collate_fn=_as_it_is,
            worker_init_fn=functools.partial(_ignore_signals_until, self._stop, os.getpid()),
            # it draws a seed, which must not come from training's generator
            generator=torch.Generator(),
        )
        # Signals that come while workers start wait until `_ignore_signals_until` has set their
        # handlers.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, WORKER_SIGNALS)
        try:
            return iter(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class _ErrorsAsResults:
    """A function that returns its ValueErrors: raised in a worker, they would arrive wrapped in its
    traceback.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __getitem__(self, item: Any) -> Any:
        try:
            return self._function(item)
        except ValueError as error:
            return error


def _noted(items: Iterable[Item], taken: deque[Item]) -> Iterator[Item]:
    for item in items:
        taken.append(item)
        yield item


def _as_it_is(result: Result) -> Result:
    """In place of torch's conversion to tensors, which travel through /dev/shm: containers keep
    that small.
    """
    return result


def _ignore_signals_until(stop: Event, parent: int, worker: int) -> None:
    """Launchers signal whole process groups, but a run that saves and exits on a signal still needs
    its data: workers end when the main process closes them, or is gone.

    torch's worker loop ends then, too, but its process waits until its last results have been read,
    and workers that were started later hold the pipe open: with large results, all of them would
    stay forever.
    """

    def end_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    def on_terminate(signum: int, frame: object) -> None:
        if stop.is_set():
            os._exit(0)

    for number in WORKER_SIGNALS:
        signal.signal(number, on_terminate if number == signal.SIGTERM else signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WORKER_SIGNALS)
