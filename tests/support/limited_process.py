"""A function in a child process whose memory and processor time the kernel limits."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# A child that waits forever uses no processor time, so that the kernel does not end it.
TIMEOUT = 300  # seconds


def run_limited(
    function: Callable[[], str], memory: int, seconds: int, start_method: str = "fork"
) -> str:
    """Return the result of `function`, run in a child process.

    The child may use `memory` bytes of address space more than it has when `function` starts, and
    `seconds` of processor time. If it fails, the result is its traceback or the signal that ended
    it. Use the start method "spawn" for functions that access object storage: the threads of its
    client do not survive a fork. The function must then be picklable.
    """
    context: Any = multiprocessing.get_context(start_method)
    reader, writer = context.Pipe(duplex=False)
    child = context.Process(target=_run_and_report, args=(function, memory, seconds, writer))
    # Objects of earlier tests refer to threads that do not exist in the child, which must not
    # collect them: it begins without collections.
    gc.disable()
    try:
        child.start()
    finally:
        gc.enable()
    writer.close()
    if not reader.poll(TIMEOUT):
        child.kill()
        child.join()
        return f"no result after {TIMEOUT} s"
    try:
        result = reader.recv()
    except EOFError:  # the child died; its exit code has the reason
        result = ""
    child.join()
    return result if child.exitcode == 0 else f"killed by signal {-child.exitcode}"


def limit_address_space(extra: int) -> None:
    """Limit this process's address space to its current size plus `extra` bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + extra
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _run_and_report(
    function: Callable[[], str], memory: int, seconds: int, writer: Connection
) -> None:
    gc.freeze()
    gc.enable()
    result = "no result"
    try:
        limit_address_space(memory)
        spent = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
        resource.setrlimit(resource.RLIMIT_CPU, (spent + seconds, spent + seconds))
        result = function()
    except BaseException:
        result = traceback.format_exc()
    writer.send(result[:4000])
    os._exit(0)  # without the clean-up of the test process, which a forked child would repeat
