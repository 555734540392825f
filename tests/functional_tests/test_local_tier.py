"""Checkpoints on the disks of the nodes: runs resume from the remaining replicas after nodes are
lost, at any layout.

A node is a directory that only its ranks may touch: an audit hook fails the test when another rank
opens a file there.
"""

import itertools
import logging
import shutil
import sys
from pathlib import Path

import pytest

import pretrain_gpt
from megatron.core.dist_checkpointing.verification import verify
from tests.support.compare import assert_same
from tests.support.training_harness import LAYOUTS, LLAMA, train, whole

FLAGS = (
    f"{LLAMA} --num-layers 2 --mock-data --train-iters 10 --save-interval 5 "
    "--non-persistent-ckpt-type local --non-persistent-save-interval 2 --replication "
)
ROUNDING = 1e-5
LAYOUT = "tp2_dp2"  # of the run that is killed, on two nodes of two ranks


class KilledError(Exception):
    pass


class Guard:
    """Forbids a process the directories of other nodes. An audit hook stays for the life of the
    process.
    """

    own: Path | None = None
    installed = False

    @classmethod
    def watch(cls, own):
        cls.own = own
        if own is not None and not cls.installed:
            sys.addaudithook(cls._hook)
            cls.installed = True

    @classmethod
    def _hook(cls, event, args):
        if cls.own is None or event not in (
            "open",
            "os.listdir",
            "os.scandir",
            "os.mkdir",
            "os.rename",
            "os.remove",
        ):
            return
        if isinstance(args[0], str | Path):
            path = Path(args[0])
            assert path.is_relative_to(cls.own) or not path.is_relative_to(cls.own.parent), (
                f"{event} {path}: not mine"
            )


def train_on_nodes(rank, world_size, flags, nodes, killed_in=None):
    """The log and the outcome of a rank on the node `nodes[rank]`; all ranks are killed in
    iteration `killed_in`.
    """
    own = Path(nodes[rank])
    passes = itertools.count()
    messages = []
    own.mkdir(parents=True, exist_ok=True)

    def forward_step(model, batch, activation):
        if killed_in is not None and next(passes) == 2 * (
            killed_in - 1
        ):  # micro-batches of a replica
            raise KilledError
        return pretrain_gpt.forward_step(model, batch, activation)

    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("megatron").addHandler(handler)
    Guard.watch(own)
    outcome = None
    try:
        outcome = train(
            rank,
            world_size,
            f"{flags} --non-persistent-local-ckpt-dir {own}",
            forward_step=forward_step,
        )
    except KilledError:
        pass
    finally:
        Guard.watch(None)
        logging.getLogger("megatron").removeHandler(handler)
    return "\n".join(messages), outcome


class Killed:
    """Files of a run that was killed in iteration 10: iterations 6 and 8 on the nodes a and b, and
    iteration 5 in --save.
    """

    def __init__(self, pool, root):
        self.pool = pool
        self.root = root

    def node(self, name):
        return self.root / "nodes" / name

    def files(self, node, iteration, pattern="*.distcp"):
        return sorted(self.node(node).glob(f"*/iter_{iteration:07d}-*/{pattern}"))

    def run(self, nodes, layout=LAYOUT, more="", **options):
        world_size, flags = {"single": (1, ""), **LAYOUTS}[layout]
        save = f"--save {self.root}/run --load {self.root}/run"
        directories = [str(self.node(name)) for name in nodes]
        answers = self.pool.run(
            train_on_nodes,
            world_size,
            f"{FLAGS} {flags} {save} {more}",
            directories,
            *options.values(),
        )
        return [log for log, _ in answers], [outcome for _, outcome in answers]


@pytest.fixture(scope="module")
def killed_once(pool, tmp_path_factory):
    killed = Killed(pool, tmp_path_factory.mktemp("killed") / "run")
    logs, _ = killed.run("aabb", killed_in=10)
    assert "no replica" not in logs[0]
    for node in "ab":
        kept = [path.name.partition("-")[0] for path in killed.node(node).glob("*/iter_*")]
        assert sorted(kept) == ["iter_0000006", "iter_0000008"], "two stay"
    shutil.copytree(killed.root, killed.root.with_name("as_killed"))
    return killed


@pytest.fixture
def killed(killed_once):
    """Restore the files in their original directory: a copy elsewhere would be another run, without
    checkpoints on the nodes.
    """
    shutil.rmtree(killed_once.root)
    shutil.copytree(killed_once.root.with_name("as_killed"), killed_once.root)
    return killed_once


@pytest.fixture(scope="module")
def undisturbed(pool):
    return pool.run(
        train, LAYOUTS[LAYOUT][0], f"{FLAGS.partition('--save')[0]} {LAYOUTS[LAYOUT][1]}"
    )


