"""Trial load of a Hugging Face tokenizer whose normalizer could exhaust time or memory.

Loading normalizes the added tokens. Native code does that, which no Python timeout interrupts: a
regular expression can take exponential time, and a chain of replacements can grow a token of 40
bytes to terabytes. A forked process therefore loads such a tokenizer first, under limits of the
kernel.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SECONDS = 60  # of processor time
MEMORY = 4 << 30  # bytes of address space
_SMALL_GROWTH = 8  # SentencePiece replaces a space by 3 bytes


def try_to_load(path: Path, content: Any, load: Callable[[], object]) -> None:
    """Raise ValueError if `load`, which loads the tokenizer in `path`, exceeds the limits.

    `content` is that of its tokenizer.json. Without a normalizer that may exceed them nothing is
    done; other errors of `load` are left to the caller, who loads the tokenizer afterwards.
    """
    if not _may_exceed_limits(content):
        return
    child = os.fork()
    if child == 0:
        _load_and_exit(load)
    _, status = os.waitpid(child, 0)
    if status != 0:
        raise ValueError(
            f"--tokenizer-model {path}: loading it takes more than {SECONDS} s of processor time "
            f"or {MEMORY >> 30} GiB of memory, because of its normalizer"
        )


def _may_exceed_limits(content: Any) -> bool:
    """Return whether the normalizer can do more than replace strings by slightly longer ones."""
    growth = 1.0
    normalizer = content.get("normalizer") if isinstance(content, dict) else None
    for step in _list_steps(normalizer):
        pattern = step.get("pattern")
        replacement = step.get("content")
        if step.get("type") == "Precompiled":
            return True
        if step.get("type") != "Replace":
            continue
        text = pattern.get("String") if isinstance(pattern, dict) else None
        if not isinstance(text, str) or not isinstance(replacement, str) or not text:
            return True
        growth *= max(1.0, len(replacement.encode()) / len(text.encode()))
    return growth > _SMALL_GROWTH


def _list_steps(normalizer: Any) -> Iterator[dict[str, Any]]:
    """Yield the normalizers of a sequence, which may be nested."""
    if not isinstance(normalizer, dict):
        return
    yield normalizer
    steps = normalizer.get("normalizers")
    for step in steps if isinstance(steps, list) else []:
        yield from _list_steps(step)


def _load_and_exit(load: Callable[[], object]) -> None:
    """End this process, which may only load, with status 0 unless memory is exhausted."""
    status = 0
    try:
        # Neither the library nor Python prints a backtrace.
        faulthandler.disable()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _lower_limit(
            resource.RLIMIT_CPU, int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2])) + SECONDS
        )
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        _lower_limit(resource.RLIMIT_AS, pages * resource.getpagesize() + MEMORY)
        signal.alarm(10 * SECONDS)  # a fork can deadlock
        load()
    except MemoryError:
        status = 1
    except BaseException:  # the caller reports it
        pass
    os._exit(status)


def _lower_limit(name: int, value: int) -> None:
    _, hard = resource.getrlimit(name)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(name, (value, hard))
