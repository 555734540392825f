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


def run_convert(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Return the output and the exit status of `tools/checkpoint/convert.py`."""
    return run_tool(convert, *arguments)


def run_merge(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Return the output and the exit status of `tools/checkpoint/merge.py`."""
    return run_tool(merge, *arguments)


def run_tool(tool: ModuleType, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Return the output and the exit status of the tool for this command line."""
    out = io.StringIO()
    err = io.StringIO()
    status = 0
    command = [tool.__name__, *map(str, arguments)]
    handlers = {}
    for signal_number in conversion_options.STOPPING:
        handlers[signal_number] = signal.getsignal(signal_number)
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
        for signal_number, handler in handlers.items():
            signal.signal(signal_number, handler)
    return subprocess.CompletedProcess(command, status, out.getvalue(), err.getvalue())
