"""Pool of worker processes that run one function as N ranks of a gloo process group.

Importing the program takes seconds, so that workers are forked from a server that has imported it,
and one pool serves all tests of a session::

    def all_reduce(rank, world_size, value):  # at module level: workers import it by name
        tensor = torch.tensor(value + rank)
        torch.distributed.all_reduce(tensor)
        return tensor.item()

    def test_all_reduce(pool):  # the fixture of tests/conftest.py
        assert pool.run(all_reduce, 2, 10) == [21, 21]

Every run uses a new default process group, which is destroyed afterwards: runs share imported
modules only.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

START_TIMEOUT = 180.0  # seconds for a worker to import torch on a loaded machine
GRACE = 3.0  # seconds the other ranks get to report once one rank has failed
STACK_TIMEOUT = 20.0  # seconds for a hung worker to write its stack

READY = "ready"
RESULT = "result"
ERROR = "error"
UNUSABLE = "unusable"  # an error of a worker that has no process group


class RemoteTraceback(Exception):
    """Cause of an exception that `DistributedPool.run` raises: the tracebacks of the ranks."""

    def __str__(self) -> str:
        return "\n" + self.args[0]


@dataclass(frozen=True)
class _Task:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    world_size: int
    store_port: int
    run: int
    timeout: float


@dataclass(frozen=True)
class _Worker:
    process: BaseProcess
    connection: Connection
    stacks: Path  # the worker dumps its Python stack here on SIGUSR1


class DistributedPool:
    """Persistent worker processes.

    `run` makes the first `world_size` of them the ranks of one process group.
    """

    def __init__(self, max_workers: int = 4) -> None:
        self.max_workers = max_workers
        self._workers: list[_Worker] = []
        self._directory: Path | None = None
        self._store: dist.TCPStore | None = None  # outlives every worker
        self._runs = 0

    def run(
        self, function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 300
    ) -> list[Any]:
        """Return `function(rank, world_size, *args)` of each rank, in rank order.

        `function` must be importable by name (at module level). Arguments and results are pickled
        by value. Raises the first exception of any rank, with the tracebacks of all failed ranks
        as its cause. Raises RuntimeError for a rank that died, before the errors that its death
        causes on other ranks, and TimeoutError with the stacks of the ranks that still run after
        `timeout` seconds, which is also the timeout of the group's collectives. Workers are
        replaced after both, and after a rank could not initialize its process group.
        """
        if not 1 <= world_size <= self.max_workers:
            raise ValueError(
                f"world_size {world_size} must be from 1 to the pool's max_workers "
                f"{self.max_workers}"
            )
        workers = self._start(world_size)
        self._runs += 1
        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = self._store.port
        tasks = [
            _Task(function, args, rank, world_size, port, self._runs, timeout)
            for rank in range(world_size)
        ]
        for worker, message in zip(workers, [_encode(task) for task in tasks], strict=True):
            worker.connection.send_bytes(message)
        return self._collect(workers, timeout)

    def close(self) -> None:
        """Kill all workers, also busy ones; a later `run` starts new ones."""
        for worker in self._workers:
            worker.connection.close()
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
        self._workers = []
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _start(self, count: int) -> list[_Worker]:
        """Return the first `count` workers; new ones start together, to import in parallel."""
        if not all(worker.process.is_alive() for worker in self._workers):
            self.close()
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="distributed_pool_"))
        spawned = []
        for index in range(len(self._workers), count):
            spawned.append(_spawn(self._directory / f"stacks_{index}"))
            self._workers.append(spawned[-1])
        for worker in spawned:
            if not worker.connection.poll(START_TIMEOUT) or _receive(worker) != (READY, None):
                self.close()
                raise RuntimeError(f"a pool worker did not start within {START_TIMEOUT:.0f} s")
        return self._workers[:count]

    def _collect(self, workers: list[_Worker], timeout: float) -> list[Any]:
        """Return the results of all ranks, or raise the first failure.

        After the first failure the other ranks have `GRACE` seconds to report theirs.
        """
        # The timeout of the process group expires first: its error has more details.
        deadline = time.monotonic() + timeout + GRACE
        running: dict[Any, int] = {worker.connection: rank for rank, worker in enumerate(workers)}
        results: list[Any] = [None] * len(workers)
        failures: list[tuple[BaseException, str]] = []
        usable = True
        while running and (ready := wait(list(running), max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                rank = running.pop(connection)
                kind, value = _receive(workers[rank])
                if kind == RESULT:
                    results[rank] = value
                else:
                    usable = usable and kind == ERROR
                    # The death of a rank explains the errors of the others.
                    failures.insert(0 if kind is None else len(failures), value)
                    deadline = min(deadline, time.monotonic() + GRACE)
        if running:
            stacks = "\n".join(
                f"rank {rank} hangs at:\n{_read_stack(workers[rank])}" for rank in running.values()
            )
            error = TimeoutError(f"ranks {sorted(running.values())} still ran after {timeout} s")
            failures.append((error, stacks))
        if running or not usable:
            self.close()
        if failures:
            raise failures[0][0] from RemoteTraceback("\n".join(text for _, text in failures))
        return results


def collect_garbage_rarely() -> None:
    """Exclude present objects from garbage collection; later ones are visited less often.

    Small tests create many objects, and few cycles of them: collecting took 5 % of their time.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def _encode(task: _Task) -> bytes:
    """Return the pickled import path and task.

    The worker sets the import path first: it may have started before the directory of the test's
    module was added.
    """
    return pickle.dumps((sys.path, pickle.dumps(task)))


