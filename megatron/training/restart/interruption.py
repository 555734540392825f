"""Interrupts the main thread of a rank when its attempt has ended.

The main thread may be in a collective that a lost rank will never join, waiting for a thread, or
computing. Connections are shut down, so that collectives and requests to the store fail on both
ends; a signal interrupts everything else.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron.core.deferred import queueing_lock
from megatron.training.restart.attempts import AttemptBoard

NEW_PROCESS = 75  # exit code with which a worker requests a new process (EX_TEMPFAIL)
_SIGNAL = signal.SIGUSR2  # schedulers send SIGUSR1 and SIGTERM
_PAUSE = 0.2  # seconds between two signals: an exception in a destructor is lost
# Seconds to leave an attempt. A send of gloo does not always notice that its connection is closed.
PATIENCE = 0.5
_QUEUEING_TIME = 5.0  # maximum seconds to wait for messages that are being queued
_WAIT = timedelta(hours=1)  # of one request to the store


class AttemptEndedError(BaseException):
    """The attempt has ended on another rank. Not an Exception, which training code may handle."""


class Interrupter:
    """Interrupts the main thread of a worker in `interruptible` blocks. Create it there."""

    def __init__(self, prefix: str) -> None:
        self._board = AttemptBoard(prefix)  # of the thread that waits for the end of an attempt
        self._main_thread = threading.get_ident()
        self._inside = False
        self._outside: set[str] = set()  # connections from before the block
        self._released = threading.Event()
        # Interruptions of an attempt must not reach the process groups of the next one.
        self._lock = threading.Lock()
        signal.signal(_SIGNAL, self._on_signal)

    @contextmanager
    def interruptible(self, attempt: int) -> Iterator[None]:
        """Raise AttemptEndedError, or an error of a collective, once `attempt` has ended.

        After an error call `release` when the objects of the attempt are released. If that takes
        too long, the process exits to be replaced.
        """
        self._outside = list_connections()
        self._released = threading.Event()
        thread = threading.Thread(
            target=self._interrupt_after_end,
            args=(attempt, self._released),
            name="restart-interrupter",
            daemon=True,
        )
        self._inside = True
        try:
            thread.start()
            yield
            self.release()
        finally:
            self._inside = False

    def release(self) -> None:
        """Report that the main thread has left the attempt and released its objects."""
        with self._lock:
            self._released.set()

    def abort_communication(self) -> None:
        """Let all operations of process groups and requests over new connections fail."""
        with self._lock:
            abort_communication(self._outside)

    def _interrupt_after_end(self, attempt: int, released: threading.Event) -> None:
        while not self._board.wait_for_end(attempt, _WAIT):
            pass
        ended = time.monotonic()
        while not released.is_set():
            # A new process costs milliseconds, unless it needs another context on the device.
            if time.monotonic() - ended > PATIENCE and not torch.cuda.is_initialized():
                os._exit(NEW_PROCESS)
            with self._lock:
                if self._inside and not released.is_set():
                    abort_communication(self._outside)
                    signal.pthread_kill(self._main_thread, _SIGNAL)
            released.wait(_PAUSE)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._inside:
            raise AttemptEndedError


def abort_communication(kept: Collection[str]) -> None:
    """Let all operations of process groups fail, and all requests over connections not in `kept`.

    gloo cannot be aborted, but it fails when its connections are shut down. So do clients of the
    store.
    """
    if dist.is_initialized() and dist.get_backend() == "nccl":
        # Messages are queued within microseconds, unless the queue of a stream is full.
        is_locked = queueing_lock.acquire(timeout=_QUEUEING_TIME)
        try:
            with contextlib.suppress(RuntimeError, ValueError):
                distributed_c10d._abort_process_group()
        finally:
            if is_locked:
                queueing_lock.release()
    for name in list_connections():
        if name not in kept:
            _shut_down(name)


def list_connections() -> set[str]:
    """Return the names of the sockets of this process, `descriptor socket:[inode]`."""
    names = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            if target.startswith("socket:"):
                names.add(f"{descriptor} {target}")
    return names


def _shut_down(name: str) -> None:
    descriptor, _, target = name.partition(" ")
    with contextlib.suppress(OSError):
        copy = socket.socket(fileno=os.dup(int(descriptor)))
        with copy:
            # The descriptor may have been closed and used for another file meanwhile.
            is_same = os.readlink(f"/proc/self/fd/{copy.fileno()}") == target
            # gloo terminates the process if a socket is shut down that it listens on.
            is_listening = copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if is_same and not is_listening and copy.family != socket.AF_UNIX:
                copy.shutdown(socket.SHUT_RDWR)
