"""Whole nodes are lost under torchrun: an agent with all its processes is killed, and its disk is deleted.

A node is a directory and an agent. The rendezvous store is a process of its own, so that any node may die. Without
TORCH_DISABLE_SHARE_RDZV_TCP_STORE the workers meet in a store of the first node's agent, which is gone with it.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests import ROOT
from tests.compare import assert_same
from tests.functional_tests.crash_harness import DEADLINE, ONE_THREAD, free_port, stored_tensors
from tests.processes import children_of
from tests.training_harness import COMMON, LAYOUTS, LLAMA

ITERATIONS = 60
FLAGS = (
    f"{COMMON} {LLAMA} --num-layers 2 --mock-data --async-save --train-iters {ITERATIONS} --save-interval 20 "
    "--non-persistent-ckpt-type local --non-persistent-save-interval 2 --replication --goodput "
)
STORE = """
import sys, time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
while True: time.sleep(1)
"""
RENDEZVOUS = "is_host=0,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=120"


def tree_of(pid):
    return [pid, *(below for child in children_of(pid) for below in tree_of(child))]


class Cluster:
    def __init__(self, root, nnodes, processes, flags):
        self.root, self._port = root, free_port()
        self._launch = f"-m torch.distributed.run --nnodes {nnodes} --nproc-per-node {processes} --max-restarts 20 "
        self._launch += f"--monitor-interval 0.1 --rdzv-backend c10d --rdzv-conf {RENDEZVOUS} --rdzv-id job "
        self._launch += f"--rdzv-endpoint 127.0.0.1:{self._port} {ROOT}/pretrain_gpt.py {flags}"
        self._store = subprocess.Popen([sys.executable, "-c", STORE, str(self._port)])
        self.agents = {}

    def start(self, node):
        command = f"{self._launch} --non-persistent-local-ckpt-dir {self.disk(node)}".split()
        environment = os.environ | ONE_THREAD | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with self._log(node).open("a") as log:
            self.agents[node] = subprocess.Popen(
                [sys.executable, *command], stdout=log, stderr=subprocess.STDOUT, env=environment
            )

    def disk(self, node):
        return self.root / "disks" / node

    def _log(self, node):
        return self.root / f"{node}.log"

    def output(self):
        return "\n".join(path.read_text() for path in sorted(self.root.glob("*.log")))

    def until(self, happened):
        deadline = time.monotonic() + 4 * DEADLINE
        while not happened():
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.005)

    def lose(self, node):
        """Every process of the node, also those in sessions of their own, and its disk."""
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


@pytest.fixture
def cluster(tmp_path):
    clusters = []

    def make(nnodes, layout, processes):
        flags = f"{FLAGS} {LAYOUTS[layout][1]} --save {tmp_path}/run --load {tmp_path}/run"
        clusters.append(Cluster(tmp_path, nnodes, processes, flags))
        return clusters[0]

    yield make
    for made in clusters:
        made.close()


def resumed(output):
    return [(match[1], int(match[2])) for match in re.finditer(r"> loaded .* of (\S+) at iteration (\d+)", output)]


def moment(cluster, node, kind, rng):
    """When to kill: somewhere in a save or in the removal after it, as the node's own disk shows."""
    seen = len(re.findall(r"iteration +\d+/", cluster.output()))
    cluster.until(lambda: len(re.findall(r"iteration +\d+/", cluster.output())) > seen + rng.randrange(4, 12))
    saves = lambda: set(cluster.disk(node).glob("*/iter_*"))  # noqa: E731
    before = saves()
    if kind == "writing":
        cluster.until(lambda: saves() - before)
    elif kind == "replicating":
        cluster.until(lambda: any(len(list(path.glob("*.distcp"))) > 3 for path in saves() - before))
    elif kind == "committing":
        cluster.until(lambda: any(list(path.glob(".done-*")) for path in saves() - before))
    elif kind == "removing":
        cluster.until(lambda: before - saves())
    time.sleep(rng.uniform(0, 0.005))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["staging", "writing", "replicating", "committing", "removing"])
@pytest.mark.parametrize("victim", ["a", "b"])
def test_a_lost_node_is_replaced(cluster, launcher, tmp_path, kind, victim):
    """Bitwise the undisturbed end, from a local checkpoint newer than the persistent one."""
    world_size, layout_flags = LAYOUTS["dp2_distributed_optimizer"]
    launcher.run(world_size, f"{FLAGS.partition('--non-')[0]} {layout_flags} --save {tmp_path}/straight")
    nodes = cluster(2, "dp2_distributed_optimizer", 1)
    nodes.start("a")
    nodes.start("b")
    nodes.until(lambda: re.search(r"iteration +4/", nodes.output()))
    moment(nodes, victim, kind, random.Random(f"{kind}{victim}"))
    nodes.lose(victim)
    nodes.start("c")
    assert nodes.wait() == [0, 0], nodes.output()
    loaded = resumed(nodes.output())
    assert loaded and "/disks/" in loaded[-1][0], nodes.output()
    final = f"iter_{ITERATIONS:07d}"
    assert_same(stored_tensors(tmp_path / "run" / final), stored_tensors(tmp_path / "straight" / final))


@pytest.mark.slow
def test_fewer_nodes_go_on(cluster, tmp_path):
    """A node is lost and not replaced: the other one goes on alone, with what it and the lost one had saved."""
    nodes = cluster("1:2", "dp2_distributed_optimizer", 1)
    nodes.start("a")
    nodes.start("b")
    nodes.until(lambda: re.search(r"saved local checkpoint from iteration +10 ", nodes.output()))
    nodes.lose("b")
    assert nodes.wait() == [0], nodes.output()
    assert "there are no more nodes" in nodes.output()
    assert [iteration >= 10 and "/disks/a/" in path for path, iteration in resumed(nodes.output())] == [True]


@pytest.mark.slow
def test_two_neighbours_at_once(cluster, tmp_path):
    nodes = cluster(2, "dp2_distributed_optimizer", 1)
    nodes.start("a")
    nodes.start("b")
    nodes.until(lambda: re.search(r"saved local checkpoint from iteration +26 ", nodes.output()))
    nodes.lose("a")
    nodes.lose("b")
    nodes.start("c")
    nodes.start("d")
    assert nodes.wait() == [0, 0], nodes.output()
    assert resumed(nodes.output())[-1][1] in (20, 40)
    assert "goodput" in nodes.output() and "done again later" in nodes.output()