class _Pickler(pickle.Pickler):
    """Stores plain tensors as bytes: torch's own way takes 0.25 ms for each, this one 0.02."""

    def reducer_override(self, value: Any) -> Any:
        is_plain = type(value) is torch.Tensor and value.layout is torch.strided
        if not is_plain or value.requires_grad or value.device.type != "cpu" or value.numel() == 0:
            return NotImplemented
        content = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return _make_tensor, (bytearray(content), value.dtype, value.shape)


def _make_tensor(content: bytearray, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.frombuffer(content, dtype=dtype).view(shape)


def _decode(message: bytes) -> _Task:
    path, task = pickle.loads(message)
    sys.path[:] = path
    return pickle.loads(task)


def get_fork_context() -> ForkServerContext:
    """Return the context whose processes are forked from one that has only imported the program."""
    context = multiprocessing.get_context("forkserver")
    # The first step of an optimizer imports torch._dynamo.
    modules = ["tests.support.training_harness", "torch._dynamo", "torch.distributed.fsdp"]
    context.set_forkserver_preload(modules)
    return context


def _spawn(stacks: Path) -> _Worker:
    context = get_fork_context()
    ours, theirs = context.Pipe()
    process = context.Process(target=_worker_main, args=(theirs, stacks), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours, stacks)


def _receive(worker: _Worker) -> tuple[str | None, Any]:
    """Return the worker's next message, or `(None, failure)` if it died."""
    try:
        return pickle.loads(worker.connection.recv_bytes())
    except (EOFError, ConnectionError):
        worker.process.join()
        message = f"a worker process died (exit code {worker.process.exitcode})"
        return None, (RuntimeError(message), message)


def _read_stack(worker: _Worker) -> str:
    """Return the stack of a hung worker.

    Its fault handler writes the stack even while a collective blocks the interpreter.
    """
    assert worker.process.pid is not None
    os.kill(worker.process.pid, signal.SIGUSR1)
    # The stack is complete once it has stopped growing; a busy machine takes seconds to begin.
    deadline = time.monotonic() + STACK_TIMEOUT
    text = ""
    while time.monotonic() < deadline:
        time.sleep(0.2)
        before = text
        text = worker.stacks.read_text()
        if text and text == before:
            break
    return text


def _worker_main(connection: Connection, stacks: Path) -> None:
    """Serve tasks until the pool closes the connection."""
    torch.set_num_threads(1)
    collect_garbage_rarely()
    if sys.platform == "linux":
        # Containers often cannot resolve their own host name.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with stacks.open("w") as stack_file:
        connection.send_bytes(pickle.dumps((READY, None)))
        while True:
            try:
                message = connection.recv_bytes()
            except (EOFError, ConnectionError):
                return
            # The previous task may have replaced the handler, e.g., by those of exit signals;
            # `register` alone would not install it again.
            faulthandler.unregister(signal.SIGUSR1)
            faulthandler.register(signal.SIGUSR1, file=stack_file)
            connection.send_bytes(_answer(message))
            if dist.is_initialized():
                dist.destroy_process_group()


def _answer(message: bytes) -> bytes:
    """Run one task and return its pickled result or error.

    The caller destroys the process group afterwards, so that a failure is reported before other
    ranks notice it.
    """
    rank = None
    failed = UNUSABLE  # e.g., gloo keeps a thread or a connection of a failed initialization
    try:
        task = _decode(message)
        rank = task.rank
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(task.world_size))
        timeout = timedelta(seconds=task.timeout)
        client = dist.TCPStore("127.0.0.1", task.store_port, is_master=False, timeout=timeout)
        store = dist.PrefixStore(str(task.run), client)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=task.world_size, timeout=timeout
        )
        failed = ERROR
        result = task.function(rank, task.world_size, *task.args)
        dist.barrier()  # no rank closes a connection that another rank still reads from
        content = io.BytesIO()
        _Pickler(content, pickle.HIGHEST_PROTOCOL).dump((RESULT, result))
        return content.getvalue()
    except BaseException as error:
        text = f"rank {rank}: {traceback.format_exc()}"
        try:
            return pickle.dumps((failed, (pickle.loads(pickle.dumps(error)), text)))
        except Exception:
            error = RuntimeError(f"{type(error).__name__}: {error}")
            return pickle.dumps((failed, (error, text)))
