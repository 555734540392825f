"""Loss of whole nodes under torchrun: an agent and its processes are killed, and its disk is
deleted.
"""

import random
import re
import time

import pytest

from tests.support.cluster import Cluster
from tests.support.compare import assert_same
from tests.support.crash_harness import stored_tensors
from tests.support.training_harness import COMMON, LAYOUTS, LLAMA

ITERATIONS = 60
FLAGS = (
    f"{COMMON} {LLAMA} --num-layers 2 --mock-data --async-save --train-iters {ITERATIONS} "
    "--save-interval 20 "
    "--non-persistent-ckpt-type local --non-persistent-save-interval 2 --replication --goodput "
)


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
    return [
        (match[1], int(match[2]))
        for match in re.finditer(r"> loaded .* of (\S+) at iteration (\d+)", output)
    ]


def moment(cluster, node, kind, rng):
    """Wait for a random moment in a phase of a save, observed on the disk of the node."""
    seen = len(re.findall(r"iteration +\d+/", cluster.output()))
    cluster.until(
        lambda: len(re.findall(r"iteration +\d+/", cluster.output())) > seen + rng.randrange(4, 12)
    )
    saves = lambda: set(cluster.disk(node).glob("*/iter_*"))  # noqa: E731
    before = saves()
    if kind == "writing":
        cluster.until(lambda: saves() - before)
    elif kind == "replicating":
        cluster.until(
            lambda: any(len(list(path.glob("*.distcp"))) > 3 for path in saves() - before)
        )
    elif kind == "committing":
        cluster.until(lambda: any(list(path.glob(".done-*")) for path in saves() - before))
    elif kind == "draining":
        cluster.until(lambda: list((cluster.root / "run").glob(".generation-*/saving-*")))
    elif kind == "removing":
        cluster.until(lambda: before - saves())
    time.sleep(rng.uniform(0, 0.005))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["staging", "writing", "replicating", "committing", "draining", "removing"]
)
@pytest.mark.parametrize("victim", ["a", "b"])
def test_run_continues_after_a_node_is_replaced(cluster, launcher, tmp_path, kind, victim):
    """The run resumes from a local checkpoint that is newer than the persistent one, and ends
    bitwise like an undisturbed run.
    """
    world_size, layout_flags = LAYOUTS["dp2_distributed_optimizer"]
    launcher.run(
        world_size, f"{FLAGS.partition('--non-')[0]} {layout_flags} --save {tmp_path}/straight"
    )
    nodes = cluster(2, "dp2_distributed_optimizer", 1)
    nodes.start("a")
    nodes.start("b")
    nodes.until(lambda: re.search(r"iteration +4/", nodes.output()))
    moment(nodes, victim, kind, random.Random(f"{kind}{victim}"))
    nodes.lose(victim)
    nodes.start("c")
    assert nodes.wait() == [0, 0], nodes.output()
    loaded = resumed(nodes.output())
    assert loaded, nodes.output()
    assert "/disks/" in loaded[-1][0], nodes.output()
    final = f"iter_{ITERATIONS:07d}"
    assert_same(
        stored_tensors(tmp_path / "run" / final), stored_tensors(tmp_path / "straight" / final)
    )


@pytest.mark.slow
def test_waiting_node_replaces_a_lost_one(cluster, launcher, tmp_path):
    """torchrun lets a node beyond the maximum of --nnodes wait; it takes the place of a lost one."""
    world_size, layout_flags = LAYOUTS["dp2_distributed_optimizer"]
    launcher.run(
        world_size, f"{FLAGS.partition('--non-')[0]} {layout_flags} --save {tmp_path}/straight"
    )
    nodes = cluster("2:2", "dp2_distributed_optimizer", 1)
    for node in "abc":
        nodes.start(node)
    nodes.until(lambda: re.search(r"saved local checkpoint from iteration +10 ", nodes.output()))
    (spare,) = (node for node in "abc" if not nodes.workers(node))
    lost = "b" if spare == "a" else "a"
    nodes.lose(lost)
    assert nodes.wait() == [0, 0], nodes.output()
    loaded = resumed(nodes.output())
    assert loaded
    assert loaded[-1][1] >= 10
    assert "/disks/" in loaded[-1][0]
    final = f"iter_{ITERATIONS:07d}"
    assert_same(
        stored_tensors(tmp_path / "run" / final), stored_tensors(tmp_path / "straight" / final)
    )


@pytest.mark.slow
def test_run_continues_with_fewer_nodes(cluster, tmp_path):
    """A node is lost and not replaced: the other one continues alone, with its own files and its
    replicas of the other node's.
    """
    nodes = cluster("1:2", "dp2_distributed_optimizer", 1)
    nodes.start("a")
    nodes.start("b")
    nodes.until(lambda: re.search(r"saved local checkpoint from iteration +10 ", nodes.output()))
    nodes.lose("b")
    assert nodes.wait() == [0], nodes.output()
    assert "there are not more nodes" in nodes.output()
    assert [
        iteration >= 10 and "/disks/a/" in path for path, iteration in resumed(nodes.output())
    ] == [True]


@pytest.mark.slow
def test_run_continues_after_losing_a_replication_group(cluster, tmp_path):
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
    assert "goodput" in nodes.output()
    assert "done again later" in nodes.output()
