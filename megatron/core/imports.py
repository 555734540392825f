"""Imports of entry programs, which take seconds."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from megatron.core.terminal import INTERRUPTED


@contextmanager
def program_imports() -> Iterator[None]:
    """Import modules without collecting garbage, and let Ctrl-C end the process meanwhile.

    Importing torch and this package creates 190,000 objects that are never freed. Visiting them
    again and again takes a fifth of the processor time of the imports. Later collections do not
    visit them either: a full one takes 0.15 s less, in which training would wait.

    Has no effect if torch has been imported, e.g. by another program that uses this one.
    """
    if "torch" in sys.modules:
        yield
        return
    _open_missing_streams()
    # A shell starts background jobs with SIGINT ignored, and a program may have its own handler.
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    exits = is_default and threading.current_thread() is threading.main_thread()
    collects = gc.isenabled()
    gc.disable()
    if exits:
        signal.signal(signal.SIGINT, _exit_interrupted)
    try:
        yield
    finally:
        if exits:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        gc.freeze()
        if collects:
            gc.enable()


def _open_missing_streams() -> None:
    """Open the null device for every standard stream that the process was started without (`2>&-`).

    The next file that is opened would get its descriptor, and a library that writes a message to
    descriptor 2 would write it into that file, possibly the shard of a checkpoint.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is this one
            os.set_inheritable(descriptor, True)
    # Python has None for a missing stream.
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, "w", closefd=False))


def _exit_interrupted(signal_number: int, frame: FrameType | None) -> None:
    # There is nothing to clean up.
    os._exit(INTERRUPTED)