def train_without_a_disk(rank, world_size, flags, root):
    """Train, and replace the directory of node 1 by a file when training begins."""
    own = Path(root) / f"node{rank}"

    def forward_step(model, batch, activation):
        if rank == 1 and own.is_dir():
            shutil.rmtree(own)
            own.touch()
        return pretrain_gpt.forward_step(model, batch, activation)

    train(
        rank,
        world_size,
        f"{flags} --non-persistent-local-ckpt-dir {own}",
        forward_step=forward_step,
    )


def test_node_without_local_files_keeps_persistent_saves(pool, tmp_path):
    """The one at iteration 2 was to come from the nodes' disks: the next save, at 3, makes up for
    it.
    """
    world_size, layout = LAYOUTS["dp2_distributed_optimizer"]
    flags = FLAGS.replace(
        "--save-interval 5", "--save-interval 2 --async-save --exit-on-save-failure"
    )
    flags = flags.replace("--non-persistent-save-interval 2", "--non-persistent-save-interval 3")
    pool.run(
        train_without_a_disk, world_size, f"{flags} {layout} --save {tmp_path}/run", str(tmp_path)
    )
    saved = sorted(path for path in (tmp_path / "run").glob("iter_*"))
    assert [path.name for path in saved] == [
        f"iter_{iteration:07d}" for iteration in (3, 4, 6, 8, 10)
    ]
    assert all(verify(path).ok for path in saved)


def flip(path):
    """One bit in the middle of a tensor."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def test_replaced_node_with_other_ranks_resumes(killed, undisturbed):
    """Node b is gone, a new one comes first: the end is bitwise the undisturbed one."""
    shutil.rmtree(killed.node("b"))
    logs, outcomes = killed.run("ccaa")
    assert "iter_0000008-" in logs[0]
    assert "at iteration 8" in logs[0]
    assert_same(whole(outcomes), whole(undisturbed))
    assert "no replica" not in logs[0]
    assert "seeded anew" not in logs[0], "the states of the generators have replicas, too"


def test_replication_interval(pool, tmp_path, undisturbed):
    """Node b takes the local checkpoints 4 and 8 of 2, 4, 6 and 8 with it."""
    killed = Killed(pool, tmp_path / "run")
    interval = "--replication-interval 2"
    killed.run("aabb", more=interval, killed_in=10)
    shutil.rmtree(killed.node("b"))
    logs, outcomes = killed.run("ccaa", more=interval)
    assert "iter_0000006-" in logs[0]
    assert "at iteration 6" in logs[0]
    assert_same(whole(outcomes), whole(undisturbed))


OTHERS = [("tp2_pp2", "ccaa"), ("pp2_dp2", "acbd"), ("cp2", "bc"), ("tp2_sp", "bb")]


@pytest.mark.parametrize(
    ("layout", "nodes"),
    [("single", "a"), *(pytest.param(*other, marks=pytest.mark.slow) for other in OTHERS)],
)
def test_other_layouts_and_fewer_nodes_resume(killed, undisturbed, layout, nodes):
    if "b" not in nodes:
        shutil.rmtree(killed.node("b"))
    logs, outcomes = killed.run(nodes, layout)
    assert "at iteration 8" in logs[0]
    expected = undisturbed[0].measured.losses[8:]
    assert outcomes[0].measured.losses == pytest.approx(expected, rel=ROUNDING)


def test_losing_a_replication_group_falls_back_to_persistent_checkpoint(killed, undisturbed):
    for node in "ab":
        shutil.rmtree(killed.node(node))
    logs, outcomes = killed.run("cd", "dp2_distributed_optimizer")
    assert "at iteration 5" in logs[0]
    assert outcomes[0].measured.losses == pytest.approx(
        undisturbed[0].measured.losses[5:], rel=ROUNDING
    )


def test_damaged_blocks_are_read_from_replicas(killed, undisturbed):
    """A damaged copy is replaced by the other node's. If both are damaged, the run falls back to
    the checkpoint before, and then to the persistent one. A missing or truncated file is not
    considered.
    """
    expected = undisturbed[0].measured.losses

    def resumed(*texts):
        logs, outcomes = killed.run(
            "ab", "tp2_sp", "--exit-interval 9 --non-persistent-save-interval 100"
        )
        for path in (killed.root / "run").glob("iter_0000009"):  # saved at the exit
            shutil.rmtree(path)
            (killed.root / "run" / "latest_checkpointed_iteration.txt").write_text("5")
        log = "\n".join(logs)
        assert all(text in log for text in texts), log
        losses = outcomes[0].measured.losses
        assert losses == pytest.approx(expected[9 - len(losses) : 9], rel=ROUNDING)

    name = "__1_0.distcp"
    (copy,), (other,) = (killed.files(node, 8, name) for node in "ab")
    flip(copy)
    resumed(f"{name} on the node of rank 0 is damaged", "trying the next node", "at iteration 8")
    flip(other)
    resumed(f"{name}: no node has bytes", "taking an older checkpoint", "at iteration 6")
    for node in "ab":
        (file,) = killed.files(node, 6, "__3_1.distcp")
        file.write_bytes(file.read_bytes()[:-1])
    resumed("no node has the files of rank 3 of 4", "at iteration 5")
