"""Python programs that are forked after their imports and end like interpreters.

Unlike those of `tests.support.programs`, a program returns from the main function of its
interpreter: threads are joined and functions that are registered for the exit run. It can be
observed, and killed, while it runs.
"""

import functools
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests import ROOT

# The first step of an optimizer imports torch._dynamo.
PRELOADED = ("torch._dynamo", "megatron.checkpointer", "megatron.training.data.loaders")
SERVER = "from tests.support.interpreters import main; main()"
REQUEST_BYTES = 1 << 17


class Interpreter:
    """A running program, with the interface of `subprocess.Popen`."""

    def __init__(
        self, program: str, *words: str, directory: Path, environment: Mapping[str, str]
    ) -> None:
        output, child_output = os.pipe()
        errors, child_errors = os.pipe()
        request = {
            "program": program,
            "words": words,
            "directory": str(directory),
            "environment": dict(environment),
        }
        self.pid: int = ask(request, child_output, child_errors)
        os.close(child_output)
        os.close(child_errors)
        self.stdout = os.fdopen(output)
        self.stderr = os.fdopen(errors)
        self.returncode: int | None = None

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.returncode is None:
            self.returncode = ask({"poll": self.pid})
            if self.returncode is None:
                if time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired(str(self.pid), timeout)
                time.sleep(0.005)
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Return the remaining output and all errors, which must fit into a pipe."""
        output = self.stdout.read()
        errors = self.stderr.read()
        self.wait(timeout)
        return output, errors


def ask(request: dict[str, Any], *descriptors: int) -> Any:
    """Send a request to the server, which ends when this process does."""
    _, connection = _start_server()
    socket.send_fds(connection, [json.dumps(request).encode()], descriptors)
    return json.loads(connection.recv(REQUEST_BYTES))


@functools.cache
def _start_server() -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    descriptor = theirs.fileno()
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(descriptor)],
        cwd=ROOT,
        pass_fds=[descriptor],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    theirs.close()
    return server, ours


def main() -> None:
    """Fork a process for each request; the process returns from here as the program."""
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # the end of a program need not visit the objects of the imports
    connection = socket.socket(fileno=int(sys.argv[1]))
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 2)
        if not message:
            return
        request = json.loads(message)
        answer: int | None
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                connection.close()
                return _run(request, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
        connection.send(json.dumps(answer).encode())


def _run(request: dict[str, Any], outputs: list[int]) -> None:
    # A shell that starts the tests in the background lets them ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, output in enumerate(outputs, start=1):
        os.dup2(output, descriptor)
        os.close(output)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = ["-c", *request["words"]]
    exec(compile(request["program"], "<string>", "exec"), vars(sys.modules["__main__"]))
