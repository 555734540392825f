"""Loss of whole nodes under torchrun: an agent and its processes are killed, and its disk is
deleted.
"""

import random
import re
import time

import pytest

from tests.support.cluster import Cluster
from tests.support.crash_harness import assert_same_checkpoint
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


def read_resumes(output):
    """Return (directory, iteration) of every checkpoint that was loaded."""
    resumes = []
    for match in re.finditer(r"> loaded .* of (\S+) at iteration (\d+)", output):
        directory, iteration = match.groups()
        resumes.append((directory, int(iteration)))
    return resumes


def count_iterations(cluster):
    return len(re.findall(r"iteration +\d+/", cluster.output()))


def wait_for_phase(cluster, node, phase, rng):
    """Wait for a random moment in a phase of a save, observed on the disk of the node."""
    start = count_iterations(cluster)
    cluster.until(lambda: count_iterations(cluster) > start + rng.randrange(4, 12))

    def list_saves():
        return set(cluster.disk(node).glob("*/iter_*"))

    before = list_saves()

    def has_begun():
        new = list_saves() - before
        if phase == "writing":
            return bool(new)
        if phase == "replicating":
            return any(len(list(path.glob("*.distcp"))) > 3 for path in new)
        if phase == "committing":
            return any(list(path.glob(".done-*")) for path in new)
        if phase == "draining":
            return any((cluster.root / "run").glob(".generation-*/saving-*"))
        if phase == "removing":
            return bool(before - list_saves())
        assert phase == "staging"
        return True

    cluster.until(has_begun)
    time.sleep(rng.uniform(0, 0.005))


def train_undisturbed(launcher, tmp_path):
    """Train without local checkpoints and return the directory."""
    world_size, layout_flags = LAYOUTS["dp2_distributed_optimizer"]
    persistent_flags = FLAGS.partition("--non-")[0]
    directory = tmp_path / "straight"
    launcher.run(world_size, f"{persistent_flags} {layout_flags} --save {directory}")
    return directory


@pytest.mark.slow
@pytest.mark.parametrize(
    "phase",
    ["staging", "writing", "replicating", "committing", "draining", "removing"],
)
@pytest.mark.parametrize("victim", ["a", "b"])
def test_run_continues_after_a_node_is_replaced(cluster, launcher, tmp_path, phase, victim):
    """The run resumes from a local checkpoint that is newer than the persistent one, and ends
    bitwise like an undisturbed run.
    """
    undisturbed = train_undisturbed(launcher, tmp_path)
    nodes = cluster(2, "dp2_distributed_optimizer", 1)
    nodes.start("a")
    nodes.start("b")
    nodes.until(lambda: re.search(r"iteration +4/", nodes.output()))
    wait_for_phase(nodes, victim, phase, random.Random(f"{phase}{victim}"))
    nodes.lose(victim)
    nodes.start("c")
    assert nodes.wait() == [0, 0], nodes.output()

    resumes = read_resumes(nodes.output())
    assert resumes, nodes.output()

    directory, _ = resumes[-1]
    assert "/disks/" in directory, nodes.output()
    assert_same_checkpoint(tmp_path / "run", undisturbed, ITERATIONS)


@pytest.mark.slow
def test_waiting_node_replaces_a_lost_one(cluster, launcher, tmp_path):
    """torchrun lets a node beyond the maximum of --nnodes wait; it takes the place of a lost one."""
    undisturbed = train_undisturbed(launcher, tmp_path)
    nodes = cluster("2:2", "dp2_distributed_optimizer", 1)
    for node in "abc":
        nodes.start(node)
    nodes.until(lambda: re.search(r"saved local checkpoint from iteration +10 ", nodes.output()))
    (spare,) = (node for node in "abc" if not nodes.workers(node))
    lost = "b" if spare == "a" else "a"
    nodes.lose(lost)
    assert nodes.wait() == [0, 0], nodes.output()

    resumes = read_resumes(nodes.output())
    assert resumes

    directory, iteration = resumes[-1]
    assert iteration >= 10
    assert "/disks/" in directory
    assert_same_checkpoint(tmp_path / "run", undisturbed, ITERATIONS)


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

    ((directory, iteration),) = read_resumes(nodes.output())
    assert iteration >= 10
    assert "/disks/a/" in directory


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

    _, iteration = read_resumes(nodes.output())[-1]
    assert iteration in (20, 40)
    assert "goodput" in nodes.output()
    assert "done again later" in nodes.output()
