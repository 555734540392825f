"""Run the tools that write checkpoints in this process, which saves seconds of imports."""

import contextlib
import io
import signal
import subprocess
import sys
from types import ModuleType
from unittest import mock

from megatron.commands import conversion_options
from tools.checkpoint import convert, merge


def run_convert(*words: object) -> subprocess.CompletedProcess[str]:
    """Return the output and the exit status of `tools/checkpoint/convert.py`."""
    return run_tool(convert, *words)


def run_merge(*words: object) -> subprocess.CompletedProcess[str]:
    """Return the output and the exit status of `tools/checkpoint/merge.py`."""
    return run_tool(merge, *words)


def run_tool(tool: ModuleType, *words: object) -> subprocess.CompletedProcess[str]:
    """Return the output and the exit status of the tool for this command line."""
    out = io.StringIO()
    err = io.StringIO()
    status = 0
    command = [tool.__name__, *map(str, words)]
    handlers = {number: signal.getsignal(number) for number in conversion_options.STOPPING}
    try:
        with (
            mock.patch.object(sys, "argv", command),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            tool.main()
    except SystemExit as error:  # as the interpreter does: a text is printed, and is a failure
        status = error.code if isinstance(error.code, int) else 1
        err.write("" if isinstance(error.code, int) else f"{error.code}\n")
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return subprocess.CompletedProcess(command, status, out.getvalue(), err.getvalue())
