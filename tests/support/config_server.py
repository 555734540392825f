"""One process for the questions of a whole test run about transformers' config classes.

Each process that reads or writes a Hugging Face model starts a process that imports transformers
without torch (see `config_fields`), which takes a second; forked programs and fuzzed readers are
more than a hundred such processes. With pytest-xdist, they connect to a server that has imported it
and forks for each of them instead. A fork has the limits of its client and answers with the
program's own `config_process.main`.
"""

from __future__ import annotations

import functools
import os
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

from megatron.conversion.huggingface import config_fields, config_process
from tests import ROOT

ADDRESS = "TEST_CONFIG_SERVER"  # variable with the path of the socket
LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_CPU)
_HEADER = struct.Struct(f"{2 * len(LIMITS)}q")  # soft and hard limit of each


class ConfigServer:
    """Server process; `ADDRESS` in the environment names its socket to later processes."""

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="config_server_"))
        path = str(self._directory / "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(128)  # clients wait for the end of the imports
            descriptor = listener.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.config_server", str(descriptor)],
                cwd=ROOT,
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        os.environ[ADDRESS] = path

    def close(self) -> None:
        del os.environ[ADDRESS]
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._directory)


class _ServedProcess(config_fields._ConfigProcess):
    """Connection to a fork of the server."""

    def __init__(self) -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(os.environ[ADDRESS])
        limits = [value for limit in LIMITS for value in resource.getrlimit(limit)]
        connection.sendall(_HEADER.pack(*limits))
        self._lock = threading.Lock()
        self._process = SimpleNamespace(  # type: ignore[assignment]
            stdin=connection.makefile("w"), stdout=connection.makefile("r"), wait=lambda: None
        )


@functools.cache
def _connect(pid: int) -> config_fields._ConfigProcess:
    """Return the connection of process `pid`, which is this one."""
    return _ServedProcess() if ADDRESS in os.environ else config_fields._ConfigProcess()


def use_config_server() -> None:
    """Let this process and its forks use the server, if there is one."""
    config_fields._config_process = _connect


def serve(listener: socket.socket) -> None:
    """Fork for each client."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # as in `config_process.main`
    config_process.config_class("llama")  # imports everything
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks are not waited for
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            answer_client(connection)
            os._exit(0)
        connection.close()


def answer_client(connection: socket.socket) -> None:
    """Become the config process of a client."""
    values = _HEADER.unpack(connection.recv(_HEADER.size, socket.MSG_WAITALL))
    for index, limit in enumerate(LIMITS):
        resource.setrlimit(limit, values[2 * index : 2 * index + 2])
    os.dup2(connection.fileno(), 0)
    os.dup2(connection.fileno(), 1)
    connection.close()
    config_process.main()


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
