"""A function over a stream of items in other processes: results in order, and a killed process is noticed.

Every worker has a pipe of its own, whose other end only that worker holds: when it dies, even in the middle of a
result, the next read fails. `concurrent.futures.ProcessPoolExecutor` has one queue for all workers and would wait for
the rest of that result forever.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NoReturn, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class WorkerDiedError(RuntimeError):
    """A worker process died, and the items it held are lost."""


def map_in_order(
    function: Callable[[Item], Result], items: Iterable[Item], num_workers: int, ahead: int
) -> Iterator[tuple[Item, Result]]:
    """`(item, function(item))` in the order of `items`; workers have at most `ahead` items each.

    Raises what `function` raises, at its place in the order, or WorkerDiedError. The workers end with the iterator.
    """
    with ExitStack() as stack:
        workers = [stack.enter_context(_Worker(function)) for _ in range(num_workers)]
        pending: deque[Item] = deque()
        sent = 0
        for item in items:
            if len(pending) == ahead * num_workers:
                yield pending.popleft(), workers[sent % num_workers].receive()
            workers[sent % num_workers].send(item)
            pending.append(item)
            sent += 1
        for number in range(sent - len(pending), sent):
            yield pending.popleft(), workers[number % num_workers].receive()


class _Worker:
    """One process; the results of what is sent are received in the same order."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.Process(target=_work, args=(theirs, function, os.getpid()), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._process.terminate()
        self._process.join()
        self._connection.close()

    def send(self, item: Any) -> None:
        try:
            self._connection.send(item)
        except OSError as error:
            self._died(error)

    def receive(self) -> Any:
        try:
            succeeded, value = self._connection.recv()
        except (EOFError, OSError) as error:
            self._died(error)
        if not succeeded:
            raise value
        return value

    def _died(self, error: Exception) -> NoReturn:
        raise WorkerDiedError("a worker process was killed (out of memory?): try fewer --workers") from error


def _work(connection: Connection, function: Callable[[Any], Any], parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    items: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def take_in() -> None:  # all the time: the main process never waits to send while results wait to be sent
        while True:
            items.put(connection.recv())

    def end_with_parent() -> None:  # a main process that is killed cannot end its workers
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    for background in (take_in, end_with_parent):
        threading.Thread(target=background, daemon=True).start()
    while True:
        item = items.get()
        try:
            answer: tuple[bool, Any] = (True, function(item))
        except Exception as error:
            answer = (False, error)
        connection.send(answer)
