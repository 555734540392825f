"""Processes as Linux reports them in /proc."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path


def heed_interrupts() -> None:
    """Undo that SIGINT is ignored, as in the background jobs of a shell; a `preexec_fn`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    """Return whether `pid` exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def is_leader(pid: int) -> bool:
    """Return whether `pid` is running and leads a process group."""
    try:
        return is_running(pid) and os.getpgid(pid) == pid
    except ProcessLookupError:
        return False


def list_open_files(directory: Path) -> list[str]:
    """Return the files in `directory` that this process has open, also removed ones.

    Descriptors of others, e.g. of idle connections of earlier tests, may be closed at any time.
    """
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [link for link in links if link.startswith(f"{directory}/")]


def wait_until(
    condition: Callable[[], object],
    seconds: float = 60,
    explain: Callable[[], str] = str,
    pause: float = 0.02,
) -> None:
    """Wait for a condition; fail with `explain()` after `seconds`, a limit that only prevents
    hangs.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(pause)
