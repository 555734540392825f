"""The process that a launcher starts for a rank under --inprocess-restart.

It has imported the program, and forks the worker that becomes the rank. When the worker dies, it
ends the attempt for all ranks and forks another worker, which needs no imports. It never uses a
device, starts no thread, and keeps running as long as the launcher lets it.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import signal
import socket
import sys
import time
from datetime import timedelta

import torch.distributed as dist

from megatron.core.terminal import print_line
from megatron.training.config.run_options import RestartConfig
from megatron.training.rendezvous import (
    agree_on_prefix,
    environment_rank,
    environment_world_size,
    launcher_store,
)
from megatron.training.restart.attempts import AttemptBoard, SharedProgress
from megatron.training.restart.interruption import NEW_PROCESS
from megatron.training.restart.preloading import ModulePipe
from megatron.training.restart.worker import STACKS_SIGNAL, Program, Worker

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_WATCHED = {signal.SIGCHLD, *_FORWARDED}
_LONGEST_PAUSE = 5.0  # seconds between two looks at the store
_TIME_FOR_STACKS = 0.5  # seconds
_TIME_TO_FINISH = timedelta(seconds=30)  # of the other ranks, after rank 0
_PR_SET_PDEATHSIG = 1


def run_restartable(config: RestartConfig, timeout: timedelta, program: Program) -> None:
    """Run `program` as this rank, again after failures (--inprocess-restart).

    `timeout` limits how long the launch waits for its ranks at first. Returns or raises in the
    process of the rank only; the monitor exits with its status.
    """
    worker = Monitor(config, timeout, program).run()
    worker.run()


def listen_at_node_address(name: str, port: int) -> socket.socket:
    """Listen at the address of this node only, as other networks of it may not be trusted.

    All addresses are used if the name is not an address of this node (e.g., of a load balancer), or
    a loopback address of a job with other nodes (as for the host name in Debian's /etc/hosts).
    """
    has_other_nodes = os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE")
    with contextlib.suppress(OSError):
        family, _, _, _, address = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
        is_loopback = ipaddress.ip_address(address[0]).is_loopback
        if not (is_loopback and has_other_nodes):
            return socket.create_server(address[:2], family=family)
    return socket.create_server(("", port))


class Monitor:
    """Forks the workers of one rank, one after another."""

    def __init__(self, config: RestartConfig, timeout: timedelta, program: Program) -> None:
        self._config = config
        self._program = program
        self._hosts_store = False
        self._prefix = self._join(timeout)
        self._board = AttemptBoard(self._prefix)
        self._progress = SharedProgress()
        self._modules = ModulePipe()
        self._stops = False  # whether the launcher has sent a signal to the rank
        self._ended_at: float | None = None  # when the attempt of the worker was seen to have ended
        # Wait for these signals with `sigtimedwait` instead of handling them.
        signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)

    def run(self) -> Worker:
        """Fork workers until the run is over. Returns in the workers only."""
        monitor = os.getpid()
        while True:
            child = os.fork()
            if child == 0:
                return self._become_worker(monitor)
            code = None
            try:
                code = self._watch(child)
                if not self._begin_next_attempt(code):
                    os._exit(code if code >= 0 else 128 - code)
            except RuntimeError as error:  # the store is lost, and with it the launcher
                if code == 0:  # the host of the store has completed the run, too
                    os._exit(0)
                print_line(f"the monitor of rank {environment_rank()}: {error}", file=sys.stderr)
                os._exit(1)  # the worker ends with its parent

    def _join(self, timeout: timedelta) -> str:
        """Return the part of the store that belongs to this launch. Collective over monitors."""
        if "MASTER_ADDR" not in os.environ:
            raise ValueError("--inprocess-restart requires a launcher, e.g., torchrun")
        if launcher_store(timeout) is None:
            self._host_store(timeout)
        store = launcher_store(timeout)
        assert store is not None
        return agree_on_prefix(store, environment_rank(), environment_world_size())

    def _host_store(self, timeout: timedelta) -> None:
        """Let rank 0 host a store for a launcher without one, in a process of its own.

        The store runs a thread, and a process with threads should not fork.
        """
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        monitor = os.getpid()
        if environment_rank() > 0:
            return
        self._hosts_store = True
        if os.fork() == 0:
            _die_with(monitor)
            port = int(os.environ["MASTER_PORT"])
            listener = listen_at_node_address(os.environ["MASTER_ADDR"], port)
            store = dist.TCPStore(
                os.environ["MASTER_ADDR"],
                port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
            while store is not None:
                time.sleep(3600)

    def _become_worker(self, monitor: int) -> Worker:
        _die_with(monitor)
        # Ctrl-C in a terminal reaches the monitor, which forwards it.
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
        self._modules.enter_worker()
        return Worker(self._config, self._prefix, self._progress, self._program, self._modules)

    def _watch(self, child: int) -> int:
        """Return the exit code of the worker `child`, negative for a signal."""
        pause = min(_LONGEST_PAUSE, self._config.inprocess_hard_timeout / 4)
        while True:
            received = signal.sigtimedwait(_WATCHED, pause)
            self._modules.import_reported()
            if received is not None and received.si_signo in _FORWARDED:
                self._stops = True
                os.kill(child, received.si_signo)
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid == child:
                return os.waitstatus_to_exitcode(status)
            if received is None:
                self._kill_stuck_worker(child)

    def _kill_stuck_worker(self, child: int) -> None:
        """Kill the worker if it has not left its attempt some time after that has ended."""
        if not self._board.has_ended(self._progress.read().attempt):
            self._ended_at = None
            return
        now = time.monotonic()
        if self._ended_at is None:
            self._ended_at = now
        if now - self._ended_at > self._config.inprocess_hard_timeout:
            os.kill(child, STACKS_SIGNAL)
            time.sleep(_TIME_FOR_STACKS)
            os.kill(child, signal.SIGKILL)

    def _begin_next_attempt(self, code: int) -> bool:
        """Return whether to fork another worker after one that has ended with exit code `code`."""
        self._ended_at = None
        progress = self._progress.read()
        if code == 0:
            self._board.finish()
            if self._hosts_store:
                self._board.wait_until_all_finished(environment_world_size(), _TIME_TO_FINISH)
            # Another rank may have died at the very end.
            if not self._board.has_ended(progress.attempt):
                return False
        elif self._stops or (code > 0 and code != NEW_PROCESS):
            return False
        if code < 0:
            name = signal.Signals(-code).name
            self._board.end(progress.attempt, f"rank {environment_rank()} was ended by {name}")
        # A rank that has completed the run does not take part any more.
        if code != 0 and self._board.is_finished():
            return False
        self._progress.write(progress.enter(self._board.find_current(progress.attempt)))
        return True


def _die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent dies, however that happens."""
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has died before the call
        os._exit(1)
