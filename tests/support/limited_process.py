"""A function in a child process whose memory and processor time the kernel limits."""

from __future__ import annotations

import gc
import os
import resource
import traceback
from collections.abc import Callable
from pathlib import Path


def run_limited(function: Callable[[], str], memory: int, seconds: int) -> str:
    """Return the result of `function`, run in a child process.

    The child may use `memory` bytes of address space more than this process and `seconds` of
    processor time. If it fails, the result is its traceback or the signal that ended it.
    """
    reader, writer = os.pipe()
    # Objects of earlier tests refer to threads that do not exist in the child, which must not
    # collect them.
    gc.collect()
    child = os.fork()
    if child == 0:
        gc.freeze()
        _run_and_report(function, memory, seconds, writer)
    os.close(writer)
    with os.fdopen(reader) as answer:
        result = answer.read()
    _, status = os.waitpid(child, 0)
    return result if status == 0 else f"killed by signal {status & 127}"


def _run_and_report(function: Callable[[], str], memory: int, seconds: int, writer: int) -> None:
    result = "no result"
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
        spent = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
        resource.setrlimit(resource.RLIMIT_CPU, (spent + seconds, spent + seconds))
        result = function()
    except BaseException:
        result = traceback.format_exc()
    os.write(writer, result.encode(errors="backslashreplace")[:4000])
    os._exit(0)
