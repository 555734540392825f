"""Directories for the files of a benchmark, which are removed however the benchmark ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

# A file in the directory that its benchmark keeps locked. The kernel releases the lock of a process
# that is killed.
OWNER = ".benchmark-owner"
SECONDS_TO_STOP = 10
DIRECTORY_HELP = "where to create the directory for files; default: $TMPDIR"


@contextlib.contextmanager
def create_scratch_directory(name: str, parent: Path | None = None) -> Iterator[Path]:
    """Yield a new directory for the benchmark `name`, and remove it at the end.

    It is created in `parent` (default: the directory for temporary files). SIGINT and SIGTERM stop
    the programs that the benchmark has started, remove the directory and end the process. SIGKILL
    leaves the directory, which the next start of the same benchmark removes. Must be called in the
    main thread.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    prefix = f"benchmark-{name}-"
    remove_abandoned_directories(parent, prefix)
    previous = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        previous[number] = signal.signal(number, _stop)
    directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    lock = _try_lock(directory / OWNER, os.O_CREAT)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if lock is not None:
            os.close(lock)
        for number, handler in previous.items():
            signal.signal(number, handler)


def remove_abandoned_directories(parent: Path, prefix: str) -> None:
    """Remove the directories of earlier launches that were killed.

    Directories of running benchmarks are locked, and other directories have no file to lock.
    """
    for directory in parent.glob(f"{prefix}*"):
        lock = _try_lock(directory / OWNER)
        if lock is not None:
            print(f"removing {directory} of a benchmark that was killed", file=sys.stderr)
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)


def _try_lock(path: Path, flags: int = 0) -> int | None:
    """Return a descriptor that locks a file, or None if it is absent or locked."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _stop(number: int, frame: FrameType | None) -> None:
    """Stop the programs that this process has started, then exit with the status of the signal.

    They get SIGTERM and some time: torchrun stops its workers, which would write on if it were
    killed.
    """
    signal.signal(number, signal.SIG_IGN)
    children = _list_running_children()
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + SECONDS_TO_STOP
    while _list_running_children() and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in _list_running_children():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    raise SystemExit(128 + number)


def _list_running_children() -> list[int]:
    """Return the children of this process that are not zombies."""
    running = []
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            with contextlib.suppress(FileNotFoundError):
                # The state follows the name, which is in parentheses.
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z":
                    running.append(int(pid))
    return running
