"""Ranks as forks of a process that has imported torch and the product, which takes seconds."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

MAX_OUTPUT = 30_000  # characters of a failed rank: after a crash, the stacks of all its threads
EXIT_GRACE = 5.0  # seconds that other ranks get once one has failed
PRELOADED = ["tests.fake_cuda.trainings"]


class RankError(Exception):
    """A rank failed; its output."""


def run_ranks(
    function: Callable[..., Any],
    num_devices: int,
    *args: Any,
    timeout: float = 120.0,
    **settings: str,
) -> list[Any]:
    """Return `function(rank, num_devices, *args)` of one forked process per fake device.

    `settings` are environment variables, e.g. FAKE_CUDA_COPY_US.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory(prefix="fake_nccl_", dir="/dev/shm") as directory:
        environment = {
            "FAKE_CUDA_DEVICES": str(num_devices),
            "FAKE_NCCL_DIR": directory,
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(find_free_port()),
            "WORLD_SIZE": str(num_devices),
            "LOCAL_WORLD_SIZE": str(num_devices),
            **settings,
        }
        processes = []
        for rank in range(num_devices):
            own_environment = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = context.Process(
                target=_run_rank,
                args=(function, rank, num_devices, args, directory, own_environment, timeout),
            )
            process.start()
            processes.append(process)
        failed = _wait_for_ranks(processes, timeout)
        if failed:
            texts = []
            for rank in failed:
                output = Path(directory, f"output{rank}")
                text = output.read_text() if output.exists() else ""
                texts.append(f"rank {rank}: {text[-MAX_OUTPUT:]}")
            raise RankError("\n".join(texts))
        results = []
        for rank in range(num_devices):
            results.append(pickle.loads(Path(directory, f"result{rank}").read_bytes()))
        return results


def find_free_port() -> int:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        port: int = server.getsockname()[1]
        return port


def _run_rank(
    function: Callable[..., Any],
    rank: int,
    num_devices: int,
    args: tuple[Any, ...],
    directory: str,
    environment: dict[str, str],
    timeout: float,
) -> None:
    """Run `function` and end the process. Output goes to a file."""
    status = 1
    try:
        os.environ.update(environment)
        output = os.open(Path(directory, f"output{rank}"), os.O_CREAT | os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        faulthandler.enable(all_threads=True)
        faulthandler.dump_traceback_later(timeout - min(5.0, timeout / 2))
        result = function(rank, num_devices, *args)
        Path(directory, f"result{rank}").write_bytes(pickle.dumps(result))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait_for_ranks(processes: list[BaseProcess], timeout: float) -> list[int]:
    """Return the failed ranks. Kills processes that run longer than `timeout` seconds."""
    failed = []
    running = dict(enumerate(processes))
    end = time.monotonic() + timeout
    while running:
        for rank, process in list(running.items()):
            process.join(0.02)
            if process.exitcode is None:
                continue
            del running[rank]
            if process.exitcode != 0:
                failed.append(rank)
                end = min(end, time.monotonic() + EXIT_GRACE)
        if running and time.monotonic() > end:
            for rank, process in running.items():
                process.kill()
                process.join()
                failed.append(rank)
            return failed
    return failed
