"""Nodes on one machine: torchrun agents, each with its own disk directory, that tests can lose.

The rendezvous store is a separate process, so that any node may die. Without
TORCH_DISABLE_SHARE_RDZV_TCP_STORE the workers use the store of the first node's agent, which is
lost with that node.
"""

import os
import shutil
import signal
import subprocess
import sys

from tests import ROOT
from tests.support.crash_harness import DEADLINE, ONE_THREAD, free_port
from tests.support.processes import children_of, wait_until

STORE = """
import sys, time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
while True: time.sleep(1)
"""
RENDEZVOUS = (
    "is_host=0,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=120"
)


def tree_of(pid):
    return [pid, *(below for child in children_of(pid) for below in tree_of(child))]


class Cluster:
    def __init__(self, root, nnodes, processes, flags):
        self.root = root
        self._port = free_port()
        self._launch = (
            f"-m torch.distributed.run --nnodes {nnodes} --nproc-per-node {processes} "
            "--max-restarts 20 "
        )
        self._launch += (
            f"--monitor-interval 0.1 --rdzv-backend c10d --rdzv-conf {RENDEZVOUS} --rdzv-id job "
        )
        self._launch += f"--rdzv-endpoint 127.0.0.1:{self._port} {ROOT}/pretrain_gpt.py {flags}"
        self._store = subprocess.Popen([sys.executable, "-c", STORE, str(self._port)])
        self.agents = {}

    def start(self, node):
        command = f"{self._launch} --non-persistent-local-ckpt-dir {self.disk(node)}".split()
        environment = (
            os.environ
            | ONE_THREAD
            | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        )
        with self._log(node).open("a") as log:
            self.agents[node] = subprocess.Popen(
                [sys.executable, *command], stdout=log, stderr=subprocess.STDOUT, env=environment
            )

    def workers(self, node):
        return children_of(self.agents[node].pid)

    def disk(self, node):
        return self.root / "disks" / node

    def _log(self, node):
        return self.root / f"{node}.log"

    def output(self):
        return "\n".join(path.read_text() for path in sorted(self.root.glob("*.log")))

    def until(self, happened):
        wait_until(happened, 4 * DEADLINE, self.output, pause=0.005)

    def lose(self, node):
        """Kill all processes of a node, also those in other sessions, and delete its disk."""
        agent = self.agents.pop(node)
        os.kill(agent.pid, signal.SIGSTOP)  # it must not start others meanwhile
        for pid in tree_of(agent.pid):
            os.kill(pid, signal.SIGKILL)
        agent.wait()
        shutil.rmtree(self.disk(node), ignore_errors=True)

    def wait(self):
        return [agent.wait(6 * DEADLINE) for agent in self.agents.values()]

    def close(self):
        for node in list(self.agents):
            if self.agents[node].poll() is None:
                self.lose(node)
        self._store.kill()
        self._store.wait()
