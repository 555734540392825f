"""Training programs as real processes that tests start within milliseconds, observe and kill."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing import Reader
from tests import ROOT
from tests.support.compare import assert_same
from tests.support.processes import children_of, is_leader, is_running

ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
DEADLINE = 60.0  # seconds; longer than any wait of a test
LONGEST_RUN = 300.0  # seconds; less than the limit of a test
STACKS_SIGNAL = signal.SIGQUIT  # lets a rank write the stacks of its threads, as in restarts


class Job:
    """The ranks of one launch of the training program."""

    def __init__(self, launcher: Launcher, pids: list[int], log: Path) -> None:
        self._launcher = launcher
        self.pids = pids
        self._log = log
        self.codes: list[int | None] = [None] * len(pids)

    def output(self, rank: int = 0) -> str:
        path = self._log.with_name(f"{self._log.name}.{rank}")
        return path.read_text() if path.exists() else ""

    def until(
        self,
        happened: Callable[[], Any],
        what: str = "what was waited for",
        pause: float = 0.004,
    ) -> Any:
        """Return the result of `happened` as soon as it is true, or as soon as rank 0 has ended."""
        deadline = time.monotonic() + DEADLINE
        while True:
            over = self.has_ended()  # before `happened`, so that no event is missed
            result = happened()
            if result or over:
                return result
            assert time.monotonic() < deadline, f"{what} did not happen:\n{self.output()}"
            time.sleep(pause)

    def workers(self) -> list[int]:
        """Return the processes of the ranks under --inprocess-restart, without lost ones."""
        workers = []
        for monitor in self.pids:
            # A worker leads a process group; the process of the store does not.
            children = children_of(monitor)
            workers += [child for child in children if is_leader(child)]
        return workers

    def until_iteration(self, iteration: int) -> None:
        self.until(lambda: self.iterations()[-1:] >= [iteration], f"iteration {iteration}")

    def has_ended(self) -> bool:
        """Return whether rank 0 has ended; it remains a zombie until it is waited for."""
        return not is_running(self.pids[0])

    def kill(self, *ranks: int) -> None:
        for rank in ranks or range(len(self.pids)):
            if self.codes[rank] is None:
                os.kill(self.pids[rank], signal.SIGKILL)

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.pids[rank], number)

    def suspend(self) -> None:
        """Stop all ranks, and return when they are stopped."""
        for rank, pid in enumerate(self.pids):
            self.signal(rank, signal.SIGSTOP)
            status = Path(f"/proc/{pid}/status")
            self.until(lambda status=status: "\nState:\tT" in status.read_text(), "the stop")

    def resume(self) -> None:
        """Let all ranks go on that `suspend` has stopped."""
        for rank in range(len(self.pids)):
            self.signal(rank, signal.SIGCONT)

    def wait(self) -> list[int]:
        """Return the exit codes of all ranks (negative: killed by that signal)."""
        deadline = time.monotonic() + LONGEST_RUN
        for rank, pid in enumerate(self.pids):
            if self.codes[rank] is None:
                while is_running(pid) and time.monotonic() < deadline:
                    time.sleep(0.004)
                if is_running(pid):
                    self._fail_with_stacks(rank)
                self.codes[rank] = self._launcher.ask({"wait": pid})
        return [code for code in self.codes if code is not None]

    def _fail_with_stacks(self, rank: int) -> None:
        """Report the stacks of a rank that does not end."""
        self.signal(rank, STACKS_SIGNAL)
        time.sleep(1)  # until the stacks are written
        raise AssertionError(f"rank {rank} does not end:\n{self.output(rank)}")

    def succeed(self) -> Job:
        codes = self.wait()
        outputs = "\n".join(self.output(rank) for rank in range(len(self.pids)))
        assert codes == [0] * len(codes), f"exit codes {codes}\n{outputs}"
        return self

    def losses(self) -> dict[int, float]:
        """Return the logged losses by iteration."""
        log_lines = re.findall(r"iteration +(\d+)/.*? lm loss: ([\d.E+-]+) ", self.output())
        return {int(iteration): float(loss) for iteration, loss in log_lines}

    def iterations(self) -> list[int]:
        return list(self.losses())

    def resumed_at(self) -> int | None:
        match = re.search(r"> loaded .* at iteration (\d+)", self.output())
        return int(match[1]) if match else None

    def saved(self) -> list[int]:
        return [
            int(iteration) for iteration in re.findall(r"> saved \S*iter_(\d+) in", self.output())
        ]


class Launcher:
    """Owner of the process that forks training programs: `start` one, or `run` it to its end."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._count = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.functional_tests.forking_launcher"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | ONE_THREAD,
        )
        self._running: list[Job] = []
        assert self._answer() == "ready"

    def start(
        self,
        world_size: int,
        flags: str,
        file_size_limits: Sequence[int | None] | None = None,
        variables: Mapping[str, str] | None = None,
        program: str = "pretrain_gpt.py",
    ) -> Job:
        """Start the program (see `forking_launcher`) with `variables` in its environment.

        `file_size_limits` are the bytes, by rank, at which the kernel refuses to let a file grow.
        """
        self._count += 1
        log = self._logs / f"job{self._count}"
        environment = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        environment |= variables or {}
        if world_size > 1:
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        pids = self.ask(
            {
                "program": program,
                "flags": shlex.split(flags),
                "environment": environment,
                "log": str(log),
                "file_size_limits": file_size_limits or [None] * world_size,
            }
        )
        job = Job(self, pids, log)
        self._running.append(job)
        return job

    def run(self, world_size: int, flags: str, **limits: Any) -> Job:
        return self.start(world_size, flags, **limits).succeed()

    def ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def kill_running(self) -> None:
        """Kill the programs that a test has left running, and wait for them."""
        for job in self._running:
            job.kill()
            job.wait()
        self._running.clear()

    def close(self) -> None:
        self.kill_running()
        self._process.kill()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the launcher has died"
        return json.loads(line)


@contextlib.contextmanager
def launching(logs: Path) -> Iterator[Launcher]:
    launcher = Launcher(logs)
    try:
        yield launcher
    finally:
        launcher.close()


def stored_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint after verifying their checksums."""
    reader = Reader(directory, verify=True)
    return {
        key: reader.read(key, (0,) * len(t.shape), t.shape)
        for key, t in reader.metadata.tensors.items()
    }


def assert_same_checkpoint(root: Path, expected_root: Path, iteration: int) -> None:
    """Assert that two runs saved bitwise equal tensors at an iteration."""
    name = f"iter_{iteration:07d}"
    assert_same(stored_tensors(root / name), stored_tensors(expected_root / name))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
